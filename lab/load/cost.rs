//! What a scheduler's BPF programs cost: time per call and per context switch, and how that grows with the machine's
//! tasks and groups. In counted time a nanosecond is an instruction.

mod crowd;
mod stats;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::fair::What;
use crate::feed::{active_scheduler, wait_ready};
use crate::feeder::Feeder;
use crate::gpu::{DeviceKind, Gpu};
use crate::report;
use crate::sample::ProcStat;
use crate::shared::Shared;
use crate::sys::{self, Children, MS, fork_child};
use crate::work::at_once;
use crowd::Crowd;
use stats::Counting;

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct CostArgs {
    /// What runs; may be given several times
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pingpong,exchange")]
    pub load: Vec<CostLoad>,
    /// Threads of the crowd; several numbers are measured one by one
    #[arg(long, value_delimiter = ',', default_value = "100")]
    pub tasks: Vec<usize>,
    /// Cgroups that the crowd is spread over, 0 for none; several numbers are measured one by one
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub groups: Vec<usize>,
    /// Let a feeder of each GPU run beside
    #[arg(long)]
    pub feeders: bool,
    /// Measured time of each, in s
    #[arg(long, default_value_t = 0.5)]
    pub seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A load to count under.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum CostLoad {
    /// A byte to and fro between two processes, wherever the scheduler puts them
    Pingpong,
    /// Groups of senders and receivers, like hackbench
    Exchange,
    /// Pairs of threads that wake each other, all at once
    Crowd,
}

/// What was counted under one load.
#[derive(Debug, Serialize)]
pub struct CostReport {
    /// The sched_ext scheduler that was active, or `kernel`.
    pub scheduler: String,
    /// What ran.
    pub load: CostLoad,
    /// Threads of the crowd; 0 for other loads.
    pub tasks: usize,
    /// Cgroups of the crowd.
    pub groups: usize,
    /// Feeders beside.
    pub feeders: usize,
    /// CPUs of the machine.
    pub cpus: usize,
    /// Measured time.
    pub seconds: f64,
    /// Context switches of the whole machine.
    pub switches: u64,
    /// CPU time that was not idle, of everything, per context switch, in ns.
    pub ns_per_switch: f64,
    /// What the scheduler's programs took of that, in ns.
    pub bpf_ns_per_switch: f64,
    /// What counting adds to each call, in ns; taken off already.
    pub overhead_ns: f64,
    /// Each program that ran.
    pub programs: Vec<ProgramCost>,
}

/// What one program cost.
#[derive(Debug, Serialize)]
pub struct ProgramCost {
    /// Its name; the kernel keeps 15 characters.
    pub name: String,
    /// Whether it is a callback of the scheduler, and not a hook beside it.
    pub is_callback: bool,
    /// Calls per context switch.
    pub calls_per_switch: f64,
    /// ns per call.
    pub ns_per_call: f64,
}

/// `lab_load cost`.
pub fn main(args: &CostArgs) -> Result<()> {
    anyhow::ensure!(args.seconds > 0.0, "the measured time must be above zero");
    let _counting = Counting::start()?;
    let overhead_ns = stats::overhead_ns()?;
    let mut reports = Vec::new();
    for &load in &args.load {
        for (tasks, groups) in sizes(load, args) {
            let report = run(args, load, tasks, groups, overhead_ns);
            let report = report.with_context(|| format!("{load:?} of {tasks} tasks in {groups} groups"))?;
            if !args.json {
                report::print_cost(&report);
            }
            reports.push(report);
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
    }
    Ok(())
}

/// The sizes of `load` to measure: (tasks, groups).
fn sizes(load: CostLoad, args: &CostArgs) -> Vec<(usize, usize)> {
    if load != CostLoad::Crowd {
        return vec![(0, 0)];
    }
    args.tasks.iter().flat_map(|&tasks| args.groups.iter().map(move |&groups| (tasks, groups))).collect()
}

fn run(args: &CostArgs, load: CostLoad, tasks: usize, groups: usize, overhead_ns: f64) -> Result<CostReport> {
    /// Time for a crowd to notice that the run is over, however badly it is scheduled.
    const GRACE_NS: u64 = 100_000 * MS;
    /// Time for a crowd to have settled.
    const WARMUP_NS: u64 = 300 * MS;
    let for_ns = (args.seconds * 1e9) as u64;
    let cpus = sys::affinity()?.len();
    let at_once = at_once(cpus);
    // The feeders are killed when this is dropped.
    let (feeders, _children) = if args.feeders { start_feeders(for_ns)? } else { (0, Children::default()) };
    let (from, to) = match load {
        CostLoad::Pingpong | CostLoad::Exchange => {
            let what = if load == CostLoad::Pingpong { What::PingpongFree } else { What::Exchange };
            let from = Instant::now()?;
            what.once(args.seconds)?;
            (from, Instant::now()?)
        }
        CostLoad::Crowd => {
            let crowd = Crowd::new(tasks, groups)?;
            let window = crowd.go(WARMUP_NS, for_ns);
            sys::sleep_until(window.start_ns);
            let from = Instant::now()?;
            sys::sleep_until(window.end_ns);
            let to = Instant::now()?;
            crowd.wait(window.end_ns + GRACE_NS)?;
            (from, to)
        }
    };
    let wall_ns = to.at_ns - from.at_ns;
    let idle: f64 = crate::feed::idle_shares(&from.stat, &to.stat, wall_ns).values().sum();
    let switches = to.stat.switches - from.stat.switches;
    let per_switch = |amount: f64| amount / switches.max(1) as f64;
    // Where CPUs take turns, the turns of the others are in every time that is measured on one. This takes them off as if
    // they fell everywhere alike; where CPUs wait for each other's locks they do not.
    let busy = (cpus as f64 - idle).max(1.0);
    let stretch = busy / busy.min(at_once);
    let programs: Vec<ProgramCost> = stats::between(&from.programs, to.programs)
        .into_iter()
        .map(|program| ProgramCost {
            name: program.name,
            is_callback: program.is_callback,
            calls_per_switch: per_switch(program.calls as f64),
            ns_per_call: (program.ns as f64 / program.calls as f64 / stretch - overhead_ns).max(0.0),
        })
        .collect();
    Ok(CostReport {
        scheduler: active_scheduler(),
        load,
        tasks,
        groups,
        feeders,
        cpus,
        seconds: wall_ns as f64 / 1e9,
        switches,
        ns_per_switch: per_switch((cpus as f64 - idle) / stretch * wall_ns as f64),
        bpf_ns_per_switch: programs
            .iter()
            .fold(0.0, |sum, program| sum + program.calls_per_switch * program.ns_per_call),
        overhead_ns,
        programs,
    })
}

/// What the kernel has counted until an instant.
struct Instant {
    at_ns: u64,
    stat: ProcStat,
    programs: std::collections::BTreeMap<u32, stats::Program>,
}

impl Instant {
    fn now() -> Result<Self> {
        Ok(Self { at_ns: sys::now_ns(), stat: ProcStat::read()?, programs: stats::programs() })
    }
}

/// Starts a feeder of each GPU and waits until they have settled.
fn start_feeders(for_ns: u64) -> Result<(usize, Children)> {
    /// Signs of GPU work for some time make a feeder.
    const SETTLE_NS: u64 = 1500 * MS;
    /// Long enough for anything that runs beside.
    const REST_NS: u64 = 200_000 * MS;
    let gpus = Gpu::find(DeviceKind::Auto, None)?;
    let shared = Shared::new(gpus.len()).context("mapping shared memory")?;
    let mut children = Children::default();
    for (gpu, slot) in gpus.iter().zip(shared.slots) {
        children.add(fork_child("feeder", || Feeder::plain(gpu).run(shared.control, slot))?);
    }
    wait_ready(shared, gpus.len(), &mut children)?;
    shared.control.go(0, for_ns + REST_NS);
    sys::sleep_ns(SETTLE_NS);
    Ok((gpus.len(), children))
}
