//! One run: forks feeders and their neighbours, lets them go together, and gathers what they saw.

use std::fs;
use std::io::PipeReader;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use crate::feeder::{Feeder, Policy, StartOn, WaitKind};
use crate::gpu::{DeviceKind, Gpu, SubmitKind};
use crate::neighbours;
use crate::report::{self, FeedReport, FeederReport, HogReport};
use crate::sample::{Merged, ProcStat};
use crate::shared::{Shared, Slot, Window};
use crate::sys::{self, Children, MS, fork_child, parse_cpulist};
use crate::work::units_of_us;

/// What to run.
#[derive(Args, Clone, Debug, Serialize)]
pub struct FeedArgs {
    /// Feeders on each GPU; 0 runs the neighbours alone
    #[arg(long, default_value_t = 1)]
    pub feeders_per_gpu: usize,
    /// How many GPUs to feed [default: all there are]
    #[arg(long)]
    pub gpus: Option<usize>,
    /// Where GPUs come from
    #[arg(long, value_enum, default_value = "auto")]
    pub device: DeviceKind,
    /// Length of a GPU kernel, in µs
    #[arg(long, default_value_t = 10_000)]
    pub kernel_us: u64,
    /// CPU work in each step of a feeder, in µs of an undisturbed CPU in the counted lab
    #[arg(long, default_value_t = 1000)]
    pub work_us: u64,
    /// How feeders wait for the GPU
    #[arg(long, value_enum, default_value = "block")]
    pub wait: WaitKind,
    /// How feeders submit to the GPU
    #[arg(long, value_enum, default_value = "ioctl")]
    pub submit: SubmitKind,
    /// Loader processes of each feeder; with any, each step of it needs a batch from one of them
    #[arg(long, default_value_t = 0)]
    pub loaders: usize,
    /// CPU work in each batch of a loader, in µs of an undisturbed CPU in the counted lab
    #[arg(long, default_value_t = 1000)]
    pub batch_us: u64,
    /// Neighbours that compute without a pause
    #[arg(long, default_value_t = 0)]
    pub hogs: usize,
    /// Neighbours that compute for 0.2 to 1 ms of work and then sleep for 0.5 to 2 ms
    #[arg(long, default_value_t = 0)]
    pub bursty: usize,
    /// Measured time, in s
    #[arg(long, default_value_t = 6.0)]
    pub seconds: f64,
    /// Time before that, in s
    #[arg(long, default_value_t = 1.0)]
    pub warmup_s: f64,
    /// How the kernel is told that feeders and loaders matter
    #[arg(long, value_enum, default_value = "other")]
    pub feeder_policy: Policy,
    /// Where feeders are before they are free to run anywhere
    #[arg(long, value_enum, default_value = "anywhere")]
    pub start_on: StartOn,
    /// Pin feeders to these CPUs for good, such as 2-3
    #[arg(long, value_name = "CPUS")]
    pub pin_feeders: Option<String>,
    /// Put all feeders into one process, a thread each
    #[arg(long)]
    pub one_process: bool,
    /// Print JSON
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

/// `lab_load feed`.
pub fn main(args: &FeedArgs) -> Result<()> {
    let report = run(args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report::print_feed(&report);
    }
    Ok(())
}

/// What a slot of the shared memory belongs to: feeders come first, then loaders, hogs and bursty tasks.
struct Layout {
    feeders: usize,
    loaders: usize,
    hogs: usize,
    bursty: usize,
}

impl Layout {
    fn tasks(&self) -> usize {
        self.feeders + self.loaders + self.hogs + self.bursty
    }

    /// Splits the slots by kind, in the order of the fields.
    fn split<'a>(&self, slots: &'a [Slot]) -> [&'a [Slot]; 4] {
        let (feeders, rest) = slots.split_at(self.feeders);
        let (loaders, rest) = rest.split_at(self.loaders);
        let (hogs, bursty) = rest.split_at(self.hogs);
        [feeders, loaders, hogs, bursty]
    }
}

/// Runs once and reports.
pub fn run(args: &FeedArgs) -> Result<FeedReport> {
    /// Time for all tasks to notice that the run is over, however badly they are scheduled.
    const GRACE_NS: u64 = 20_000 * MS;

    anyhow::ensure!(args.seconds > 0.0 && args.warmup_s >= 0.0, "the measured time must be above zero");
    let gpus = if args.feeders_per_gpu == 0 { Vec::new() } else { Gpu::find(args.device, args.gpus)? };
    let feeders = gpus.len() * args.feeders_per_gpu;
    let layout = Layout { feeders, loaders: feeders * args.loaders, hogs: args.hogs, bursty: args.bursty };
    let shared = Shared::new(layout.tasks()).context("mapping shared memory")?;
    let mut children = Children::default();
    fork_neighbours(args, &layout, shared, &mut children)?;
    fork_feeders(args, &gpus, &layout, shared, &mut children)?;

    wait_ready(shared, layout.tasks(), &mut children)?;
    let window = shared.control.go((args.warmup_s * 1e9) as u64, (args.seconds * 1e9) as u64);
    sys::sleep_until(window.start_ns);
    let (before_ns, before) = (sys::now_ns(), ProcStat::read()?);
    sys::sleep_until(window.end_ns);
    let (after_ns, after) = (sys::now_ns(), ProcStat::read()?);
    children.wait(window.end_ns + GRACE_NS)?;

    let mut report = gather(args, &gpus, &layout, shared.slots, window);
    report.idle = idle_shares(&before, &after, after_ns - before_ns);
    report.idle_cpus = report.idle.values().sum();
    report.context_switches = after.switches - before.switches;
    Ok(report)
}

/// Waits until `tasks` tasks are set up.
///
/// # Errors
/// One ended badly, or they were not set up in time.
pub fn wait_ready(shared: Shared, tasks: usize, children: &mut Children) -> Result<()> {
    const LIMIT_NS: u64 = 60_000 * MS;
    let limit_ns = sys::now_ns() + LIMIT_NS;
    while shared.control.ready() < tasks {
        anyhow::ensure!(!children.reap()?, "all tasks ended before the run began");
        let ready = shared.control.ready();
        anyhow::ensure!(sys::now_ns() < limit_ns, "only {ready} of {tasks} tasks were set up in time");
        sys::sleep_ns(2 * MS);
    }
    Ok(())
}

fn fork_neighbours(args: &FeedArgs, layout: &Layout, shared: Shared, children: &mut Children) -> Result<()> {
    let [_, _, hogs, bursty] = layout.split(shared.slots);
    for slot in hogs {
        children.add(fork_child("hog", || {
            slot.claim();
            neighbours::hog(shared.control, slot);
            Ok(())
        })?);
    }
    for (index, slot) in bursty.iter().take(args.bursty).enumerate() {
        children.add(fork_child("bursty neighbour", || {
            slot.claim();
            neighbours::bursty(shared.control, slot, index);
            Ok(())
        })?);
    }
    Ok(())
}

/// Forks all loaders and then the feeders they supply, one by one or together.
fn fork_feeders(args: &FeedArgs, gpus: &[Gpu], layout: &Layout, shared: Shared, children: &mut Children) -> Result<()> {
    let pinned = args.pin_feeders.as_deref().map(parse_cpulist).transpose().context("--pin-feeders")?;
    let [slots, loader_slots, ..] = layout.split(shared.slots);
    let mut loader_slots = loader_slots.iter();
    let mut readers: Vec<RawFd> = Vec::new();
    let mut feeders = Vec::new();
    for (index, slot) in slots.iter().enumerate() {
        let mut loaders = Vec::new();
        for slot in loader_slots.by_ref().take(args.loaders) {
            loaders.push(fork_loader(args, shared, slot, &mut readers, children)?);
        }
        let feeder = Feeder {
            gpu: gpus[index / args.feeders_per_gpu].clone(),
            submit: args.submit,
            wait: args.wait,
            policy: args.feeder_policy,
            start_on: args.start_on,
            pinned: pinned.clone(),
            kernel_ns: args.kernel_us * 1000,
            work_units: units_of_us(args.work_us),
            loaders,
        };
        feeders.push((feeder, slot));
    }
    if args.one_process {
        children.add(fork_child("feeders", || {
            std::thread::scope(|scope| {
                let run = |(feeder, slot): (Feeder, &'static Slot)| scope.spawn(|| feeder.run(shared.control, slot));
                let threads: Vec<_> = feeders.into_iter().map(run).collect();
                threads.into_iter().try_for_each(|thread| match thread.join() {
                    Ok(result) => result,
                    Err(_) => anyhow::bail!("a feeder thread panicked"),
                })
            })
        })?);
    } else {
        for (feeder, slot) in feeders {
            children.add(fork_child("feeder", || feeder.run(shared.control, slot))?);
        }
    }
    Ok(())
}

/// Forks a loader and returns the end of the pipe that its feeder reads from.
fn fork_loader(
    args: &FeedArgs,
    shared: Shared,
    slot: &'static Slot,
    readers: &mut Vec<RawFd>,
    children: &mut Children,
) -> Result<PipeReader> {
    let (reader, writer) = std::io::pipe()?;
    let bytes = (neighbours::BATCH_BYTES * neighbours::PREFETCH) as libc::c_int;
    // SAFETY: takes integers only.
    sys::check(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, bytes) }).context("F_SETPIPE_SZ")?;
    readers.push(reader.as_raw_fd());
    let (policy, units) = (args.feeder_policy, units_of_us(args.batch_us));
    children.add(fork_child("loader", || {
        // Were a loader to hold reading ends too, it would wait for ever once the feeder has gone.
        for &fd in readers.iter() {
            // SAFETY: the child's own copy, which nothing in this child uses.
            unsafe { libc::close(fd) };
        }
        slot.claim();
        policy.apply()?;
        neighbours::loader(shared.control, slot, units, writer)
    })?);
    Ok(reader)
}

/// Share of `wall_ns` that each CPU was idle.
pub fn idle_shares(before: &ProcStat, after: &ProcStat, wall_ns: u64) -> std::collections::BTreeMap<usize, f64> {
    let before: std::collections::BTreeMap<_, _> = before.idle_ns.iter().copied().collect();
    let share = |&(cpu, idle_ns): &(usize, u64)| {
        let idle_ns = idle_ns.saturating_sub(*before.get(&cpu)?);
        Some((cpu, (idle_ns as f64 / wall_ns as f64).min(1.0)))
    };
    after.idle_ns.iter().filter_map(share).collect()
}

fn gather(args: &FeedArgs, gpus: &[Gpu], layout: &Layout, slots: &[Slot], window: Window) -> FeedReport {
    let [feeders, loaders, hogs, bursty] = layout.split(slots);
    let units = |slots: &[Slot]| slots.iter().map(|slot| slot.units.load(Relaxed)).sum::<u64>();
    let spin = feeders.iter().map(|slot| slot.spin_units.load(Relaxed)).sum::<u64>();
    let hog_units = || hogs.iter().map(|slot| slot.units.load(Relaxed));
    let wake = Merged::of(feeders.iter().map(|slot| &slot.wake));
    let per_gpu = |index: usize| &feeders[index * args.feeders_per_gpu..(index + 1) * args.feeders_per_gpu];
    let feeder_reports: Vec<FeederReport> = gpus
        .iter()
        .enumerate()
        .flat_map(|(index, gpu)| per_gpu(index).iter().map(|slot| feeder_report(gpu, slot, window)))
        .collect();
    let mean = |value: fn(&FeederReport) -> Option<f64>| {
        let values: Vec<f64> = feeder_reports.iter().filter_map(value).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    FeedReport {
        scheduler: active_scheduler(),
        seconds: window.ns() as f64 / 1e9,
        gpu_busy: mean(|feeder| Some(feeder.gpu_busy)),
        delay_share: mean(|feeder| feeder.delay_share),
        home_share: mean(|feeder| feeder.home_share),
        wake_p50_ns: wake.percentile_ns(0.5),
        wake_p99_ns: wake.percentile_ns(0.99),
        wake_max_ns: wake.max_ns(),
        background_units: units(hogs) + units(bursty),
        feeder_units: units(feeders),
        spin_units: spin,
        loader_units: units(loaders),
        total_units: units(slots) + spin,
        hogs: hog_units().min().map(|min_units| HogReport {
            min_units,
            max_units: hog_units().max().unwrap_or(min_units),
            max_gap_ms: hogs.iter().map(|slot| slot.longest_gap_ns(window)).max().unwrap_or(0) as f64 / 1e6,
        }),
        idle: Default::default(),
        idle_cpus: 0.0,
        context_switches: 0,
        feeders: feeder_reports,
        options: args.clone(),
    }
}

/// What the feeder of `gpu` with this slot saw.
pub fn feeder_report(gpu: &Gpu, slot: &Slot, window: Window) -> FeederReport {
    let wake = Merged::of([&slot.wake].into_iter());
    let share = |ns: u64| {
        let wall_ns = slot.delay_wall_ns.load(Relaxed);
        (wall_ns > 0).then(|| ns as f64 / wall_ns as f64)
    };
    let cpus: std::collections::BTreeMap<usize, u32> = (slot.cpus.iter().enumerate())
        .map(|(cpu, samples)| (cpu, samples.load(Relaxed)))
        .filter(|&(_, samples)| samples > 0)
        .collect();
    let samples: u32 = cpus.values().sum();
    let home_share = gpu.home.as_ref().filter(|_| samples > 0).map(|home| {
        let at_home: u32 = cpus.iter().filter(|(cpu, _)| home.contains(cpu)).map(|(_, samples)| samples).sum();
        f64::from(at_home) / f64::from(samples)
    });
    FeederReport {
        gpu: gpu.name.clone(),
        node: gpu.node,
        home: gpu.home.as_deref().map(sys::format_cpulist),
        tid: slot.tid.load(Relaxed),
        gpu_busy: slot.kernel_ns.load(Relaxed) as f64 / window.ns() as f64,
        delay_share: share(slot.delay_ns.load(Relaxed)),
        cpu_share: share(slot.cpu_ns.load(Relaxed)),
        home_share,
        wake_p50_ns: wake.percentile_ns(0.5),
        wake_p99_ns: wake.percentile_ns(0.99),
        wake_max_ns: wake.max_ns(),
        max_gap_ms: slot.longest_gap_ns(window) as f64 / 1e6,
        steps: slot.steps.load(Relaxed),
        units: slot.units.load(Relaxed),
        spin_units: slot.spin_units.load(Relaxed),
        cpus,
    }
}

/// Name of the sched_ext scheduler that is active, or `kernel` if none is.
pub fn active_scheduler() -> String {
    match fs::read_to_string("/sys/kernel/sched_ext/state") {
        Ok(state) if state.trim() == "enabled" => fs::read_to_string("/sys/kernel/sched_ext/root/ops")
            .map_or_else(|_| "sched_ext".to_string(), |name| name.trim().to_string()),
        _ => "kernel".to_string(),
    }
}
