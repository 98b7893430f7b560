//! Parses the command line and calls the command.

use clap::Parser;
use scx_stoker::cli::{Cli, Command};
use scx_stoker::commands;

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).format_target(false).init();
    match &cli.command {
        Some(Command::Topology(args)) => commands::topology(args),
        Some(Command::Threads(args)) => commands::threads(args),
        Some(Command::Check(args)) => commands::check(args),
        None => commands::run(&cli.run),
    }
}
