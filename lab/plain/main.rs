//! `lab_plain`: the least that a sched_ext scheduler can be, to measure others against. Runs until SIGINT.

// The skeleton is generated.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/plain_skel.rs"));
}

use std::mem::MaybeUninit;
use std::time::Duration;

use anyhow::Result;
use libbpf_rs::OpenObject;
use scx_utils::{UserExitInfo, scx_ops_attach, scx_ops_load, scx_ops_open, uei_exited, uei_report};
use skel::PlainSkelBuilder;

fn main() -> Result<()> {
    /// How often it looks whether it should end.
    const INTERVAL: Duration = Duration::from_millis(50);
    let shutdown = scx_stoker::scheduler::shutdown_flag()?;
    let mut object = MaybeUninit::<OpenObject>::uninit();
    let builder = PlainSkelBuilder::default();
    let mut skel = scx_ops_open!(builder, &mut object, plain_ops, None)?;
    let mut skel = scx_ops_load!(skel, plain_ops, uei)?;
    let link = scx_ops_attach!(skel, plain_ops)?;
    while !shutdown.load(std::sync::atomic::Ordering::Relaxed) && !uei_exited!(&skel, uei) {
        std::thread::sleep(INTERVAL);
    }
    drop(link);
    uei_report!(&skel, uei).map(|_: UserExitInfo| ())
}
