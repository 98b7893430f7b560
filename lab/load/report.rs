//! What a run found, for programs (JSON by serde) and for people (a small table).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::fair::FairReport;
use crate::feed::FeedArgs;
use crate::work::UNITS_PER_MS;

/// Results of `lab_load feed`. Shares are fractions of the measured time; a unit is 10 µs of undisturbed work.
#[derive(Debug, Serialize)]
pub struct FeedReport {
    /// The sched_ext scheduler that was active, or `kernel`.
    pub scheduler: String,
    /// Measured time.
    pub seconds: f64,
    /// Share of time with a kernel on the GPU, mean over feeders; none without feeders.
    pub gpu_busy: Option<f64>,
    /// Share of time runnable but not running, mean over feeders.
    pub delay_share: Option<f64>,
    /// Share of samples on a home CPU, mean over feeders whose GPU has a known home.
    pub home_share: Option<f64>,
    /// Median of how late feeders ran after their kernel was done.
    pub wake_p50_ns: u64,
    /// Its 99th percentile.
    pub wake_p99_ns: u64,
    /// Its maximum.
    pub wake_max_ns: u64,
    /// Work of hogs and bursty tasks.
    pub background_units: u64,
    /// Work of feeders between kernels.
    pub feeder_units: u64,
    /// Work that feeders burnt while waiting.
    pub spin_units: u64,
    /// Work of loaders.
    pub loader_units: u64,
    /// All of the above.
    pub total_units: u64,
    /// How hogs fared; none without hogs.
    pub hogs: Option<HogReport>,
    /// Share of time each CPU was idle.
    pub idle: BTreeMap<usize, f64>,
    /// Their sum: how many CPUs were idle on average.
    pub idle_cpus: f64,
    /// Context switches of the whole machine.
    pub context_switches: u64,
    /// Each feeder.
    pub feeders: Vec<FeederReport>,
    /// What was run.
    pub options: FeedArgs,
}

/// How hogs fared.
#[derive(Debug, Serialize)]
pub struct HogReport {
    /// Work of the hog that did least.
    pub min_units: u64,
    /// Work of the hog that did most.
    pub max_units: u64,
    /// Longest time a hog went without progress.
    pub max_gap_ms: f64,
}

/// How one feeder fared; the names are those of [`FeedReport`].
#[derive(Debug, Serialize)]
pub struct FeederReport {
    /// The GPU it feeds.
    pub gpu: String,
    /// That GPU's NUMA node; none if unknown.
    pub node: Option<usize>,
    /// That GPU's CPUs; none if unknown.
    pub home: Option<String>,
    /// Kernel identifier of its thread.
    pub tid: u64,
    /// Share of time with its kernel on the GPU.
    pub gpu_busy: f64,
    /// Share of time runnable but not running; none if it hardly ran at all.
    pub delay_share: Option<f64>,
    /// Share of time running; none if it hardly ran at all.
    pub cpu_share: Option<f64>,
    /// Share of samples on a home CPU; none if home is unknown.
    pub home_share: Option<f64>,
    /// Median of how late it ran after its kernel was done.
    pub wake_p50_ns: u64,
    /// Its 99th percentile.
    pub wake_p99_ns: u64,
    /// Its maximum.
    pub wake_max_ns: u64,
    /// Longest time between two ends of a wait.
    pub max_gap_ms: f64,
    /// Kernels submitted.
    pub steps: u64,
    /// Work between kernels.
    pub units: u64,
    /// Work burnt while waiting.
    pub spin_units: u64,
    /// Samples by the CPU it was seen on.
    pub cpus: BTreeMap<usize, u32>,
}

/// Prints a run for people.
pub fn print_feed(report: &FeedReport) {
    println!("scheduler {}, {} s measured", report.scheduler, report.seconds);
    if !report.feeders.is_empty() {
        println!(
            "{:<12} {:>7} {:>8} {:>6} {:>7} {:>7} {:>24} {:>7}",
            "gpu", "home", "feeder", "busy", "delay", "at home", "wake p50/p99/max ms", "kernels"
        );
    }
    for feeder in &report.feeders {
        let wake =
            format!("{:.3} / {:.3} / {:.3}", ms(feeder.wake_p50_ns), ms(feeder.wake_p99_ns), ms(feeder.wake_max_ns));
        println!(
            "{:<12} {:>7} {:>8} {:>6.3} {:>7} {:>7} {wake:>24} {:>7}",
            feeder.gpu,
            feeder.home.as_deref().unwrap_or("unknown"),
            feeder.tid,
            feeder.gpu_busy,
            percent(feeder.delay_share),
            percent(feeder.home_share),
            feeder.steps
        );
    }
    let work = |units: u64| units / UNITS_PER_MS;
    println!(
        "work done, in ms: background {}, feeders {}, spinning {}, loaders {}, total {}",
        work(report.background_units),
        work(report.feeder_units),
        work(report.spin_units),
        work(report.loader_units),
        work(report.total_units)
    );
    if let Some(hogs) = &report.hogs {
        println!(
            "hogs: {} to {} ms of work each, longest gap {:.1} ms",
            work(hogs.min_units),
            work(hogs.max_units),
            hogs.max_gap_ms
        );
    }
    println!("idle CPUs {:.2}, context switches {}", report.idle_cpus, report.context_switches);
}

/// Nanoseconds as milliseconds.
pub fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// A share as a percentage, or a dash.
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".to_string(), |share| format!("{:.1} %", share * 100.0))
}

/// Prints micro-benchmarks for people.
pub fn print_fair(reports: &[FairReport]) {
    println!("{:<16} {:>12} {:<8} {:>8} {:>5}", "benchmark", "median", "", "spread", "runs");
    for report in reports {
        let FairReport { unit, median, spread, runs, .. } = report;
        let (name, spread) = (report.what.name(), percent(Some(*spread)));
        println!("{name:<16} {median:>12.0} {unit:<8} {spread:>8} {:>5}", runs.len());
    }
}
