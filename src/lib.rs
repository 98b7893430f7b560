//! `scx_stoker`: a `sched_ext` CPU scheduler that keeps GPUs fed.
//!
//! The machine is discovered ([`machine`]), handed to the BPF scheduler ([`scheduler`]), which finds the threads that
//! feed GPUs with what [`workload`] adds from user space; [`metrics`] tells what came of it.

pub mod bpf_intf;
pub mod bpf_skel;
pub mod cgroup;
pub mod cli;
pub mod commands;
pub mod config;
pub mod machine;
pub mod metrics;
pub mod scheduler;
pub mod workload;
