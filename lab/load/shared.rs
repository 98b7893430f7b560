//! Memory shared by all tasks of a run: when it starts and ends, and a slot of results for each task.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::sample::Histogram;
use crate::sys::{futex_wait, futex_wake, now_ns, tid};

/// CPUs whose samples are told apart; those beyond share the last counter.
pub const MAX_CPUS: usize = 256;

/// When things happen, in ns of CLOCK_MONOTONIC. All are zero until the parent, which has seen every task ready, opens.
#[repr(C, align(64))]
pub struct Control {
    ready: AtomicU32,
    is_open: AtomicU32,
    start_ns: AtomicU64,
    end_ns: AtomicU64,
}

/// The measured part of a run, in ns of CLOCK_MONOTONIC.
#[derive(Clone, Copy)]
pub struct Window {
    /// First instant that counts.
    pub start_ns: u64,
    /// First instant that no longer counts.
    pub end_ns: u64,
}

impl Window {
    /// Whether `at_ns` counts.
    pub fn holds(&self, at_ns: u64) -> bool {
        (self.start_ns..self.end_ns).contains(&at_ns)
    }

    /// How much of `from_ns..to_ns` counts, in ns.
    pub fn overlap(&self, from_ns: u64, to_ns: u64) -> u64 {
        to_ns.min(self.end_ns).saturating_sub(from_ns.max(self.start_ns))
    }

    /// Length in ns.
    pub fn ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

impl Control {
    /// Says that the calling task is set up, and waits for the start of the warm-up.
    pub fn ready_and_wait(&self) -> Window {
        self.ready.fetch_add(1, Relaxed);
        while self.is_open.load(Acquire) == 0 {
            futex_wait(&self.is_open, 0, false);
        }
        self.window()
    }

    /// Tasks that are set up so far.
    pub fn ready(&self) -> usize {
        self.ready.load(Relaxed) as usize
    }

    /// Lets all tasks go: a warm-up of `warmup_ns`, then `measure_ns` that count.
    pub fn go(&self, warmup_ns: u64, measure_ns: u64) -> Window {
        let now = now_ns();
        self.start_ns.store(now + warmup_ns, Relaxed);
        self.end_ns.store(now + warmup_ns + measure_ns, Relaxed);
        self.is_open.store(1, Release);
        futex_wake(&self.is_open, i32::MAX, false);
        self.window()
    }

    fn window(&self) -> Window {
        Window { start_ns: self.start_ns.load(Relaxed), end_ns: self.end_ns.load(Relaxed) }
    }
}

/// What one task did inside the window. A field that a kind of task has no use for stays zero.
#[repr(C, align(64))]
pub struct Slot {
    /// Kernel identifier of the thread.
    pub tid: AtomicU64,
    /// Units of work done for its own sake.
    pub units: AtomicU64,
    /// Units of work burnt while waiting for the GPU.
    pub spin_units: AtomicU64,
    /// Batches taken, worked on and submitted (feeder), produced (loader) or runs ended (bursty).
    pub steps: AtomicU64,
    /// Time with a GPU kernel running, in ns.
    pub kernel_ns: AtomicU64,
    /// Time runnable but not running, in ns, out of `delay_wall_ns`.
    pub delay_ns: AtomicU64,
    /// Time over which `delay_ns` and `cpu_ns` were counted, in ns.
    pub delay_wall_ns: AtomicU64,
    /// Time running, in ns, out of `delay_wall_ns`.
    pub cpu_ns: AtomicU64,
    /// Last sign of life, in ns of CLOCK_MONOTONIC.
    pub seen_ns: AtomicU64,
    /// Longest time between two signs of life, in ns.
    pub max_gap_ns: AtomicU64,
    /// How late it ran after its GPU kernel was done.
    pub wake: Histogram,
    /// Where it was seen, by CPU.
    pub cpus: [AtomicU32; MAX_CPUS],
}

impl Slot {
    /// Records which thread the slot belongs to.
    pub fn claim(&self) {
        self.tid.store(tid(), Relaxed);
    }

    /// Records on which CPU the calling thread is.
    pub fn note_cpu(&self) {
        self.cpus[crate::sys::cpu().min(MAX_CPUS - 1)].fetch_add(1, Relaxed);
    }

    /// Records a sign of life at `now_ns` and the gap since the last one, as far as it lies in the window.
    pub fn note_seen(&self, now_ns: u64, window: Window) {
        let gap_ns = window.overlap(self.seen_ns.swap(now_ns, Relaxed), now_ns);
        self.max_gap_ns.fetch_max(gap_ns, Relaxed);
    }

    /// Longest gap in ns, with the time after the last sign of life.
    pub fn longest_gap_ns(&self, window: Window) -> u64 {
        let open_ns = window.overlap(self.seen_ns.load(Relaxed), window.end_ns);
        self.max_gap_ns.load(Relaxed).max(open_ns)
    }
}

/// The shared mapping. It stays for the life of the process, so its references are static.
#[derive(Clone, Copy)]
pub struct Shared {
    /// When things happen.
    pub control: &'static Control,
    /// One slot a task.
    pub slots: &'static [Slot],
}

impl Shared {
    /// Maps memory for `tasks` tasks, shared with every child forked after this.
    pub fn new(tasks: usize) -> io::Result<Self> {
        let bytes = size_of::<Control>() + tasks * size_of::<Slot>();
        let base = map_shared(bytes)?;
        // SAFETY: the mapping is zeroed, page-aligned, large enough and never unmapped, both types are made of
        // atomics, for which zero is valid, and sizes are multiples of their alignment (64).
        unsafe {
            Ok(Self {
                control: &*base.cast::<Control>(),
                slots: std::slice::from_raw_parts(base.add(size_of::<Control>()).cast::<Slot>(), tasks),
            })
        }
    }
}

/// Maps `bytes` zeroed bytes that children share, for the life of the process.
pub fn map_shared(bytes: usize) -> io::Result<*mut u8> {
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes.max(1),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base.cast()) }
}
