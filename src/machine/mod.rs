//! What the machine is: CPUs, caches, nodes and GPUs, behind one [`Machine`].
//!
//! hwloc gives CPUs and memory, sysfs gives the GPUs of every vendor with their device numbers and interrupts, NVML
//! and NCCL topology files add what they know. `home` decides from all of them where a GPU is at home. What a
//! person should know about the result is in [`Machine::notes`].

mod cpuset;
pub mod devices;
mod discover;
mod home;
mod hwloc;
mod nccl;
pub mod nvml;
mod pci;
pub mod sysfs;
mod wide_pci;
mod xml;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

pub use cpuset::CpuSet;
pub use nvml::NvmlSource;
pub use pci::PciAddress;

/// Stands for core, LLC, node or package of an offline CPU: nobody knows where it would be.
pub const UNPLACED: u32 = u32::MAX;

/// A machine, as far as its sources tell.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// All CPUs, offline ones too, by ascending number.
    pub cpus: Vec<Cpu>,
    /// Groups of CPUs that share a last-level cache. `llcs[i].id == i`.
    pub llcs: Vec<Llc>,
    /// NUMA nodes by ascending OS number, which may have gaps.
    pub nodes: Vec<Node>,
    /// Packages (sockets).
    pub packages: Vec<Package>,
    /// GPUs. `gpus[i].index == i`.
    pub gpus: Vec<Gpu>,
    /// Control devices that belong to no single GPU.
    pub shared_devices: Vec<SharedDevice>,
    /// Display controllers that were found and are not GPUs.
    pub left_out: Vec<LeftOut>,
    /// What a person should be told, once: each says what it means and what to do.
    pub notes: Vec<String>,
}

/// One CPU (hardware thread).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cpu {
    /// The kernel's number.
    pub id: u32,
    /// Whether it was online.
    pub online: bool,
    /// Its core; numbered across the machine. [`UNPLACED`] when offline.
    pub core: u32,
    /// Index into [`Machine::llcs`]. [`UNPLACED`] when offline.
    pub llc: u32,
    /// OS number of its node. [`UNPLACED`] when offline.
    pub node: u32,
    /// Index into [`Machine::packages`]. [`UNPLACED`] when offline.
    pub package: u32,
    /// Speed relative to the fastest CPU, 1 to 1024.
    pub capacity: u32,
    /// Kind of core, 0 the slowest; all 0 on uniform machines.
    pub kind: u32,
}

/// CPUs that share a last-level cache, on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Llc {
    /// Its index.
    pub id: u32,
    /// Its online CPUs.
    pub cpus: CpuSet,
    /// OS number of its node.
    pub node: u32,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The kernel's number.
    pub id: u32,
    /// Its online CPUs. Empty for a node of GPU, CXL or other memory only, which is never a home.
    pub cpus: CpuSet,
    /// Size of its memory, bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// Distance to each node, itself included, by OS number; 10 is local.
    pub distances: BTreeMap<u32, u32>,
}

impl Node {
    /// Whether it has memory only.
    pub fn is_cpuless(&self) -> bool {
        self.cpus.is_empty()
    }
}

/// A package (socket).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Package {
    /// The OS number.
    pub id: u32,
    /// Its online CPUs.
    pub cpus: CpuSet,
}

/// Who made a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    /// NVIDIA.
    Nvidia,
    /// AMD.
    Amd,
    /// Intel.
    Intel,
    /// A GPU emulated by a hypervisor.
    Virtio,
    /// Any other.
    Other,
}

impl Vendor {
    /// By PCI vendor number.
    pub fn from_pci(id: u32) -> Self {
        match id {
            0x10de => Self::Nvidia,
            0x1002 | 0x1022 => Self::Amd,
            0x8086 => Self::Intel,
            0x1af4 => Self::Virtio,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvidia => "NVIDIA",
            Self::Amd => "AMD",
            Self::Intel => "Intel",
            Self::Virtio => "virtio",
            Self::Other => "other",
        })
    }
}

/// One GPU or other accelerator.
#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    /// Its index in [`Machine::gpus`]: PCI order, then devices that are not on PCI. Not NVML's index.
    pub index: u32,
    /// Its vendor.
    pub vendor: Vendor,
    /// A name for people.
    pub name: String,
    /// PCI address, unless it is not on PCI.
    pub pci: Option<PciAddress>,
    /// UUID, from NVML or AMD's driver.
    pub uuid: Option<String>,
    /// The kernel driver bound to it, for example `nvidia` or `vfio-pci`.
    pub driver: Option<String>,
    /// All character devices that are this GPU's own.
    pub devices: Vec<CharDevice>,
    /// Its interrupt numbers.
    pub irqs: Vec<u32>,
    /// Where it is at home.
    pub home: Home,
    /// Whether it is divided into MIG instances.
    pub mig: bool,
    /// Its MIG instances.
    pub mig_instances: Vec<MigInstance>,
}

/// The one among `gpus` that a person means by its index, PCI address or UUID.
pub fn gpu_named<'a>(gpus: &'a [Gpu], name: &str) -> Option<&'a Gpu> {
    let (index, pci) = (name.parse().ok(), name.parse().ok());
    gpus.iter().find(|gpu| {
        let has_uuid = || gpu.uuid.as_ref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(name));
        Some(gpu.index) == index || gpu.pci.is_some() && gpu.pci == pci || has_uuid()
    })
}

/// A part of a GPU that works as one, with its parent's home.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MigInstance {
    /// UUID, from NVML.
    pub uuid: String,
    /// A name for people, from NVML.
    pub name: Option<String>,
}

/// A character device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct CharDevice {
    /// Its usual path.
    pub path: PathBuf,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// A control device that belongs to no single GPU, such as `/dev/nvidiactl` or `/dev/kfd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SharedDevice {
    /// Whose driver it is; [`Vendor::Other`] for VFIO.
    pub vendor: Vendor,
    /// The device.
    pub device: CharDevice,
    /// Indexes of the GPUs that it may serve.
    pub gpus: Vec<u32>,
}

/// A display controller that computes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its name.
    pub name: String,
    /// PCI address, unless it is not on PCI.
    pub pci: Option<PciAddress>,
    /// Why it is no GPU.
    pub reason: String,
}

/// The CPUs local to a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Home {
    /// Some source tells.
    Known {
        /// What counts as "at home". Online CPUs; never empty.
        cpus: CpuSet,
        /// All online CPUs, best first.
        order: Vec<u32>,
        /// OS number of the node that `cpus` are on, unless they are on several.
        node: Option<u32>,
        /// Who says so.
        source: HomeSource,
    },
    /// No source tells. Not the same as node 0.
    Unknown {
        /// Why, for people.
        reason: String,
    },
}

/// Who says where a GPU is at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HomeSource {
    /// hwloc.
    Hwloc,
    /// sysfs.
    Sysfs,
    /// NVML's affinities.
    Nvml,
    /// An NCCL topology file.
    NcclTopo,
    /// Nobody, but the machine has one node only.
    OnlyNode,
}

impl fmt::Display for HomeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hwloc => "hwloc",
            Self::Sysfs => "sysfs",
            Self::Nvml => "NVML",
            Self::NcclTopo => "the NCCL topology file",
            Self::OnlyNode => "the only node",
        })
    }
}

/// Where to look. The default is this machine with everything found by itself.
#[derive(Clone, Debug)]
pub struct Sources {
    /// An hwloc XML export to read instead of this machine.
    pub hwloc_xml: Option<PathBuf>,
    /// A directory with a copy of `sys` and `proc` to read instead of this machine's.
    pub sysroot: Option<PathBuf>,
    /// An NCCL topology file. Without one, `$NCCL_TOPO_FILE` and then the usual places are tried.
    pub nccl_topo: Option<PathBuf>,
    /// NVML. [`NvmlSource::Auto`] is this machine's, so it is off when another machine is read.
    pub nvml: NvmlSource,
    /// How long any one answer of NVML may take.
    pub nvml_timeout: Duration,
}

impl Default for Sources {
    fn default() -> Self {
        Self {
            hwloc_xml: None,
            sysroot: None,
            nccl_topo: None,
            nvml: NvmlSource::Auto,
            nvml_timeout: Duration::from_secs(5),
        }
    }
}
