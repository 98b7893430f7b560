//! Probes on the calls by which GPU libraries are asked to launch work: turned on for a sample, and off again. What a
//! call costs more meanwhile is measured on a function of our own.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use libbpf_rs::{Link, ProgramInput, UprobeMultiOpts};

use super::{Scheduler, bytes_of_mut};
use crate::bpf_intf::stoker_launches;
use crate::workload::parse_maps;

/// libbpf's way to say "of any process".
const ANY_PROCESS: i32 = -1;

/// Probes that are on for as long as this lives.
pub struct LaunchProbes {
    link: Link,
    since: Instant,
    calls_before: u64,
    /// The number of the sample that they serve.
    pub sample: u32,
}

/// What the scheduler remembers of probes.
#[derive(Debug, Default)]
pub(super) struct Probing {
    call_ns: u64,
    /// Of [`Scheduler::try_probes`].
    trial_calls: u64,
    /// Added to when probes have gone.
    probed_ns: Arc<AtomicU64>,
}

/// What probes saw and cost, of all samples together.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaunchStats {
    /// Calls that were seen.
    pub calls: u64,
    /// Time with probes on, in nanoseconds.
    pub probed_ns: u64,
    /// What one of the calls costs more than without a probe, in nanoseconds, as measured at the start.
    pub call_ns: u64,
}

impl LaunchStats {
    /// Time that the probes took from those who called, in nanoseconds.
    pub fn cost_ns(&self) -> u64 {
        self.calls * self.call_ns
    }
}

impl Scheduler<'_> {
    /// Finds out whether calls can be probed here, and what that costs.
    ///
    /// # Errors
    /// They cannot.
    pub fn try_probes(&mut self) -> Result<()> {
        const CALLS: u32 = 200;
        const ROUNDS: u32 = 5;
        let calls = || {
            let start = Instant::now();
            (0..CALLS).for_each(|_| black_box(probed as extern "C" fn())());
            start.elapsed()
        };
        // The quickest round is the one that nobody interrupted.
        let quickest = || (0..ROUNDS).map(|_| calls()).min().unwrap_or_default();
        let without = quickest();
        let link = self.attach_probes("/proc/self/exe", vec![own_offset()?])?;
        let before = self.launch_calls();
        let with = quickest();
        drop(link);
        if self.launch_calls() == before {
            bail!("a probe on a function of its own did not see it called");
        }
        self.probing.trial_calls = self.launch_calls();
        self.probing.call_ns = (with.saturating_sub(without) / CALLS).as_nanos() as u64;
        Ok(())
    }

    /// Turns probes on: on the functions of `library` that begin at `offsets`, in bytes.
    ///
    /// # Errors
    /// There are none, or they cannot be probed.
    pub fn probe_launches(&mut self, library: &File, offsets: Vec<usize>) -> Result<LaunchProbes> {
        if offsets.is_empty() {
            bail!("it exports none of the functions that are known to launch work");
        }
        let bss = self.skel.maps.bss_data.as_mut().context("the BPF object has no variables")?;
        bss.launch_sample = bss.launch_sample.wrapping_add(1).max(1);
        let (sample, calls_before, since) = (bss.launch_sample, bss.launch_calls, Instant::now());
        let link = self.attach_probes(&format!("/proc/self/fd/{}", library.as_raw_fd()), offsets)?;
        Ok(LaunchProbes { link, since, calls_before, sample })
    }

    /// How many calls these probes have seen.
    pub fn calls_seen(&self, probes: &LaunchProbes) -> u64 {
        self.launch_calls() - probes.calls_before
    }

    /// Turns probes off, in a thread of its own: the kernel first waits until nobody can be in one, which takes long on a
    /// busy machine. The thread ends when they are off. If there can be no thread they are off on return.
    pub fn end_probes(&self, probes: LaunchProbes) -> Option<JoinHandle<()>> {
        let probed_ns = Arc::clone(&self.probing.probed_ns);
        let end = move || {
            drop(probes.link);
            probed_ns.fetch_add(probes.since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        };
        std::thread::Builder::new().spawn(end).ok()
    }

    /// What probes saw and cost so far.
    pub fn launch_stats(&self) -> LaunchStats {
        LaunchStats {
            calls: self.launch_calls() - self.probing.trial_calls,
            probed_ns: self.probing.probed_ns.load(Ordering::Relaxed),
            call_ns: self.probing.call_ns,
        }
    }

    /// Whether a thread launched work in that sample. If it did it is a feeder from now on, of one of `gpus`, given as
    /// bits, that its process uses, unless its cgroup's owner says otherwise.
    ///
    /// # Errors
    /// The BPF side could not be asked. That the thread is gone is no error.
    pub fn judge_launches(&self, tid: u32, sample: u32, gpus: u64) -> Result<bool> {
        let mut launches = stoker_launches { tid: tid as i32, sample, gpus, launched: 0, pad: 0 };
        let input = ProgramInput { context_in: Some(bytes_of_mut(&mut launches)), ..ProgramInput::default() };
        self.skel.progs.judge_launches.test_run(input).context("could not reach the BPF side")?;
        Ok(launches.launched != 0)
    }

    /// All at once: each time that probes come or go, the kernel waits until no CPU can be in between.
    fn attach_probes(&self, path: &str, offsets: Vec<usize>) -> Result<Link> {
        let opts = UprobeMultiOpts { offsets, ..UprobeMultiOpts::default() };
        Ok(self.skel.progs.note_launch.attach_uprobe_multi_with_opts(ANY_PROCESS, path, "", opts)?)
    }

    fn launch_calls(&self) -> u64 {
        self.skel.maps.bss_data.as_ref().map_or(0, |bss| bss.launch_calls)
    }
}

/// What [`Scheduler::try_probes`] probes.
#[inline(never)]
extern "C" fn probed() {
    black_box(());
}

/// Where [`probed`] is in this program's file, in bytes.
fn own_offset() -> Result<usize> {
    let address = probed as extern "C" fn() as usize as u64;
    let maps = std::fs::read_to_string("/proc/self/maps").context("could not read /proc/self/maps")?;
    let own = parse_maps(&maps).find(|mapping| (mapping.start..mapping.end).contains(&address));
    let own = own.context("this program's code is not mapped from a file")?;
    Ok((address - own.start + own.offset) as usize)
}
