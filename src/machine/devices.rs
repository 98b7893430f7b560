//! Finds the GPUs of every vendor in sysfs: PCI classes, DRM, accel, VFIO, and NVIDIA's files in `/proc`.
//!
//! What counts as a GPU is what can compute. A display controller whose driver offers no render node cannot (BMCs
//! such as ASPEED's and Matrox', bochs, cirrus), nor can the few BMC chips whose shared driver offers one by habit.
//! A display controller without any DRM driver counts if it is of a vendor whose GPUs compute: it may be driven by
//! NVIDIA's driver alone, be passed through to a guest, or await its driver. SR-IOV makes virtual functions by the
//! dozen; one that has no driver is nothing yet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::cpuset::CpuSet;
use super::home::SysfsPlace;
use super::hwloc::{Found, PciObject};
use super::pci::PciAddress;
use super::sysfs::{Tree, numbered};
use super::{CharDevice, LeftOut, Vendor};

/// NVIDIA's major number, the one that Linux assigns.
const NVIDIA_MAJOR: u32 = 195;

/// Display chips of server BMCs made by a GPU vendor: ATI ES1000 and its forebears.
const BMC_CHIPS: [(u32, u32); 3] = [(0x1002, 0x515e), (0x1002, 0x5969), (0x1002, 0x4752)];

/// A device that may be a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// PCI address, unless it is not on PCI.
    pub pci: Option<PciAddress>,
    /// What to call a device that is not on PCI, for example `vgem`.
    pub platform: Option<String>,
    /// PCI class with programming interface, for example 0x030200.
    pub class: Option<u32>,
    /// PCI vendor and device.
    pub ids: Option<(u32, u32)>,
    /// A name from the driver.
    pub name: Option<String>,
    /// UUID, where the driver's files have one.
    pub uuid: Option<String>,
    /// The driver bound to it.
    pub driver: Option<String>,
    /// Its own character devices.
    pub devices: Vec<CharDevice>,
    /// Its interrupts.
    pub irqs: Vec<u32>,
    /// What sysfs says about its place.
    pub place: SysfsPlace,
    /// Whether NVIDIA's driver lists it.
    pub nvidia: bool,
    /// Whether it is a virtual function (SR-IOV).
    virtual_function: bool,
    /// Whether a DRM driver shows it.
    drm: bool,
    /// Whether that driver offers a render node.
    render: bool,
    /// Whether an accel driver shows it.
    accel: bool,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// GPUs, those on PCI first, in order of address.
    pub gpus: Vec<Candidate>,
    /// Display controllers that are none.
    pub left_out: Vec<LeftOut>,
    /// Control devices, with the vendor whose GPUs they serve; [`Vendor::Other`] for VFIO.
    pub shared: Vec<(Vendor, CharDevice)>,
}

impl Scan {
    /// Whether the GPUs are the same as in `other`, whatever devices and interrupts they have now.
    pub fn has_the_gpus_of(&self, other: &Scan) -> bool {
        let bare = |gpu: &Candidate| Candidate {
            devices: Vec::new(),
            irqs: Vec::new(),
            // Which nodes a driver offers shows in the devices.
            drm: false,
            render: false,
            accel: false,
            ..gpu.clone()
        };
        self.gpus.iter().map(bare).eq(other.gpus.iter().map(bare))
    }
}

impl Candidate {
    /// A GPU that only NVML knows.
    pub fn of_nvml(address: PciAddress) -> Self {
        Self { pci: Some(address), nvidia: true, ..Self::default() }
    }

    /// Its vendor.
    pub fn vendor(&self) -> Vendor {
        match self.ids {
            _ if self.nvidia => Vendor::Nvidia,
            Some((vendor, _)) => Vendor::from_pci(vendor),
            None => Vendor::Other,
        }
    }

    /// A name for people.
    pub fn title(&self) -> String {
        let what = match self.class.map(|class| class >> 16) {
            Some(0x12) => "accelerator",
            _ if self.accel && !self.drm => "accelerator",
            _ => "GPU",
        };
        match (&self.name, &self.platform, self.ids) {
            (Some(name), ..) => name.clone(),
            (None, Some(platform), _) => platform.clone(),
            (None, None, Some((vendor, device))) => match self.vendor() {
                Vendor::Other => format!("{what} {vendor:04x}:{device:04x}"),
                known => format!("{known} {what} {vendor:04x}:{device:04x}"),
            },
            (None, None, None) if self.nvidia => format!("NVIDIA {what}"),
            (None, None, None) => format!("{what} of unknown make"),
        }
    }

    /// Why it computes nothing, if so.
    fn unfit(&self) -> Option<&'static str> {
        if self.nvidia || self.accel {
            return None;
        }
        if self.ids.is_some_and(|ids| BMC_CHIPS.contains(&ids)) {
            return Some("the display chip of a management controller; it computes nothing");
        }
        if self.render {
            return None;
        }
        if self.virtual_function && self.driver.is_none() {
            return Some("a virtual function that no driver uses");
        }
        if self.drm {
            return Some("its driver offers no render node, so it shows pictures and computes nothing");
        }
        match self.class.map(|class| class >> 8) {
            Some(0x0302) => None,
            Some(class) if class >> 8 == 0x12 => None,
            _ if matches!(self.vendor(), Vendor::Nvidia | Vendor::Amd | Vendor::Intel) => None,
            _ => Some("a display controller of a vendor that makes no GPUs for computing, and without a render node"),
        }
    }
}

/// Looks through sysfs and `/proc`.
pub fn scan(tree: &Tree) -> Scan {
    let mut found = pci_candidates(tree);
    add_drm(tree, &mut found);
    add_accel(tree, &mut found);
    add_nvidia(tree, &mut found);
    add_vfio(tree, &mut found);
    let mut scan = sort_out(found.into_values());
    scan.shared = shared(tree);
    scan
}

/// The GPUs of an hwloc export, which knows no device numbers or interrupts.
pub fn from_hwloc(found: &Found) -> Scan {
    let compute = ["renderD", "nvml", "cuda", "rsmi", "opencl", "ze"];
    let candidates = found.pci.iter().filter(|pci| matches!(pci.class >> 8, 0x03 | 0x12)).map(|pci: &PciObject| {
        let render = pci
            .os_devices
            .iter()
            .any(|name| compute.iter().any(|prefix| name.strip_prefix(prefix).is_some_and(is_tail)));
        Candidate {
            pci: Some(pci.address),
            class: Some(u32::from(pci.class) << 8),
            ids: Some((u32::from(pci.vendor), u32::from(pci.device))),
            name: pci.name.clone(),
            render,
            ..Candidate::default()
        }
    });
    // OS devices without a PCI device above them: not on PCI, or in a domain that hwloc cannot express.
    let loose = found.loose.iter().filter(|name| numbered(name, "renderD").is_some()).map(|name| Candidate {
        platform: Some(name.clone()),
        render: true,
        ..Candidate::default()
    });
    sort_out(candidates.chain(loose))
}

/// What follows `opencl` in `opencl0d1`, or `nvml` in `nvml3`.
fn is_tail(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_digit())
}

fn sort_out(candidates: impl Iterator<Item = Candidate>) -> Scan {
    let mut scan = Scan::default();
    for mut candidate in candidates {
        candidate.devices.sort();
        candidate.devices.dedup();
        match candidate.unfit() {
            None => scan.gpus.push(candidate),
            Some(reason) => {
                let name = candidate.title().replace("GPU", "display");
                scan.left_out.push(LeftOut { name, pci: candidate.pci, reason: reason.into() })
            }
        }
    }
    scan.gpus.sort_by(|a, b| (a.pci.is_none(), a.pci, &a.platform).cmp(&(b.pci.is_none(), b.pci, &b.platform)));
    scan
}

/// Devices on PCI by address, others by path.
type Candidates = BTreeMap<(Option<PciAddress>, String), Candidate>;

fn on_pci(address: PciAddress) -> (Option<PciAddress>, String) {
    (Some(address), String::new())
}

fn pci_candidates(tree: &Tree) -> Candidates {
    let mut found = Candidates::new();
    for name in tree.names("sys/bus/pci/devices") {
        let class = tree.hex(format!("sys/bus/pci/devices/{name}/class"));
        let (Ok(address), Some(0x03 | 0x12)) = (name.parse(), class.map(|class| class >> 16)) else { continue };
        found.insert(on_pci(address), pci_candidate(tree, address));
    }
    found
}

fn pci_candidate(tree: &Tree, address: PciAddress) -> Candidate {
    let path = PathBuf::from("sys/bus/pci/devices").join(address.to_string());
    let id = |file| tree.hex(path.join(file));
    // NVIDIA's and most others' drivers use MSI; `irq` is then a stale legacy number.
    let mut irqs: Vec<u32> = tree.names(path.join("msi_irqs")).iter().filter_map(|name| name.parse().ok()).collect();
    if irqs.is_empty() {
        irqs.extend(tree.number(path.join("irq")).and_then(|irq| u32::try_from(irq).ok()).filter(|irq| *irq > 0));
    }
    irqs.sort_unstable();
    Candidate {
        pci: Some(address),
        class: id("class"),
        ids: id("vendor").zip(id("device")),
        name: tree.text(path.join("product_name")).filter(|name| !name.is_empty()),
        // AMD's, in the form that its tools and HIP_VISIBLE_DEVICES use.
        uuid: tree.text(path.join("unique_id")).filter(|id| !id.is_empty()).map(|id| format!("GPU-{id}")),
        driver: tree.link_name(path.join("driver")),
        irqs,
        place: place(tree, &path),
        virtual_function: tree.link(path.join("physfn")).is_some(),
        ..Candidate::default()
    }
}

fn place(tree: &Tree, path: &Path) -> SysfsPlace {
    let list = tree.text(path.join("local_cpulist")).and_then(|text| CpuSet::from_list(&text).ok());
    let mask = || tree.text(path.join("local_cpus")).and_then(|text| CpuSet::from_mask(&text).ok());
    SysfsPlace { node: tree.number(path.join("numa_node")), cpus: list.or_else(mask) }
}

/// The candidate that a class device such as `/sys/class/drm/card0` belongs to.
///
/// Its link names every device above it: `devices/pci0000:00/0000:00:02.0/virtio1/drm/card0`. The innermost PCI
/// address counts. Without one, the device itself does.
fn owner<'a>(tree: &Tree, link: &Path, found: &'a mut Candidates) -> Option<&'a mut Candidate> {
    // Without the class device itself (card0) and its class (drm).
    let device = link.parent()?.parent()?;
    let pci = device.iter().rev().find_map(|part| part.to_str()?.parse::<PciAddress>().ok());
    if let Some(address) = pci {
        return Some(found.entry(on_pci(address)).or_insert_with(|| pci_candidate(tree, address)));
    }
    let name = device.file_name()?.to_string_lossy().into_owned();
    let candidate = found.entry((None, device.to_string_lossy().into_owned())).or_insert_with(|| {
        let path = Path::new("sys").join(device);
        Candidate { driver: tree.link_name(path.join("driver")), place: place(tree, &path), ..Candidate::default() }
    });
    candidate.platform.get_or_insert(name);
    Some(candidate)
}

fn add_drm(tree: &Tree, found: &mut Candidates) {
    let names: Vec<String> = tree
        .names("sys/class/drm")
        .into_iter()
        .filter(|name| numbered(name, "card").or(numbered(name, "renderD")).is_some())
        .collect();
    let link = |name: &str| tree.link(Path::new("sys/class/drm").join(name));
    // The partitions of an AMD GPU are platform devices; KFD knows which GPU they are part of.
    let kfd = kfd_render_minors(tree);
    let partition = |name: &String| {
        let address = kfd.get(&numbered(name, "renderD")?).filter(|address| found.contains_key(&on_pci(**address)))?;
        Some((link(name)?.parent()?.to_owned(), *address))
    };
    let partitions: BTreeMap<PathBuf, PciAddress> = names.iter().filter_map(partition).collect();
    for name in names {
        let Some(link) = link(&name) else { continue };
        let candidate = match link.parent().and_then(|parent| partitions.get(parent)) {
            Some(address) => found.get_mut(&on_pci(*address)),
            None => owner(tree, &link, found),
        };
        let Some(candidate) = candidate else { continue };
        candidate.drm = true;
        candidate.render |= numbered(&name, "renderD").is_some();
        candidate.devices.extend(char_device(tree, &Path::new("sys/class/drm").join(&name), "/dev/dri", &name));
    }
}

/// AMD's KFD numbers a render node and the PCI address of the GPU behind it.
fn kfd_render_minors(tree: &Tree) -> BTreeMap<u32, PciAddress> {
    let nodes = "sys/class/kfd/kfd/topology/nodes";
    let known = tree.names(nodes).into_iter().filter_map(|node| {
        let text = tree.text(format!("{nodes}/{node}/properties"))?;
        let value = |name: &str| -> Option<u32> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
            line.trim().parse().ok()
        };
        let (minor, location) = (value("drm_render_minor")?, value("location_id")?);
        let address = PciAddress {
            domain: value("domain").unwrap_or(0),
            bus: (location >> 8) as u8,
            device: (location >> 3 & 0x1f) as u8,
            // The low bits number the partition, not a PCI function.
            function: 0,
        };
        (minor > 0).then_some((minor, address))
    });
    known.collect()
}

fn add_accel(tree: &Tree, found: &mut Candidates) {
    for name in tree.names("sys/class/accel") {
        let class_device = Path::new("sys/class/accel").join(&name);
        let (Some(_), Some(link)) = (numbered(&name, "accel"), tree.link(&class_device)) else { continue };
        let Some(candidate) = owner(tree, &link, found) else { continue };
        candidate.accel = true;
        candidate.devices.extend(char_device(tree, &class_device, "/dev/accel", &name));
    }
}

fn char_device(tree: &Tree, class_device: &Path, directory: &str, name: &str) -> Option<CharDevice> {
    let (major, minor) = tree.device_number(class_device.join("dev"))?;
    Some(CharDevice { path: Path::new(directory).join(name), major, minor })
}

/// The value of a `Name: value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

fn add_nvidia(tree: &Tree, found: &mut Candidates) {
    let caps_major = majors(tree).get("nvidia-caps").copied();
    for name in tree.names("proc/driver/nvidia/gpus") {
        let Ok(address) = name.parse::<PciAddress>() else { continue };
        let candidate = found.entry(on_pci(address)).or_insert_with(|| pci_candidate(tree, address));
        candidate.nvidia = true;
        let Some(text) = tree.text(format!("proc/driver/nvidia/gpus/{name}/information")) else { continue };
        candidate.name = field(&text, "Model").map(String::from).or_else(|| candidate.name.take());
        let Some(minor) = field(&text, "Device Minor").and_then(|minor| minor.parse::<u32>().ok()) else { continue };
        candidate.devices.push(nvidia_device(minor));
        if let Some(major) = caps_major {
            let root = format!("proc/driver/nvidia/capabilities/gpu{minor}/mig");
            candidate.devices.extend(mig_devices(tree, Path::new(&root), major, 3));
        }
    }
}

/// Whether a device is NVIDIA's device file of one GPU, which NVML numbers too.
pub fn is_nvidia_device(device: &CharDevice) -> bool {
    device.major == NVIDIA_MAJOR
}

/// NVIDIA's device file of the GPU with this minor number.
pub fn nvidia_device(minor: u32) -> CharDevice {
    CharDevice { path: format!("/dev/nvidia{minor}").into(), major: NVIDIA_MAJOR, minor }
}

/// The access files of MIG instances: `gi0/access`, `gi0/ci0/access`.
fn mig_devices(tree: &Tree, path: &Path, major: u32, depth: u32) -> Vec<CharDevice> {
    let mut devices = Vec::new();
    let access = tree.text(path.join("access"));
    if let Some(minor) = access.as_deref().and_then(|text| field(text, "DeviceFileMinor")?.parse().ok()) {
        devices.push(CharDevice { path: format!("/dev/nvidia-caps/nvidia-cap{minor}").into(), major, minor });
    }
    let instances =
        tree.names(path).into_iter().filter(|name| numbered(name, "gi").is_some() || numbered(name, "ci").is_some());
    if depth > 0 {
        devices.extend(instances.flat_map(|name| mig_devices(tree, &path.join(name), major, depth - 1)));
    }
    devices
}

/// Character devices through which a GPU is handed to a guest or a user-space driver.
fn add_vfio(tree: &Tree, found: &mut Candidates) {
    for candidate in found.values_mut() {
        let Some(address) = candidate.pci else { continue };
        let path = PathBuf::from("sys/bus/pci/devices").join(address.to_string());
        if candidate.driver.as_deref().is_none_or(|driver| !driver.contains("vfio")) {
            continue;
        }
        if let Some(group) = tree.link_name(path.join("iommu_group")) {
            // A group without an IOMMU behind it has the longer name.
            for name in [format!("noiommu-{group}"), group] {
                candidate.devices.extend(char_device(
                    tree,
                    &Path::new("sys/class/vfio").join(&name),
                    "/dev/vfio",
                    &name,
                ));
            }
        }
        for name in tree.names(path.join("vfio-dev")) {
            let class_device = path.join("vfio-dev").join(&name);
            candidate.devices.extend(char_device(tree, &class_device, "/dev/vfio/devices", &name));
        }
    }
}

/// Majors of character devices by name, from `/proc/devices`.
fn majors(tree: &Tree) -> BTreeMap<String, u32> {
    let text = tree.text("proc/devices").unwrap_or_default();
    let lines = text.lines().take_while(|line| !line.starts_with("Block"));
    lines
        .filter_map(|line| line.trim().split_once(' '))
        .filter_map(|(major, name)| Some((name.trim().to_string(), major.parse().ok()?)))
        .collect()
}

fn shared(tree: &Tree) -> Vec<(Vendor, CharDevice)> {
    let majors = majors(tree);
    let mut shared = Vec::new();
    let mut add = |vendor, path: &str, major, minor| {
        shared.push((vendor, CharDevice { path: path.into(), major, minor }));
    };
    // The driver registers under several names, depending on its version, always with this major.
    if majors.iter().any(|(name, major)| *major == NVIDIA_MAJOR && name.starts_with("nvidia")) {
        add(Vendor::Nvidia, "/dev/nvidia-modeset", NVIDIA_MAJOR, 254);
        add(Vendor::Nvidia, "/dev/nvidiactl", NVIDIA_MAJOR, 255);
    }
    if let Some(major) = majors.get("nvidia-uvm") {
        add(Vendor::Nvidia, "/dev/nvidia-uvm", *major, 0);
        add(Vendor::Nvidia, "/dev/nvidia-uvm-tools", *major, 1);
    }
    if let Some((major, minor)) = tree.device_number("sys/class/kfd/kfd/dev") {
        add(Vendor::Amd, "/dev/kfd", major, minor);
    }
    if let Some((major, minor)) = tree.device_number("sys/class/misc/vfio/dev") {
        add(Vendor::Other, "/dev/vfio/vfio", major, minor);
    }
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    fn display(vendor: u32, device: u32, class: u32) -> Candidate {
        Candidate { class: Some(class), ids: Some((vendor, device)), ..Candidate::default() }
    }

    #[test]
    fn a_bmc_is_no_gpu_with_or_without_its_driver() {
        let aspeed = display(0x1a03, 0x2000, 0x030000);
        assert!(aspeed.unfit().is_some());
        assert!(Candidate { drm: true, ..aspeed }.unfit().is_some());
        let es1000 = display(0x1002, 0x515e, 0x030000);
        assert!(Candidate { drm: true, render: true, ..es1000 }.unfit().is_some());
    }

    #[test]
    fn a_render_node_makes_a_gpu_of_any_display_controller() {
        let virtio = display(0x1af4, 0x1050, 0x030000);
        assert!(virtio.unfit().is_some());
        assert!(Candidate { drm: true, ..virtio.clone() }.unfit().is_some());
        assert!(Candidate { drm: true, render: true, ..virtio }.unfit().is_none());
    }

    #[test]
    fn a_compute_gpu_counts_before_its_driver_is_loaded() {
        for candidate in [
            display(0x10de, 0x2330, 0x030200),
            display(0x1002, 0x740f, 0x038000),
            display(0x1da3, 0x1020, 0x120000),
            display(0x10de, 0x2204, 0x030000),
        ] {
            assert!(candidate.unfit().is_none(), "{candidate:?}");
        }
    }

    #[test]
    fn a_virtual_function_counts_once_something_drives_it() {
        let idle = Candidate { virtual_function: true, ..display(0x8086, 0x56c0, 0x038000) };
        assert!(idle.unfit().is_some());
        assert!(Candidate { driver: Some("vfio-pci".into()), ..idle }.unfit().is_none());
    }

    #[test]
    fn fields_of_nvidias_files_are_found_whatever_the_spacing() {
        let text = "Model: \t\t NVIDIA H100\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        assert_eq!(field(text, "Model"), Some("NVIDIA H100"));
        assert_eq!(field(text, "Device Minor"), Some("3"));
        assert_eq!(field(text, "Minor"), None);
    }
}
