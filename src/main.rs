//! Parses the command line and calls the command.

use clap::{Parser, Subcommand};
use scx_stoker::commands::topology;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Topology(topology::TopologyArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Topology(args) => topology::run(&args),
    }
}
