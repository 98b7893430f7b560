//! A zoo of processes and threads whose roles are known, and what a scheduler takes each of them for.

mod cast;
mod launchers;
mod link;
mod members;
mod verdict;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compare::{Running, Scheduler};
use crate::cuda;
use crate::feed::active_scheduler;
use crate::gpu::{DeviceKind, Gpu};
use crate::nvidia;
use crate::sys::{self, MS, now_ns, sleep_ns};
use cast::{Cast, Member, Truth};
use verdict::{Judged, Listed, OUTSIDER, Totals, judge};

/// What to show to whom.
#[derive(Args, Clone, Debug)]
pub struct ZooArgs {
    /// Command that runs the scheduler until it gets SIGINT
    #[arg(long, value_name = "COMMAND", required_unless_present = "dry_run")]
    pub scheduler: Option<String>,
    /// Program that is asked `threads --json` and `topology --json` [default: the command's first word]
    #[arg(long, value_name = "PATH")]
    pub scheduler_binary: Option<PathBuf>,
    /// How long the zoo runs before the scheduler is asked, in s
    #[arg(long, default_value_t = 4.0)]
    pub seconds: f64,
    /// Show those that take stand-ins instead of the others: processes that launch through CUDA's library
    /// (for --probe-launches), and a feeder of /dev/nvidia0
    #[arg(long)]
    pub stand_ins: bool,
    /// Neighbours that compute without a pause
    #[arg(long, default_value_t = 8)]
    pub hogs: usize,
    /// How long the scheduler may take to load, in s
    #[arg(long, default_value_t = 300)]
    pub attach_timeout_s: u64,
    /// Write what was found to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Start no scheduler: print who is what, wait, and end
    #[arg(long, conflicts_with_all = ["scheduler", "scheduler_binary", "json"])]
    pub dry_run: bool,
}

/// What was found.
#[derive(Serialize)]
struct Report {
    /// Name of the scheduler's sched_ext_ops.
    scheduler: String,
    /// How long the zoo ran before the scheduler was asked, in s.
    seconds: f64,
    totals: Totals,
    threads: Vec<Judged>,
}

/// `lab_load zoo`.
pub fn main(args: &ZooArgs) -> Result<()> {
    anyhow::ensure!(args.seconds > 0.0, "--seconds must be above zero");
    let gpus = Gpu::find(DeviceKind::Auto, None)?;
    let result = if args.dry_run { dry_run(args, &gpus) } else { run(args, &gpus) };
    members::remove_own_cgroup();
    cuda::remove_copies();
    result
}

fn dry_run(args: &ZooArgs, gpus: &[Gpu]) -> Result<()> {
    let mut zoo = Zoo::early(gpus, args)?;
    zoo.open(gpus, args)?;
    for member in zoo.members() {
        let (tid, comm, truth) = (member.tid(), &member.comm, verdict::truth_name(member.truth));
        println!("{tid:>7}  {comm:<15}  {truth:<19}  {:>6} steps  {}", member.steps(), member.kind);
    }
    zoo.check_alive()
}

fn run(args: &ZooArgs, gpus: &[Gpu]) -> Result<()> {
    let active = active_scheduler();
    anyhow::ensure!(active == "kernel", "{active} is active already: stop it first");
    let command = args.scheduler.clone().context("no --scheduler")?;
    let binary = match &args.scheduler_binary {
        Some(path) => path.clone(),
        None => command.split_whitespace().next().context("--scheduler is empty")?.into(),
    };
    let (gpus, indices) = in_scheduler_order(&binary, gpus)?;
    let gpus = gpus.as_slice();
    if args.stand_ins {
        nvidia::let_nvml_say(&gpus[0])?;
    }

    let mut zoo = Zoo::early(gpus, args)?;
    let scheduler = Scheduler { name: "zoo".to_string(), command };
    let running = Running::start(&scheduler, args.attach_timeout_s * 1000 * MS)?;
    let threads = zoo.open(gpus, args).and_then(|()| {
        let asked_ns = now_ns();
        let listed = listed_threads(&binary)?;
        eprintln!("{} answered after {} ms", binary.display(), (now_ns() - asked_ns) / MS);
        zoo.check_alive()?;
        anyhow::ensure!(active_scheduler() == running.ops, "{} left during the run", running.ops);
        Ok(judge_all(&zoo, listed, &indices))
    });
    if threads.is_err() {
        running.show_output();
    }
    // First the zoo: the scheduler ends quickly only on a machine that is not full.
    drop(zoo);
    let ops = running.ops.clone();
    let stopped = running.stop().context("stopping the scheduler");
    let threads = threads?;
    stopped?;

    let totals = Totals::of(&threads);
    print!("{}", verdict::report(&threads));
    let failure = totals.failure();
    if let Some(path) = &args.json {
        let report = Report { scheduler: ops, seconds: args.seconds, totals, threads };
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    match failure {
        Some(failure) => bail!("{failure}"),
        None => Ok(()),
    }
}

/// All members.
struct Zoo {
    // Goes first: it may use what the early ones keep there.
    late: Cast,
    early: Cast,
}

impl Zoo {
    /// Starts those that run before the scheduler does.
    fn early(gpus: &[Gpu], args: &ZooArgs) -> Result<Self> {
        /// Time for them to have settled before the scheduler comes.
        const SETTLE_NS: u64 = 500 * MS;
        let mut early = Cast::new()?;
        match args.stand_ins {
            true => members::early_with_stand_ins(&mut early, gpus)?,
            false => members::early(&mut early, gpus)?,
        }
        early.start()?;
        sleep_ns(SETTLE_NS);
        Ok(Self { early, late: Cast::new()? })
    }

    /// Starts the others, and lets all run for the time that was asked for.
    fn open(&mut self, gpus: &[Gpu], args: &ZooArgs) -> Result<()> {
        match args.stand_ins {
            true => members::late_with_stand_ins(&mut self.late, gpus)?,
            false => members::late(&mut self.late, gpus)?,
        }
        members::hogs(&mut self.late, args.hogs)?;
        self.late.start()?;
        sleep_ns((args.seconds * 1e9) as u64);
        Ok(())
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.early.members.iter().chain(&self.late.members)
    }

    /// Err if someone has ended, or a member that should work did nothing: then its role would not be true.
    fn check_alive(&mut self) -> Result<()> {
        self.early.check_alive()?;
        self.late.check_alive()?;
        let idle: Vec<&str> = self
            .members()
            .filter(|member| !member.has_run() && !member.is_waiting())
            .map(|member| member.comm.as_str())
            .collect();
        anyhow::ensure!(idle.is_empty(), "did nothing in all the time: {}", idle.join(", "));
        Ok(())
    }
}

/// Judges all members, and whoever the scheduler lists beside them.
fn judge_all(zoo: &Zoo, listed: Vec<Listed>, indices: &[i64]) -> Vec<Judged> {
    let mut listed: BTreeMap<u64, Listed> = listed.into_iter().map(|listed| (listed.tid, listed)).collect();
    let mut judged: Vec<Judged> = zoo
        .members()
        .map(|member| {
            let found = listed.remove(&member.tid());
            judge(member.kind, &member.comm, member.tid(), member.truth, found.as_ref(), indices)
        })
        .collect();
    for other in listed.into_values().filter(|other| !is_kernel_thread(other.pid)) {
        judged.push(judge(OUTSIDER, &other.comm, other.tid, Truth::Ordinary, Some(&other), indices));
    }
    judged
}

/// Whether `pid` is a thread of the kernel: a GPU's own may rightly be listed. Those have no program.
fn is_kernel_thread(pid: u64) -> bool {
    Path::new(&format!("/proc/{pid}")).exists() && fs::read_link(format!("/proc/{pid}/exe")).is_err()
}

/// What the running scheduler takes threads for.
fn listed_threads(binary: &Path) -> Result<Vec<Listed>> {
    ask(binary, "threads")
}

/// `gpus` in the scheduler's order, which need not be that of their minor numbers, and its index of each.
fn in_scheduler_order(binary: &Path, gpus: &[Gpu]) -> Result<(Vec<Gpu>, Vec<i64>)> {
    #[derive(Deserialize)]
    struct Topology {
        gpus: Vec<Value>,
    }
    let topology: Topology = ask(binary, "topology")?;
    let index_of = |gpu: &Gpu| {
        let path = gpu.device.as_ref()?.to_str()?;
        let has_it = |known: &&Value| {
            known["devices"].as_array().is_some_and(|devices| devices.iter().any(|device| device["path"] == path))
        };
        topology.gpus.iter().find(has_it)?["index"].as_i64()
    };
    let mut known = Vec::new();
    for gpu in gpus {
        let index = index_of(gpu).with_context(|| format!("the scheduler does not know {}", gpu.name))?;
        known.push((index, gpu.clone()));
    }
    known.sort_by_key(|&(index, _)| index);
    let (indices, gpus) = known.into_iter().unzip();
    Ok((gpus, indices))
}

/// What `binary WHAT --json` prints.
fn ask<T: for<'de> Deserialize<'de>>(binary: &Path, what: &str) -> Result<T> {
    let mut command = Command::new(binary);
    // What is asked is what it knows now, and not how soon the asker gets a CPU.
    // SAFETY: the closure makes one system call and touches no memory of the parent.
    unsafe { command.pre_exec(|| sys::set_fifo(1)) };
    let output = command.args([what, "--json"]).output().with_context(|| format!("running {}", binary.display()))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "`{} {what} --json` failed: {}", binary.display(), complaint.trim());
    serde_json::from_slice(&output.stdout).with_context(|| format!("what `{} {what} --json` printed", binary.display()))
}
