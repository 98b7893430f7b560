//! Weights of groups: each tree of cgroups is filled with tasks, and what they get is held against what they are due.

mod tree;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::cgroup::{self, Groups};
use crate::feed::{active_scheduler, feeder_report, idle_shares, wait_ready};
use crate::feeder::Feeder;
use crate::gpu::{DeviceKind, Gpu};
use crate::neighbours;
use crate::report::{self, FeederReport};
use crate::sample::ProcStat;
use crate::shared::{Shared, Slot, Window};
use crate::sys::{self, Children, MS, fork_child};
use tree::{Due, Group, GroupWeight, TaskKind, Tasks, Tree};

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct WeightsArgs {
    /// Which trees [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub trees: Vec<Tree>,
    /// Measured time of each, in s
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// Time before that, in s
    #[arg(long, default_value_t = 1.0)]
    pub warmup_s: f64,
    /// Let a feeder of each GPU run beside, in no group
    #[arg(long)]
    pub feeders: bool,
    /// Where GPUs come from
    #[arg(long, value_enum, default_value = "auto")]
    pub device: DeviceKind,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How one tree was shared out.
#[derive(Debug, Serialize)]
pub struct TreeReport {
    /// The sched_ext scheduler that was active, or `kernel`.
    pub scheduler: String,
    /// Which tree.
    pub tree: Tree,
    /// Measured time.
    pub seconds: f64,
    /// CPUs that feeders left for the tree.
    pub cpus: f64,
    /// How many CPUs were idle on average.
    pub idle_cpus: f64,
    /// Error of largest size, as a fraction of what was due; those meant to be idle are left out.
    pub worst_error: f64,
    /// Who has it.
    pub worst: String,
    /// Mean of the errors' sizes.
    pub mean_error: f64,
    /// Most that a group went beyond its `cpu.max`, as a fraction of it; none without limits.
    pub worst_excess: Option<f64>,
    /// Share of the CPU time that idle tasks and groups had; none without them.
    pub idle_share: Option<f64>,
    /// Longest time that a hog went without progress; the idle ones and those in groups with a limit left out.
    pub max_gap_ms: f64,
    /// Each set of tasks.
    pub rows: Vec<Row>,
    /// Each group with a limit.
    pub limits: Vec<Limit>,
    /// Each feeder beside them.
    pub feeders: Vec<FeederReport>,
}

/// What a set of like tasks got.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The group they are in.
    pub group: String,
    /// The tasks.
    pub tasks: String,
    /// Work they did, in units.
    pub units: u64,
    /// Their share of the CPU time that the tree had: their group's, as `cpu.stat` says, by their part of the work done
    /// in it. Work alone would not do: those who sleep or fork now and then spend time on that.
    pub share: f64,
    /// The share that they are due.
    pub due: f64,
    /// `share / due - 1`; none for those who are to run only when nothing else wants to.
    pub error: Option<f64>,
    /// CPUs that their group used, as its `cpu.stat` says.
    pub group_cpus: f64,
    /// Longest time that one of them went without progress.
    pub max_gap_ms: f64,
}

/// What became of a limit.
#[derive(Debug, Serialize)]
pub struct Limit {
    /// The group.
    pub group: String,
    /// `cpu.max`, in CPUs.
    pub limit_cpus: f64,
    /// CPUs that it used, as its `cpu.stat` says.
    pub used_cpus: f64,
}

/// `lab_load weights`.
pub fn main(args: &WeightsArgs) -> Result<()> {
    anyhow::ensure!(args.seconds > 0.0 && args.warmup_s >= 0.0, "the measured time must be above zero");
    let trees = if args.trees.is_empty() { Tree::value_variants() } else { &args.trees };
    let mut reports = Vec::new();
    for &tree in trees {
        let report = run(args, tree).with_context(|| format!("the tree '{}'", tree.name()))?;
        if !args.json {
            report::print_tree(&report);
        }
        reports.push(report);
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
    }
    Ok(())
}

/// Prefix of the groups at the top, so that they cannot be taken for anybody else's.
const PREFIX: &str = "lab_load_";

/// Where the group with `path` is below `root`.
fn place(root: &Path, path: &str) -> PathBuf {
    if path.is_empty() { root.to_path_buf() } else { root.join(format!("{PREFIX}{path}")) }
}

/// Makes the groups of `tree`.
fn make_groups(tree: &Group, root: &Path, groups: &mut Groups) -> Result<()> {
    let mut with_cpus = false;
    tree.visit("", &mut |_, group| with_cpus |= group.cpus.is_some());
    let mut result = Ok(());
    tree.visit("", &mut |path, group| {
        if result.is_ok() {
            result = make_group(group, &place(root, path), path.is_empty(), with_cpus, groups);
        }
    });
    result
}

fn make_group(group: &Group, path: &Path, is_root: bool, with_cpus: bool, groups: &mut Groups) -> Result<()> {
    /// The period of limits that the kernel has unless told otherwise.
    const PERIOD_US: f64 = 100_000.0;
    if !is_root {
        groups.make(path)?;
        match group.weight {
            GroupWeight::Weight(weight) => cgroup::write(path, "cpu.weight", &weight.to_string())?,
            GroupWeight::Idle => cgroup::write(path, "cpu.idle", "1")?,
        }
    }
    if let Some(cpus) = group.limit_cpus {
        cgroup::write(path, "cpu.max", &format!("{:.0} {PERIOD_US}", cpus * PERIOD_US))?;
    }
    if let Some(cpus) = &group.cpus {
        cgroup::write(path, "cpuset.cpus", &format!("{}-{}", cpus.start, cpus.end - 1))?;
    }
    if !group.groups.is_empty() {
        cgroup::delegate(path, "cpu")?;
        if with_cpus {
            cgroup::delegate(path, "cpuset")?;
        }
    }
    Ok(())
}

/// Measures one tree.
fn run(args: &WeightsArgs, which: Tree) -> Result<TreeReport> {
    /// Time for all tasks to notice that the run is over, however badly they are scheduled.
    const GRACE_NS: u64 = 60_000 * MS;
    let tree = which.root();
    let members = tree.members();
    let gpus = if args.feeders { Gpu::find(args.device, None)? } else { Vec::new() };
    let hogs: usize = members.iter().map(|(_, tasks)| tasks.count).sum();
    let shared = Shared::new(hogs + gpus.len()).context("mapping shared memory")?;
    let (slots, feeder_slots) = shared.slots.split_at(hogs);

    let root = cgroup::root()?;
    // Groups go after the tasks in them: locals are dropped last to first.
    let mut groups = Groups::default();
    let mut children = Children::default();
    make_groups(&tree, &root, &mut groups)?;
    let mut next = slots.iter();
    for (path, tasks) in &members {
        let group = place(&root, path);
        for (index, slot) in next.by_ref().take(tasks.count).enumerate() {
            children.add(fork_child("task", || run_task(&group, tasks, index, shared, slot))?);
        }
    }
    for (gpu, slot) in gpus.iter().zip(feeder_slots) {
        children.add(fork_child("feeder", || Feeder::plain(gpu).run(shared.control, slot))?);
    }

    wait_ready(shared, shared.slots.len(), &mut children)?;
    let window = shared.control.go((args.warmup_s * 1e9) as u64, (args.seconds * 1e9) as u64);
    sys::sleep_until(window.start_ns);
    let before = Seen::now(&tree, &root)?;
    sys::sleep_until(window.end_ns);
    let after = Seen::now(&tree, &root)?;
    children.wait(window.end_ns + GRACE_NS)?;

    let feeders: Vec<FeederReport> =
        gpus.iter().zip(feeder_slots).map(|(gpu, slot)| feeder_report(gpu, slot, window)).collect();
    let all_cpus = sys::affinity()?.len() as f64;
    let cpus = all_cpus - feeders.iter().filter_map(|feeder| feeder.cpu_share).sum::<f64>();
    let mut report = judge(which, &tree, cpus, slots, window, |path| after.cpus_since(&before, path));
    report.idle_cpus = idle_shares(&before.stat, &after.stat, after.at_ns - before.at_ns).values().sum();
    report.feeders = feeders;
    Ok(report)
}

fn run_task(group: &Path, tasks: &Tasks, index: usize, shared: Shared, slot: &Slot) -> Result<()> {
    slot.claim();
    cgroup::join(group)?;
    sys::set_nice(tasks.nice).context("nice (below 0 it needs root)")?;
    sys::set_policy(tasks.policy).context("scheduling policy")?;
    match tasks.kind {
        TaskKind::Hog => neighbours::hog(shared.control, slot),
        TaskKind::Bursty => neighbours::bursty(shared.control, slot, index),
        TaskKind::Forker => neighbours::forker(shared.control, slot)?,
    }
    Ok(())
}

/// What the kernel says at an instant.
struct Seen {
    at_ns: u64,
    stat: ProcStat,
    /// CPU time of each group that has tasks or a limit: (path, ns).
    usage: Vec<(String, u64)>,
}

impl Seen {
    fn now(tree: &Group, root: &Path) -> Result<Self> {
        let mut usage = Vec::new();
        let mut result = Ok(());
        let at_ns = sys::now_ns();
        tree.visit("", &mut |path, group| {
            if result.is_ok() && !path.is_empty() && !(group.tasks.is_empty() && group.limit_cpus.is_none()) {
                result = cgroup::usage_ns(&place(root, path)).map(|ns| usage.push((path.to_string(), ns)));
            }
        });
        result.and_then(|()| Ok(Self { at_ns, stat: ProcStat::read()?, usage }))
    }

    /// CPUs that the group `path` used since `before`.
    fn cpus_since(&self, before: &Self, path: &str) -> f64 {
        let of = |seen: &Self| seen.usage.iter().find(|(group, _)| group == path).map_or(0, |&(_, ns)| ns);
        (of(self) - of(before)) as f64 / (self.at_ns - before.at_ns) as f64
    }
}

/// Holds what tasks did against what they are due. `used_cpus` tells what a group used, by its path.
fn judge(
    which: Tree,
    tree: &Group,
    cpus: f64,
    slots: &[Slot],
    window: Window,
    used_cpus: impl Fn(&str) -> f64,
) -> TreeReport {
    let members = tree.members();
    let dues = tree.dues(cpus);
    let all_due: f64 = dues.iter().map(|due| due.cpus).sum();
    let units_of = |slots: &[Slot]| slots.iter().map(|slot| slot.units.load(Relaxed)).sum::<u64>();
    let mut units_in: BTreeMap<&str, u64> = BTreeMap::new();
    let mut rest = slots;
    for (group, tasks) in &members {
        let (own, others) = rest.split_at(tasks.count);
        rest = others;
        *units_in.entry(group).or_default() += units_of(own);
    }
    let all_cpus: f64 = units_in.keys().map(|group| used_cpus(group)).sum();
    let mut slots = slots;
    let row = |((group, tasks), due): (&(String, Tasks), &Due)| {
        let (own, rest) = slots.split_at(tasks.count);
        slots = rest;
        let units = units_of(own);
        let of_group = units as f64 / units_in[group.as_str()].max(1) as f64;
        let (share, due_share) = (used_cpus(group) * of_group / all_cpus, due.cpus / all_due);
        Row {
            group: due.group.clone(),
            tasks: tasks.to_string(),
            units,
            share,
            due: due_share,
            error: (!due.is_idle).then_some(share / due_share - 1.0),
            group_cpus: used_cpus(&due.group),
            max_gap_ms: own.iter().map(|slot| slot.longest_gap_ns(window)).max().unwrap_or(0) as f64 / 1e6,
        }
    };
    let rows: Vec<Row> = members.iter().zip(&dues).map(row).collect();
    let mut limits = Vec::new();
    tree.visit("", &mut |path, group| {
        let limit = |limit_cpus| Limit { group: path.to_string(), limit_cpus, used_cpus: used_cpus(path) };
        limits.extend(group.limit_cpus.map(limit));
    });
    summarise(which, window, cpus, rows, limits)
}

fn summarise(which: Tree, window: Window, cpus: f64, rows: Vec<Row>, limits: Vec<Limit>) -> TreeReport {
    let judged = || rows.iter().filter_map(|row| Some((row, row.error?)));
    let worst = judged().max_by(|(_, a), (_, b)| a.abs().total_cmp(&b.abs()));
    let idle = || rows.iter().filter(|row| row.error.is_none());
    let is_limited = |row: &Row| limits.iter().any(|limit| row.group.starts_with(&limit.group));
    let gaps = judged().filter(|(row, _)| !is_limited(row)).map(|(row, _)| row.max_gap_ms);
    TreeReport {
        scheduler: active_scheduler(),
        tree: which,
        seconds: window.ns() as f64 / 1e9,
        cpus,
        idle_cpus: 0.0,
        worst_error: worst.map_or(0.0, |(_, error)| error),
        worst: worst.map_or_else(String::new, |(row, _)| format!("{}: {}", row.group, row.tasks)),
        mean_error: judged().map(|(_, error)| error.abs()).sum::<f64>() / judged().count().max(1) as f64,
        worst_excess: limits.iter().map(|limit| limit.used_cpus / limit.limit_cpus - 1.0).reduce(f64::max),
        idle_share: idle().next().map(|_| idle().map(|row| row.share).sum()),
        max_gap_ms: gaps.fold(0.0, f64::max),
        feeders: Vec::new(),
        rows,
        limits,
    }
}
