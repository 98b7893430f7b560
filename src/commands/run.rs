//! `scx_stoker` without a command: runs the scheduler, or watches one that runs.

use anyhow::{Context, Result};

use crate::cli::{Cli, RunArgs};
use crate::config::Config;
use crate::machine::Sources;
use crate::{metrics, scheduler};

/// # Errors
/// What is wrong with the configuration file. Why the scheduler could not start or was ended; for `--monitor` why the connection failed.
pub fn run(args: &RunArgs) -> Result<()> {
    let shutdown = scheduler::shutdown_flag()?;
    if let Some(interval) = args.monitor {
        return metrics::monitor(interval, &shutdown);
    }
    let config = Config::read(args.config.as_deref())?;
    let args = Cli::over(&config.options, std::env::args_os())?.run;
    if let Some(interval) = args.stats {
        let shutdown = shutdown.clone();
        let print = move || {
            if let Err(error) = metrics::monitor(interval, &shutdown) {
                log::warn!("no more counters: {error:#}");
            }
        };
        std::thread::Builder::new().spawn(print).context("could not start a thread for --stats")?;
    }
    let sources = Sources { nccl_topo: args.nccl_topo.clone(), ..Sources::default() };
    scheduler::run(&args.scheduler, &config.rules, &sources, args.verbose, &shutdown)
}
