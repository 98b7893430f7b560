//! What of the kernel the scheduler uses where it is there, and what it means where it is not. It is looked for, and
//! never told from a version.

use anyhow::{Context, Result};
use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{Func, Typedef};
use scx_utils::compat;

/// One of [`ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Opens are seen.
    FileOpen,
    /// Ioctls are seen.
    FileIoctl,
    /// Mappings are seen.
    MmapFile,
    /// Polls are seen.
    PollWait,
    /// Interrupts are seen.
    Interrupts,
    /// A CPU can be told to look for work.
    Kick,
    /// A callback says when a higher scheduling class takes a CPU.
    CpuRelease,
    /// A callback says when it gives the CPU back.
    CpuAcquire,
    /// A callback tells of cpu.idle.
    SetIdle,
    /// A callback tells of cpu.max.
    SetBandwidth,
}

/// All of them.
pub const ALL: [Feature; 10] = [
    Feature::FileOpen,
    Feature::FileIoctl,
    Feature::MmapFile,
    Feature::PollWait,
    Feature::Interrupts,
    Feature::Kick,
    Feature::CpuRelease,
    Feature::CpuAcquire,
    Feature::SetIdle,
    Feature::SetBandwidth,
];

impl Feature {
    /// What the kernel calls it.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::FileOpen => "security_file_open",
            Self::FileIoctl => "security_file_ioctl",
            Self::MmapFile => "security_mmap_file",
            Self::PollWait => "__pollwait",
            Self::Interrupts => "irq_handler_entry",
            Self::Kick => "scx_bpf_kick_cpu",
            Self::CpuRelease => "cpu_release",
            Self::CpuAcquire => "cpu_acquire",
            Self::SetIdle => "cgroup_set_idle",
            Self::SetBandwidth => "cgroup_set_bandwidth",
        }
    }

    /// Whether it is a part of sched_ext.
    pub fn is_of_sched_ext(self) -> bool {
        matches!(self, Self::Kick | Self::CpuRelease | Self::CpuAcquire | Self::SetIdle | Self::SetBandwidth)
    }

    /// What it is for: "it" does that.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::FileOpen => "sees threads that open a GPU",
            Self::FileIoctl => "sees threads that submit by ioctl",
            Self::MmapFile => "sees threads that map a GPU",
            Self::PollWait => "sees threads that poll a GPU",
            Self::Interrupts => "sees threads that a GPU's interrupt wakes",
            Self::Kick => "makes a CPU look for a feeder at once",
            Self::CpuRelease => "moves tasks away from a CPU that a real-time task takes",
            Self::CpuAcquire => "tells that the real-time task is done",
            Self::SetIdle => "tells of cpu.idle of cgroups",
            Self::SetBandwidth => "tells of cpu.max of cgroups",
        }
    }

    /// What its absence means.
    pub fn absence(self) -> &'static str {
        match self {
            Self::FileOpen | Self::FileIoctl | Self::MmapFile => {
                "such threads are found by what their process holds open, seconds later"
            }
            Self::PollWait | Self::Interrupts => "such threads are found by what else they do only",
            Self::Kick => "a feeder that loses its CPU waits up to an ordinary task's turn for another",
            Self::SetIdle | Self::SetBandwidth => {
                "it is read from the cgroups' files as soon as one of them has been written"
            }
            Self::CpuRelease | Self::CpuAcquire => "tasks that were queued on such a CPU alone wait for it",
        }
    }

    /// What to do about its absence.
    pub fn way_out(self) -> &'static str {
        match self {
            Self::FileOpen | Self::FileIoctl | Self::MmapFile | Self::PollWait | Self::Interrupts => {
                "boot a kernel built with CONFIG_SECURITY=y and tracing (CONFIG_FTRACE=y), as distributions' are"
            }
            Self::Kick => "boot a kernel whose BTF was made by pahole 1.26 or newer",
            Self::SetIdle => "none is needed; Linux 6.19 has it",
            Self::SetBandwidth => "none is needed; Linux 6.17 has it",
            Self::CpuRelease | Self::CpuAcquire => "nothing: newer kernels have no such callback any more",
        }
    }
}

/// The running kernel's description of itself.
pub struct Kernel {
    btf: Btf<'static>,
    /// Functions of sched_ext that cannot be called, for want of a right prototype.
    malformed: Vec<String>,
}

impl Kernel {
    /// # Errors
    /// Its BTF cannot be read.
    pub fn running() -> Result<Self> {
        let btf = Btf::from_vmlinux().context("could not read the kernel's BTF")?;
        Ok(Self { btf, malformed: compat::malformed_scx_kfuncs() })
    }

    /// Whether the kernel has a function of that name which programs can be attached to.
    pub fn has_function(&self, name: &str) -> bool {
        self.btf.type_by_name::<Func>(name).is_some()
    }

    /// Whether the kernel has it.
    pub fn has(&self, feature: Feature) -> bool {
        let symbol = feature.symbol();
        match feature {
            Feature::FileOpen | Feature::FileIoctl | Feature::MmapFile | Feature::PollWait => self.has_function(symbol),
            Feature::Interrupts => self.btf.type_by_name::<Typedef>(&format!("btf_trace_{symbol}")).is_some(),
            Feature::Kick => self.has_function(symbol) && !self.malformed.iter().any(|function| function == symbol),
            Feature::CpuRelease | Feature::CpuAcquire | Feature::SetIdle | Feature::SetBandwidth => {
                compat::struct_has_field("sched_ext_ops", symbol).unwrap_or(false)
            }
        }
    }
}
