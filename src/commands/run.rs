//! `scx_stoker` without a command: runs the scheduler, or watches one that runs.

use anyhow::Result;

use crate::cli::RunArgs;
use crate::machine::Sources;
use crate::{metrics, scheduler};

/// # Errors
/// Why the scheduler could not start or was ended; for `--monitor` why the connection failed.
pub fn run(args: &RunArgs) -> Result<()> {
    let shutdown = scheduler::shutdown_flag()?;
    if let Some(interval) = args.monitor {
        return metrics::monitor(interval, &shutdown);
    }
    if let Some(interval) = args.stats {
        let shutdown = shutdown.clone();
        std::thread::spawn(move || {
            if let Err(error) = metrics::monitor(interval, &shutdown) {
                log::warn!("no more counters: {error:#}");
            }
        });
    }
    let sources = Sources { nccl_topo: args.nccl_topo.clone(), ..Sources::default() };
    scheduler::run(&args.scheduler, &sources, args.verbose, &shutdown)
}
