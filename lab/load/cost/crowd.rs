//! A crowd of threads, half of which can always run: pairs that wake each other, spread over groups.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use anyhow::{Context, Result};

use crate::cgroup::{self, Groups};
use crate::feed::wait_ready;
use crate::shared::{Shared, Slot, Window};
use crate::sys::{self, Children, MS, Punctual, fork_child, futex_wait, futex_wake};

/// A crowd that runs. It is ended, and its groups removed, when this is dropped.
pub struct Crowd {
    // Groups go after the tasks in them: fields are dropped first to last.
    children: Children,
    _groups: Groups,
    shared: Shared,
    // It is to look at the crowd when the window begins and ends, and not when thousands of others have had their turns.
    _punctual: Punctual,
}

/// Stack of a thread that does next to nothing.
const STACK_BYTES: usize = 64 * 1024;

impl Crowd {
    /// Makes `tasks` threads, at least two, in `groups` groups; with 0 groups, in the one that this process is in.
    pub fn new(tasks: usize, groups: usize) -> Result<Self> {
        let processes = groups.max(1);
        let punctual = || Punctual::new().context("SCHED_FIFO (needs root)");
        let mut crowd = Self {
            _punctual: punctual()?,
            children: Children::default(),
            _groups: Groups::default(),
            shared: Shared::new(processes).context("mapping shared memory")?,
        };
        let places = crowd.make_groups(groups)?;
        for (index, slot) in crowd.shared.slots.iter().enumerate() {
            let pairs = (tasks / 2 / processes + usize::from(index < tasks / 2 % processes)).max(1);
            let (shared, place) = (crowd.shared, places.get(index));
            crowd.children.add(fork_child("crowd", || {
                if let Some(place) = place {
                    cgroup::join(place)?;
                }
                // It stops the others.
                let _punctual = punctual()?;
                run(pairs, shared, slot)
            })?);
        }
        wait_ready(crowd.shared, processes, &mut crowd.children)?;
        Ok(crowd)
    }

    fn make_groups(&mut self, groups: usize) -> Result<Vec<PathBuf>> {
        if groups == 0 {
            return Ok(Vec::new());
        }
        let root = cgroup::root()?;
        cgroup::delegate(&root, "cpu")?;
        let place = |index| Path::new(&root).join(format!("lab_load_crowd{index}"));
        (0..groups).map(|index| self._groups.make(&place(index)).map(|()| place(index))).collect()
    }

    /// Lets them run.
    pub fn go(&self, warmup_ns: u64, measure_ns: u64) -> Window {
        self.shared.control.go(warmup_ns, measure_ns)
    }

    /// Waits for their end; Err if one failed or they do not end in time.
    pub fn wait(mut self, limit_ns: u64) -> Result<()> {
        self.children.wait(limit_ns)
    }
}

fn run(pairs: usize, shared: Shared, slot: &Slot) -> Result<()> {
    let turns: Vec<AtomicU32> = (0..pairs).map(|_| AtomicU32::new(0)).collect();
    let (gate, stop, switches) = (AtomicU32::new(0), AtomicBool::new(false), AtomicU64::new(0));
    let arrived = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (turn, side) in turns.iter().flat_map(|turn| [(turn, 0), (turn, 1)]) {
            let (gate, stop, switches, arrived) = (&gate, &stop, &switches, &arrived);
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, move || {
                arrived.fetch_add(1, Ordering::Relaxed);
                while gate.load(Ordering::Acquire) == 0 {
                    futex_wait(gate, 0, true);
                }
                let mut own = 0;
                while !stop.load(Ordering::Relaxed) {
                    if turn.load(Ordering::Acquire) != side {
                        futex_wait(turn, 1 - side, true);
                        continue;
                    }
                    own += 1;
                    turn.store(1 - side, Ordering::Release);
                    futex_wake(turn, 1, true);
                }
                switches.fetch_add(own, Ordering::Relaxed);
                // The partner may sleep: it is its turn now.
                turn.store(1 - side, Ordering::Release);
                futex_wake(turn, 1, true);
            });
            if let Err(error) = thread {
                // Those that run already must end before the scope does.
                stop.store(true, Ordering::Relaxed);
                gate.store(1, Ordering::Release);
                futex_wake(gate, i32::MAX, true);
                return Err(error).context("starting a thread");
            }
        }
        // What it takes a thread to begin is not to be part of the window.
        while arrived.load(Ordering::Relaxed) < 2 * pairs {
            sys::sleep_ns(2 * MS);
        }
        let window = shared.control.ready_and_wait();
        gate.store(1, Ordering::Release);
        futex_wake(&gate, i32::MAX, true);
        sys::sleep_until(window.end_ns);
        stop.store(true, Ordering::Relaxed);
        anyhow::Ok(())
    })?;
    slot.steps.store(switches.load(Ordering::Relaxed), Ordering::Relaxed);
    Ok(())
}
