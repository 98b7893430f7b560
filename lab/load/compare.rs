//! Schedulers compared: the same scenarios in one boot under EEVDF, its ceiling and each scheduler in turn.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use crate::feed::active_scheduler;
use crate::report;
use crate::sys::{MS, check, now_ns, sleep_ns};

/// What to compare.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// The scheduler to judge, and the command that runs it until it gets SIGINT; without one, EEVDF and its ceiling
    #[arg(long, value_name = "NAME=COMMAND", value_parser = parse_scheduler)]
    pub scheduler: Option<Scheduler>,
    /// Another scheduler beside it; may be given several times
    #[arg(long, value_name = "NAME=COMMAND", value_parser = parse_scheduler)]
    pub peer: Vec<Scheduler>,
    /// What the feeders meet
    #[arg(long, value_enum, value_delimiter = ',', default_value = "hogs,spin,bursty,loaders")]
    pub scenarios: Vec<Scenario>,
    /// Add EEVDF with feeders at nice −20
    #[arg(long)]
    pub nice: bool,
    /// What to run under each; but the SCHED_FIFO and nice feeders only feed
    #[arg(long, value_enum, value_delimiter = ',', default_value = "feed")]
    pub parts: Vec<Part>,
    /// How often everything is run
    #[arg(long, default_value_t = 1)]
    pub runs: usize,
    /// Measured time of each run with feeders, in s
    #[arg(long, default_value_t = 6.0)]
    pub seconds: f64,
    /// How long a scheduler may take to load, in s
    #[arg(long, default_value_t = 300)]
    pub attach_timeout_s: u64,
    /// Options for every `feed` run, such as '--device none'
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, default_value = "")]
    pub feed_options: String,
    /// Options for every `weights` run
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, default_value = "")]
    pub weights_options: String,
    /// Options for every `fair` run
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, default_value = "")]
    pub fair_options: String,
    /// Options for every `storm` run
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, default_value = "")]
    pub storm_options: String,
    /// Options for every `cost` run
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, default_value = "")]
    pub cost_options: String,
    /// Write everything to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What can be run under a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Feeders beside neighbours: the scenarios
    Feed,
    /// Micro-benchmarks
    Fair,
    /// Trees of cgroups
    Weights,
    /// Storms
    Storm,
    /// What BPF programs cost
    Cost,
}

impl Part {
    /// Its subcommand.
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }
}

impl CompareArgs {
    /// The user's options for a part.
    fn options_of(&self, part: Part) -> &str {
        match part {
            Part::Feed => &self.feed_options,
            Part::Fair => &self.fair_options,
            Part::Weights => &self.weights_options,
            Part::Storm => &self.storm_options,
            Part::Cost => &self.cost_options,
        }
    }
}

/// A scheduler and how to run it.
#[derive(Clone, Debug, Serialize)]
pub struct Scheduler {
    /// What the table calls it.
    pub name: String,
    /// A shell command.
    pub command: String,
}

fn parse_scheduler(text: &str) -> Result<Scheduler, String> {
    match text.split_once('=') {
        Some((name, command)) if !name.is_empty() && !command.is_empty() => {
            Ok(Scheduler { name: name.to_string(), command: command.to_string() })
        }
        _ => Err("expected NAME=COMMAND".to_string()),
    }
}

/// What the feeders meet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// Eight hogs
    Hogs,
    /// Eight hogs, and feeders that spin while they wait
    Spin,
    /// Four hogs and twelve bursty neighbours
    Bursty,
    /// Eight hogs, and a loader process that each feeder waits for
    Loaders,
}

impl Scenario {
    /// What the table calls it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Hogs => "8 hogs",
            Self::Spin => "8 hogs, spinning wait",
            Self::Bursty => "4 hogs + 12 bursty",
            Self::Loaders => "8 hogs, loader processes",
        }
    }

    /// What that means, for people.
    pub fn explanation(self) -> &'static str {
        match self {
            Self::Hogs => "neighbours that compute without a pause; feeders sleep until the GPU is done",
            Self::Spin => "feeders poll until the GPU is done, as CUDA does unless told otherwise",
            Self::Bursty => "the bursty ones compute for 0.2 to 1 ms and sleep for 0.5 to 2 ms",
            Self::Loaders => "another process prepares each batch, and the feeder waits for it",
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Hogs => &["--hogs", "8"],
            Self::Spin => &["--hogs", "8", "--wait", "spin"],
            Self::Bursty => &["--hogs", "4", "--bursty", "12"],
            Self::Loaders => &["--hogs", "8", "--loaders", "1"],
        }
    }
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Kernel release.
    pub kernel: String,
    /// Measured time of each run, in s.
    pub seconds: f64,
    /// How often everything was run.
    pub runs: usize,
    /// EEVDF first, then the ceiling, then the others in the order they ran.
    pub contenders: Vec<Contender>,
}

/// One scheduler's results.
#[derive(Debug, Serialize)]
pub struct Contender {
    /// What the table calls it.
    pub name: String,
    /// What it is to the comparison.
    pub role: Role,
    /// The command that ran it; none for the kernel's scheduler.
    pub command: Option<String>,
    /// From its start until it was attached, in s.
    pub load_s: Option<f64>,
    /// Why it has no more results, if anything went wrong.
    pub failure: Option<String>,
    /// Feeding: each scenario in turn, as often as everything was run.
    pub runs: Vec<Run>,
    /// Micro-benchmarks, as `lab_load fair --json` prints them; empty if not asked for.
    pub fair: Vec<Value>,
    /// Trees of cgroups, as `lab_load weights --json` prints them, again for each run; empty if not asked for.
    pub weights: Vec<Value>,
    /// Storms, as `lab_load storm --json` prints them, likewise.
    pub storms: Vec<Value>,
    /// Costs, as `lab_load cost --json` prints them, likewise.
    pub costs: Vec<Value>,
}

/// What a contender is to the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The kernel's scheduler: others are relative to it.
    Baseline,
    /// SCHED_FIFO feeders: the best there can be.
    Ceiling,
    /// The scheduler to judge.
    Judged,
    /// Another one.
    Peer,
}

/// One scenario's results.
#[derive(Debug, Serialize)]
pub struct Run {
    /// Which.
    pub scenario: Scenario,
    /// As `lab_load feed --json` prints it.
    pub feed: Value,
}

/// `lab_load compare`.
pub fn main(args: &CompareArgs) -> Result<()> {
    let active = active_scheduler();
    anyhow::ensure!(active == "kernel", "{active} is active already: stop it first");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_string();
    let mut comparison = Comparison { kernel, seconds: args.seconds, runs: args.runs, contenders: Vec::new() };
    anyhow::ensure!(args.runs > 0, "--runs must be above zero");

    let mut natives = vec![("EEVDF", Role::Baseline, "other"), ("EEVDF, SCHED_FIFO feeders", Role::Ceiling, "fifo")];
    if args.nice {
        natives.push(("EEVDF, feeders nice -20", Role::Peer, "nice"));
    }
    // The ceiling and nice feeders differ from EEVDF in feeding only.
    natives.retain(|(_, _, policy)| *policy == "other" || args.parts.contains(&Part::Feed));
    for (name, role, policy) in natives {
        let mut contender = Contender::new(name, role, None);
        contender.measure(args, policy, None);
        comparison.contenders.push(contender);
    }
    let judged = args.scheduler.iter().map(|scheduler| (Role::Judged, scheduler));
    for (role, scheduler) in judged.chain(args.peer.iter().map(|peer| (Role::Peer, peer))) {
        comparison.contenders.push(run_scheduler(args, role, scheduler)?);
    }

    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&comparison)?;
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    report::print_comparison(&comparison);
    // A peer that would not load is told of in the table; it does not make the others' figures wrong.
    for contender in comparison.contenders.iter().filter(|contender| contender.role != Role::Peer) {
        if let Some(failure) = &contender.failure {
            bail!("{}: {failure}", contender.name);
        }
    }
    Ok(())
}

impl Contender {
    fn new(name: &str, role: Role, command: Option<String>) -> Self {
        let name = name.to_string();
        let (runs, fair, weights, storms, costs) = Default::default();
        Self { name, role, command, load_s: None, failure: None, runs, fair, weights, storms, costs }
    }

    /// Where the reports of a part go that is not about feeding.
    fn found(&mut self, part: Part) -> &mut Vec<Value> {
        match part {
            Part::Feed | Part::Fair => &mut self.fair,
            Part::Weights => &mut self.weights,
            Part::Storm => &mut self.storms,
            Part::Cost => &mut self.costs,
        }
    }

    /// Runs what was asked for, until something fails. A scheduler that runs must still be active after each.
    fn measure(&mut self, args: &CompareArgs, policy: &str, running: Option<&Running>) {
        if let Err(error) = self.try_measure(args, policy, running) {
            eprintln!("  failed: {error:#}");
            self.failure = Some(format!("{error:#}"));
        }
    }

    fn try_measure(&mut self, args: &CompareArgs, policy: &str, running: Option<&Running>) -> Result<()> {
        let pid = running.map(|running| running.child.id());
        let still_active = || match running {
            Some(running) if active_scheduler() != running.ops => {
                bail!("it left during the run: {}", running.last_words())
            }
            _ => Ok(()),
        };
        let wants = |part: Part| args.parts.contains(&part);
        // Those not about feeding come first, while no GPU was used: feeders count for seconds after they have ended.
        if policy == "other" {
            let (pid, repeats) = (pid.map(|pid| pid.to_string()), (3 * args.runs).to_string());
            for part in [Part::Fair, Part::Cost, Part::Weights, Part::Storm].into_iter().filter(|part| wants(*part)) {
                let name = part.name();
                let mut command = vec![name.as_str(), "--json"];
                command.extend(args.options_of(part).split_whitespace());
                match (part, &pid) {
                    (Part::Fair, _) => command.extend(["--runs", &repeats]),
                    (Part::Storm, Some(pid)) => command.extend(["--scheduler-pid", pid]),
                    _ => {}
                }
                for _ in 0..if part == Part::Fair { 1 } else { args.runs } {
                    eprint!("{}: {name} … ", self.name);
                    let Value::Array(list) = run_self(&command)? else { bail!("{name} printed no list") };
                    still_active()?;
                    eprintln!("done");
                    self.found(part).extend(list);
                }
            }
        }
        for &scenario in args.scenarios.iter().filter(|_| wants(Part::Feed)) {
            for _ in 0..args.runs {
                let seconds = args.seconds.to_string();
                let mut options = vec!["feed", "--json", "--seconds", &seconds, "--feeder-policy", policy];
                options.extend(scenario.options());
                options.extend(args.options_of(Part::Feed).split_whitespace());
                eprint!("{}: {} … ", self.name, scenario.title());
                let feed = run_self(&options)?;
                still_active()?;
                eprintln!("{}", report::summary(&feed));
                self.runs.push(Run { scenario, feed });
            }
        }
        Ok(())
    }
}

/// Runs this program with `options` and returns the JSON it prints. A process of its own, so that no run can leave
/// anything behind for the next.
fn run_self(options: &[&str]) -> Result<Value> {
    let mut command = Command::new(std::env::current_exe()?);
    die_with_parent(&mut command);
    let output = command.args(options).stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "`lab_load {}` failed ({})", options.join(" "), output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn die_with_parent(command: &mut Command) {
    // SAFETY: the closure makes one system call and touches no memory of the parent.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    };
}

/// Runs everything under one scheduler. Err only if it cannot be got rid of: then nothing after it would be true.
fn run_scheduler(args: &CompareArgs, role: Role, scheduler: &Scheduler) -> Result<Contender> {
    let mut contender = Contender::new(&scheduler.name, role, Some(scheduler.command.clone()));
    eprint!("{}: loading … ", scheduler.name);
    let from_ns = now_ns();
    match Running::start(scheduler, args.attach_timeout_s * 1000 * MS) {
        Ok(running) => {
            let load_s = (now_ns() - from_ns) as f64 / 1e9;
            eprintln!("{} attached after {load_s:.1} s", running.ops);
            contender.load_s = Some(load_s);
            contender.measure(args, "other", Some(&running));
            if contender.failure.is_some() {
                running.show_output();
            }
            running.stop().with_context(|| format!("stopping {}", scheduler.name))?;
        }
        Err(error) => {
            eprintln!("failed: {error:#}");
            contender.failure = Some(format!("{error:#}"));
        }
    }
    let active = active_scheduler();
    anyhow::ensure!(active == "kernel", "{} left {active} behind", scheduler.name);
    Ok(contender)
}

/// A scheduler that is attached.
pub struct Running {
    child: Child,
    /// Name of its sched_ext_ops.
    pub ops: String,
    output: PathBuf,
}

impl Running {
    /// Starts `scheduler` and waits until it is attached.
    pub fn start(scheduler: &Scheduler, limit_ns: u64) -> Result<Self> {
        let output = std::env::temp_dir().join(format!("lab_load.{}.{}", std::process::id(), scheduler.name));
        let log = File::create(&output).with_context(|| output.display().to_string())?;
        let mut command = Command::new("sh");
        // With exec the shell is gone, and SIGINT reaches the scheduler itself.
        command.arg("-c").arg(format!("exec {}", scheduler.command));
        die_with_parent(&mut command);
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let mut running = Self { child, ops: String::new(), output };
        match running.wait_attached(now_ns() + limit_ns) {
            Ok(()) => Ok(running),
            Err(error) => {
                running.show_output();
                let _ = running.child.kill();
                let _ = running.child.wait();
                Err(error)
            }
        }
    }

    fn wait_attached(&mut self, limit_ns: u64) -> Result<()> {
        while active_scheduler() == "kernel" {
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended before it was attached ({status}){}", self.complaint());
            }
            anyhow::ensure!(now_ns() < limit_ns, "it was not attached in time");
            sleep_ns(50 * MS);
        }
        self.ops = active_scheduler();
        Ok(())
    }

    /// Why the scheduler ended, in its own words: schedulers made with scx_utils print a line about it.
    fn last_words(&self) -> String {
        /// Time to find out that it has been thrown out, and to say so.
        const LIMIT_NS: u64 = 5000 * MS;
        let limit_ns = now_ns() + LIMIT_NS;
        loop {
            let bytes = fs::read(&self.output).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            if let Some((_, reason)) = text.lines().find_map(|line| line.split_once("EXIT: ")) {
                return reason.to_string();
            }
            if now_ns() >= limit_ns {
                return "it does not say why".to_string();
            }
            sleep_ns(50 * MS);
        }
    }

    /// What it printed from its error message on, in one line after a colon; nothing if it printed none.
    fn complaint(&self) -> String {
        let bytes = fs::read(&self.output).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("Error")).collect();
        let words: Vec<&str> = lines.iter().flat_map(|line| line.split_whitespace()).collect();
        if words.is_empty() { String::new() } else { format!(": {}", words.join(" ")) }
    }

    /// Shows the last lines that the scheduler printed.
    pub fn show_output(&self) {
        const LINES: usize = 40;
        let bytes = fs::read(&self.output).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            eprintln!("  | {line}");
        }
    }

    /// Asks the scheduler to end as a user would, and waits until the kernel's is back.
    pub fn stop(mut self) -> Result<()> {
        const LIMIT_NS: u64 = 60_000 * MS;
        let pid = libc::pid_t::try_from(self.child.id())?;
        if self.child.try_wait()?.is_none() {
            // SAFETY: takes integers only; the child is unreaped, so its identifier is its own.
            check(unsafe { libc::kill(pid, libc::SIGINT) })?;
        }
        let limit_ns = now_ns() + LIMIT_NS;
        while self.child.try_wait()?.is_none() || active_scheduler() != "kernel" {
            if now_ns() >= limit_ns {
                self.show_output();
                self.child.kill()?;
                self.child.wait()?;
                bail!("it did not end on SIGINT");
            }
            sleep_ns(50 * MS);
        }
        let _ = fs::remove_file(&self.output);
        Ok(())
    }
}
