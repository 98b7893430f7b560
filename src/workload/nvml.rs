//! Which processes NVML says use a GPU: the truth about a process, where device files only tell what it has open.
//!
//! A GPU that hangs or fails must not silence the others. NVML is asked on one thread only, because calls from several
//! at once have crashed machines, and a call that hangs cannot be ended. So while one hangs nobody is asked, and what
//! was said of the other GPUs stands. Once it comes back, the others are asked again, and the GPU that hung is left out
//! but for one question now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use crate::machine::nvml::{NoAnswer, NvmlThread, explain};
use crate::machine::{Machine, Vendor};

/// How long the answer about one GPU may take: the caller waits for it.
const TIMEOUT: Duration = Duration::from_millis(300);

/// How long a GPU that hung or failed is left in peace.
const REST: Duration = Duration::from_secs(60);

/// Asks NVML who uses its GPUs.
pub struct NvmlProcesses<'a> {
    nvml: &'a NvmlThread,
    gpus: Vec<Subject>,
}

/// One GPU to ask about.
struct Subject {
    /// NVML knows GPUs by UUID.
    uuid: String,
    /// [`crate::machine::Gpu::index`].
    index: u32,
    /// Up to when its samples of utilisation were read, in NVML's time.
    sampled_until: u64,
    /// It hung or failed, which was said, and is not asked before then.
    rests_until: Option<Instant>,
}

/// What NVML said at one look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// GPUs, as bits, of which [`Self::uses`] says all that is known now. Of others, what was said before stands.
    pub answered: u64,
    /// By PID.
    pub uses: BTreeMap<u32, NvmlUse>,
}

/// How a process uses GPUs: each field holds them as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmlUse {
    /// Those it computes or draws on, as a client of MPS too.
    pub gpus: u64,
    /// Those of which NVML can tell whether they do.
    pub judged: u64,
    /// Those that worked for it since the last look.
    pub worked: u64,
}

/// What NVML says of one GPU.
struct Answer {
    users: BTreeSet<u32>,
    /// Those for which it worked lately, and up to when that is known; none where NVML cannot tell.
    worked: Option<(BTreeSet<u32>, u64)>,
}

impl<'a> NvmlProcesses<'a> {
    /// For the GPUs of `machine` that NVML knows.
    pub fn new(nvml: &'a NvmlThread, machine: &Machine) -> Self {
        let nvidia = machine.gpus.iter().filter(|gpu| gpu.vendor == Vendor::Nvidia && gpu.index < u64::BITS);
        let subject = |uuid, index| Subject { uuid, index, sampled_until: 0, rests_until: None };
        Self { nvml, gpus: nvidia.filter_map(|gpu| Some(subject(gpu.uuid.clone()?, gpu.index))).collect() }
    }

    /// Who uses which GPU. Nobody uses one that hangs or fails, as far as this tells.
    pub fn read(&mut self, now: Instant) -> Reading {
        let mut reading = Reading::default();
        for gpu in &mut self.gpus {
            if self.nvml.is_stuck() {
                break;
            }
            if gpu.rests_until.is_some_and(|until| now < until) {
                continue;
            }
            let (uuid, since) = (gpu.uuid.clone(), gpu.sampled_until);
            let bit = 1 << gpu.index;
            match self.nvml.ask(TIMEOUT, move |nvml| look(nvml, &uuid, since)) {
                Ok(Ok(answer)) => {
                    if gpu.rests_until.take().is_some() {
                        log::info!("NVML tells again who uses GPU {}", gpu.index);
                    }
                    reading.answered |= bit;
                    take(&mut reading.uses, bit, &answer);
                    if let Some((_, until)) = answer.worked {
                        gpu.sampled_until = until;
                    }
                }
                // Processes came between the question for their number and the one for them.
                Ok(Err(NvmlError::InsufficientSize(_))) => {}
                Ok(Err(error)) => {
                    reading.answered |= bit;
                    gpu.fail(now, &format!("NVML cannot tell who uses GPU {}: {}", gpu.index, explain(&error)));
                }
                Err(NoAnswer) => {
                    reading.answered |= bit;
                    let limit = TIMEOUT.as_millis();
                    gpu.fail(
                        now,
                        &format!("NVML did not answer within {limit} ms when asked who uses GPU {}", gpu.index),
                    );
                }
            }
        }
        reading
    }
}

impl Subject {
    /// Leaves it out for a while, and says so the first time.
    fn fail(&mut self, now: Instant, what: &str) {
        if self.rests_until.replace(now + REST).is_none() {
            log::warn!(
                "{what}. Its feeders are found by device files alone for now; it is asked again every {} s. Check with \
                 `nvidia-smi` and `dmesg`.",
                REST.as_secs()
            );
        }
    }
}

/// Adds what was said of one GPU.
fn take(uses: &mut BTreeMap<u32, NvmlUse>, bit: u64, answer: &Answer) {
    for &pid in &answer.users {
        let used: &mut NvmlUse = uses.entry(pid).or_default();
        used.gpus |= bit;
        // Of those that are no users, the samples may speak in other numbers than ours.
        if let Some((worked, _)) = &answer.worked {
            used.judged |= bit;
            used.worked |= if worked.contains(&pid) { bit } else { 0 };
        }
    }
}

fn look(nvml: &Nvml, uuid: &str, since: u64) -> Result<Answer, NvmlError> {
    // The whole GPU: for privileged callers its lists include the processes of its MIG instances.
    let device = nvml.device_by_uuid(uuid)?;
    let compute = device.running_compute_processes()?;
    let graphics = if_there_is(device.running_graphics_processes())?;
    let mps = if_there_is(device.mps_running_compute_processes())?;
    // The work of MPS clients goes through a server of theirs, and is not told apart.
    let worked = match mps.is_empty().then(|| device.process_utilization_stats(since)) {
        // No PID stands for time in which nobody used it.
        Some(Ok(samples)) => {
            let until = samples.iter().map(|sample| sample.timestamp).fold(since, u64::max);
            Some((samples.iter().map(|sample| sample.pid).filter(|&pid| pid != 0).collect(), until))
        }
        Some(Err(NvmlError::NotFound)) => Some((BTreeSet::new(), since)),
        // Not with MIG, nor on every GPU.
        Some(Err(_)) | None => None,
    };
    let users = [compute, graphics, mps].into_iter().flatten().map(|process| process.pid).collect();
    Ok(Answer { users, worked })
}

/// A list that this GPU or driver does not have is empty.
fn if_there_is(list: Result<Vec<ProcessInfo>, NvmlError>) -> Result<Vec<ProcessInfo>, NvmlError> {
    match list {
        Err(NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_)) => Ok(Vec::new()),
        other => other,
    }
}
