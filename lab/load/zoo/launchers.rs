//! Members that only their calls of CUDA's library tell from the other threads of their process: the first thread opens
//! and maps the GPU and then waits, and another one launches.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use anyhow::Result;

use super::cast::{Cast, Truth};
use super::members::{KERNEL_NS, Pool, STEP_UNITS, beside, open, or_exit, rest, wait_for};
use crate::cuda::Cuda;
use crate::feeder::WaitKind;
use crate::gpu::{Gpu, SubmitKind};
use crate::sys::{futex_wait, futex_wake, now_ns};
use crate::work::work;

/// A process with a pool of threads as PyTorch has, one thread beside it that launches, and a first thread that waits.
pub fn pool(
    cast: &mut Cast,
    gpus: &[Gpu],
    gpu: usize,
    name: &str,
    kind: &'static str,
    (threads, wait): (u32, WaitKind),
) -> Result<()> {
    let first = cast.add_waiting("first thread of a launching process, waits", &format!("{name}-main"))?;
    let feeder = cast.add(kind, format!("{name}-feed"), Truth::Feeder { gpu })?;
    let mut workers = Vec::new();
    for index in 0..threads {
        workers.push(cast.add("pool of a launching process", format!("{name}-{index}"), Truth::SupplierAtMost)?);
    }
    cast.fork("launching process", || {
        first.introduce();
        // In this order, as the real library opens the device: reading files is no sign of work for one that has it.
        let cuda = Cuda::load(name)?;
        let _queue = open(&gpus[gpu], SubmitKind::Doorbell)?;
        let pool = Pool::default();
        std::thread::scope(|scope| {
            for worker in &workers {
                beside(scope, || pool.serve(worker));
            }
            beside(scope, || {
                feeder.enter();
                loop {
                    pool.run(threads);
                    work(STEP_UNITS);
                    cuda.launch();
                    wait_for(now_ns() + KERNEL_NS, wait);
                    feeder.step();
                }
            });
            first.enter();
            or_exit(rest());
        });
        Ok(())
    })
}

/// A process whose threads take turns in launching.
pub fn in_turns(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    const THREADS: u32 = 2;
    let first = cast.add_waiting("first thread of a launching process, waits", "zl-turns-main")?;
    let mut feeders = Vec::new();
    for index in 0..THREADS {
        let kind = "launches, in turns with another thread";
        feeders.push(cast.add(kind, format!("zl-turns{index}"), Truth::Feeder { gpu })?);
    }
    cast.fork("process that launches in turns", || {
        first.introduce();
        let cuda = Cuda::load("zl-turns")?;
        let _queue = open(&gpus[gpu], SubmitKind::Doorbell)?;
        let turn = &AtomicU32::new(0);
        std::thread::scope(|scope| {
            for (index, feeder) in (0..).zip(&feeders) {
                beside(scope, move || {
                    feeder.enter();
                    loop {
                        let now = turn.load(SeqCst);
                        if now % THREADS != index {
                            futex_wait(turn, now, true);
                            continue;
                        }
                        work(STEP_UNITS / 4);
                        cuda.launch();
                        wait_for(now_ns() + KERNEL_NS, WaitKind::Block);
                        feeder.step();
                        turn.store(now.wrapping_add(1), SeqCst);
                        futex_wake(turn, i32::MAX, true);
                    }
                });
            }
            first.enter();
            or_exit(rest());
        });
        Ok(())
    })
}
