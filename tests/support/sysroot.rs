//! Builds the `/sys` and `/proc` of a made-up machine in a temporary directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The shape of a machine. CPUs are numbered as Linux does on x86: first threads first.
#[derive(Clone, Copy)]
pub struct Shape {
    pub packages: u32,
    /// NUMA nodes in each package.
    pub nodes: u32,
    /// Cores in each node.
    pub cores: u32,
    /// Threads in each core.
    pub threads: u32,
}

/// A made-up machine; gone when dropped.
pub struct Sysroot {
    directory: tempfile::TempDir,
    shape: Shape,
}

/// A PCI device.
pub struct Device<'a> {
    pub address: &'a str,
    pub class: u32,
    pub vendor: u32,
    pub device: u32,
    pub node: i32,
    pub driver: Option<&'a str>,
    /// Number of its DRM card, and whether there is a render node (card + 128) as well.
    pub drm: Option<(u32, bool)>,
}

/// An NVIDIA data-centre GPU without a driver.
pub fn nvidia(address: &str, node: i32) -> Device<'_> {
    Device { address, class: 0x030200, vendor: 0x10de, device: 0x2330, node, driver: None, drm: None }
}

fn list(numbers: impl IntoIterator<Item = u32>) -> String {
    numbers.into_iter().map(|number| number.to_string()).collect::<Vec<_>>().join(",")
}

/// The kernel's mask format.
fn mask(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut words = vec![0u32];
    for number in numbers {
        let word = number as usize / 32;
        words.resize(words.len().max(word + 1), 0);
        words[word] |= 1 << (number % 32);
    }
    words.iter().rev().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

impl Sysroot {
    pub fn new(shape: Shape) -> Self {
        let root = Self { directory: tempfile::tempdir().unwrap(), shape };
        let cpus = root.cpu_count();
        root.write("sys/devices/system/cpu/possible", &format!("0-{}", cpus - 1));
        root.write("sys/devices/system/cpu/present", &format!("0-{}", cpus - 1));
        root.write("sys/devices/system/cpu/online", &format!("0-{}", cpus - 1));
        root.write("proc/cpuinfo", "");
        for cpu in 0..cpus {
            let node = root.node_of(cpu);
            let package = node / shape.nodes;
            let core = cpu % (cpus / shape.threads);
            let topology = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            let same = |key: &dyn Fn(u32) -> u32| mask((0..cpus).filter(|other| key(*other) == key(cpu)));
            root.write(&format!("{topology}/physical_package_id"), &package.to_string());
            root.write(&format!("{topology}/core_id"), &core.to_string());
            root.write(&format!("{topology}/package_cpus"), &same(&|cpu| root.node_of(cpu) / shape.nodes));
            root.write(&format!("{topology}/core_cpus"), &same(&|cpu| cpu % (cpus / shape.threads)));
            let cache = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3");
            root.write(&format!("{cache}/level"), "3");
            root.write(&format!("{cache}/type"), "Unified");
            root.write(&format!("{cache}/size"), "32768K");
            root.write(&format!("{cache}/shared_cpu_map"), &same(&|cpu| root.node_of(cpu)));
        }
        let nodes = shape.packages * shape.nodes;
        for node in 0..nodes {
            root.node(node, (0..cpus).filter(|cpu| root.node_of(*cpu) == node));
        }
        root.distances(&(0..nodes).collect::<Vec<_>>());
        root
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    pub fn remove(&self, path: &str) {
        let path = self.path().join(path);
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    fn cpu_count(&self) -> u32 {
        let shape = self.shape;
        shape.packages * shape.nodes * shape.cores * shape.threads
    }

    fn node_of(&self, cpu: u32) -> u32 {
        cpu % (self.cpu_count() / self.shape.threads) / self.shape.cores
    }

    fn node(&self, id: u32, cpus: impl Iterator<Item = u32> + Clone) {
        let path = format!("sys/devices/system/node/node{id}");
        self.write(&format!("{path}/cpumap"), &mask(cpus.clone()));
        self.write(&format!("{path}/cpulist"), &list(cpus));
        self.write(&format!("{path}/meminfo"), &format!("Node {id} MemTotal:  1048576 kB"));
    }

    /// Distances that grow with the difference of the numbers, across packages twice as much.
    fn distances(&self, nodes: &[u32]) {
        self.write("sys/devices/system/node/online", &list(nodes.iter().copied()));
        self.write("sys/devices/system/node/possible", &list(nodes.iter().copied()));
        for from in nodes {
            let far = |to: &u32| {
                let packages = (from / self.shape.nodes).abs_diff(to / self.shape.nodes);
                (10 + from.abs_diff(*to) + 10 * packages.min(9)).to_string()
            };
            let row: Vec<String> = nodes.iter().map(far).collect();
            self.write(&format!("sys/devices/system/node/node{from}/distance"), &row.join(" "));
        }
    }

    /// Adds nodes of memory only.
    pub fn memory_nodes(&self, ids: &[u32]) {
        ids.iter().for_each(|id| self.node(*id, [].into_iter()));
        let nodes: Vec<u32> = (0..self.shape.packages * self.shape.nodes).chain(ids.iter().copied()).collect();
        self.distances(&nodes);
    }

    /// Takes CPUs offline as the kernel shows it.
    pub fn offline(&self, offline: &[u32]) {
        let online = (0..self.cpu_count()).filter(|cpu| !offline.contains(cpu));
        self.write("sys/devices/system/cpu/online", &list(online.clone()));
        for cpu in offline {
            self.write(&format!("sys/devices/system/cpu/cpu{cpu}/online"), "0");
            self.remove(&format!("sys/devices/system/cpu/cpu{cpu}/topology"));
            self.remove(&format!("sys/devices/system/cpu/cpu{cpu}/cache"));
        }
        for node in 0..self.shape.packages * self.shape.nodes {
            self.node(node, online.clone().filter(|cpu| self.node_of(*cpu) == node));
        }
    }

    /// Adds a PCI device and, if it has them, its DRM nodes.
    pub fn pci(&self, device: &Device) {
        let domain_and_bus = &device.address[..device.address.len() - 5];
        let real = format!("devices/pci{domain_and_bus}/{}", device.address);
        self.link(&format!("sys/bus/pci/devices/{}", device.address), &format!("../../../{real}"));
        let file = |name: &str, text: String| self.write(&format!("sys/{real}/{name}"), &text);
        file("class", format!("{:#08x}", device.class));
        file("vendor", format!("{:#06x}", device.vendor));
        file("device", format!("{:#06x}", device.device));
        file("numa_node", device.node.to_string());
        file("irq", "11".into());
        // With no node, the kernel calls every CPU local.
        let local = (0..self.cpu_count()).filter(|cpu| device.node < 0 || self.node_of(*cpu) == device.node as u32);
        file("local_cpus", mask(local.clone()));
        file("local_cpulist", list(local));
        if let Some(driver) = device.driver {
            self.link(&format!("sys/{real}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
        }
        if let Some((card, render)) = device.drm {
            self.drm(&real, card, render);
        }
    }

    /// Adds DRM nodes below a device (a path in `/sys`).
    pub fn drm(&self, device: &str, card: u32, render: bool) {
        let render = render.then_some(("renderD", card + 128));
        for (prefix, minor) in [Some(("card", card)), render].into_iter().flatten() {
            let name = format!("{prefix}{minor}");
            self.write(&format!("sys/{device}/drm/{name}/dev"), &format!("226:{minor}"));
            self.link(&format!("sys/class/drm/{name}"), &format!("../../{device}/drm/{name}"));
        }
    }

    /// Makes NVIDIA's driver show a GPU.
    pub fn nvidia_driver(&self, address: &str, minor: u32) {
        let text = format!("Model: \t\t NVIDIA H100\nIRQ:   \t\t 0\nDevice Minor: \t {minor}");
        self.write(&format!("proc/driver/nvidia/gpus/{address}/information"), &text);
    }

    /// A path below the root.
    pub fn join(&self, path: &str) -> PathBuf {
        self.path().join(path)
    }
}
