//! A feeder: takes a batch, works on it, submits a kernel, waits for the GPU, and measures how it is treated.

use std::io::{self, PipeReader, Read};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::gpu::{Gpu, Queue, SubmitKind};
use crate::neighbours::BATCH_BYTES;
use crate::sample::Schedstat;
use crate::shared::{Control, Slot};
use crate::sys::{self, MS};
use crate::work::{UNITS_PER_MS, work};

/// How a feeder waits for its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WaitKind {
    /// Sleeps until the kernel is done
    Block,
    /// Polls, as CUDA does unless told otherwise
    Spin,
}

/// How the kernel is told that feeders matter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Not at all
    Other,
    /// SCHED_FIFO, priority 50: the ceiling
    Fifo,
    /// Nice −20
    Nice,
}

impl Policy {
    /// Applies it to the calling thread.
    pub fn apply(self) -> Result<()> {
        match self {
            Self::Other => Ok(()),
            Self::Fifo => sys::set_fifo(50).context("SCHED_FIFO (needs root)"),
            Self::Nice => sys::set_nice(-20).context("nice −20 (needs root)"),
        }
    }
}

/// Where a feeder is put before it is free to run anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum StartOn {
    /// Wherever it was forked
    Anywhere,
    /// At home
    Home,
    /// On CPUs that are not its GPU's home
    OtherNode,
}

/// What a feeder does.
pub struct Feeder {
    /// The GPU it feeds.
    pub gpu: Gpu,
    /// How it submits.
    pub submit: SubmitKind,
    /// How it waits.
    pub wait: WaitKind,
    /// Its policy.
    pub policy: Policy,
    /// Where it starts.
    pub start_on: StartOn,
    /// CPUs it is pinned to for good; none to leave it free.
    pub pinned: Option<Vec<usize>>,
    /// Length of a GPU kernel in ns.
    pub kernel_ns: u64,
    /// Units of CPU work in a step.
    pub work_units: u64,
    /// Where batches come from, in turn; empty if it needs none.
    pub loaders: Vec<PipeReader>,
}

impl Feeder {
    /// A feeder of `gpu` as `lab_load feed` has without options: 1 ms of work, a kernel of 10 ms, and again.
    pub fn plain(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            submit: SubmitKind::Ioctl,
            wait: WaitKind::Block,
            policy: Policy::Other,
            start_on: StartOn::Anywhere,
            pinned: None,
            kernel_ns: 10 * MS,
            work_units: UNITS_PER_MS,
            loaders: Vec::new(),
        }
    }

    /// Runs until the window ends.
    pub fn run(mut self, control: &Control, slot: &Slot) -> Result<()> {
        slot.claim();
        sys::no_timer_slack();
        self.policy.apply()?;
        self.go_to_start()?;
        let queue = Queue::open(&self.gpu, self.submit)?;
        if self.submit == SubmitKind::Doorbell && self.gpu.device.is_some() && !queue.has_doorbell() {
            eprintln!("lab_load: {}: no memory to map, so its doorbell is none", self.gpu.name);
        }
        let window = control.ready_and_wait();
        let mut first = None;
        for step in 0.. {
            if !self.take_batch(step)? {
                break;
            }
            work(self.work_units);
            let submitted_ns = sys::now_ns();
            if window.holds(submitted_ns) {
                slot.units.fetch_add(self.work_units, Relaxed);
                slot.steps.fetch_add(1, Relaxed);
                slot.note_cpu();
            }
            queue.submit().context("submitting a kernel")?;
            let deadline_ns = submitted_ns + self.kernel_ns;
            slot.kernel_ns.fetch_add(window.overlap(submitted_ns, deadline_ns), Relaxed);
            let woken_ns = match self.wait {
                WaitKind::Block => {
                    sys::sleep_until(deadline_ns);
                    sys::now_ns()
                }
                WaitKind::Spin => spin_until(deadline_ns, slot, |at_ns| window.holds(at_ns)),
            };
            slot.note_seen(woken_ns, window);
            if window.holds(deadline_ns) {
                slot.wake.add(woken_ns.saturating_sub(deadline_ns));
                slot.note_cpu();
            }
            if woken_ns >= window.start_ns && first.is_none() {
                first = Some((woken_ns, Schedstat::of_this_thread()?));
            }
            if woken_ns >= window.end_ns {
                break;
            }
        }
        // Without a wake-up inside the window there is nothing to subtract from: the slot then says so with zeros.
        if let Some((from_ns, before)) = first {
            let after = Schedstat::of_this_thread()?;
            slot.delay_ns.store(after.delay_ns - before.delay_ns, Relaxed);
            slot.cpu_ns.store(after.cpu_ns - before.cpu_ns, Relaxed);
            slot.delay_wall_ns.store(sys::now_ns() - from_ns, Relaxed);
        }
        Ok(())
    }

    /// Moves to where the feeder starts, and then opens its affinity again unless it is pinned for good.
    fn go_to_start(&self) -> Result<()> {
        let all = sys::affinity()?;
        let is_home = |cpu: &usize| self.gpu.home.as_ref().is_none_or(|home| home.contains(cpu));
        let start: Vec<usize> = match self.start_on {
            StartOn::Anywhere => Vec::new(),
            StartOn::Home => all.iter().copied().filter(is_home).collect(),
            StartOn::OtherNode => all.iter().copied().filter(|cpu| !is_home(cpu)).collect(),
        };
        if !start.is_empty() {
            sys::set_affinity(&start).context("affinity of the start")?;
            work(UNITS_PER_MS);
            sys::set_affinity(&all)?;
        }
        match &self.pinned {
            Some(cpus) => sys::set_affinity(cpus).context("affinity of a pinned feeder"),
            None => Ok(()),
        }
    }

    /// Takes the next batch, if the feeder has loaders. False if they have stopped.
    fn take_batch(&mut self, step: usize) -> Result<bool> {
        if self.loaders.is_empty() {
            return Ok(true);
        }
        let turn = step % self.loaders.len();
        match self.loaders[turn].read_exact(&mut [0; BATCH_BYTES]) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            other => Ok(other.map(|()| true)?),
        }
    }
}

/// Polls until `deadline_ns`, a unit of work at a time, and returns when it saw that the time had come.
fn spin_until(deadline_ns: u64, slot: &Slot, counts: impl Fn(u64) -> bool) -> u64 {
    for polls in 1.. {
        work(1);
        let now = sys::now_ns();
        if counts(now) {
            slot.spin_units.fetch_add(1, Relaxed);
            // Now and then, so that time at home is seen while spinning but does not outweigh the rest.
            if polls % UNITS_PER_MS == 0 {
                slot.note_cpu();
            }
        }
        if now >= deadline_ns {
            return now;
        }
    }
    deadline_ns
}
