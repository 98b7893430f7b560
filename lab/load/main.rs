//! `lab_load`: emulated GPU feeders and their noisy neighbours, micro-benchmarks, and schedulers compared by them.
//!
//! It runs inside the lab guest, where time is counted in instructions, and needs no GPU: a GPU "kernel" is a timer
//! that is armed when a feeder submits and wakes it when it expires. It runs on any Linux host too, where its work
//! takes less time than its names say.

mod cgroup;
mod compare;
mod cost;
mod cuda;
mod fair;
mod feed;
mod feeder;
mod gpu;
mod neighbours;
mod nvidia;
mod plot;
mod report;
mod sample;
mod shared;
mod storm;
mod svg;
mod sys;
mod weights;
mod work;
mod zoo;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "lab_load", about = "Emulated GPU load, its neighbours, and what they show about a scheduler")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run feeders and neighbours once, under the scheduler that is active now
    Feed(feed::FeedArgs),
    /// Run micro-benchmarks of the scheduling path, under the scheduler that is active now
    Fair(fair::FairArgs),
    /// Run the feeding scenarios under EEVDF, its SCHED_FIFO ceiling and the named schedulers, and print one table
    Compare(compare::CompareArgs),
    /// Share CPUs out among trees of cgroups, under the scheduler that is active now, and tell how fairly it was done
    Weights(weights::WeightsArgs),
    /// Raise storms of tasks, groups, forks, yields and changes of affinity, and tell whether the scheduler stands them
    Storm(storm::StormArgs),
    /// Count what the BPF programs of the active scheduler cost for each call and each context switch
    Cost(cost::CostArgs),
    /// Draw charts of what `compare --json` wrote
    Plot(plot::PlotArgs),
    /// Show a scheduler a zoo of threads of known roles, and print what it takes each of them for
    Zoo(zoo::ZooArgs),
    /// Keep a stand-in for /dev/nvidia0 there until killed
    Nvidia0,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Feed(args) => feed::main(&args),
        Command::Fair(args) => fair::main(&args),
        Command::Compare(args) => compare::main(&args),
        Command::Weights(args) => weights::main(&args),
        Command::Storm(args) => storm::main(&args),
        Command::Cost(args) => cost::main(&args),
        Command::Plot(args) => plot::main(&args),
        Command::Zoo(args) => zoo::main(&args),
        Command::Nvidia0 => nvidia::main(),
    }
}
