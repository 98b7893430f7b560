//! `scx_stoker`: a `sched_ext` CPU scheduler that keeps GPUs fed.

pub mod commands;
pub mod machine;
