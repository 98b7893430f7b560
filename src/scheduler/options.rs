//! What people who know better may set.

use clap::Args;

/// Options of the scheduler itself. The defaults are meant for every machine.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Turn of an ordinary task, in microseconds: shorter where many wait, longer for one that sleeps soon anyway
    #[arg(long, value_name = "US", default_value_t = 3000, value_parser = clap::value_parser!(u64).range(100..=100_000))]
    pub slice_us: u64,

    /// Turn of a feeder among feeders that share a home CPU, in microseconds
    #[arg(long, value_name = "US", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(100..=100_000))]
    pub feeder_slice_us: u64,

    /// Share of a home's CPU time that feeders may take ahead of ordinary work, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 80, value_parser = clap::value_parser!(u32).range(1..=95))]
    pub feeder_cap: u32,

    /// How long a feeder waits at home for another one before it leaves, in microseconds
    #[arg(long, value_name = "US", default_value_t = 500, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub home_wait_us: u64,

    /// How long an open or an ioctl on a GPU makes its thread a feeder, in seconds
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub evidence_s: u64,

    /// Now and then, for a fifth of a second, note which threads of GPU processes call CUDA, HIP or Level Zero to launch
    /// work: finds feeders that nothing else tells from their process's other threads. Each call then costs a trap
    #[arg(long)]
    pub probe_launches: bool,
}
