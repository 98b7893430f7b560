//! Storms: far more tasks, groups, forks, yields or changes of affinity than any sane machine has. A task beside them
//! watches how long it is kept from running, and whether the scheduler stays.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::cgroup::{self, Groups};
use crate::feed::{active_scheduler, wait_ready};
use crate::report;
use crate::shared::{Control, Shared, Slot};
use crate::sys::{self, Children, MS, fork_child, now_ns};
use crate::work::{Sequence, work};

/// What to raise.
#[derive(Args, Clone, Debug)]
pub struct StormArgs {
    /// Which storms [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub storms: Vec<Storm>,
    /// Tasks of the storm of tasks
    #[arg(long, default_value_t = 10_000)]
    pub tasks: usize,
    /// Groups of the storm of groups
    #[arg(long, default_value_t = 2000)]
    pub groups: usize,
    /// How long each of them goes on, in s; the one of groups ends when all are made and removed
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,
    /// The scheduler's process, whose memory is looked at
    #[arg(long)]
    pub scheduler_pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A storm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Storm {
    /// Thousands of tasks that can all run
    Tasks,
    /// Thousands of cgroups made and removed, while tasks move through them
    Groups,
    /// Processes that fork and exit without a pause
    Fork,
    /// Tasks that yield without a pause
    Yield,
    /// Tasks that change their affinity without a pause
    Affinity,
}

/// What came of one storm.
#[derive(Debug, Serialize)]
pub struct StormReport {
    /// Which.
    pub storm: Storm,
    /// The sched_ext scheduler that was active before, or `kernel`.
    pub scheduler: String,
    /// Whether it still was after it.
    pub still_active: bool,
    /// How long it went on.
    pub seconds: f64,
    /// What it did: units of work, moves, forks, yields, or changes of affinity.
    pub done: u64,
    /// Longest time that a task beside its group which wants to run for a moment every 5 ms had to wait.
    pub longest_stall_ms: f64,
    /// Memory of the scheduler's process before, in KiB; none if it is not known.
    pub rss_before_kib: Option<u64>,
    /// The same after.
    pub rss_after_kib: Option<u64>,
}

/// `lab_load storm`.
pub fn main(args: &StormArgs) -> Result<()> {
    anyhow::ensure!(args.seconds > 0.0 && args.tasks > 0 && args.groups > 0, "there would be no storm");
    let storms = if args.storms.is_empty() { Storm::value_variants() } else { &args.storms };
    let mut reports = Vec::new();
    for &storm in storms {
        reports.push(run(args, storm).with_context(|| format!("the storm {storm:?}"))?);
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
    } else {
        report::print_storms(&reports);
    }
    Ok(())
}

/// Processes of a storm, by its kind.
const FORKERS: usize = 8;
const YIELDERS_PER_CPU: usize = 4;
const MOVERS: usize = 16;
/// Groups in a batch of the storm of groups: the first of them holds the others.
const BATCH_OF_GROUPS: usize = 10;
/// Threads in one process of the storm of tasks.
const THREADS: usize = 500;

fn run(args: &StormArgs, storm: Storm) -> Result<StormReport> {
    /// Time for all to end after it, however badly they are scheduled.
    const GRACE_NS: u64 = 120_000 * MS;
    /// For each task, so that all are awake when the storm begins.
    const WAKE_NS: u64 = MS / 5;
    let cpus = sys::affinity()?;
    let processes = match storm {
        Storm::Tasks => args.tasks.div_ceil(THREADS),
        Storm::Groups | Storm::Affinity => MOVERS,
        Storm::Fork => FORKERS,
        Storm::Yield => YIELDERS_PER_CPU * cpus.len(),
    };
    let scheduler = active_scheduler();
    // Its code is in memory then: thousands of tasks that wait for a disk are no storm.
    work(1);
    let rss_before_kib = args.scheduler_pid.and_then(rss_kib);
    let shared = Shared::new(processes).context("mapping shared memory")?;
    let mut groups = Groups::default();
    let mut children = Children::default();
    let from_ns = now_ns();
    let root = cgroup::root()?;
    cgroup::delegate(&root, "cpu")?;
    let own = root.join("lab_load_storm");
    groups.make(&own)?;
    let places = if storm == Storm::Groups { make_groups(args.groups, &own, &mut groups)? } else { Vec::new() };
    for (index, slot) in shared.slots.iter().enumerate() {
        let (control, own, places, cpus) = (shared.control, &own, &places, &cpus);
        let threads = THREADS.min(args.tasks - (index * THREADS).min(args.tasks));
        children.add(fork_child("storm", || {
            if storm != Storm::Groups {
                cgroup::join(own)?;
            }
            match storm {
                Storm::Tasks => crowd(control, slot, threads),
                Storm::Groups => mover(control, slot, index, places),
                Storm::Fork => until_end(control, slot, || Ok(sys::in_child(|| ())?)),
                Storm::Yield => until_end(control, slot, || {
                    std::thread::yield_now();
                    Ok(())
                }),
                Storm::Affinity => changer(control, slot, index, cpus),
            }
        })?);
    }
    let tasks = if storm == Storm::Tasks { args.tasks } else { processes };
    wait_ready(shared, tasks, &mut children)?;
    let (watches, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let longest_ns = std::thread::scope(|scope| {
        // Of its own, and there before the storm: this thread, with all that it did for it, may not run before it is over.
        let watcher = scope.spawn(|| {
            let mut longest_ns = 0;
            while !ended.load(Relaxed) {
                longest_ns = longest_ns.max(moment_ns());
                watches.store(true, Relaxed);
            }
            longest_ns
        });
        while !watches.load(Relaxed) {
            sys::sleep_ns(MS);
        }
        let window = shared.control.go(tasks as u64 * WAKE_NS, (args.seconds * 1e9) as u64);
        let outcome = children.wait(window.end_ns + GRACE_NS);
        ended.store(true, Relaxed);
        let longest_ns = watcher.join().map_err(|_| anyhow::anyhow!("the task that watches panicked"))?;
        outcome.map(|()| longest_ns)
    })?;
    // Removing groups is part of it.
    drop(groups);
    Ok(StormReport {
        storm,
        still_active: active_scheduler() == scheduler,
        scheduler,
        seconds: (now_ns() - from_ns) as f64 / 1e9,
        done: shared.slots.iter().map(|slot| slot.steps.load(Relaxed)).sum(),
        longest_stall_ms: longest_ns as f64 / 1e6,
        rss_before_kib,
        rss_after_kib: args.scheduler_pid.and_then(rss_kib),
    })
}

/// Sleeps for a moment and returns how much later than that this task ran, in ns.
fn moment_ns() -> u64 {
    let due_ns = now_ns() + 5 * MS;
    sys::sleep_until(due_ns);
    now_ns().saturating_sub(due_ns)
}

/// Memory of the process `pid` in KiB.
fn rss_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok())
}

/// `count` groups below `root`.
fn make_groups(count: usize, root: &Path, groups: &mut Groups) -> Result<Vec<PathBuf>> {
    cgroup::delegate(root, "cpu")?;
    let mut sequence = Sequence::new(count);
    let mut places: Vec<PathBuf> = Vec::new();
    for index in 0..count {
        let parent = if index.is_multiple_of(BATCH_OF_GROUPS) {
            root.to_path_buf()
        } else {
            places[index / BATCH_OF_GROUPS * BATCH_OF_GROUPS].clone()
        };
        let place = Path::new(&parent).join(index.to_string());
        groups.make(&place)?;
        if index.is_multiple_of(BATCH_OF_GROUPS) {
            cgroup::delegate(&place, "cpu")?;
        }
        cgroup::write(&place, "cpu.weight", &sequence.between(1, 1000).to_string())?;
        places.push(place);
    }
    Ok(places)
}

/// Repeats `operation` until the end, and counts.
fn until_end(control: &Control, slot: &Slot, mut operation: impl FnMut() -> Result<()>) -> Result<()> {
    /// Operations between two looks at the clock, which is slow in the lab.
    const BATCH: u64 = 32;
    let window = control.ready_and_wait();
    sys::sleep_until(window.start_ns);
    while now_ns() < window.end_ns {
        (0..BATCH).try_for_each(|_| operation())?;
        slot.steps.fetch_add(BATCH, Relaxed);
    }
    Ok(())
}

/// `threads` threads that compute.
fn crowd(control: &Control, slot: &Slot, threads: usize) -> Result<()> {
    const STACK_BYTES: usize = 64 * 1024;
    std::thread::scope(|scope| {
        let compute = || {
            until_end(control, slot, || {
                work(1);
                Ok(())
            })
        };
        for _ in 1..threads {
            std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, compute)
                .context("starting a thread")?;
        }
        compute()
    })
}

/// Goes through all groups, each mover from another one on.
fn mover(control: &Control, slot: &Slot, index: usize, places: &[PathBuf]) -> Result<()> {
    control.ready_and_wait();
    for turn in 0..places.len() {
        let at = (turn + index * places.len() / MOVERS) % places.len();
        // Those that hold others take no tasks.
        if !at.is_multiple_of(BATCH_OF_GROUPS) {
            cgroup::join(&places[at])?;
            slot.steps.fetch_add(1, Relaxed);
        }
        work(1);
    }
    cgroup::join(Path::new(cgroup::ROOT))
}

/// Ties itself to one CPU after another.
fn changer(control: &Control, slot: &Slot, index: usize, cpus: &[usize]) -> Result<()> {
    let mut sequence = Sequence::new(index);
    until_end(control, slot, || {
        let cpu = cpus[sequence.between(0, cpus.len() as u64 - 1) as usize];
        sys::set_affinity(&[cpu])?;
        work(1);
        Ok(())
    })
}
