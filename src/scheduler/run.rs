//! The life of the scheduler: start, look after threads and counters, restart when the machine changes, stop.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Layout, Options, Scheduler, preflight};
use crate::bpf_intf::{stoker_limits_STOKER_MAX_GROUPS as MAX_GROUPS, stoker_limits_STOKER_MAX_LEVELS as MAX_LEVELS};
use crate::cgroup;
use crate::config::Config;
use crate::machine::nvml::NvmlThread;
use crate::machine::{Home, Machine, Sources};
use crate::metrics::{self, Counters, Request, Thread};
use crate::workload::{Change, GpuWatch, Launches, NvmlProcesses, Rule, Workload};

/// How often user space looks after threads and counters.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two readings of cpu.max and cpu.idle that nobody was seen to write, where the kernel does not tell of them.
const LIMITS_EVERY: Duration = Duration::from_secs(5);

enum Ended {
    /// The caller asked for it.
    Asked,
    /// GPUs or CPUs have come or gone: start again.
    MachineChanged,
    /// The kernel ended it.
    ByKernel,
}

/// Runs the scheduler until `shutdown`, again and again when the machine changes.
///
/// # Errors
/// What is missing before the start, why the kernel refused it, or why it ended it.
pub fn run(
    options: &Options,
    rules: &[Rule],
    sources: &Sources,
    is_verbose: bool,
    shutdown: &AtomicBool,
) -> Result<()> {
    preflight::check()?;
    let server = metrics::serve().context("could not serve the counters")?;
    let mut has_started = false;
    loop {
        // Before discovery: what comes in between is a change.
        let mut watch = GpuWatch::new();
        // Without NVML, discovery says whether that matters here.
        let nvml = NvmlThread::start(&sources.nvml, sources.nvml_timeout).ok();
        let mut machine = match &nvml {
            Some(nvml) => Machine::discover_with(sources, Some(nvml)),
            None => Machine::discover(sources),
        }
        .context("could not find out what this machine is")?;
        introduce(&machine);
        // That a GPU goes later is no mistake of the file's.
        if !has_started {
            Config::check_gpus(rules, &machine)?;
        }
        has_started = true;
        let mut object = MaybeUninit::uninit();
        let mut scheduler = Scheduler::start(options, &machine, &mut object)?;
        log::info!("scx_stoker schedules this machine now");
        let processes = nvml.as_ref().map(|nvml| NvmlProcesses::new(nvml, &machine));
        let evidence_ttl = Duration::from_secs(options.evidence_s);
        let mut workload = Workload::new(scheduler.layout(), &machine, rules, processes, evidence_ttl);
        if options.probe_launches {
            workload.sample_launches(Launches::try_new(&mut scheduler));
        }
        let ended = tend(&mut scheduler, workload, &mut machine, &server, &mut watch, is_verbose, shutdown);
        let exit = scheduler.stop()?;
        match ended? {
            Ended::Asked => return Ok(()),
            // The kernel ends it for that alone, which can come before user space sees what else has changed.
            _ if exit.should_restart() => log::info!("CPUs have come or gone: starting again"),
            Ended::MachineChanged => log::info!("GPUs have come or gone: starting again"),
            Ended::ByKernel => return Ok(()),
        }
    }
}

fn introduce(machine: &Machine) {
    for note in &machine.notes {
        log::warn!("{note}");
    }
    if machine.gpus.is_empty() {
        log::info!("no GPU here yet: all tasks are ordinary until one comes");
    }
    for gpu in &machine.gpus {
        // The notes tell of those whose home is unknown.
        if let Home::Known { cpus, source, .. } = &gpu.home {
            log::info!("GPU {} ({}): home is CPUs {cpus}, says {source}", gpu.index, gpu.name);
        }
    }
}

fn tend(
    scheduler: &mut Scheduler,
    mut workload: Workload,
    machine: &mut Machine,
    server: &metrics::Server,
    watch: &mut GpuWatch,
    is_verbose: bool,
    shutdown: &AtomicBool,
) -> Result<Ended> {
    let mut last = Counters::read(scheduler, machine);
    let mut next = Instant::now();
    let mut lost = 0;
    let mut told_of_groups = false;
    let mut limits_read: Option<(u64, Instant)> = None;
    loop {
        if scheduler.has_exited() {
            return Ok(Ended::ByKernel);
        }
        if shutdown.load(Ordering::Relaxed) {
            return Ok(Ended::Asked);
        }
        workload.end_sample(scheduler)?;
        scheduler.pace_hooks();
        if Instant::now() >= next {
            next = Instant::now() + INTERVAL;
            workload.refresh(scheduler)?;
            match watch.look() {
                Change::None => {}
                Change::Numbers => {
                    machine.renumber(watch.scan());
                    let layout = Layout::of(machine)?;
                    // Interrupts come and go with a GPU's users, and more often.
                    let has_other_devices = layout.devices != scheduler.layout().devices;
                    if scheduler.renumber(layout).is_err() {
                        return Ok(Ended::MachineChanged);
                    }
                    // After BPF, so that nobody comes between the two unseen.
                    if has_other_devices {
                        workload.renumber(scheduler.layout());
                        log::info!("device files of GPUs have come or gone");
                    }
                }
                Change::Gpus => return Ok(Ended::MachineChanged),
            }
            scheduler.next_epoch();
            if is_verbose {
                let counters = Counters::read(scheduler, machine);
                println!("{}", counters.since(&last).status_line());
                last = counters;
            }
            scheduler.expire_evidence()?;
            if !told_of_groups && scheduler.groups_lost() > 0 {
                told_of_groups = true;
                log::warn!(
                    "there are more cgroups than the {MAX_GROUPS}, or more levels of them than the {MAX_LEVELS}, that scx_stoker has \
                     room for: each further one shares its parent's weight and limits"
                );
            }
            if lost == 0 && scheduler.processes_lost() > 0 {
                lost = scheduler.processes_lost();
                log::warn!(
                    "more processes use GPUs than can be noted: the others are looked for in /proc, so that it takes some \
                     seconds to know of them"
                );
            }
        }
        let writes = scheduler.limit_writes();
        if !scheduler.hears_of_limits()
            && limits_read.is_none_or(|(seen, at)| seen != writes || at.elapsed() >= LIMITS_EVERY)
        {
            limits_read = Some((writes, Instant::now()));
            cgroup::limits(Path::new(cgroup::ROOT)).iter().try_for_each(|limit| scheduler.set_group(limit))?;
        }
        // Ctrl-C waits that long at most.
        let limit = next.saturating_duration_since(Instant::now()).min(Duration::from_millis(100));
        for request in server.wait(limit) {
            match request {
                Request::Counters => server.answer_counters(Counters::read(scheduler, machine))?,
                Request::Threads => {
                    server.answer_threads(scheduler.threads()?.iter().map(Thread::from).collect())?;
                }
            }
        }
    }
}

/// A flag that Ctrl-C and SIGTERM raise.
///
/// # Errors
/// The signal handler could not be installed.
pub fn shutdown_flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    ctrlc::set_handler(move || raised.store(true, Ordering::Relaxed)).context("could not catch Ctrl-C")?;
    Ok(flag)
}
