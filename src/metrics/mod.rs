//! What the scheduler counted: read from BPF, served over scx_stats, and told in a line.

mod counters;
mod server;

pub use counters::{Counters, GpuCounters};
pub use server::{Server, monitor, serve};
