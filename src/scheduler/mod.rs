//! Opens, configures, loads and attaches the BPF scheduler, and asks it what it counted.

pub mod features;
mod layout;
mod options;
mod pace;
pub mod preflight;
mod probes;
mod run;

use std::collections::BTreeMap;
use std::io::Read;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use libbpf_rs::{AsRawLibbpf, Iter, Link, MapCore, MapFlags, OpenObject, PrintLevel, ProgramInput, libbpf_sys};
use scx_utils::{UserExitInfo, scx_ops_attach, scx_ops_load, scx_ops_open, uei_exited, uei_report};

use features::{Feature, Kernel};
pub use layout::{Layout, dev_t};
pub use options::Options;
use pace::Pace;
use probes::Probing;
pub use probes::{LaunchProbes, LaunchStats};
pub use run::{run, shutdown_flag};

use crate::bpf_intf::{
    stoker_evidence_STOKER_EV_WORD as EV_WORD, stoker_group_report,
    stoker_limits_STOKER_MAX_PROCESSES as MAX_PROCESSES, stoker_limits_STOKER_MIN_DEVICES as MIN_DEVICES,
    stoker_limits_STOKER_MIN_IRQS as MIN_IRQS, stoker_process, stoker_thread, stoker_thread_report,
    stoker_word_STOKER_WORD_FEEDER as WORD_FEEDER, stoker_word_STOKER_WORD_NONE as WORD_NONE,
    stoker_word_STOKER_WORD_ORDINARY as WORD_ORDINARY,
};
use crate::bpf_skel::{BpfSkel, BpfSkelBuilder, OpenBpfSkel, types};
use crate::cgroup;
use crate::machine::Machine;
use crate::workload::LAUNCH_PERIOD;

/// A scheduler that runs for as long as this lives.
pub struct Scheduler<'a> {
    skel: BpfSkel<'a>,
    link: Option<Link>,
    layout: Layout,
    missing: Missing,
    feeders: Vec<Feeders>,
    probing: Probing,
    pace: Pace,
}

/// Feeders of one GPU, counted once in each epoch.
#[derive(Clone, Copy, Debug, Default)]
struct Feeders {
    /// In all epochs before this one.
    before: u64,
    /// In the last epoch that is over.
    last: u64,
}

impl<'a> Scheduler<'a> {
    /// Loads the scheduler for `machine` and makes it the kernel's.
    ///
    /// # Errors
    /// What the kernel refused, with its message on standard error. The kernel's own scheduler then goes on.
    pub fn start(options: &Options, machine: &Machine, object: &'a mut MaybeUninit<OpenObject>) -> Result<Self> {
        let layout = Layout::of(machine)?;
        for note in &layout.notes {
            log::warn!("{note}");
        }
        let mut builder = BpfSkelBuilder::default();
        builder.obj_builder.debug(false);
        // After debug(false), which silences the cause of a failed load as well.
        scx_utils::init_libbpf_logging(Some(PrintLevel::Warn));

        let mut skel = scx_ops_open!(builder, object, stoker_ops, None)?;
        configure(&mut skel, options, &layout)?;
        make_room(&mut skel, &layout)?;
        let missing = leave_out_missing(&mut skel)?;
        // Nothing of it is loaded where it is not asked for.
        skel.progs.note_launch.set_autoload(options.probe_launches);
        // The scheduler is attached below, after the hooks; libbpf would warn that the skeleton has no place for its link.
        // SAFETY: the map is open, and this only sets a flag of it.
        unsafe { libbpf_sys::bpf_map__set_autoattach(skel.maps.stoker_ops.as_libbpf_object().as_ptr(), false) };
        let mut skel = scx_ops_load!(skel, stoker_ops, uei)?;
        fill(&skel.maps.devices, &BTreeMap::new(), &layout.devices).context("could not say which devices are GPUs'")?;
        fill(&skel.maps.irqs, &BTreeMap::new(), &layout.irqs).context("could not say which interrupts are GPUs'")?;
        let link = scx_ops_attach!(skel, stoker_ops)?;
        let feeders = vec![Feeders::default(); layout.gpu_domain.len()];
        let (probing, pace) = (Probing::default(), Pace::new(Duration::from_secs(options.evidence_s)));
        Ok(Self { skel, link: Some(link), layout, missing, feeders, probing, pace })
    }

    /// What the BPF side indexes by.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Goes by the device and interrupt numbers of `layout` from now on, which must be of the same GPUs.
    ///
    /// # Errors
    /// There is no room for them: only a scheduler that starts anew has it.
    pub fn renumber(&mut self, layout: Layout) -> Result<()> {
        fill(&self.skel.maps.devices, &self.layout.devices, &layout.devices)?;
        fill(&self.skel.maps.irqs, &self.layout.irqs, &layout.irqs)?;
        self.layout = layout;
        Ok(())
    }

    /// Whether the kernel has ended the scheduler.
    pub fn has_exited(&self) -> bool {
        // The macro takes it for granted that the section is there.
        self.skel.maps.data_data.is_some() && uei_exited!(&self.skel, uei)
    }

    /// Hands the CPUs back to the kernel's scheduler and says why it ended.
    ///
    /// # Errors
    /// The kernel's reason, when it was an error.
    pub fn stop(mut self) -> Result<UserExitInfo> {
        drop(self.link.take());
        uei_report!(&self.skel, uei)
    }

    /// Counters of one GPU since the start.
    pub fn gpu_stats(&self, gpu: u32) -> types::stoker_gpu_stats {
        self.skel.maps.bss_data.as_ref().map(|bss| bss.gpu_ctxs[gpu as usize].stats).unwrap_or_default()
    }

    /// Processes that touched a GPU and found the map full.
    pub fn processes_lost(&self) -> u64 {
        self.skel.maps.bss_data.as_ref().map_or(0, |bss| bss.processes_lost)
    }

    /// Whether BPF sees every use of a GPU's device file, or /proc must be looked through now and then.
    pub fn has_all_hooks(&self) -> bool {
        !self.missing.hooks
    }

    /// Whether the kernel tells of every group's cpu.max and cpu.idle, or [`Self::set_group`] must.
    pub fn hears_of_limits(&self) -> bool {
        !self.missing.limits
    }

    /// How often cpu.max or cpu.idle of a group was written, where the kernel does not tell of that.
    pub fn limit_writes(&self) -> u64 {
        self.skel.maps.bss_data.as_ref().map_or(0, |bss| bss.limit_writes)
    }

    /// cgroups that found no number free: each counts as its parent.
    pub fn groups_lost(&self) -> u64 {
        self.skel.maps.bss_data.as_ref().map_or(0, |bss| bss.groups_lost)
    }

    /// What came of cpu.max, of all groups together, since the start.
    pub fn limit_stats(&self) -> types::stoker_limit_stats {
        self.skel.maps.bss_data.as_ref().map(|bss| bss.limit_stats).unwrap_or_default()
    }

    /// Tells the BPF side of a group's cpu.max and cpu.idle. That the cpu controller does not know the group is no error.
    ///
    /// # Errors
    /// The BPF side could not be told.
    pub fn set_group(&self, limit: &cgroup::Limit) -> Result<()> {
        let mut report = stoker_group_report {
            cgroup: limit.cgroup,
            quota_ns: limit.quota_ns,
            period_ns: limit.period_ns,
            burst_ns: limit.burst_ns,
            is_idle: limit.is_idle.into(),
            ret: 0,
        };
        let input = ProgramInput { context_in: Some(bytes_of_mut(&mut report)), ..ProgramInput::default() };
        self.skel.progs.set_group.test_run(input).context("could not reach the BPF side")?;
        Ok(())
    }

    /// Ends an epoch: the time over which feeders are counted.
    pub fn next_epoch(&mut self) {
        let Some(bss) = self.skel.maps.bss_data.as_mut() else { return };
        bss.epoch = bss.epoch.wrapping_add(1);
        for (feeders, gpu) in self.feeders.iter_mut().zip(&bss.gpu_ctxs) {
            *feeders = Feeders { before: gpu.stats.feeders, last: gpu.stats.feeders - feeders.before };
        }
    }

    /// Distinct feeders of a GPU that ran in the last epoch.
    pub fn feeders(&self, gpu: u32) -> u64 {
        self.feeders.get(gpu as usize).map_or(0, |feeders| feeders.last)
    }

    /// Lets evidence of GPU use that is too old have no more effect, nor cost.
    ///
    /// # Errors
    /// The BPF side could not be asked.
    pub fn expire_evidence(&self) -> Result<()> {
        self.skel.progs.expire_evidence.test_run(ProgramInput::default()).context("could not reach the BPF side")?;
        Ok(())
    }

    /// The processes that touched a GPU, by PID.
    pub fn processes(&self) -> Vec<(u32, stoker_process)> {
        let map = &self.skel.maps.processes;
        map.keys()
            .filter_map(|key| {
                let value = map.lookup(&key, MapFlags::ANY).ok()??;
                Some((u32::from_ne_bytes(key.try_into().ok()?), from_bytes(&value)?))
            })
            .collect()
    }

    /// Forgets a process that has ended.
    pub fn forget_process(&self, pid: u32) {
        // Not there any more is as good.
        let _ = self.skel.maps.processes.delete(&pid.to_ne_bytes());
    }

    /// All threads that are something to a GPU, or were seen to use one.
    ///
    /// # Errors
    /// The BPF side could not be asked.
    pub fn threads(&self) -> Result<Vec<stoker_thread>> {
        let mut bytes = Vec::new();
        let link = self.skel.progs.list_threads.attach().context("could not list threads")?;
        Iter::new(&link)?.read_to_end(&mut bytes)?;
        Ok(bytes.chunks_exact(size_of::<stoker_thread>()).filter_map(from_bytes).collect())
    }

    /// What the BPF side saw of a thread; none if it is gone.
    ///
    /// # Errors
    /// The BPF side could not be asked.
    pub fn thread_use(&self, tid: u32) -> Result<Option<ThreadUse>> {
        let report = self.exchange(tid, ThreadUse { evidence: 0, gpus: 0 }, WORD_NONE)?;
        Ok((report.ret == 0).then_some(ThreadUse { evidence: report.known_evidence, gpus: report.known_gpus }))
    }

    /// Tells the BPF side that a thread uses GPUs, from now on for as long as evidence holds.
    ///
    /// # Errors
    /// The BPF side could not be told. That the thread is gone is no error.
    pub fn report_thread(&self, tid: u32, used: ThreadUse) -> Result<()> {
        self.exchange(tid, used, WORD_NONE).map(|_| ())
    }

    /// Makes a thread a feeder of GPUs, given as bits, or lets it be none, whatever it does. It must be said again within
    /// the time that evidence holds.
    ///
    /// # Errors
    /// The BPF side could not be told. That the thread is gone is no error.
    pub fn name_thread(&self, tid: u32, feeds: Option<u64>) -> Result<()> {
        let (gpus, word) = feeds.map_or((0, WORD_ORDINARY), |gpus| (gpus, WORD_FEEDER));
        self.exchange(tid, ThreadUse { evidence: EV_WORD, gpus }, word).map(|_| ())
    }

    fn exchange(&self, tid: u32, used: ThreadUse, word: u32) -> Result<stoker_thread_report> {
        let mut report = stoker_thread_report {
            tid: tid as i32,
            evidence: used.evidence,
            word,
            pad: 0,
            gpus: used.gpus,
            known_gpus: 0,
            known_evidence: 0,
            ret: 0,
        };
        let input = ProgramInput { context_in: Some(bytes_of_mut(&mut report)), ..ProgramInput::default() };
        self.skel.progs.report_thread.test_run(input).context("could not reach the BPF side")?;
        Ok(report)
    }
}

/// How a thread uses GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadUse {
    /// `STOKER_EV_*`.
    pub evidence: u32,
    /// GPUs, as bits.
    pub gpus: u64,
}

/// Makes a map of GPUs as bits, by device or interrupt number, hold `new` instead of `old`.
fn fill(map: &impl MapCore, old: &BTreeMap<u32, u64>, new: &BTreeMap<u32, u64>) -> Result<()> {
    for (number, gpus) in new.iter().filter(|(number, gpus)| old.get(number) != Some(gpus)) {
        map.update(&number.to_ne_bytes(), &gpus.to_ne_bytes(), MapFlags::ANY)?;
    }
    for number in old.keys().filter(|number| !new.contains_key(number)) {
        map.delete(&number.to_ne_bytes())?;
    }
    Ok(())
}

/// Writes options and machine into the constants of the object.
fn configure(skel: &mut OpenBpfSkel, options: &Options, layout: &Layout) -> Result<()> {
    let Some(rodata) = skel.maps.rodata_data.as_mut() else { bail!("the BPF object has no constants to set") };
    rodata.slice_ns = options.slice_us * 1000;
    rodata.feeder_slice_ns = options.feeder_slice_us * 1000;
    rodata.feeder_cap_permille = options.feeder_cap * 10;
    rodata.home_wait_ns = options.home_wait_us * 1000;
    rodata.evidence_ttl_ns = options.evidence_s * 1_000_000_000;
    rodata.launch_ttl_ns = rodata.evidence_ttl_ns.max(3 * LAUNCH_PERIOD.as_nanos() as u64);

    rodata.nr_cpus = layout.nr_cpus;
    rodata.nr_online = layout.llcs.iter().map(|cpus| cpus.len() as u32).sum::<u32>().max(1);
    rodata.nr_llcs = layout.llcs.len() as u32;
    rodata.nr_domains = layout.domains.len() as u32;
    for (cpu, place) in layout.cpus.iter().enumerate() {
        rodata.cpus[cpu] = types::stoker_cpu { domains: place.domains, llc: place.llc.into() };
    }
    for (llc, order) in layout.steal_order.iter().enumerate() {
        rodata.steal_order[llc][..order.len()].copy_from_slice(order);
    }
    for (domain, cpus) in layout.domains.iter().enumerate() {
        rodata.domain_nr_cpus[domain] = cpus.len() as u32;
    }
    rodata.gpu_domain[..layout.gpu_domain.len()].copy_from_slice(&layout.gpu_domain);
    Ok(())
}

/// Makes the maps as large as this machine needs.
fn make_room(skel: &mut OpenBpfSkel, layout: &Layout) -> Result<()> {
    // As many again may come, or the scheduler starts again with more.
    let room = |known: usize, least: u32| least.max(2 * known as u32);
    skel.maps.devices.set_max_entries(room(layout.devices.len(), MIN_DEVICES))?;
    skel.maps.irqs.set_max_entries(room(layout.irqs.len(), MIN_IRQS))?;
    skel.maps.processes.set_max_entries(process_room())?;
    skel.maps.queued_loads.set_max_entries((layout.llcs.len() as u32).max(1))?;
    Ok(())
}

/// Processes that can be there at once, as far as there is a use in noting them.
fn process_room() -> u32 {
    let limit = |name: &str| -> Option<u32> {
        std::fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).ok()?.trim().parse().ok()
    };
    ["pid_max", "threads-max"].into_iter().filter_map(limit).fold(MAX_PROCESSES, u32::min)
}

/// What user space must do in the kernel's stead.
#[derive(Clone, Copy, Debug, Default)]
struct Missing {
    /// Not every use of a GPU's device file is seen.
    hooks: bool,
    /// cpu.max or cpu.idle are not told.
    limits: bool,
}

/// Turns off what the running kernel has not.
fn leave_out_missing(skel: &mut OpenBpfSkel) -> Result<Missing> {
    let kernel = Kernel::running()?;
    let mut missing = Missing::default();
    for feature in features::ALL.into_iter().filter(|feature| !kernel.has(*feature)) {
        let (progs, ops) = (&mut skel.progs, skel.struct_ops.stoker_ops_mut());
        let hook = match feature {
            Feature::FileOpen => Some(&mut progs.stoker_file_open),
            Feature::FileIoctl => Some(&mut progs.stoker_file_ioctl),
            Feature::MmapFile => Some(&mut progs.stoker_mmap_file),
            Feature::PollWait => {
                progs.stoker_pollwait.set_autoload(false);
                None
            }
            Feature::Interrupts => {
                progs.stoker_irq_entry.set_autoload(false);
                progs.stoker_irq_exit.set_autoload(false);
                None
            }
            // The BPF side looks for it by itself.
            Feature::Kick => None,
            Feature::CpuRelease => {
                ops.cpu_release = std::ptr::null_mut();
                None
            }
            Feature::CpuAcquire => {
                ops.cpu_acquire = std::ptr::null_mut();
                None
            }
            Feature::SetIdle => {
                ops.cgroup_set_idle = std::ptr::null_mut();
                missing.limits = true;
                None
            }
            Feature::SetBandwidth => {
                ops.cgroup_set_bandwidth = std::ptr::null_mut();
                missing.limits = true;
                None
            }
        };
        if let Some(hook) = hook {
            hook.set_autoload(false);
            missing.hooks = true;
        }
        log::warn!(
            "this kernel has no usable {}, which {}: {}. Way out: {}.",
            feature.symbol(),
            feature.purpose(),
            feature.absence(),
            feature.way_out()
        );
    }
    skel.progs.stoker_cgroup_written.set_autoload(missing.limits && kernel.has_function("cgroup_file_write"));
    Ok(missing)
}

/// A plain C struct as bytes.
fn bytes_of_mut<T: Copy>(value: &mut T) -> &mut [u8] {
    // SAFETY: the types used here are C structs of integers without padding, made by bindgen, and any bytes are a value
    // of such a type.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(value).cast(), size_of::<T>()) }
}

fn from_bytes<T: Copy>(bytes: &[u8]) -> Option<T> {
    // SAFETY: as above, and the length is checked.
    (bytes.len() == size_of::<T>()).then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}
