//! The machine as the BPF side indexes it: arrays by CPU, LLC, domain and GPU. A pure function of [`Machine`].

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::bpf_intf::{
    stoker_limits_STOKER_MAX_CPUS as MAX_CPUS, stoker_limits_STOKER_MAX_DOMAINS as MAX_DOMAINS,
    stoker_limits_STOKER_MAX_GPUS as MAX_GPUS, stoker_limits_STOKER_MAX_LLCS as MAX_LLCS,
    stoker_none_STOKER_NO_DOMAIN as NO_DOMAIN,
};
use crate::machine::{CpuSet, Home, Machine};

/// What [`Machine`] is to the BPF side.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// All CPU numbers are below this.
    pub nr_cpus: u32,
    /// By CPU number.
    pub cpus: Vec<CpuPlace>,
    /// CPUs of each queue: an LLC, or a node where there are too many LLCs.
    pub llcs: Vec<CpuSet>,
    /// For each LLC all others, nearest first.
    pub steal_order: Vec<Vec<u16>>,
    /// The distinct homes.
    pub domains: Vec<CpuSet>,
    /// The domain of each GPU; `STOKER_NO_DOMAIN` where the home is unknown.
    pub gpu_domain: Vec<u8>,
    /// For each device number, in the kernel's own encoding (`dev_t`), the GPUs it belongs to, as bits.
    pub devices: BTreeMap<u32, u64>,
    /// For each interrupt number the GPUs it belongs to, as bits.
    pub irqs: BTreeMap<u32, u64>,
    /// What could not be taken in, for people.
    pub notes: Vec<String>,
}

/// One CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuPlace {
    /// Index into [`Layout::llcs`].
    pub llc: u32,
    /// Bit d: it is home to domain d.
    pub domains: u64,
}

/// The kernel's `dev_t` of a character device: 12 bits of major number, 20 of minor.
pub fn dev_t(major: u32, minor: u32) -> u32 {
    major << 20 | minor
}

impl Layout {
    /// # Errors
    /// A machine with CPU numbers beyond what the BPF side is built for.
    pub fn of(machine: &Machine) -> Result<Self> {
        let nr_cpus = machine.cpus.iter().map(|cpu| cpu.id + 1).max().unwrap_or(0);
        if nr_cpus > MAX_CPUS {
            bail!("this machine has CPU numbers up to {}, and scx_stoker is built for {MAX_CPUS}", nr_cpus - 1);
        }
        let (llcs, nodes): (Vec<_>, Vec<_>) = if machine.llcs.len() <= MAX_LLCS as usize {
            machine.llcs.iter().map(|llc| (llc.cpus.clone(), llc.node)).unzip()
        } else {
            machine.nodes.iter().filter(|node| !node.is_cpuless()).map(|node| (node.cpus.clone(), node.id)).unzip()
        };
        if llcs.is_empty() || llcs.len() > MAX_LLCS as usize {
            bail!("this machine has {} LLCs and as many nodes; scx_stoker is built for 1 to {MAX_LLCS}", llcs.len());
        }
        let mut layout = Self {
            nr_cpus,
            cpus: vec![CpuPlace::default(); nr_cpus as usize],
            steal_order: steal_order(machine, &nodes),
            llcs,
            ..Self::default()
        };
        for cpu in &machine.cpus {
            let llc = layout.llcs.iter().position(|cpus| cpus.contains(cpu.id)).unwrap_or(0);
            layout.cpus[cpu.id as usize] = CpuPlace { llc: llc as u32, domains: 0 };
        }
        layout.take_gpus(machine);
        Ok(layout)
    }

    fn take_gpus(&mut self, machine: &Machine) {
        let (gpus, ignored) = machine.gpus.split_at(machine.gpus.len().min(MAX_GPUS as usize));
        if !ignored.is_empty() {
            self.notes.push(format!("{} GPUs beyond the first {MAX_GPUS} are not served", ignored.len()));
        }
        for gpu in gpus {
            let domain = match &gpu.home {
                Home::Known { cpus, .. } => self.domain_of(cpus),
                Home::Unknown { .. } => NO_DOMAIN as u8,
            };
            self.gpu_domain.push(domain);
            for &irq in &gpu.irqs {
                *self.irqs.entry(irq).or_default() |= 1 << gpu.index;
            }
            for device in &gpu.devices {
                *self.devices.entry(dev_t(device.major, device.minor)).or_default() |= 1 << gpu.index;
            }
        }
        for shared in &machine.shared_devices {
            let bits = shared.gpus.iter().filter(|&&gpu| gpu < MAX_GPUS).fold(0, |bits, gpu| bits | 1 << gpu);
            // VFIO's, where it serves other devices only.
            if bits == 0 {
                continue;
            }
            *self.devices.entry(dev_t(shared.device.major, shared.device.minor)).or_default() |= bits;
        }
    }

    /// The domain whose home is `cpus`. The last one is left for GPUs of unknown home.
    fn domain_of(&mut self, cpus: &CpuSet) -> u8 {
        let known = self.domains.iter().position(|home| home == cpus);
        let domain = known.unwrap_or(self.domains.len());
        if domain >= MAX_DOMAINS as usize - 1 {
            self.notes.push(format!("there are more than {} distinct homes: some GPUs go without", MAX_DOMAINS - 1));
            return NO_DOMAIN as u8;
        }
        if known.is_none() {
            self.domains.push(cpus.clone());
            for cpu in cpus.iter() {
                self.cpus[cpu as usize].domains |= 1 << domain;
            }
        }
        domain as u8
    }
}

/// For each queue the others by the distance of their nodes, and among equals the next one first, so that not all
/// steal from the same.
fn steal_order(machine: &Machine, nodes: &[u32]) -> Vec<Vec<u16>> {
    let distance = |from: u32, to: u32| {
        let known = machine.nodes.iter().find(|node| node.id == from).and_then(|node| node.distances.get(&to));
        known.copied().unwrap_or(if from == to { 10 } else { 20 })
    };
    let nr = nodes.len();
    (0..nr)
        .map(|llc| {
            let mut others: Vec<usize> = (1..nr).map(|step| (llc + step) % nr).collect();
            others.sort_by_key(|&other| distance(nodes[llc], nodes[other]));
            others.into_iter().map(|other| other as u16).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::machine::{CharDevice, Cpu, Gpu, HomeSource, Llc, Node, SharedDevice, Vendor};

    fn cpus(list: &str) -> CpuSet {
        CpuSet::from_list(list).unwrap()
    }

    fn gpu(index: u32, minor: u32, home: Option<&str>) -> Gpu {
        Gpu {
            index,
            vendor: Vendor::Other,
            name: String::new(),
            pci: None,
            uuid: None,
            driver: None,
            devices: vec![CharDevice { path: "/dev/x".into(), major: 226, minor }],
            irqs: Vec::new(),
            home: match home {
                Some(list) => {
                    Home::Known { cpus: cpus(list), order: Vec::new(), node: None, source: HomeSource::Sysfs }
                }
                None => Home::Unknown { reason: "a test".into() },
            },
            mig: false,
            mig_instances: Vec::new(),
        }
    }

    /// Four LLCs of two CPUs on nodes 0, 0, 1 and 4, of which 1 is nearer to 0 than 4 is.
    fn machine(gpus: Vec<Gpu>) -> Machine {
        let nodes_of_llcs = [0, 0, 1, 4];
        let distance = |from: u32, to: u32| match (from, to) {
            _ if from == to => 10,
            (0, 1) | (1, 0) => 12,
            _ => 32,
        };
        Machine {
            cpus: (0..8)
                .map(|id| Cpu {
                    id,
                    online: true,
                    core: id,
                    llc: id / 2,
                    node: nodes_of_llcs[id as usize / 2],
                    package: 0,
                    capacity: 1024,
                    kind: 0,
                })
                .collect(),
            llcs: (0..4)
                .map(|id| Llc {
                    id,
                    cpus: cpus(&format!("{}-{}", id * 2, id * 2 + 1)),
                    node: nodes_of_llcs[id as usize],
                })
                .collect(),
            nodes: [(0, "0-3"), (1, "4-5"), (4, "6-7")]
                .map(|(id, list)| Node {
                    id,
                    cpus: cpus(list),
                    memory_bytes: 0,
                    distances: [0, 1, 4].into_iter().map(|to| (to, distance(id, to))).collect(),
                })
                .to_vec(),
            packages: Vec::new(),
            gpus,
            shared_devices: Vec::new(),
            left_out: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn an_idle_cpu_steals_from_its_own_node_first_then_from_the_nearest() {
        let layout = Layout::of(&machine(Vec::new())).unwrap();
        assert_eq!(layout.steal_order, [vec![1, 2, 3], vec![0, 2, 3], vec![0, 1, 3], vec![0, 1, 2]]);
        assert_eq!(layout.cpus[5].llc, 2);
    }

    #[test]
    fn gpus_that_share_a_home_share_a_domain_and_an_unknown_home_is_none() {
        let gpus =
            vec![gpu(0, 128, Some("0-3")), gpu(1, 129, Some("4-5")), gpu(2, 130, Some("0-3")), gpu(3, 131, None)];
        let layout = Layout::of(&machine(gpus)).unwrap();
        assert_eq!(layout.gpu_domain, [0, 1, 0, NO_DOMAIN as u8]);
        assert_eq!(layout.domains, [cpus("0-3"), cpus("4-5")]);
        assert_eq!(layout.cpus.iter().map(|cpu| cpu.domains).collect::<Vec<_>>(), [1, 1, 1, 1, 2, 2, 0, 0]);
    }

    #[test]
    fn a_device_is_known_by_the_kernels_own_number_and_a_control_device_by_all_its_gpus_if_any() {
        let mut machine = machine(vec![gpu(0, 128, None), gpu(1, 300, None)]);
        machine.shared_devices.push(SharedDevice {
            vendor: Vendor::Amd,
            device: CharDevice { path: "/dev/kfd".into(), major: 235, minor: 0 },
            gpus: vec![0, 1],
        });
        machine.shared_devices.push(SharedDevice {
            vendor: Vendor::Other,
            device: CharDevice { path: "/dev/vfio/vfio".into(), major: 10, minor: 196 },
            gpus: Vec::new(),
        });
        let layout = Layout::of(&machine).unwrap();
        let expected = [(226 << 20 | 128, 0b01), (226 << 20 | 300, 0b10), (235 << 20, 0b11)];
        assert_eq!(layout.devices, BTreeMap::from(expected));
    }

    #[test]
    fn cpu_numbers_beyond_what_the_bpf_side_holds_are_refused_by_name() {
        let mut machine = machine(Vec::new());
        machine.cpus[7].id = MAX_CPUS;
        assert!(Layout::of(&machine).unwrap_err().to_string().contains("1024"));
    }

    #[test]
    fn gpus_beyond_the_limit_are_told_of() {
        let gpus = (0..=MAX_GPUS).map(|index| gpu(index, index, Some("0-3"))).collect();
        let layout = Layout::of(&machine(gpus)).unwrap();
        assert_eq!(layout.gpu_domain.len(), MAX_GPUS as usize);
        assert_eq!(layout.notes.len(), 1);
    }
}
