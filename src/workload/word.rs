//! Applies what cgroups' owners say of their tasks: see [`crate::cgroup`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use super::process::Reader;
use crate::cgroup::{self, Spoken};
use crate::machine::Machine;
use crate::scheduler::Scheduler;

/// What is said now.
#[derive(Debug)]
pub struct Words {
    /// The index of each GPU by all its names.
    gpus: BTreeMap<String, u32>,
    spoken: Vec<Spoken>,
    /// What was told to people already: each once.
    told: BTreeSet<String>,
}

impl Words {
    /// Nothing is said yet.
    pub fn new(machine: &Machine) -> Self {
        let names = machine.gpus.iter().flat_map(|gpu| {
            let pci = gpu.pci.map(|pci| pci.to_string());
            [Some(gpu.index.to_string()), pci, gpu.uuid.clone()].into_iter().flatten().map(|name| (name, gpu.index))
        });
        Self { gpus: names.collect(), spoken: Vec::new(), told: BTreeSet::new() }
    }

    /// Reads what all cgroups say.
    pub fn read(&mut self) {
        let (spoken, nonsense) = cgroup::spoken(Path::new(cgroup::ROOT));
        self.spoken = spoken;
        for complaint in nonsense {
            self.tell(complaint);
        }
    }

    /// Tells the BPF side. `uses` gives the GPUs, as bits, that a process is known to use.
    ///
    /// # Errors
    /// The BPF side could not be told.
    pub fn apply(&mut self, scheduler: &Scheduler, reader: &Reader, uses: impl Fn(u32) -> u64) -> Result<()> {
        let mut complaints = Vec::new();
        for spoken in &self.spoken {
            let (Some(is_feeder), Some(process)) = (spoken.word.feeder, reader.process(spoken.pid)) else { continue };
            let feeds = if is_feeder {
                match self.gpus_of(spoken, uses(spoken.pid)) {
                    Ok(gpus) => Some(gpus),
                    Err(complaint) => {
                        complaints.push(complaint);
                        continue;
                    }
                }
            } else {
                None
            };
            for tid in reader.threads(&process) {
                scheduler.name_thread(tid, feeds)?;
            }
        }
        for complaint in complaints {
            self.tell(complaint);
        }
        Ok(())
    }

    /// The GPUs, as bits, that a process is said to feed, or else uses.
    fn gpus_of(&self, spoken: &Spoken, used: u64) -> Result<u64, String> {
        let group = spoken.group.display();
        match &spoken.word.gpu {
            Some(name) => match self.gpus.get(name) {
                Some(&gpu) if gpu < u64::BITS => Ok(1 << gpu),
                _ => Err(format!(
                    "user.stoker.gpu of cgroup {group} is '{name}', which is no GPU here: `scx_stoker topology` shows them"
                )),
            },
            None if used == 0 => Err(format!(
                "cgroup {group} is said to feed a GPU, and not which, and its process {} uses none: set user.stoker.gpu",
                spoken.pid
            )),
            None => Ok(used),
        }
    }

    fn tell(&mut self, complaint: String) {
        if !self.told.contains(&complaint) {
            log::warn!("{complaint}");
            self.told.insert(complaint);
        }
    }
}
