//! What hwloc knows: CPUs, cores, caches, nodes, packages, and where PCI devices hang.
//!
//! hwloc reads its behaviour from `HWLOC_*` environment variables, with which whoever starts a root daemon could
//! feed it any machine. So they are cleared around every load, and ours are set: which tree to read, only the
//! Linux back end (others load plugins that open GPUs), and GPU memory nodes kept so that they can be marked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::ObjectType;
use hwlocality::topology::Topology;
use hwlocality::topology::builder::{BuildFlags, TopologyBuilder, TypeFilter};

use super::cpuset::CpuSet;
use super::pci::PciAddress;
use super::sysfs::{Tree, scale};
use super::{Cpu, Llc, Node, Package, UNPLACED};

/// A PCI device as hwloc describes it.
#[derive(Clone, Debug)]
pub struct PciObject {
    /// Its address. hwloc 2 drops devices in domains above 0xffff.
    pub address: PciAddress,
    /// Class and subclass, for example 0x0302.
    pub class: u16,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// Its name, where the export has one.
    pub name: Option<String>,
    /// The names of the OS devices below it, for example `renderD128`.
    pub os_devices: Vec<String>,
}

/// Everything taken from one hwloc topology.
#[derive(Debug)]
pub struct Found {
    pub cpus: Vec<Cpu>,
    pub llcs: Vec<Llc>,
    pub nodes: Vec<Node>,
    pub packages: Vec<Package>,
    pub pci: Vec<PciObject>,
    /// The CPUs closest to each PCI device.
    pub places: BTreeMap<PciAddress, CpuSet>,
    /// OS devices with no PCI device above them.
    pub loose: Vec<String>,
    /// The variables that were set in our environment and ignored.
    pub ignored_variables: Vec<String>,
}

/// What to read.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// A `/sys` and `/proc` tree.
    Tree(&'a Tree),
    /// The text of an XML export.
    Xml(&'a str),
}

/// Loads a topology.
///
/// # Errors
/// hwloc refuses the input, or finds no CPU in it.
pub fn load(input: Input<'_>) -> Result<Found> {
    let root = match input {
        Input::Tree(tree) if tree.root() != Path::new("/") => Some(tree.root()),
        _ => None,
    };
    let load = || match input {
        Input::Tree(_) => build(None),
        Input::Xml(text) => build(Some(text)).or_else(|error| build(Some(&as_version_2(text).ok_or(error)?))),
    };
    let (topology, ignored_variables) = with_clean_environment(matches!(input, Input::Tree(_)), root, load);
    let topology = topology?;
    let tree = match input {
        Input::Tree(tree) => Some(tree),
        Input::Xml(_) => None,
    };
    let mut found = describe(&topology, tree)?;
    found.ignored_variables = ignored_variables;
    if let Input::Xml(text) = input {
        for (object, cpus) in super::wide_pci::find(text)? {
            if found.pci.iter().any(|known| known.address == object.address) {
                continue; // hwloc 3 keeps them.
            }
            found.loose.retain(|name| !object.os_devices.contains(name));
            found.places.insert(object.address, cpus);
            found.pci.push(object);
        }
    }
    Ok(found)
}

/// hwloc 2 refuses what hwloc 3 exports, although all that is read here means the same in both (the types of OS devices
/// do not, and are not read). `None` if it is not such an export.
fn as_version_2(text: &str) -> Option<String> {
    let (before, after) = text.split_once("<topology version=\"3.")?;
    let (_, rest) = after.split_once('"')?;
    Some(format!("{before}<topology version=\"2.0\"{rest}"))
}

fn build(xml: Option<&str>) -> Result<Topology> {
    let mut builder = TopologyBuilder::new();
    if let Some(text) = xml {
        builder = builder.from_xml(text).context("hwloc cannot read this as one of its XML exports")?;
    }
    builder
        // Our own cgroup must not hide CPUs: tasks outside it are scheduled, too.
        .with_flags(BuildFlags::INCLUDE_DISALLOWED)
        .context("hwloc refused its flags")?
        .with_io_type_filter(TypeFilter::KeepImportant)
        .context("hwloc refused its filter")?
        .build()
        .context("hwloc could not load the topology")
}

/// Runs `load` with no `HWLOC_*` variable but ours, and says which it removed.
fn with_clean_environment<T>(reads_tree: bool, root: Option<&Path>, load: impl FnOnce() -> T) -> (T, Vec<String>) {
    static ENVIRONMENT: Mutex<()> = Mutex::new(());
    let _one_at_a_time = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
    let present: Vec<String> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("HWLOC_"))
        .collect();
    let mut ours = vec![("HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES", "1".into())];
    ours.extend(reads_tree.then(|| ("HWLOC_COMPONENTS", "linux,stop".into())));
    ours.extend(root.map(|root| ("HWLOC_FSROOT", root.as_os_str().to_owned())));
    // SAFETY: the lock keeps this module's changes apart, Rust's own accesses are serialised by the standard library,
    // and the only C code of this program that reads the environment meanwhile is hwloc, in this thread.
    unsafe {
        present.iter().for_each(|name| std::env::remove_var(name));
        ours.iter().for_each(|(name, value)| std::env::set_var(name, value));
    }
    let loaded = load();
    // SAFETY: as above.
    unsafe { ours.iter().for_each(|(name, _)| std::env::remove_var(name)) };
    (loaded, present)
}

fn cpuset(object: &TopologyObject) -> CpuSet {
    object.cpuset().map(|set| set.iter_set().map(|index| usize::from(index) as u32).collect()).unwrap_or_default()
}

fn os_index(object: &TopologyObject) -> Option<u32> {
    object.os_index().and_then(|index| u32::try_from(index).ok())
}

fn name(object: &TopologyObject) -> Option<String> {
    object.name().map(|name| name.to_string_lossy().into_owned())
}

fn describe(topology: &Topology, tree: Option<&Tree>) -> Result<Found> {
    let online: CpuSet = topology.cpuset().iter_set().map(|index| usize::from(index) as u32).collect();
    if online.is_empty() {
        bail!("there is no online CPU in it");
    }
    let nodes = nodes(topology, tree);
    let packages: Vec<Package> = topology
        .objects_with_type(ObjectType::Package)
        .enumerate()
        .map(|(index, object)| Package { id: os_index(object).unwrap_or(index as u32), cpus: cpuset(object) })
        .collect();
    let packages = if packages.is_empty() { vec![Package { id: 0, cpus: online.clone() }] } else { packages };

    let position = |cpu: u32| packages.iter().position(|package| package.cpus.contains(cpu));
    let mut cpus: Vec<Cpu> = topology
        .objects_with_type(ObjectType::PU)
        .filter_map(|object| {
            let id = os_index(object)?;
            let core = object.ancestors().find(|ancestor| ancestor.object_type() == ObjectType::Core);
            Some(Cpu {
                id,
                online: true,
                core: core.unwrap_or(object).logical_index() as u32,
                llc: UNPLACED,
                node: nodes.iter().find(|node| node.cpus.contains(id)).map_or(UNPLACED, |node| node.id),
                package: position(id).map_or(UNPLACED, |index| index as u32),
                capacity: 1024,
                kind: 0,
            })
        })
        .collect();
    cpus.sort_by_key(|cpu| cpu.id);
    let llcs = group_by_llc(topology, &mut cpus);
    rate(topology, tree, &mut cpus);

    // hwloc does not say where an offline CPU would be, and neither does the kernel.
    let complete = topology.complete_cpuset();
    let complete = complete.iter_set().map(|index| usize::from(index) as u32);
    cpus.extend(complete.filter(|id| !online.contains(*id)).map(|id| Cpu {
        id,
        online: false,
        core: UNPLACED,
        llc: UNPLACED,
        node: UNPLACED,
        package: UNPLACED,
        capacity: 1024,
        kind: 0,
    }));
    cpus.sort_by_key(|cpu| cpu.id);

    let (pci, places) = pci_devices(topology);
    let loose = topology
        .os_devices()
        .filter(|object| !object.ancestors().any(|above| above.object_type() == ObjectType::PCIDevice))
        .filter_map(name)
        .collect();
    Ok(Found { cpus, llcs, nodes, packages, pci, places, loose, ignored_variables: Vec::new() })
}

/// The nodes, each CPU in one of them.
///
/// hwloc also gives memory-only nodes the CPUs nearest to them. The kernel knows better (`cpumap`); without it, a CPU
/// belongs to the closest node, and among equals to plain memory, then to the lowest number.
fn nodes(topology: &Topology, tree: Option<&Tree>) -> Vec<Node> {
    let mut nodes: Vec<(Node, bool)> = topology
        .objects_with_type(ObjectType::NUMANode)
        .filter_map(|object| {
            let id = os_index(object)?;
            let memory_bytes = match object.attributes() {
                Some(ObjectAttributes::NUMANode(attributes)) => {
                    attributes.local_memory().map_or(0, |bytes| bytes.get())
                }
                _ => 0,
            };
            let cpumap = tree.and_then(|tree| tree.text(format!("sys/devices/system/node/node{id}/cpumap")));
            let kernels = cpumap.and_then(|text| CpuSet::from_mask(&text).ok());
            let special = object.subtype().is_some_and(|subtype| subtype.to_bytes() != b"DRAM");
            let cpus = kernels.unwrap_or_else(|| cpuset(object));
            Some((Node { id, cpus, memory_bytes, distances: BTreeMap::new() }, special))
        })
        .collect();
    nodes.sort_by_key(|(node, special)| (node.cpus.len(), *special, node.id));
    let mut taken = CpuSet::new();
    for (node, _) in &mut nodes {
        node.cpus = node.cpus.difference(&taken);
        taken = taken.union(&node.cpus);
    }
    let mut nodes: Vec<Node> = nodes.into_iter().map(|(node, _)| node).collect();
    nodes.sort_by_key(|node| node.id);

    for matrix in topology.distances_with_name("NUMALatency").into_iter().flatten().take(1) {
        let ids: Vec<Option<u32>> = matrix.objects().map(|object| object.and_then(os_index)).collect();
        for ((from, to), distance) in matrix.enumerate_distances() {
            let (Some(from), Some(to)) = (ids.get(from).copied().flatten(), ids.get(to).copied().flatten()) else {
                continue;
            };
            if let Some(node) = nodes.iter_mut().find(|node| node.id == from) {
                node.distances.insert(to, distance as u32);
            }
        }
    }
    // The kernel's defaults (LOCAL_DISTANCE, REMOTE_DISTANCE) where nothing is known.
    let ids: Vec<u32> = nodes.iter().map(|node| node.id).collect();
    for node in &mut nodes {
        for id in &ids {
            let default = if *id == node.id { 10 } else { 20 };
            node.distances.entry(*id).or_insert(default);
        }
    }
    nodes
}

/// Which CPUs share a last-level cache.
///
/// That is the outermost cache of a CPU. Where a package shows no cache that several cores share, as in many virtual
/// machines, one queue a core would be nonsense: the package's CPUs count as one. A cache that spans nodes is split,
/// so that an LLC has one node.
fn group_by_llc(topology: &Topology, cpus: &mut [Cpu]) -> Vec<Llc> {
    let cores: BTreeMap<u32, u32> = cpus.iter().map(|cpu| (cpu.id, cpu.core)).collect();
    let outermost: BTreeMap<u32, (u64, bool)> = topology
        .objects_with_type(ObjectType::PU)
        .filter_map(|object| {
            let cache = object.ancestors().filter(|above| is_outer_cache(above.object_type())).last()?;
            let shared_by: BTreeSet<Option<&u32>> = cpuset(cache).iter().map(|cpu| cores.get(&cpu)).collect();
            let shared = shared_by.len() > 1 || cache.object_type() != ObjectType::L2Cache;
            Some((os_index(object)?, (cache.global_persistent_index(), shared)))
        })
        .collect();
    let packages_with_llc: BTreeSet<u32> = cpus
        .iter()
        .filter(|cpu| outermost.get(&cpu.id).is_some_and(|(_, shared)| *shared))
        .map(|cpu| cpu.package)
        .collect();
    let mut llcs: Vec<Llc> = Vec::new();
    let mut known: BTreeMap<(Option<u64>, u32, u32), u32> = BTreeMap::new();
    for cpu in cpus {
        let cache = outermost.get(&cpu.id).map(|(cache, _)| *cache);
        let key = (cache.filter(|_| packages_with_llc.contains(&cpu.package)), cpu.package, cpu.node);
        cpu.llc = *known.entry(key).or_insert_with(|| {
            let id = llcs.len() as u32;
            llcs.push(Llc { id, cpus: CpuSet::new(), node: cpu.node });
            id
        });
        llcs[cpu.llc as usize].cpus.insert(cpu.id);
    }
    llcs
}

fn is_outer_cache(kind: ObjectType) -> bool {
    matches!(kind, ObjectType::L2Cache | ObjectType::L3Cache | ObjectType::L4Cache | ObjectType::L5Cache)
}

/// Fills in capacity and kind.
fn rate(topology: &Topology, tree: Option<&Tree>, cpus: &mut [Cpu]) {
    let mut figures = vec![0; cpus.len()];
    let mut kernels = false;
    if let Ok(kinds) = topology.cpu_kinds() {
        for (rank, kind) in kinds.enumerate() {
            let info = |name: &[u8]| {
                let info = kind.infos.iter().find(|info| info.name().to_bytes() == name)?;
                info.value().to_str().ok()?.parse::<i64>().ok()
            };
            let capacity = info(b"LinuxCapacity");
            kernels |= capacity.is_some();
            let figure = capacity.or_else(|| info(b"FrequencyMaxMHz")).unwrap_or(0);
            let members: CpuSet = kind.cpuset.iter_set().map(|index| usize::from(index) as u32).collect();
            for (cpu, slot) in cpus.iter_mut().zip(&mut figures).filter(|(cpu, _)| members.contains(cpu.id)) {
                cpu.kind = rank as u32;
                *slot = figure;
            }
        }
    }
    let ids: Vec<u32> = cpus.iter().map(|cpu| cpu.id).collect();
    let capacities = match tree {
        Some(tree) => {
            super::sysfs::capacities(&ids, |cpu, file| tree.number(format!("sys/devices/system/cpu/cpu{cpu}/{file}")))
        }
        None if figures.contains(&0) => vec![1024; ids.len()],
        None if kernels => figures.iter().map(|figure| (*figure).clamp(1, 1024) as u32).collect(),
        None => scale(&figures),
    };
    for (cpu, capacity) in cpus.iter_mut().zip(capacities) {
        cpu.capacity = capacity;
    }
}

fn pci_devices(topology: &Topology) -> (Vec<PciObject>, BTreeMap<PciAddress, CpuSet>) {
    let mut devices = Vec::new();
    let mut places = BTreeMap::new();
    for object in topology.pci_devices() {
        let Some(ObjectAttributes::PCIDevice(pci)) = object.attributes() else { continue };
        #[allow(clippy::useless_conversion)] // hwloc 3 widens the domain to 32 bits.
        let domain = u32::from(pci.domain());
        let address = PciAddress { domain, bus: pci.bus_id(), device: pci.bus_device(), function: pci.function() };
        if let Some(place) = object.first_non_io_ancestor() {
            places.insert(address, cpuset(place));
        }
        devices.push(PciObject {
            address,
            class: pci.class_id(),
            vendor: pci.vendor_id(),
            device: pci.device_id(),
            name: object.info("PCIDevice").or(object.name()).map(|name| name.to_string_lossy().into_owned()),
            os_devices: object.io_children().filter_map(name).collect(),
        });
    }
    (devices, places)
}
