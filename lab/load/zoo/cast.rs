//! Who is in the zoo: each thread's true role, and the shared memory by which it says that it is there.

use std::ffi::CString;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::shared::{Control, Shared, Slot, Window};
use crate::sys::{self, Children, MS, fork_child};

/// Threads for which there is room.
const MAX_THREADS: usize = 256;

/// What a thread is, known because it was made so.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "role", rename_all = "kebab-case")]
pub enum Truth {
    /// It feeds a GPU.
    Feeder {
        /// Which of the zoo's GPUs.
        gpu: usize,
    },
    /// A feeder waits for its work.
    Supplier {
        /// 1 if the feeder waits for this thread itself, 2 if it waits for one that waits for this thread.
        depth: u32,
    },
    /// To call it a supplier is right, and to call it ordinary too; it is no feeder.
    SupplierAtMost,
    /// Neither.
    Ordinary,
}

/// A thread of the zoo, seen from outside.
pub struct Member {
    /// How it is made: threads of one kind share a row of the table.
    pub kind: &'static str,
    /// Its name.
    pub comm: String,
    /// What it is.
    pub truth: Truth,
    slot: &'static Slot,
    waits: bool,
}

impl Member {
    /// Whether it does nothing but wait for others.
    pub fn is_waiting(&self) -> bool {
        self.waits
    }

    /// Its identifier in the namespace of this process.
    pub fn tid(&self) -> u64 {
        self.slot.tid.load(Relaxed)
    }

    /// Steps it has made since the start, whatever a step is to its kind.
    pub fn steps(&self) -> u64 {
        self.slot.steps.load(Relaxed)
    }

    /// Whether it has done something since the start.
    pub fn has_run(&self) -> bool {
        self.steps() + self.slot.units.load(Relaxed) > 0
    }
}

/// What a thread of the zoo needs to play its part.
#[derive(Clone)]
pub struct Part {
    comm: CString,
    /// Where it tells what it did.
    pub slot: &'static Slot,
    /// When things happen.
    pub control: &'static Control,
}

impl Part {
    /// Takes the part's name, without telling who has it.
    pub fn take_name(&self) {
        // SAFETY: the name is a string that outlives the call; the kernel cuts what is too long.
        unsafe { libc::prctl(libc::PR_SET_NAME, self.comm.as_ptr()) };
        sys::no_timer_slack();
    }

    /// Says that the calling thread has this part.
    pub fn introduce(&self) {
        self.take_name();
        self.slot.claim();
    }

    /// Introduces the calling thread and waits until all are there.
    pub fn enter(&self) -> Window {
        self.introduce();
        self.control.ready_and_wait()
    }

    /// Counts a step.
    pub fn step(&self) {
        self.slot.steps.fetch_add(1, Relaxed);
    }
}

/// Members that start together. Those still alive are killed when it is dropped.
pub struct Cast {
    shared: Shared,
    /// Everyone, in the order of the table.
    pub members: Vec<Member>,
    children: Children,
}

impl Cast {
    /// Nobody yet.
    pub fn new() -> Result<Self> {
        let shared = Shared::new(MAX_THREADS).context("mapping shared memory")?;
        Ok(Self { shared, members: Vec::new(), children: Children::default() })
    }

    /// Adds a member; a thread that is forked after this must play it.
    pub fn add(&mut self, kind: &'static str, comm: impl Into<String>, truth: Truth) -> Result<Part> {
        let comm = comm.into();
        anyhow::ensure!(comm.len() < 16, "the name {comm} is too long for a thread");
        let slot = self.shared.slots.get(self.members.len()).context("too many threads in the zoo")?;
        let part = Part { comm: CString::new(comm.as_str())?, slot, control: self.shared.control };
        self.members.push(Member { kind, comm, truth, slot, waits: false });
        Ok(part)
    }

    /// Adds a member that does nothing but wait for others.
    pub fn add_waiting(&mut self, kind: &'static str, comm: &str) -> Result<Part> {
        let part = self.add(kind, comm, Truth::Ordinary)?;
        if let Some(member) = self.members.last_mut() {
            member.waits = true;
        }
        Ok(part)
    }

    /// Forks a process.
    pub fn fork(&mut self, name: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.children.add(fork_child(name, body)?);
        Ok(())
    }

    /// Waits until all are there and lets them go.
    pub fn start(&mut self) -> Result<()> {
        /// Time for all to be set up.
        const SETUP_NS: u64 = 60_000 * MS;
        /// They run until they are killed; this is for when nobody does.
        const LIFE_NS: u64 = 3_600_000 * MS;
        let limit_ns = sys::now_ns() + SETUP_NS;
        while self.shared.control.ready() < self.members.len() {
            self.check_alive()?;
            let absent: Vec<&str> =
                self.members.iter().filter(|member| member.tid() == 0).map(|member| member.comm.as_str()).collect();
            anyhow::ensure!(sys::now_ns() < limit_ns, "not set up in time: {}", absent.join(", "));
            sys::sleep_ns(2 * MS);
        }
        self.shared.control.go(0, LIFE_NS);
        Ok(())
    }

    /// Err if a process has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        anyhow::ensure!(!self.children.reap()?, "all processes of the zoo have ended");
        Ok(())
    }
}
