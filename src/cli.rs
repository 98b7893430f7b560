//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::{CheckArgs, ThreadsArgs, TopologyArgs};
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
    /// Tell whether scx_stoker can run here, and what it would have to do without; changes nothing
    Check(CheckArgs),
}

/// Options of running the scheduler.
#[derive(clap::Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    /// Options that the BPF side gets.
    pub scheduler: Options,

    /// Configuration file: these options and rules about threads; what the command line says wins
    /// [default: /etc/scx_stoker.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

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

impl Cli {
    /// The command line (with the program's name first) on top of options that are said elsewhere in the same words.
    ///
    /// # Errors
    /// One of them is not understood.
    pub fn over(options: &[String], line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut line = line.into_iter();
        let words = line.next().into_iter().chain(options.iter().map(OsString::from)).chain(line);
        Self::from_arg_matches(&Self::command().args_override_self(true).try_get_matches_from(words)?)
    }
}

fn seconds(text: &str) -> Result<std::time::Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is not a number of seconds"))?;
    if !(0.01..=86_400.0).contains(&seconds) {
        return Err("must be from 0.01 to 86400 seconds".to_string());
    }
    Ok(std::time::Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_the_default() {
        let file = ["--feeder-cap=50".to_string(), "--slice-us=1000".to_string(), "--verbose".to_string()];
        let line = ["scx_stoker", "--feeder-cap", "60"].map(OsString::from);
        let RunArgs { scheduler, verbose, .. } = Cli::over(&file, line).unwrap().run;
        assert_eq!((scheduler.feeder_cap, scheduler.slice_us, scheduler.home_wait_us), (60, 1000, 500));
        assert!(verbose);
    }
}
