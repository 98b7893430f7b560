//! Which processes NVML says use a GPU: the truth about a process, where device files only tell what it has open.

use std::collections::BTreeMap;
use std::time::Duration;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::machine::Machine;
use crate::machine::nvml::NvmlThread;

/// How long the answer about one GPU may take: the caller waits for it.
const TIMEOUT: Duration = Duration::from_millis(300);

/// Asks NVML who uses its GPUs.
pub struct NvmlProcesses<'a> {
    nvml: &'a NvmlThread,
    /// NVML knows GPUs by UUID; the index is [`crate::machine::Gpu::index`].
    gpus: Vec<(String, u32)>,
    /// No more questions: the last one was not answered.
    has_hung: bool,
}

impl<'a> NvmlProcesses<'a> {
    /// For the GPUs of `machine` that NVML knows.
    pub fn new(nvml: &'a NvmlThread, machine: &Machine) -> Self {
        let gpus = machine.gpus.iter().filter_map(|gpu| Some((gpu.uuid.clone()?, gpu.index))).collect();
        Self { nvml, gpus, has_hung: false }
    }

    /// The GPUs, as bits, that each process computes or draws on, MPS clients included. A GPU that errors has none.
    pub fn read(&mut self) -> BTreeMap<u32, u64> {
        let mut processes = BTreeMap::new();
        for (uuid, index) in &self.gpus {
            if self.has_hung {
                break;
            }
            let question = uuid.clone();
            match self.nvml.ask(TIMEOUT, move |nvml| pids(nvml, &question)) {
                Ok(pids) => pids.into_iter().for_each(|pid| *processes.entry(pid).or_default() |= 1 << index),
                Err(_) => {
                    self.has_hung = true;
                    log::warn!(
                        "NVML did not answer within {} ms when asked who uses GPU {index}, and is asked no more: feeders \
                         are found by device files alone until scx_stoker starts again",
                        TIMEOUT.as_millis()
                    );
                }
            }
        }
        processes
    }
}

fn pids(nvml: &Nvml, uuid: &str) -> Vec<u32> {
    let Ok(device) = nvml.device_by_uuid(uuid) else { return Vec::new() };
    type List = fn(&Device) -> Result<Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>, NvmlError>;
    let lists: [List; 3] = [
        |device| device.running_compute_processes(),
        |device| device.running_graphics_processes(),
        |device| device.mps_running_compute_processes(),
    ];
    // A list that this GPU or driver does not have is empty.
    lists.iter().flat_map(|list| list(&device).unwrap_or_default()).map(|process| process.pid).collect()
}
