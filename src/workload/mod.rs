//! Who uses which GPU, seen from user space: what happened before the scheduler started, and threads that submit
//! without system calls. BPF sees the rest by itself.

mod activity;
mod elf;
mod fdinfo;
mod launch;
mod maps;
mod nvml;
mod process;
mod rule;
mod uevent;
mod watch;
mod word;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;

pub use launch::{Launches, PERIOD as LAUNCH_PERIOD};
pub use maps::{FileId, Mapping, parse_maps};
pub use nvml::{NvmlProcesses, NvmlUse, Reading};
pub use rule::Rule;
pub use watch::{Change, GpuWatch};

use crate::bpf_intf::{
    stoker_evidence_STOKER_EV_IOCTL as EV_IOCTL, stoker_evidence_STOKER_EV_IRQ as EV_IRQ,
    stoker_evidence_STOKER_EV_LAUNCH as EV_LAUNCH, stoker_evidence_STOKER_EV_MMAP as EV_MMAP,
    stoker_evidence_STOKER_EV_OPEN as EV_OPEN, stoker_evidence_STOKER_EV_POLL as EV_POLL,
    stoker_evidence_STOKER_EV_PROCESS as EV_PROCESS, stoker_evidence_STOKER_EV_VCPU as EV_VCPU,
};
use crate::machine::{Gpu, Machine};
use crate::scheduler::{Layout, Scheduler, ThreadUse};
use activity::Activity;
use fdinfo::{CountingDrivers, Engines};
use launch::Launching;
use process::{Process, Reader};
use word::Words;

/// Refreshes between two readings of a process's open files.
const FILES_EVERY: u32 = 5;

/// Counters that are read every five seconds tell of no shorter time.
const MIN_IDLE: Duration = Duration::from_secs(10);

/// The GPU processes known, and what is known of each.
pub struct Workload<'a> {
    nvml: Option<NvmlProcesses<'a>>,
    /// For each device number its GPUs as bits.
    devices: BTreeMap<u32, u64>,
    /// GPUs, as bits, that are passed through to guests.
    passed_through: u64,
    reader: Reader,
    processes: BTreeMap<u32, Known>,
    words: Words<'a>,
    /// None if launches are not to be sampled, or cannot.
    launches: Option<Launches>,
    drivers: CountingDrivers,
    /// How long a process may show no GPU work before it is taken to do none.
    idle_after: Duration,
    refreshes: u32,
    /// Processes that BPF could not note, as of the last look through /proc.
    lost: u64,
}

struct Known {
    process: Process,
    /// GPUs whose devices it holds open, as bits; 0 once it has closed them.
    gpus: u64,
    /// When BPF last saw it open or map one, as far as `gpus` knows of it.
    seen_ns: u64,
    /// GPUs that NVML says it uses, as bits.
    told: u64,
    engines: Engines,
    by_engines: Activity,
    by_nvml: Activity,
    launching: Launching,
}

impl Known {
    /// Nothing is known of it yet.
    fn new(process: Process) -> Self {
        Self {
            process,
            gpus: 0,
            seen_ns: 0,
            told: 0,
            engines: Engines::default(),
            by_engines: Activity::default(),
            by_nvml: Activity::default(),
            launching: Launching::default(),
        }
    }

    /// GPUs that may work for it, as bits.
    fn feeds(&self, idle_after: Duration, now: Instant) -> u64 {
        self.by_nvml.working(self.by_engines.working(self.gpus | self.told, idle_after, now), idle_after, now)
    }
}

impl<'a> Workload<'a> {
    /// Looks at all processes once, for files opened before this. `rules` are the configuration file's, `evidence_ttl` is
    /// how long evidence of GPU work holds.
    pub fn new(
        layout: &Layout,
        machine: &Machine,
        rules: &'a [Rule],
        nvml: Option<NvmlProcesses<'a>>,
        evidence_ttl: Duration,
    ) -> Self {
        let mut workload = Self {
            nvml,
            devices: layout.devices.clone(),
            passed_through: passed_through(machine),
            reader: Reader::new("/proc"),
            processes: BTreeMap::new(),
            words: Words::new(machine, rules),
            launches: None,
            drivers: CountingDrivers::default(),
            idle_after: evidence_ttl.max(MIN_IDLE),
            refreshes: 0,
            lost: 0,
        };
        workload.look_through_proc();
        workload
    }

    /// Goes by other device numbers from now on, through which a process may have opened a GPU already.
    pub fn renumber(&mut self, layout: &Layout) {
        self.devices = layout.devices.clone();
        self.look_through_proc();
    }

    /// Takes in every process that holds a GPU open.
    fn look_through_proc(&mut self) {
        if self.devices.is_empty() {
            return;
        }
        for process in self.reader.all() {
            let gpus = self.reader.held(&process, &self.devices);
            if gpus != 0 && !self.reader.has_inherited(&process, &self.devices) {
                self.known(process).gpus |= gpus;
            }
        }
    }

    /// Renews the evidence of threads that still have reason to be feeders, and forgets processes that ended.
    ///
    /// # Errors
    /// The BPF side could not be asked.
    pub fn refresh(&mut self, scheduler: &mut Scheduler) -> Result<()> {
        let now = Instant::now();
        self.take_seen(scheduler);
        self.take_told(now);
        let reads_files = self.refreshes.is_multiple_of(FILES_EVERY);
        if reads_files {
            // Whom BPF did not see, or had no room to note, is found as at the start.
            let lost = scheduler.processes_lost();
            if !scheduler.has_all_hooks() || lost != self.lost {
                self.look_through_proc();
            }
            self.lost = lost;
        }
        self.refreshes = self.refreshes.wrapping_add(1);
        self.processes.retain(|&pid, known| self.reader.process(pid).as_ref() == Some(&known.process));
        if reads_files {
            self.read_files(now);
        }
        if let Some(launches) = &mut self.launches {
            for (&pid, known) in self.processes.iter_mut().filter(|(_, known)| known.gpus != 0) {
                known.launching.read(&self.reader, pid, reads_files);
            }
            launches.start(scheduler, &self.reader, &mut self.processes);
        }
        for known in self.processes.values() {
            let gpus = known.feeds(self.idle_after, now);
            if gpus & self.passed_through != 0 {
                report_vcpus(scheduler, &self.reader, known, gpus, reads_files)?;
            } else if gpus != 0 {
                report_threads(scheduler, &self.reader, known, gpus)?;
            }
        }
        // Last, so that the explicit word wins.
        if reads_files {
            self.words.read(&self.reader);
        }
        self.words.apply(scheduler, &self.reader, |pid| {
            self.processes.get(&pid).map_or(0, |known| match known.feeds(self.idle_after, now) {
                0 => known.gpus,
                gpus => gpus,
            })
        })
    }

    /// Samples launches from now on, unless there are none.
    pub fn sample_launches(&mut self, launches: Option<Launches>) {
        self.launches = launches;
    }

    /// Ends a sample of launches when it is time. To be called every tenth of a second or so.
    ///
    /// # Errors
    /// The BPF side could not be asked.
    pub fn end_sample(&mut self, scheduler: &Scheduler) -> Result<()> {
        match &mut self.launches {
            Some(launches) => launches.end_if_due(scheduler, &self.reader, &mut self.processes),
            None => Ok(()),
        }
    }

    /// Reads what the known processes hold open, and what engines did for them.
    fn read_files(&mut self, now: Instant) {
        for known in self.processes.values_mut() {
            let files = self.reader.gpu_files(&known.process, &self.devices);
            known.gpus = files.iter().fold(0, |all, (gpus, _)| all | gpus);
            let (told, worked) = known.engines.look(&files, &mut self.drivers);
            known.by_engines.note(u64::MAX, told, worked, now);
        }
    }

    /// Takes in what BPF saw, and lets it forget processes that ended.
    fn take_seen(&mut self, scheduler: &Scheduler) {
        for (pid, seen) in scheduler.processes() {
            match self.reader.process(pid) {
                Some(process) if process.has_started_at(seen.start_ns) => {
                    let known = self.known(process);
                    // What BPF saw once holds only until the open files tell otherwise.
                    if known.seen_ns != seen.seen_ns {
                        known.seen_ns = seen.seen_ns;
                        known.gpus |= seen.gpus;
                    }
                }
                _ => scheduler.forget_process(pid),
            }
        }
    }

    /// Takes in what NVML says. It speaks of this moment, so what it said before of a GPU holds no more.
    fn take_told(&mut self, now: Instant) {
        let Some(nvml) = &mut self.nvml else { return };
        let reading = nvml.read(now);
        for known in self.processes.values_mut() {
            known.told &= !reading.answered;
            let used = reading.uses.get(&known.process.pid).copied().unwrap_or_default();
            known.by_nvml.note(reading.answered, used.judged, used.worked, now);
        }
        for (pid, used) in reading.uses {
            if let Some(process) = self.reader.process(pid) {
                self.known(process).told |= used.gpus;
            }
        }
    }

    /// What is known of a process; nothing of one that had its PID before.
    fn known(&mut self, process: Process) -> &mut Known {
        let known = self.processes.entry(process.pid).or_insert_with(|| Known::new(process.clone()));
        if known.process != process {
            *known = Known::new(process);
        }
        known
    }
}

/// GPUs, as bits, that are passed through to guests, or to programs that drive them by themselves.
fn passed_through(machine: &Machine) -> u64 {
    let is_vfio = |gpu: &&Gpu| gpu.driver.as_deref().is_some_and(|driver| driver.contains("vfio"));
    let indexes = machine.gpus.iter().filter(is_vfio).map(|gpu| gpu.index);
    indexes.filter(|&index| index < u64::BITS).fold(0, |bits, index| bits | 1 << index)
}

/// Of a process that runs a guest, the virtual CPUs feed the GPUs that the guest has. They are the threads that call
/// KVM_RUN, whatever the program calls them: BPF sees each call, and `looks` is for those that have waited in one since
/// before the start. A program that drives the GPU by itself has none, and is like any other.
fn report_vcpus(scheduler: &Scheduler, reader: &Reader, known: &Known, gpus: u64, looks: bool) -> Result<()> {
    let mut has_guest = false;
    for tid in reader.threads(&known.process) {
        let Some(used) = scheduler.thread_use(tid)? else { continue };
        if used.evidence & EV_VCPU != 0 || looks && reader.waits_in_guest(&known.process, tid) {
            has_guest = true;
            scheduler.report_thread(tid, ThreadUse { evidence: EV_VCPU, gpus })?;
        }
    }
    if !has_guest {
        report_threads(scheduler, reader, known, gpus)?;
    }
    Ok(())
}

/// Threads that mapped a GPU feed it for as long as their process holds it, with system calls or without. Where no
/// thread was seen to do anything, all happened before the start, and each may be the one, unless a sample is to tell.
fn report_threads(scheduler: &Scheduler, reader: &Reader, known: &Known, gpus: u64) -> Result<()> {
    let mut unseen = Vec::new();
    let mut seen = false;
    for tid in reader.threads(&known.process) {
        let Some(used) = scheduler.thread_use(tid)? else { continue };
        let own = used.evidence & (EV_OPEN | EV_MMAP | EV_IOCTL | EV_POLL | EV_IRQ | EV_LAUNCH);
        seen |= own != 0;
        if own & EV_MMAP != 0 {
            scheduler.report_thread(tid, ThreadUse { evidence: EV_MMAP, gpus: gpus & used.gpus })?;
        } else if own == 0 {
            unseen.push(tid);
        }
    }
    if !seen && !known.launching.is_about_to_be_judged() {
        for tid in unseen {
            scheduler.report_thread(tid, ThreadUse { evidence: EV_PROCESS, gpus })?;
        }
    }
    Ok(())
}
