//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::commands::{ThreadsArgs, TopologyArgs};
use crate::scheduler::Options;

/// Keeps GPUs fed: a sched_ext CPU scheduler that gives the threads that feed a GPU the CPUs next to it, at once.
#[derive(Parser, Debug)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    /// Without one, the scheduler runs until Ctrl-C.
    pub command: Option<Command>,

    #[command(flatten)]
    /// Options of the scheduler.
    pub run: RunArgs,
}

/// Commands beside running the scheduler.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Print CPUs, nodes and GPUs, and where each GPU is at home
    Topology(TopologyArgs),
    /// Print who feeds which GPU and who supplies them, as the running scheduler knows it
    Threads(ThreadsArgs),
}

/// Options of running the scheduler.
#[derive(clap::Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    /// Options that the BPF side gets.
    pub scheduler: Options,

    /// Print a status line every second
    #[arg(short, long)]
    pub verbose: bool,

    /// Also print the counters every so many seconds, as other sched_ext schedulers do
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub stats: Option<std::time::Duration>,

    /// Only print the counters of a scheduler that runs already, every so many seconds
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub monitor: Option<std::time::Duration>,

    /// NCCL topology file that says where GPUs are (default: $NCCL_TOPO_FILE, then the cloud vendors' usual places)
    #[arg(long, value_name = "FILE")]
    pub nccl_topo: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<std::time::Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is not a number of seconds"))?;
    if !(0.01..=86_400.0).contains(&seconds) {
        return Err("must be from 0.01 to 86400 seconds".to_string());
    }
    Ok(std::time::Duration::from_secs_f64(seconds))
}
