//! Samples which threads launch work on a GPU by calling its vendor's library, for `--probe-launches`. A process with a
//! pool of threads that submits by writing to mapped memory shows nothing else of which thread feeds.
//!
//! One library is sampled at a time. It is the file that counts, and not its name: containers have their own copies,
//! and each is a library of its own. What is paid is paid for each call, so the length of a sample and the time until the
//! next depend on how many there are.

use std::collections::BTreeMap;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Known;
use super::elf::function_offsets;
use super::maps::{FileId, parse_maps};
use super::process::Reader;
use crate::scheduler::{LaunchProbes, Scheduler};

/// Time between the beginnings of two samples of one library.
pub const PERIOD: Duration = Duration::from_secs(10);
/// The same after a sample without a call: the process may be about to begin.
const IDLE_PERIOD: Duration = Duration::from_secs(3);
/// How long a sample takes: whoever feeds a GPU launches several times in it.
const LENGTH: Duration = Duration::from_millis(200);
/// How long it takes at most, where fewer than [`FEW_CALLS`] are seen.
const FULL_LENGTH: Duration = Duration::from_secs(1);
const FEW_CALLS: u64 = 20;

/// Whether a function of this name launches work.
type IsLaunch = fn(&str) -> bool;

/// The libraries whose calls are launches: how their file's name starts, and whether a function launches work or copies.
/// By their beginnings and ends, because each release adds variants.
const VENDORS: [(&str, IsLaunch); 3] = [
    ("libcuda.so", |function| {
        let copies = function.starts_with("cuMemcpy") || function.starts_with("cuMemset");
        function.starts_with("cuLaunch")
            || function.starts_with("cuGraphLaunch")
            || copies && function.contains("Async")
    }),
    ("libamdhip64.so", |function| {
        let copies = function.starts_with("hipMemcpy") || function.starts_with("hipMemset");
        function.starts_with("hip") && function.contains("Launch") || copies && function.contains("Async")
    }),
    ("libze_loader.so", |function| {
        function == "zeCommandQueueExecuteCommandLists"
            || function.starts_with("zeCommandListAppendLaunch")
            || function.starts_with("zeCommandListAppendMemory")
            || function.starts_with("zeCommandListImmediateAppendCommandLists")
    }),
];

/// A library that a process has mapped.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// Which file it is.
    pub file: FileId,
    name: String,
    is_launch: IsLaunch,
    /// The name of the mapping below `/proc/PID/map_files`.
    range: String,
}

/// The libraries in the text of `/proc/PID/maps`.
fn libraries_in(maps: &str) -> Vec<Mapped> {
    let mut found: Vec<Mapped> = Vec::new();
    for mapping in parse_maps(maps).filter(|mapping| mapping.is_executable) {
        let name = mapping.path.rsplit('/').next().unwrap_or_default();
        let Some((_, is_launch)) = VENDORS.iter().find(|(start, _)| name.starts_with(start)) else { continue };
        if found.iter().all(|library| library.file != mapping.file) {
            let range = format!("{:x}-{:x}", mapping.start, mapping.end);
            found.push(Mapped { file: mapping.file, name: name.to_string(), is_launch: *is_launch, range });
        }
    }
    found
}

/// What is known of the launches of one process.
#[derive(Debug, Default)]
pub struct Launching {
    libraries: Vec<Mapped>,
    has_been_read: bool,
    is_judged: bool,
}

impl Launching {
    /// Looks at what the process has mapped: at first sight, and when `again`.
    pub fn read(&mut self, reader: &Reader, pid: u32, again: bool) {
        if again || !self.has_been_read {
            self.has_been_read = true;
            self.libraries = libraries_in(&reader.maps(pid));
        }
    }

    /// Whether a sample will tell soon who launches, so that there is no need to guess.
    pub fn is_about_to_be_judged(&self) -> bool {
        !self.libraries.is_empty() && !self.is_judged
    }

    /// Whether the process has mapped this library. If so, it is taken as judged.
    fn judge(&mut self, file: &FileId) -> bool {
        let has_it = self.libraries.iter().any(|library| library.file == *file);
        self.is_judged |= has_it;
        has_it
    }
}

/// Takes samples.
#[derive(Default)]
pub struct Launches {
    /// From when on each library may be sampled again.
    due_at: BTreeMap<FileId, Instant>,
    /// Those that cannot be, and their names.
    refused: BTreeMap<FileId, String>,
    sample: Option<Sample>,
    /// The last one's probes, as they are turned off.
    ending: Option<JoinHandle<()>>,
}

struct Sample {
    library: Mapped,
    probes: LaunchProbes,
    began_at: Instant,
}

impl Launches {
    /// None, with a warning, where calls cannot be probed.
    pub fn try_new(scheduler: &mut Scheduler) -> Option<Self> {
        match scheduler.try_probes() {
            Ok(()) => {
                log::info!(
                    "launches are sampled: each library for some {} ms every {} s; meanwhile a call of it takes {} ns more here",
                    LENGTH.as_millis(),
                    PERIOD.as_secs(),
                    scheduler.launch_stats().call_ns
                );
                Some(Self::default())
            }
            Err(error) => {
                log::warn!(
                    "--probe-launches has no effect, because calls of libraries cannot be probed here ({error:#}): feeders \
                     that submit without system calls are found by how they wait only. It takes a kernel with \
                     CONFIG_UPROBES=y that is not locked down."
                );
                None
            }
        }
    }

    /// Starts the next sample, if one is due and none is taken.
    pub(super) fn start(&mut self, scheduler: &mut Scheduler, reader: &Reader, processes: &mut BTreeMap<u32, Known>) {
        if self.sample.is_some() || self.ending.as_ref().is_some_and(|ending| !ending.is_finished()) {
            return;
        }
        let mapped: Vec<(u32, &Mapped)> = processes
            .iter()
            .filter(|(_, known)| known.gpus != 0)
            .flat_map(|(&pid, known)| known.launching.libraries.iter().map(move |library| (pid, library)))
            .collect();
        let is_mapped = |file: &FileId| mapped.iter().any(|(_, library)| library.file == *file);
        let now = Instant::now();
        self.refused.retain(|file, _| is_mapped(file));
        self.due_at.retain(|file, due_at| is_mapped(file) || *due_at > now);
        let Some((pid, library)) = self.due(&mapped, now) else { return };
        // A process that has ended, or unmapped it, is no reason to complain.
        let Ok(file) = reader.mapped_file(pid, &library.range) else { return };
        let offsets = function_offsets(&file, library.is_launch);
        match offsets.and_then(|offsets| scheduler.probe_launches(&file, offsets)) {
            Ok(probes) => self.sample = Some(Sample { library, probes, began_at: Instant::now() }),
            Err(error) => self.refuse(library, &error, processes),
        }
    }

    /// The library that waits longest, of those whose turn it is.
    fn due(&self, mapped: &[(u32, &Mapped)], now: Instant) -> Option<(u32, Mapped)> {
        let due_at = |library: &Mapped| self.due_at.get(&library.file);
        let candidates = mapped.iter().filter(|(_, library)| {
            due_at(library).is_none_or(|&due_at| due_at <= now) && !self.refused.contains_key(&library.file)
        });
        let (pid, library) = candidates.min_by_key(|(_, library)| due_at(library))?;
        Some((*pid, (*library).clone()))
    }

    fn refuse(&mut self, library: Mapped, error: &anyhow::Error, processes: &mut BTreeMap<u32, Known>) {
        if self.refused.values().all(|name| *name != library.name) {
            log::warn!(
                "calls of {} cannot be probed ({error:#}): feeders that launch by it and make no system calls are found by \
                 how they wait only",
                library.name
            );
        }
        for known in processes.values_mut() {
            known.launching.judge(&library.file);
        }
        self.refused.insert(library.file, library.name);
    }

    /// Ends the sample if it is time, and makes feeders of the threads that launched in it.
    ///
    /// # Errors
    /// The BPF side could not be asked.
    pub(super) fn end_if_due(
        &mut self,
        scheduler: &Scheduler,
        reader: &Reader,
        processes: &mut BTreeMap<u32, Known>,
    ) -> Result<()> {
        let is_over = |sample: &mut Sample| is_over(sample.began_at.elapsed(), scheduler.calls_seen(&sample.probes));
        let Some(Sample { library, probes, began_at }) = self.sample.take_if(is_over) else { return Ok(()) };
        let (sample, calls, time) = (probes.sample, scheduler.calls_seen(&probes), began_at.elapsed());
        self.ending = scheduler.end_probes(probes);
        let period = if calls > 0 { PERIOD } else { IDLE_PERIOD };
        self.due_at.insert(library.file.clone(), began_at + period);
        let (mut judged, mut feeders) = (0, 0);
        for known in processes.values_mut() {
            if known.gpus == 0 || !known.launching.judge(&library.file) {
                continue;
            }
            judged += 1;
            for tid in reader.threads(&known.process) {
                feeders += u32::from(scheduler.judge_launches(tid, sample, known.gpus)?);
            }
        }
        log::debug!(
            "{}: {calls} launches by {feeders} threads of {judged} processes in {} ms, which cost them {} us",
            library.name,
            time.as_millis(),
            calls * scheduler.launch_stats().call_ns / 1000
        );
        Ok(())
    }
}

/// Whether a sample that has taken so long and seen so many calls tells enough.
fn is_over(elapsed: Duration, calls: u64) -> bool {
    elapsed >= if calls < FEW_CALLS { FULL_LENGTH } else { LENGTH }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps(lines: &[&str]) -> Vec<Mapped> {
        libraries_in(&lines.join("\n"))
    }

    const CUDA: &str = "1000-3000 r-xp 00001000 fe:01 42 /usr/lib/libcuda.so.550.54.15";

    #[test]
    fn a_library_is_found_once_by_its_code_whatever_its_version_and_path() {
        let found = maps(&[
            "0-1000 r--p 00000000 fe:01 42 /usr/lib/libcuda.so.550.54.15",
            CUDA,
            "5000-6000 r-xp 00004000 fe:01 42 /usr/lib/libcuda.so.550.54.15",
            "7000-8000 r-xp 00000000 fe:01 43 /usr/lib/libcudart.so.12",
            "9000-a000 r-xp 00000000 00:2f 7 /opt/rocm/lib/libamdhip64.so.6 (deleted)",
        ]);
        let names: Vec<(&str, &str)> = found.iter().map(|library| (library.name.as_str(), &*library.range)).collect();
        assert_eq!(names, [("libcuda.so.550.54.15", "1000-3000"), ("libamdhip64.so.6", "9000-a000")]);
        assert!((found[1].is_launch)("hipModuleLaunchKernel"));
    }

    #[test]
    fn launches_and_copies_count_in_all_their_variants_and_waits_and_questions_do_not() {
        let is_launch = |library: &str, function: &str| {
            let vendor = VENDORS.iter().find(|(start, _)| library.starts_with(start)).unwrap();
            (vendor.1)(function)
        };
        let launches = [
            ("libcuda.so.1", "cuLaunchKernel"),
            ("libcuda.so.1", "cuLaunchKernelEx_ptsz"),
            ("libcuda.so.1", "cuGraphLaunch"),
            ("libcuda.so.1", "cuMemcpyHtoDAsync_v2_ptsz"),
            ("libamdhip64.so.6", "hipLaunchKernel"),
            ("libamdhip64.so.6", "hipGraphLaunch_spt"),
            ("libamdhip64.so.6", "hipMemcpyAsync"),
            ("libze_loader.so.1", "zeCommandListAppendLaunchKernel"),
        ];
        assert!(launches.iter().all(|(library, function)| is_launch(library, function)));
        let others = [
            ("libcuda.so.1", "cuStreamSynchronize"),
            ("libcuda.so.1", "cuMemcpyDtoH_v2"),
            ("libcuda.so.1", "cuGraphInstantiate"),
            ("libamdhip64.so.6", "hipStreamSynchronize"),
            ("libze_loader.so.1", "zeCommandQueueSynchronize"),
        ];
        let wrong: Vec<_> = others.iter().filter(|(library, function)| is_launch(library, function)).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn a_sample_goes_on_while_few_calls_are_seen_but_not_for_good() {
        let is_over = |ms, calls| is_over(Duration::from_millis(ms), calls);
        assert_eq!([is_over(100, 1000), is_over(200, 1000)], [false, true]);
        assert_eq!([is_over(900, 0), is_over(900, 3), is_over(1000, 0)], [false, false, true]);
    }

    #[test]
    fn libraries_take_turns_and_none_comes_again_before_its_time() {
        let (a, b) = (&maps(&[CUDA])[0], &maps(&["1000-2000 r-xp 0 fe:01 7 /a/libcuda.so.1"])[0]);
        let start = Instant::now();
        let mut launches = Launches::default();
        let mut turn = |after_s: u64| {
            let now = start + Duration::from_secs(after_s);
            let due = launches.due(&[(1, a), (2, b)], now);
            due.map(|(pid, library)| {
                launches.due_at.insert(library.file, now + PERIOD);
                pid
            })
        };
        assert_eq!([turn(0), turn(1), turn(2), turn(9)], [Some(1), Some(2), None, None]);
        assert_eq!([turn(20), turn(21)], [Some(1), Some(2)]);
    }
}
