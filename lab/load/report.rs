//! What a run found, for programs (JSON by serde) and for people (a small table).

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::compare::{Comparison, Contender, Role, Scenario};
use crate::cost::CostReport;
use crate::fair::FairReport;
use crate::feed::FeedArgs;
use crate::storm::StormReport;
use crate::weights::TreeReport;
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

/// Prints how a tree of cgroups was shared out.
pub fn print_tree(report: &TreeReport) {
    println!("\n{}: scheduler {}, {} s measured", report.tree.name(), report.scheduler, report.seconds);
    println!(
        "  {:<14} {:<22} {:>8} {:>8} {:>8} {:>10} {:>8}",
        "group", "tasks", "share", "due", "error", "group CPUs", "gap, ms"
    );
    for row in &report.rows {
        println!(
            "  {:<14} {:<22} {:>8} {:>8} {:>8} {:>10.3} {:>8.0}",
            row.group,
            row.tasks,
            percent(Some(row.share)),
            percent(Some(row.due)),
            signed_percent(row.error),
            row.group_cpus,
            row.max_gap_ms
        );
    }
    for limit in &report.limits {
        println!("  {}: used {:.3} CPUs of {} (cpu.max)", limit.group, limit.used_cpus, limit.limit_cpus);
    }
    println!(
        "  worst error {} ({}), mean {}, longest gap {:.0} ms, idle CPUs {:.2}",
        signed_percent(Some(report.worst_error)),
        report.worst,
        percent(Some(report.mean_error)),
        report.max_gap_ms,
        report.idle_cpus
    );
    for feeder in &report.feeders {
        let (busy, delay) = (percent(Some(feeder.gpu_busy)), percent(feeder.delay_share));
        println!("  feeder of {}: GPU busy {busy}, starvation {delay}", feeder.gpu);
    }
}

/// Prints what came of storms.
pub fn print_storms(reports: &[StormReport]) {
    println!("{:<10} {:>8} {:>12} {:>18} {:>22}", "storm", "s", "done", "longest stall, ms", "scheduler's MiB");
    for report in reports {
        let mib = |kib: Option<u64>| plain(kib.map(|kib| kib as f64 / 1024.0), 1);
        let memory = format!("{} to {}", mib(report.rss_before_kib), mib(report.rss_after_kib));
        let left = if report.still_active { "" } else { "  the scheduler LEFT" };
        let name = format!("{:?}", report.storm).to_lowercase();
        println!(
            "{name:<10} {:>8.1} {:>12} {:>18.1} {memory:>22}{left}",
            report.seconds, report.done, report.longest_stall_ms
        );
    }
}

/// Prints what BPF programs cost.
pub fn print_cost(report: &CostReport) {
    println!("\n{}: scheduler {}", cost_title(&serde_json::to_value(report).unwrap_or_default()), report.scheduler);
    println!("  {:<16} {:>16} {:>12} {:>14}", "program", "calls per switch", "ns per call", "ns per switch");
    for program in &report.programs {
        println!(
            "  {:<16} {:>16.3} {:>12.0} {:>14.0}{}",
            program.name,
            program.calls_per_switch,
            program.ns_per_call,
            program.calls_per_switch * program.ns_per_call,
            if program.is_callback { "" } else { "  (a hook)" }
        );
    }
    println!(
        "  {:.0} ns of BPF for each of {} context switches, of {:.0} ns in all ({:.0} ns of counting taken off each call)",
        report.bpf_ns_per_switch, report.switches, report.ns_per_switch, report.overhead_ns
    );
}

/// What a cost was counted under, from its report.
pub fn cost_title(report: &Value) -> String {
    let count = |key: &str| report[key].as_u64().unwrap_or(0);
    let load = report["load"].as_str().unwrap_or_default();
    let crowd = if load == "crowd" {
        format!(" of {} tasks in {} groups", count("tasks"), count("groups").max(1))
    } else {
        String::new()
    };
    let feeders = if count("feeders") > 0 { format!(", {} feeders", count("feeders")) } else { String::new() };
    format!("{load}{crowd}{feeders}, {} CPUs", count("cpus"))
}

fn signed_percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".to_string(), |share| format!("{:+.1} %", share * 100.0))
}

fn number(feed: &Value, key: &str) -> Option<f64> {
    feed.get(key)?.as_f64()
}

fn plain(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "–".to_string(), |value| format!("{value:.digits$}"))
}

/// One `feed` run in a few words.
pub fn summary(feed: &Value) -> String {
    format!(
        "GPU busy {}, starvation {}, wake-up p99 {} ms, at home {}",
        percent(number(feed, "gpu_busy")),
        percent(number(feed, "delay_share")),
        plain(number(feed, "wake_p99_ns").map(|ns| ns / 1e6), 2),
        percent(number(feed, "home_share"))
    )
}

/// The columns of a comparison, as the legend explains them.
const LEGEND: [(&str, &str); 8] = [
    ("GPU busy", "share of time with a kernel on the GPU, mean over GPUs; more is better"),
    ("starvation", "% of time a feeder was runnable but not running, mean over feeders; less is better"),
    ("wake-up", "how late a feeder ran after its kernel was done: median / 99th percentile"),
    ("at home", "share of samples in which a feeder was on a CPU local to its GPU"),
    (
        "background",
        "work of the neighbours, as a multiple of EEVDF's; what feeders get more of, neighbours get less of",
    ),
    ("all work", "work of neighbours, feeders and loaders, as a multiple of EEVDF's; below 1, capacity was lost"),
    ("idle CPUs", "how many CPUs had nothing to do, on average, while neighbours wanted to run"),
    ("longest gap", "the longest that any hog went without progress"),
];

/// Prints a comparison for people: what is compared, a table a scenario, a legend, one table of micro-benchmarks, and
/// what they show.
pub fn print_comparison(comparison: &Comparison) {
    print_subject(comparison);
    let width = comparison.contenders.iter().map(|contender| contender.name.len()).max().unwrap_or(0);
    let mut scenarios: Vec<Scenario> = Vec::new();
    for run in comparison.contenders.iter().flat_map(|contender| &contender.runs) {
        if !scenarios.contains(&run.scenario) {
            scenarios.push(run.scenario);
        }
    }
    for &scenario in &scenarios {
        println!("\n{}: {}", scenario.title(), scenario.explanation());
        print_row(width, "", ["GPU", "starva-", "wake-up, ms", "at", "back-", "all", "idle", "longest"]);
        print_row(width, "scheduler", ["busy", "tion", "p50 / p99", "home", "ground", "work", "CPUs", "gap, ms"]);
        for contender in &comparison.contenders {
            if let Some(feed) = contender.feed(scenario) {
                print_run(comparison, contender, scenario, feed, width);
            }
        }
    }
    if !scenarios.is_empty() {
        println!();
        LEGEND.iter().for_each(|(column, meaning)| println!("  {column:<12} {meaning}"));
        println!(
            "\n  In the counted lab a nanosecond is an instruction: hold these figures against each other, quote none."
        );
    }
    print_spread(comparison, &scenarios);
    print_fair_ratios(comparison, width);
    print_costs(comparison, width);
    print_trees(comparison, width);
    print_storm_table(comparison, width);
    println!();
    for contender in &comparison.contenders {
        if let Some(failure) = &contender.failure {
            println!("{} failed: {failure}", contender.name);
        }
    }
    let is_judged = |contender: &&Contender| contender.role == Role::Judged && !contender.runs.is_empty();
    for contender in comparison.contenders.iter().filter(is_judged) {
        print_verdict(comparison, contender, &scenarios);
    }
}

/// Says what is compared: the machine, the load, the schedulers.
fn print_subject(comparison: &Comparison) {
    println!("How well are GPUs fed beside noisy neighbours? The same load under each scheduler, in one boot.\n");
    let Some(feed) = comparison.contenders.iter().flat_map(|contender| &contender.runs).map(|run| &run.feed).next()
    else {
        println!("  kernel      Linux {}", comparison.kernel);
        return;
    };
    let cpus = feed.get("idle").and_then(Value::as_object).map_or(0, serde_json::Map::len);
    let feeders = feed.get("feeders").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let mut gpus: Vec<String> = Vec::new();
    for feeder in feeders {
        let text = |key| feeder.get(key).and_then(Value::as_str);
        let home = text("home").map_or("home unknown".to_string(), |home| format!("home CPUs {home}"));
        let gpu = format!("{} ({home})", text("gpu").unwrap_or("?"));
        if !gpus.contains(&gpu) {
            gpus.push(gpu);
        }
    }
    let option = |key| feed.get("options").and_then(|options| number(options, key));
    let in_ms = |key| plain(option(key).map(|us| us / 1000.0), 0);
    println!("  machine     Linux {}, {cpus} CPUs, {} GPUs: {}", comparison.kernel, gpus.len(), gpus.join(", "));
    println!(
        "  feeders     {} for each GPU: {} ms of CPU work, a GPU kernel of {} ms (a timer stands for it), and again",
        plain(option("feeders_per_gpu"), 0),
        in_ms("work_us"),
        in_ms("kernel_us")
    );
    println!("  measured    {} s of each run", comparison.seconds);
    let width = comparison.contenders.iter().map(|contender| contender.name.len()).max().unwrap_or(0);
    for (index, Contender { name, role, command, .. }) in comparison.contenders.iter().enumerate() {
        let what = match (role, command) {
            (Role::Ceiling, _) => "feeders and loaders at real-time priority: the best there can be".to_string(),
            (_, Some(command)) => format!("sched_ext, {}", without_folder(command)),
            (_, None) => "the kernel's own scheduler".to_string(),
        };
        println!("  {:<11} {name:<width$}  {what}", if index == 0 { "schedulers" } else { "" });
    }
}

/// A command without the folder of its program.
fn without_folder(command: &str) -> &str {
    let end = command.find(' ').unwrap_or(command.len());
    command[..end].rfind('/').map_or(command, |slash| &command[slash + 1..])
}

fn print_row(width: usize, name: &str, cells: [&str; 8]) {
    let [busy, starvation, wake, home, background, all, idle, gap] = cells;
    println!(
        "  {name:<width$} {busy:>8} {starvation:>8} {wake:>15} {home:>8} {background:>8} {all:>6} {idle:>6} {gap:>8}"
    );
}

impl Contender {
    /// The run of that scenario whose GPUs were busy for the median time.
    pub fn feed(&self, scenario: Scenario) -> Option<&Value> {
        let feeds = self.runs.iter().filter(|run| run.scenario == scenario).map(|run| &run.feed);
        median_of(feeds, |_| true, "gpu_busy")
    }

    /// Largest minus smallest GPU busy of that scenario's runs.
    fn busy_spread(&self, scenario: Scenario) -> f64 {
        let runs = self.runs.iter().filter(|run| run.scenario == scenario);
        let busy = runs.filter_map(|run| number(&run.feed, "gpu_busy"));
        let (low, high) = busy.fold((f64::INFINITY, 0.0_f64), |(low, high), busy| (low.min(busy), high.max(busy)));
        (high - low).max(0.0)
    }

    /// The run of the tree of that name whose worst error is the median.
    pub fn tree(&self, tree: &str) -> Option<&Value> {
        median_of(&self.weights, |report| report["tree"] == tree, "worst_error")
    }
}

/// Of those that are `wanted`, the one whose `key` is the median, by size.
pub fn median_of<'a>(
    reports: impl IntoIterator<Item = &'a Value>,
    wanted: impl Fn(&Value) -> bool,
    key: &str,
) -> Option<&'a Value> {
    let mut reports: Vec<&Value> = reports.into_iter().filter(|report| wanted(report)).collect();
    let size = |report: &Value| number(report, key).unwrap_or(0.0).abs();
    reports.sort_by(|a, b| size(a).total_cmp(&size(b)));
    reports.get(reports.len() / 2).copied()
}

impl Comparison {
    fn contender(&self, role: Role) -> Option<&Contender> {
        self.contenders.iter().find(|contender| contender.role == role)
    }

    /// `key` of `feed` as a multiple of what `role` reached in that scenario.
    fn ratio(&self, role: Role, scenario: Scenario, feed: &Value, key: &str) -> Option<f64> {
        let base = number(self.contender(role)?.feed(scenario)?, key)?;
        (base > 0.0).then_some(number(feed, key)? / base)
    }
}

fn print_run(comparison: &Comparison, contender: &Contender, scenario: Scenario, feed: &Value, width: usize) {
    let relative = |key| plain(comparison.ratio(Role::Baseline, scenario, feed, key), 2);
    let wake = |key| plain(number(feed, key).map(|ns| ns / 1e6), 2);
    let gap = feed.get("hogs").and_then(|hogs| number(hogs, "max_gap_ms"));
    print_row(
        width,
        &contender.name,
        [
            &percent(number(feed, "gpu_busy")),
            &percent(number(feed, "delay_share")),
            &format!("{} / {}", wake("wake_p50_ns"), wake("wake_p99_ns")),
            &percent(number(feed, "home_share")),
            &relative("background_units"),
            &relative("total_units"),
            &plain(number(feed, "idle_cpus"), 2),
            &plain(gap, 0),
        ],
    );
}

/// Says how far runs of the same lay apart.
fn print_spread(comparison: &Comparison, scenarios: &[Scenario]) {
    if comparison.runs < 2 || scenarios.is_empty() {
        return;
    }
    println!(
        "\nEach of {} runs: shown is the one of median GPU busy. Between the least and the most busy lie",
        comparison.runs
    );
    for contender in comparison.contenders.iter().filter(|contender| !contender.runs.is_empty()) {
        let spreads = scenarios.iter().map(|&scenario| contender.busy_spread(scenario));
        println!("  {}: {} at most", contender.name, percent(spreads.reduce(f64::max)));
    }
}

/// Each of `items` once, in the order in which they come first.
fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    items.fold(Vec::new(), |mut found, item| {
        if !found.contains(&item) {
            found.push(item);
        }
        found
    })
}

/// Prints what BPF programs and whole context switches cost under each scheduler.
fn print_costs(comparison: &Comparison, width: usize) {
    let titles = distinct(comparison.contenders.iter().flat_map(|contender| &contender.costs).map(cost_title));
    if titles.is_empty() {
        return;
    }
    println!(
        "\ncost of a context switch, with the kernel's counting of BPF programs on; \"in all\" has the load's own work in it"
    );
    for title in titles {
        println!("  {title}");
        println!("    {:<width$} {:>12} {:>12}  most of it", "scheduler", "BPF, ns", "in all, ns");
        for contender in &comparison.contenders {
            let Some(cost) = median_of(&contender.costs, |cost| cost_title(cost) == title, "bpf_ns_per_switch") else {
                continue;
            };
            let mut parts: Vec<(f64, &str)> = (cost["programs"].as_array().into_iter().flatten())
                .filter_map(|program| {
                    let ns = number(program, "calls_per_switch")? * number(program, "ns_per_call")?;
                    Some((ns, program["name"].as_str()?))
                })
                .collect();
            parts.sort_by(|a, b| b.0.total_cmp(&a.0));
            let parts: Vec<String> = parts.iter().take(4).map(|(ns, name)| format!("{name} {ns:.0}")).collect();
            println!(
                "    {:<width$} {:>12} {:>12}  {}",
                contender.name,
                plain(number(cost, "bpf_ns_per_switch"), 0),
                plain(number(cost, "ns_per_switch"), 0),
                parts.join(", ")
            );
        }
    }
}

/// Prints what came of storms under each scheduler.
fn print_storm_table(comparison: &Comparison, width: usize) {
    if comparison.contenders.iter().all(|contender| contender.storms.is_empty()) {
        return;
    }
    println!(
        "\nstorms: the longest that a task beside them was kept from running, and the scheduler's memory before and after"
    );
    println!("  {:<width$} {:<10} {:>12} {:>18} {:>20}", "scheduler", "storm", "done", "longest stall, ms", "MiB");
    for contender in &comparison.contenders {
        for storm in &contender.storms {
            let mib = |key| plain(number(storm, key).map(|kib| kib / 1024.0), 1);
            println!(
                "  {:<width$} {:<10} {:>12} {:>18} {:>20}",
                contender.name,
                storm["storm"].as_str().unwrap_or_default(),
                plain(number(storm, "done"), 0),
                plain(number(storm, "longest_stall_ms"), 1),
                format!("{} to {}", mib("rss_before_kib"), mib("rss_after_kib"))
            );
        }
    }
}

/// Prints what trees of cgroups got under each scheduler.
fn print_trees(comparison: &Comparison, width: usize) {
    let trees = comparison.contenders.iter().flat_map(|contender| &contender.weights);
    let names = distinct(trees.filter_map(|tree| tree["tree"].as_str()));
    if names.is_empty() {
        return;
    }
    println!(
        "\ngroups: what they got against what they were due by weights and limits; the rows of each are in the JSON file"
    );
    for name in names {
        println!("  {name}");
        println!(
            "    {:<width$} {:>9} {:>9} {:>9} {:>9} {:>9} {:>5}  worst is",
            "scheduler", "worst", "mean", "over", "to idle", "longest", "idle"
        );
        println!(
            "    {:<width$} {:>9} {:>9} {:>9} {:>9} {:>9} {:>5}",
            "", "error", "error", "limit", "ones", "gap, ms", "CPUs"
        );
        for contender in &comparison.contenders {
            let Some(tree) = contender.tree(name) else { continue };
            println!(
                "    {:<width$} {:>9} {:>9} {:>9} {:>9} {:>9} {:>5}  {}",
                contender.name,
                signed_percent(number(tree, "worst_error")),
                percent(number(tree, "mean_error")),
                signed_percent(number(tree, "worst_excess")),
                percent(number(tree, "idle_share")),
                plain(number(tree, "max_gap_ms"), 0),
                plain(number(tree, "idle_cpus"), 2),
                tree["worst"].as_str().unwrap_or_default()
            );
        }
    }
}

fn print_fair_ratios(comparison: &Comparison, width: usize) {
    let Some(base) = comparison.contender(Role::Baseline).filter(|base| !base.fair.is_empty()) else { return };
    println!("\nmicro-benchmarks (EEVDF, then ratios to it; below 1 is better, but for steps/s above 1)");
    let others = || comparison.contenders.iter().filter(|other| other.role != Role::Baseline && !other.fair.is_empty());
    print!("  {:<16} {:>18}", "", base.name);
    others().for_each(|other| print!(" {:>width$}", other.name));
    println!();
    for row in &base.fair {
        let text = |key| row.get(key).and_then(Value::as_str).unwrap_or_default();
        let median = number(row, "median");
        print!("  {:<16} {:>10} {:<7}", text("what"), plain(median, 0), text("unit"));
        for other in others() {
            let same = other.fair.iter().find(|candidate| candidate.get("what") == row.get("what"));
            let ratio = same.and_then(|same| Some(number(same, "median")? / median?));
            print!(" {:>width$}", plain(ratio, 2));
        }
        println!();
    }
}

/// Says in a few sentences what the numbers show of the judged scheduler.
fn print_verdict(comparison: &Comparison, judged: &Contender, scenarios: &[Scenario]) {
    let over = |value: &dyn Fn(Scenario) -> Option<f64>| {
        let values: Vec<f64> = scenarios.iter().filter_map(|&scenario| value(scenario)).collect();
        let lowest = values.iter().copied().reduce(f64::min)?;
        Some((lowest, values.iter().copied().reduce(f64::max)?))
    };
    let ratio =
        |role: Role, key: &str| match over(&|scenario| comparison.ratio(role, scenario, judged.feed(scenario)?, key)) {
            Some((low, high)) if high - low < 0.005 => format!("{low:.2}"),
            Some((low, high)) => format!("{low:.2} to {high:.2}"),
            None => "an unknown part".to_string(),
        };
    let starvation =
        |contender: Option<&Contender>| match over(&|scenario| number(contender?.feed(scenario)?, "delay_share")) {
            Some((low, high)) if high - low < 0.0005 => format!("{:.1} %", high * 100.0),
            Some((low, high)) => format!("{:.1} to {:.1} %", low * 100.0, high * 100.0),
            None => "an unknown part".to_string(),
        };
    let name = &judged.name;
    println!(
        "With {name}, GPUs are busy {} times as long as with EEVDF, and {} times as long as at the ceiling.",
        ratio(Role::Baseline, "gpu_busy"),
        ratio(Role::Ceiling, "gpu_busy"),
    );
    println!(
        "Their feeders starve {} of the time; with EEVDF {}.",
        starvation(Some(judged)),
        starvation(comparison.contender(Role::Baseline)),
    );
    println!("All work done together comes to {} of EEVDF's.", ratio(Role::Baseline, "total_units"));
}
