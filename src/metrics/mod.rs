//! What the scheduler counted and knows: read from BPF, served over scx_stats, and told in a line.

mod counters;
mod server;
mod threads;

pub use counters::{Counters, GpuCounters};
pub use server::{Request, Server, ask_threads, monitor, serve};
pub use threads::{Role, Thread};
