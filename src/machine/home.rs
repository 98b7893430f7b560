//! Decides a GPU's home from what each source says. Pure: what is read elsewhere comes in as [`Clues`].
//!
//! The first source that says something counts:
//!
//! 1. an NCCL topology file that the user named: whoever names it knows better than the firmware;
//! 2. sysfs (`local_cpus`, else `numa_node`): what the kernel itself goes by;
//! 3. hwloc, which knows corrections for some machines;
//! 4. NVML's CPU affinity, then its memory affinity. Never its NUMA node, which is the GPU's own memory;
//! 5. an NCCL topology file found in one of the usual places;
//! 6. on a machine with one node: that node, for a device on PCI. There is nowhere else it could be, and firmware
//!    of such machines rarely bothers to say (−1).
//!
//! Otherwise the home is unknown, which is never node 0. "All CPUs" on a machine with several nodes says nothing.
//! A node without online CPUs is no home: the nearest node that has some stands in, if one is nearest.

use super::cpuset::CpuSet;
use super::nccl;
use super::{Cpu, Home, HomeSource, Node};

/// What sysfs says about a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SysfsPlace {
    /// `numa_node`; −1 is unknown.
    pub node: Option<i64>,
    /// `local_cpus`.
    pub cpus: Option<CpuSet>,
}

/// What NVML says about a GPU. An empty or missing set is no preference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmlPlace {
    /// CPU affinity.
    pub cpus: CpuSet,
    /// Memory affinity: OS numbers of nodes.
    pub nodes: CpuSet,
}

/// Everything known about where one GPU is.
#[derive(Clone, Debug, Default)]
pub struct Clues {
    /// From an NCCL topology file that the user named.
    pub nccl_named: Option<nccl::Place>,
    /// From an NCCL topology file found in one of the usual places.
    pub nccl_found: Option<nccl::Place>,
    /// From sysfs.
    pub sysfs: Option<SysfsPlace>,
    /// The CPUs of the object under which hwloc hangs the device.
    pub hwloc: Option<CpuSet>,
    /// From NVML.
    pub nvml: Option<NvmlPlace>,
    /// Whether it is a PCI device.
    pub on_pci: bool,
}

/// The part of a machine that homes are made of.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// All CPUs.
    pub cpus: &'a [Cpu],
    /// All nodes.
    pub nodes: &'a [Node],
}

/// A home, and what a person should be told about how it came about.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The home.
    pub home: Home,
    /// Disagreements and substitutions, each a sentence about "it", the GPU.
    pub remarks: Vec<String>,
}

/// Decides one GPU's home.
pub fn decide(layout: Layout<'_>, clues: &Clues) -> Decision {
    let mut remarks = Vec::new();
    let mut proposals: Vec<(HomeSource, CpuSet)> = Vec::new();
    let named = clues.nccl_named.as_ref().and_then(|place| layout.by_nccl(place, &mut remarks));
    proposals.extend(named.map(|cpus| (HomeSource::NcclTopo, cpus)));
    let sysfs = clues.sysfs.as_ref().and_then(|place| layout.by_sysfs(place, &mut remarks));
    proposals.extend(sysfs.map(|cpus| (HomeSource::Sysfs, cpus)));
    // hwloc hangs what it knows no place for below all CPUs.
    let hwloc = clues.hwloc.as_ref().and_then(|cpus| layout.telling(cpus)).filter(|cpus| *cpus != layout.online());
    proposals.extend(hwloc.clone().map(|cpus| (HomeSource::Hwloc, cpus)));
    let nvml = clues.nvml.as_ref().and_then(|place| layout.by_nvml(place));
    proposals.extend(nvml.map(|cpus| (HomeSource::Nvml, cpus)));
    if proposals.is_empty() {
        let found = clues.nccl_found.as_ref().and_then(|place| layout.by_nccl(place, &mut remarks));
        proposals.extend(found.map(|cpus| (HomeSource::NcclTopo, cpus)));
    }
    if proposals.is_empty() && clues.on_pci && layout.nodes_with_cpus().count() == 1 {
        proposals.push((HomeSource::OnlyNode, layout.online()));
    }
    let Some((source, cpus)) = proposals.first().cloned() else {
        return Decision { home: Home::Unknown { reason: layout.why_unknown(clues) }, remarks };
    };
    for (other, theirs) in proposals.iter().skip(1) {
        // hwloc repeats sysfs; a narrower set on the same nodes is a cgroup or a finer view, no disagreement.
        if *other != HomeSource::Hwloc && !layout.nodes_of(theirs).is_subset(&layout.nodes_of(&cpus)) {
            remarks.push(format!(
                "{other} says CPUs {theirs} and {source} says CPUs {cpus}; {source} was taken, {}",
                match source {
                    HomeSource::NcclTopo => "because its file was named for this run",
                    _ => "because the kernel goes by it. If it is wrong, correct it with --nccl-topo FILE",
                }
            ));
        }
    }
    let closest = hwloc.map(|near| near.intersection(&cpus)).filter(|near| !near.is_empty());
    let order = layout.order(&closest.unwrap_or_else(|| cpus.clone()), &cpus);
    let nodes = layout.nodes_of(&cpus);
    let node = nodes.iter().next().filter(|_| nodes.len() == 1);
    Decision { home: Home::Known { cpus, order, node, source }, remarks }
}

impl Layout<'_> {
    fn online(&self) -> CpuSet {
        self.cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.id).collect()
    }

    fn nodes_with_cpus(&self) -> impl Iterator<Item = &Node> {
        let online = self.online();
        self.nodes.iter().filter(move |node| !node.cpus.intersection(&online).is_empty())
    }

    fn nodes_of(&self, cpus: &CpuSet) -> CpuSet {
        self.cpus.iter().filter(|cpu| cpu.online && cpus.contains(cpu.id)).map(|cpu| cpu.node).collect()
    }

    /// The online part of a set that singles something out: some of several nodes' CPUs, or the one node's.
    fn telling(&self, cpus: &CpuSet) -> Option<CpuSet> {
        let online = self.online();
        let cpus = cpus.intersection(&online);
        let everything = cpus == online && self.nodes_with_cpus().count() > 1;
        (!cpus.is_empty() && !everything).then_some(cpus)
    }

    /// A node's online CPUs, or the nearest node's.
    fn by_node(&self, id: u32, source: HomeSource, remarks: &mut Vec<String>) -> Option<CpuSet> {
        let Some(node) = self.nodes.iter().find(|node| node.id == id) else {
            remarks.push(format!("{source} puts it on NUMA node {id}, which this machine does not have; ignored"));
            return None;
        };
        let online = self.online();
        let cpus = node.cpus.intersection(&online);
        if !cpus.is_empty() {
            return Some(cpus);
        }
        let distance = |other: &Node| node.distances.get(&other.id).copied().unwrap_or(u32::MAX);
        let least = self.nodes_with_cpus().map(distance).min()?;
        let mut nearest = self.nodes_with_cpus().filter(|other| distance(other) == least);
        let stand_in = nearest.next()?;
        if nearest.next().is_some() {
            remarks.push(format!(
                "{source} puts it on NUMA node {id}, which has no online CPU, and several nodes are equally near"
            ));
            return None;
        }
        remarks.push(format!(
            "{source} puts it on NUMA node {id}, which has no online CPU; node {} is nearest and was taken",
            stand_in.id
        ));
        Some(stand_in.cpus.intersection(&online))
    }

    fn by_nccl(&self, place: &nccl::Place, remarks: &mut Vec<String>) -> Option<CpuSet> {
        match place.node {
            Some(node) => self.by_node(node, HomeSource::NcclTopo, remarks),
            None => place.affinity.as_ref().and_then(|cpus| self.telling(cpus)),
        }
    }

    fn by_sysfs(&self, place: &SysfsPlace, remarks: &mut Vec<String>) -> Option<CpuSet> {
        let node = place.node.and_then(|node| u32::try_from(node).ok());
        // With numa_node −1, local_cpus is every CPU: on one node, that would pass for telling.
        let local = place.cpus.as_ref().and_then(|cpus| self.telling(cpus));
        let local = local.filter(|cpus| node.is_some() || *cpus != self.online());
        local.or_else(|| self.by_node(node?, HomeSource::Sysfs, remarks))
    }

    fn by_nvml(&self, place: &NvmlPlace) -> Option<CpuSet> {
        let of_nodes = || {
            let nodes = self.nodes.iter().filter(|node| place.nodes.contains(node.id));
            nodes.fold(CpuSet::new(), |cpus, node| cpus.union(&node.cpus))
        };
        self.telling(&place.cpus).or_else(|| self.telling(&of_nodes()))
    }

    /// All online CPUs, best first: `closest`, then the rest of `home`, then the rest of its nodes, then by distance
    /// from them. Among equals: a core's first thread before its others (they share the core), then the faster.
    fn order(&self, closest: &CpuSet, home: &CpuSet) -> Vec<u32> {
        let home_nodes = self.nodes_of(home);
        let distance = |cpu: &Cpu| {
            let from_home = self.nodes.iter().filter(|node| home_nodes.contains(node.id));
            from_home.filter_map(|node| node.distances.get(&cpu.node)).min().copied().unwrap_or(u32::MAX)
        };
        let mut keyed: Vec<_> = self
            .cpus
            .iter()
            .filter(|cpu| cpu.online)
            .map(|cpu| {
                let tier = match cpu.id {
                    id if closest.contains(id) => 0,
                    id if home.contains(id) => 1,
                    _ if home_nodes.contains(cpu.node) => 2,
                    _ => 3,
                };
                let distance = if tier == 3 { distance(cpu) } else { 0 };
                let thread = self
                    .cpus
                    .iter()
                    .filter(|other| other.online && other.core == cpu.core && other.id < cpu.id)
                    .count();
                ((tier, distance, thread, std::cmp::Reverse(cpu.capacity), cpu.id), cpu.id)
            })
            .collect();
        keyed.sort();
        keyed.into_iter().map(|(_, id)| id).collect()
    }

    fn why_unknown(&self, clues: &Clues) -> String {
        if !clues.on_pci {
            return "it is not a PCI device, so nothing says where it is".into();
        }
        let nodes = self.nodes_with_cpus().count();
        match clues.sysfs.as_ref().and_then(|place| place.node) {
            Some(node) if node < 0 => {
                format!("its numa_node is {node} (unknown), no other source says more, and there are {nodes} nodes")
            }
            _ => format!("no source says where it is, and there are {nodes} nodes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of four CPUs in two cores each; the numbers in `cpuless` are further nodes without.
    fn machine(nodes: u32, cpuless: &[u32]) -> (Vec<Cpu>, Vec<Node>) {
        let cpus = (0..nodes * 4).map(|id| Cpu {
            id,
            online: true,
            core: id / 2,
            llc: id / 4,
            node: id / 4,
            package: id / 4,
            capacity: 1024,
            kind: 0,
        });
        let ids: Vec<u32> = (0..nodes).chain(cpuless.iter().copied()).collect();
        let table = ids.iter().map(|id| Node {
            id: *id,
            cpus: (0..nodes * 4).filter(|cpu| cpu / 4 == *id).collect(),
            memory_bytes: 1 << 30,
            distances: ids.iter().map(|to| (*to, 10 + 10 * id.abs_diff(*to))).collect(),
        });
        (cpus.collect(), table.collect())
    }

    fn list(text: &str) -> CpuSet {
        CpuSet::from_list(text).unwrap()
    }

    fn sysfs(node: i64, cpus: &str) -> Clues {
        let place = SysfsPlace { node: Some(node), cpus: Some(list(cpus)) };
        Clues { sysfs: Some(place), on_pci: true, ..Clues::default() }
    }

    fn decided((cpus, nodes): &(Vec<Cpu>, Vec<Node>), clues: &Clues) -> Decision {
        decide(Layout { cpus, nodes }, clues)
    }

    fn known(decision: &Decision) -> (String, Option<u32>, HomeSource) {
        match &decision.home {
            Home::Known { cpus, node, source, .. } => (cpus.to_string(), *node, *source),
            Home::Unknown { reason } => panic!("unknown: {reason}"),
        }
    }

    #[test]
    fn minus_one_is_unknown_on_two_nodes_and_never_node_0() {
        let decision = decided(&machine(2, &[]), &sysfs(-1, "0-7"));
        assert!(matches!(decision.home, Home::Unknown { .. }), "{decision:?}");
    }

    #[test]
    fn minus_one_on_one_node_is_that_node_for_a_pci_device_only() {
        let one = machine(1, &[]);
        assert_eq!(known(&decided(&one, &sysfs(-1, "0-3"))), ("0-3".into(), Some(0), HomeSource::OnlyNode));
        let clues = Clues { on_pci: false, ..sysfs(-1, "0-3") };
        assert!(matches!(decided(&one, &clues).home, Home::Unknown { .. }));
    }

    #[test]
    fn a_known_gpu_on_one_node_has_all_of_it_as_home() {
        assert_eq!(known(&decided(&machine(1, &[]), &sysfs(0, "0-3"))), ("0-3".into(), Some(0), HomeSource::Sysfs));
    }

    #[test]
    fn a_node_without_cpus_gives_way_to_the_nearest_that_has_some() {
        let decision = decided(&machine(2, &[7]), &sysfs(7, ""));
        assert_eq!(known(&decision), ("4-7".into(), Some(1), HomeSource::Sysfs));
        assert!(decision.remarks[0].contains("no online CPU"), "{decision:?}");
    }

    #[test]
    fn order_goes_home_then_by_distance_and_first_threads_first() {
        let mut machine = machine(3, &[]);
        machine.0[5].online = false;
        let Home::Known { order, .. } = decided(&machine, &sysfs(2, "8-11")).home else { panic!() };
        assert_eq!(order, [8, 10, 9, 11, 4, 6, 7, 0, 2, 1, 3]);
    }

    #[test]
    fn the_closest_locality_leads_and_the_faster_core_wins_among_equals() {
        let mut machine = machine(1, &[]);
        machine.0[2].capacity = 1000;
        machine.0[0].capacity = 900;
        let Home::Known { order, .. } = decided(&machine, &sysfs(0, "0-3")).home else { panic!() };
        assert_eq!(order, [2, 0, 1, 3]);
        let clues = Clues { hwloc: Some(list("0-1")), ..sysfs(0, "0-3") };
        let Home::Known { order, cpus, .. } = decided(&machine, &clues).home else { panic!() };
        assert_eq!(order, [0, 1, 2, 3]);
        assert_eq!(cpus, list("0-3"));
    }

    #[test]
    fn nvml_fills_in_what_sysfs_does_not_know() {
        let place = NvmlPlace { cpus: list("4-7"), nodes: CpuSet::new() };
        let clues = Clues { nvml: Some(place), ..sysfs(-1, "0-7") };
        assert_eq!(known(&decided(&machine(2, &[]), &clues)), ("4-7".into(), Some(1), HomeSource::Nvml));
        let place = NvmlPlace { cpus: CpuSet::new(), nodes: list("1") };
        let clues = Clues { nvml: Some(place), ..sysfs(-1, "0-7") };
        assert_eq!(known(&decided(&machine(2, &[]), &clues)), ("4-7".into(), Some(1), HomeSource::Nvml));
    }

    #[test]
    fn empty_narrower_and_universal_nvml_affinities_are_no_disagreement() {
        for cpus in ["", "5", "0-7"] {
            let place = NvmlPlace { cpus: list(cpus), nodes: CpuSet::new() };
            let decision = decided(&machine(2, &[]), &Clues { nvml: Some(place), ..sysfs(1, "4-7") });
            assert_eq!(known(&decision), ("4-7".into(), Some(1), HomeSource::Sysfs), "{cpus}");
            assert!(decision.remarks.is_empty(), "{decision:?}");
        }
    }

    #[test]
    fn nvml_on_another_node_is_reported_and_sysfs_taken() {
        let place = NvmlPlace { cpus: list("0-3"), nodes: CpuSet::new() };
        let decision = decided(&machine(2, &[]), &Clues { nvml: Some(place), ..sysfs(1, "4-7") });
        assert_eq!(known(&decision).1, Some(1));
        assert!(decision.remarks[0].contains("sysfs was taken"), "{decision:?}");
    }

    #[test]
    fn a_named_nccl_file_beats_sysfs_and_a_found_one_does_not() {
        let place = Some(nccl::Place { node: Some(0), affinity: None });
        let named = Clues { nccl_named: place.clone(), ..sysfs(1, "4-7") };
        let decision = decided(&machine(2, &[]), &named);
        assert_eq!(known(&decision), ("0-3".into(), Some(0), HomeSource::NcclTopo));
        assert_eq!(decision.remarks.len(), 1);
        let found = Clues { nccl_found: place.clone(), ..sysfs(1, "4-7") };
        assert_eq!(known(&decided(&machine(2, &[]), &found)).2, HomeSource::Sysfs);
        let found = Clues { nccl_found: place, ..sysfs(-1, "0-7") };
        assert_eq!(known(&decided(&machine(2, &[]), &found)), ("0-3".into(), Some(0), HomeSource::NcclTopo));
    }

    #[test]
    fn the_mask_in_an_nccl_file_is_not_trusted_against_its_node() {
        let place = nccl::Place { node: Some(1), affinity: Some(list("0-3")) };
        let clues = Clues { nccl_named: Some(place), ..sysfs(-1, "0-7") };
        assert_eq!(known(&decided(&machine(2, &[]), &clues)).0, "4-7");
    }

    #[test]
    fn an_nccl_node_that_is_not_there_is_said_and_ignored() {
        let place = nccl::Place { node: Some(9), affinity: None };
        let decision = decided(&machine(2, &[]), &Clues { nccl_named: Some(place), ..sysfs(1, "4-7") });
        assert_eq!(known(&decision).2, HomeSource::Sysfs);
        assert!(decision.remarks[0].contains("node 9"), "{decision:?}");
    }

    #[test]
    fn a_home_whose_cpus_are_all_offline_moves_to_the_nearest_node() {
        let mut machine = machine(3, &[]);
        machine.0.iter_mut().filter(|cpu| cpu.node == 2).for_each(|cpu| cpu.online = false);
        assert_eq!(known(&decided(&machine, &sysfs(2, "8-11"))).1, Some(1));
    }
}
