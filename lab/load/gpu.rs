//! The GPUs of the machine as the load needs them: where they are, and how work reaches them.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::sys::{check, parse_cpulist};

/// One GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Name of its render node, or of the stand-in.
    pub name: String,
    /// Its render node; none for a stand-in.
    pub device: Option<PathBuf>,
    /// Its NUMA node; none if unknown.
    pub node: Option<usize>,
    /// The CPUs local to it, ascending; none if unknown.
    pub home: Option<Vec<usize>>,
}

/// Where GPUs come from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Every render node in /dev/dri
    Auto,
    /// Stand-ins without a device file, one for each NUMA node
    None,
}

/// How a kernel is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SubmitKind {
    /// A DRM ioctl in the submitting thread, as graphics stacks do
    Ioctl,
    /// A few ioctls and an mmap at the start, then a memory write and no system call, as CUDA does
    Doorbell,
}

impl Gpu {
    /// The GPUs of this machine, at most `limit`.
    pub fn find(kind: DeviceKind, limit: Option<usize>) -> Result<Vec<Self>> {
        let mut gpus = match kind {
            DeviceKind::Auto => render_nodes()?,
            DeviceKind::None => stand_ins(limit)?,
        };
        if let Some(limit) = limit {
            anyhow::ensure!(gpus.len() >= limit, "found {} GPUs, not {limit}", gpus.len());
            gpus.truncate(limit);
        }
        Ok(gpus)
    }

    /// Its PCI address; none for a stand-in.
    pub fn pci_address(&self) -> Option<String> {
        Some(pci_device(&self.name)?.file_name()?.to_str()?.to_string())
    }
}

fn render_nodes() -> Result<Vec<Gpu>> {
    let entries = fs::read_dir("/dev/dri")
        .context("/dev/dri: no render node here (`modprobe virtio_gpu` in the guest, or --device none)")?;
    let mut minors = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        minors.extend(name.to_str().and_then(|name| name.strip_prefix("renderD")?.parse::<u32>().ok()));
    }
    minors.sort_unstable();
    anyhow::ensure!(!minors.is_empty(), "no render node in /dev/dri (try --device none)");
    Ok(minors.iter().map(|minor| render_node(&format!("renderD{minor}"))).collect())
}

/// The device behind a render node that knows its place. The DRM device may sit on a child of it, such as a virtio device.
fn pci_device(name: &str) -> Option<PathBuf> {
    let device = fs::canonicalize(format!("/sys/class/drm/{name}/device")).ok()?;
    device.ancestors().find(|path| path.join("numa_node").exists()).map(Path::to_path_buf)
}

fn render_node(name: &str) -> Gpu {
    let place = pci_device(name);
    let read = |file: &str| fs::read_to_string(place.as_ref()?.join(file)).ok();
    // A node of −1 means unknown, and then local_cpulist names every CPU: that is no home.
    let node = read("numa_node").and_then(|text| text.trim().parse::<usize>().ok());
    let home = node.and_then(|_| parse_cpulist(&read("local_cpulist")?).ok()).filter(|cpus| !cpus.is_empty());
    Gpu { name: name.to_string(), device: Some(Path::new("/dev/dri").join(name)), node, home }
}

fn stand_ins(count: Option<usize>) -> Result<Vec<Gpu>> {
    let online = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_else(|_| "0".to_string());
    let nodes = parse_cpulist(&online)?;
    let stand_in = |index: usize| {
        let node = *nodes.get(index % nodes.len().max(1))?;
        let cpus = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
        Some((node, parse_cpulist(&cpus).ok()?))
    };
    Ok((0..count.unwrap_or(nodes.len()))
        .map(|index| {
            let (node, home) = stand_in(index).unzip();
            Gpu { name: format!("none{index}"), device: None, node, home }
        })
        .collect())
}

/// An opened GPU, ready to take kernels. A stand-in takes them without a device.
pub struct Queue {
    file: Option<File>,
    kind: SubmitKind,
    doorbell: Option<*mut u32>,
}

impl Queue {
    /// Opens `gpu` for the calling thread.
    pub fn open(gpu: &Gpu, kind: SubmitKind) -> Result<Self> {
        let Some(path) = &gpu.device else {
            return Ok(Self { file: None, kind, doorbell: None });
        };
        let file = File::options().read(true).write(true).open(path).with_context(|| path.display().to_string())?;
        version(&file).with_context(|| format!("{}: DRM_IOCTL_VERSION", path.display()))?;
        let doorbell = match kind {
            SubmitKind::Ioctl => None,
            SubmitKind::Doorbell => map_doorbell(&file),
        };
        Ok(Self { file: Some(file), kind, doorbell })
    }

    /// Whether kernels go through mapped device memory.
    pub fn has_doorbell(&self) -> bool {
        self.doorbell.is_some()
    }

    /// Hands a kernel to the GPU.
    pub fn submit(&self) -> io::Result<()> {
        match (self.kind, &self.file) {
            (SubmitKind::Ioctl, Some(file)) => version(file)?,
            _ => {
                if let Some(doorbell) = self.doorbell {
                    // SAFETY: the mapping is a page of the device's memory that lives as long as the process.
                    unsafe { doorbell.write_volatile(1) };
                }
            }
        }
        Ok(())
    }
}

/// `_IOWR('d', number, T)`.
const fn drm_iowr<T>(number: u64) -> u64 {
    (3 << 30) | ((size_of::<T>() as u64) << 16) | ((b'd' as u64) << 8) | number
}

fn ioctl<T>(file: &File, number: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: the request carries the size of the argument, which the caller laid out as the kernel's header says.
    check(unsafe { libc::ioctl(file.as_raw_fd(), drm_iowr::<T>(number) as _, argument as *mut T) }).map(drop)
}

/// struct drm_version: three numbers, then three (length, buffer) pairs left empty.
#[repr(C)]
#[derive(Default)]
struct DrmVersion {
    numbers: [libc::c_int; 4],
    strings: [libc::size_t; 6],
}

/// The cheapest ioctl that every DRM driver answers on a render node.
fn version(file: &File) -> io::Result<()> {
    ioctl(file, 0x00, &mut DrmVersion::default())
}

/// Maps a page of a new virtio-gpu resource. Other drivers refuse: then a plain mmap of the device is tried, which
/// mostly fails too, but has passed the kernel's mmap hook as CUDA's does.
fn map_doorbell(file: &File) -> Option<*mut u32> {
    /// struct drm_virtgpu_resource_create: target format bind width height depth array_size last_level nr_samples
    /// flags bo_handle res_handle size stride.
    type ResourceCreate = [u32; 14];
    const BO_HANDLE: usize = 10;
    /// struct drm_virtgpu_map.
    #[repr(C)]
    #[derive(Default)]
    struct VirtgpuMap {
        offset: u64,
        handle: u32,
        pad: u32,
    }
    // A 32 × 32 texture (target 2, B8G8R8A8, render target): one page.
    let mut create: ResourceCreate = [2, 1, 2, 32, 32, 1, 1, 0, 0, 0, 0, 0, 4096, 0];
    let mut map = VirtgpuMap::default();
    if ioctl(file, 0x44, &mut create).is_ok() {
        map.handle = create[BO_HANDLE];
        // On failure the offset stays 0, and the mmap below is the attempt.
        let _ = ioctl(file, 0x41, &mut map);
    }
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            map.offset as libc::off_t,
        )
    };
    (page != libc::MAP_FAILED).then_some(page.cast())
}
