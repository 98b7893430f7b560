//! The threads that are something to a GPU, as the scheduler knows them now.

use serde::{Deserialize, Serialize};

use crate::bpf_intf::{
    stoker_evidence_STOKER_EV_IOCTL as IOCTL, stoker_evidence_STOKER_EV_IRQ as IRQ,
    stoker_evidence_STOKER_EV_LAUNCH as LAUNCH, stoker_evidence_STOKER_EV_MMAP as MMAP,
    stoker_evidence_STOKER_EV_OPEN as OPEN, stoker_evidence_STOKER_EV_POLL as POLL,
    stoker_evidence_STOKER_EV_PROCESS as PROCESS, stoker_evidence_STOKER_EV_VCPU as VCPU,
    stoker_evidence_STOKER_EV_WAKE as WAKE, stoker_evidence_STOKER_EV_WORD as WORD,
    stoker_role_STOKER_FEEDER as FEEDER, stoker_role_STOKER_SUPPLIER as SUPPLIER, stoker_thread,
};

/// What a thread is to a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It submits work or waits for it.
    Feeder,
    /// A feeder, or another supplier, waits for it.
    Supplier,
    /// It used a GPU, not so often or so lately that it would be a feeder: it is scheduled as an ordinary thread.
    User,
}

/// One thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Its ID, in the scheduler's PID namespace.
    pub tid: u32,
    /// Its process.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// What it is.
    pub role: Role,
    /// The GPU that it feeds, or supplies for.
    pub gpu: u32,
    /// All GPUs that it was seen to use.
    pub gpus: Vec<u32>,
    /// Of a supplier: how many threads away from the feeder it is; 1 wakes it. 0 for others.
    pub depth: u32,
    /// How this is known.
    pub evidence: Vec<String>,
}

impl From<&stoker_thread> for Thread {
    fn from(thread: &stoker_thread) -> Self {
        let names = [
            (OPEN, "open"),
            (MMAP, "mmap"),
            (IOCTL, "ioctl"),
            (POLL, "poll"),
            (PROCESS, "process"),
            (IRQ, "irq"),
            (WAKE, "wake"),
            (WORD, "word"),
            (VCPU, "vcpu"),
            (LAUNCH, "launch"),
        ];
        let comm: Vec<u8> = thread.comm.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        Self {
            tid: thread.tid,
            pid: thread.tgid,
            comm: String::from_utf8_lossy(&comm).into_owned(),
            role: match u32::from(thread.role) {
                FEEDER => Role::Feeder,
                SUPPLIER => Role::Supplier,
                _ => Role::User,
            },
            gpu: thread.gpu.into(),
            gpus: (0..u64::BITS).filter(|gpu| thread.gpus & 1 << gpu != 0).collect(),
            depth: thread.depth.into(),
            evidence: names
                .iter()
                .filter(|(bit, _)| thread.evidence & bit != 0)
                .map(|(_, name)| name.to_string())
                .collect(),
        }
    }
}
