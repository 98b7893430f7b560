//! Asks every source and puts their answers together.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::devices::{Candidate, Scan};
use super::home::{Clues, Layout, decide};
use super::nvml::{Absent, NvmlGpu, NvmlGpus, NvmlSource, NvmlThread};
use super::pci::PciAddress;
use super::sysfs::Tree;
use super::{Gpu, Home, Machine, SharedDevice, Sources, Vendor, devices, hwloc, nccl, nvml};

/// What to do about a GPU of unknown home.
const WAY_OUT: &str = "Its feeders run where any thread may. If you know where it is, say so with --nccl-topo FILE.";

impl Machine {
    /// Discovers the machine that `sources` name.
    ///
    /// # Errors
    /// A file that the user named cannot be read or understood, or there is no CPU topology. What else goes wrong
    /// ends up in [`Machine::notes`].
    pub fn discover(sources: &Sources) -> Result<Machine> {
        Self::discover_with(sources, None)
    }

    /// As [`Machine::discover`], asking NVML through a thread that runs already, for there must be one only.
    /// [`Sources::nvml`] then does not matter.
    ///
    /// # Errors
    /// As [`Machine::discover`].
    pub fn discover_with(sources: &Sources, nvml: Option<&NvmlThread>) -> Result<Machine> {
        let tree = Tree::new(sources.sysroot.clone().unwrap_or_else(|| "/".into()));
        let (found, scan) = match (&sources.hwloc_xml, &sources.sysroot) {
            (Some(_), Some(_)) => bail!("an hwloc XML file and a sysroot are two machines; name one of them"),
            (Some(path), None) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the hwloc XML file {}", path.display()))?;
                let found = hwloc::load(hwloc::Input::Xml(&text)).with_context(|| {
                    format!("{} is not usable; expected what `lstopo FILE.xml` writes", path.display())
                })?;
                let scan = devices::from_hwloc(&found);
                (found, scan)
            }
            (None, _) => {
                if !tree.has("sys/devices/system/cpu") {
                    bail!(
                        "there is no sys/devices/system/cpu in {}; expected a directory that holds a copy of /sys, \
                         and of /proc if possible",
                        tree.root().display()
                    );
                }
                let found = hwloc::load(hwloc::Input::Tree(&tree))
                    .with_context(|| format!("cannot read the CPU topology below {}", tree.root().display()))?;
                let scan = devices::scan(&tree);
                (found, scan)
            }
        };
        let here = sources.hwloc_xml.is_none() && sources.sysroot.is_none();
        let mut notes = Vec::new();
        if !found.ignored_variables.is_empty() {
            notes.push(format!(
                "{} is set and was ignored, because a service must not be led astray by its environment. Use \
                 --hwloc-xml FILE or --sysroot DIR to look at another machine.",
                found.ignored_variables.join(", ")
            ));
        }

        let has_nvidia = scan.gpus.iter().any(|gpu| gpu.vendor() == Vendor::Nvidia);
        let mut nvml = match nvml {
            Some(thread) => describe_gpus(thread, sources, &mut notes),
            None => ask_nvml(sources, here, has_nvidia, &mut notes),
        };
        let places = NcclFiles::read(sources, (sources.hwloc_xml.is_none()).then_some(&tree), &scan, &mut notes)?;

        let layout = Layout { cpus: &found.cpus, nodes: &found.nodes };
        let mut gpus = Vec::new();
        for candidate in with_nvmls_own(scan.gpus, &nvml.gpus) {
            let known = nvml.gpus.iter().position(|gpu| gpu.pci.is_some() && gpu.pci == candidate.pci);
            let known = known.map(|position| nvml.gpus.swap_remove(position));
            let clues = Clues {
                nccl_named: candidate.pci.and_then(|address| places.named.get(&address)).cloned(),
                nccl_found: candidate.pci.and_then(|address| places.found.get(&address)).cloned(),
                sysfs: Some(candidate.place.clone()),
                hwloc: candidate.pci.and_then(|address| found.places.get(&address)).cloned(),
                nvml: known.as_ref().map(|gpu| gpu.place.clone()),
                on_pci: candidate.pci.is_some(),
            };
            let decision = decide(layout, &clues);
            let gpu = gpu(gpus.len() as u32, candidate, known.unwrap_or_default(), decision.home);
            notes.extend(decision.remarks.into_iter().map(|remark| format!("{}: {remark}.", label(&gpu))));
            gpus.push(gpu);
        }
        notes.extend(unknown_homes(&gpus));
        let shared_devices = shared_devices(scan.shared, &gpus);
        Ok(Machine {
            cpus: found.cpus,
            llcs: found.llcs,
            nodes: found.nodes,
            packages: found.packages,
            gpus,
            shared_devices,
            left_out: scan.left_out,
            notes,
        })
    }

    /// Takes over the device and interrupt numbers that `scan` found. It must have the same GPUs
    /// ([`Scan::has_the_gpus_of`]).
    pub fn renumber(&mut self, scan: &Scan) {
        let mut elsewhere = scan.gpus.iter().filter(|candidate| candidate.pci.is_none());
        for gpu in &mut self.gpus {
            let candidate = match gpu.pci {
                Some(_) => scan.gpus.iter().find(|candidate| candidate.pci == gpu.pci),
                // Numbered in this order.
                None => elsewhere.next(),
            };
            // A GPU that only NVML sees is in no scan, and stays as it is.
            let Some(candidate) = candidate else { continue };
            gpu.irqs.clone_from(&candidate.irqs);
            gpu.devices.retain(devices::is_nvidia_device);
            gpu.devices.extend(candidate.devices.iter().cloned());
            gpu.devices.sort();
            gpu.devices.dedup();
        }
        self.shared_devices = shared_devices(scan.shared.clone(), &self.gpus);
    }
}

/// How notes name a GPU.
fn label(gpu: &Gpu) -> String {
    match gpu.pci {
        Some(address) => format!("GPU {} ({address})", gpu.index),
        None => format!("GPU {} ({})", gpu.index, gpu.name),
    }
}

fn gpu(index: u32, candidate: Candidate, nvml: NvmlGpu, home: Home) -> Gpu {
    let vendor = candidate.vendor();
    let title = candidate.title();
    let mut devices = candidate.devices;
    // In a container, /proc may not show the device number that NVML knows.
    let own = nvml.minor.map(devices::nvidia_device);
    devices
        .extend(own.filter(|own| !devices.iter().any(|device| (device.major, device.minor) == (own.major, own.minor))));
    devices.sort();
    Gpu {
        index,
        vendor,
        name: nvml.name.unwrap_or(title),
        pci: candidate.pci,
        uuid: nvml.uuid.or(candidate.uuid),
        driver: candidate.driver,
        devices,
        irqs: candidate.irqs,
        home,
        mig: nvml.mig,
        mig_instances: nvml.mig_instances,
    }
}

/// Adds GPUs that only NVML knows, as on WSL and in containers that hide PCI.
fn with_nvmls_own(mut candidates: Vec<Candidate>, nvml: &[NvmlGpu]) -> Vec<Candidate> {
    for address in nvml.iter().filter_map(|gpu| gpu.pci) {
        if candidates.iter().all(|candidate| candidate.pci != Some(address)) {
            candidates.push(Candidate::of_nvml(address));
        }
    }
    candidates.sort_by_key(|candidate| (candidate.pci.is_none(), candidate.pci));
    candidates
}

fn ask_nvml(sources: &Sources, here: bool, has_nvidia: bool, notes: &mut Vec<String>) -> NvmlGpus {
    if !here && sources.nvml == NvmlSource::Auto {
        return NvmlGpus::default();
    }
    match NvmlThread::start(&sources.nvml, sources.nvml_timeout) {
        Ok(thread) => describe_gpus(&thread, sources, notes),
        Err(Absent::NotThere) => {
            if has_nvidia && sources.nvml == NvmlSource::Auto {
                notes.push(
                    "There are NVIDIA GPUs and no NVML (libnvidia-ml.so.1): homes come from sysfs, and UUIDs, MIG \
                     instances and NVML's process lists are missing. Install the driver's NVML library, or ignore this."
                        .into(),
                );
            }
            NvmlGpus::default()
        }
        // A library left over on a machine without NVIDIA GPUs concerns nobody.
        Err(Absent::Broken(_)) if !has_nvidia && sources.nvml == NvmlSource::Auto => NvmlGpus::default(),
        Err(Absent::Broken(reason)) => {
            notes.push(format!(
                "NVML does not work: {reason}. Homes come from sysfs, and UUIDs, MIG instances and NVML's process lists \
                 are missing. Check with `nvidia-smi`."
            ));
            NvmlGpus::default()
        }
    }
}

fn describe_gpus(thread: &NvmlThread, sources: &Sources, notes: &mut Vec<String>) -> NvmlGpus {
    let found = nvml::gpus(thread, sources.nvml_timeout);
    notes.extend(found.faults.iter().map(|fault| {
        format!("{fault}. For what is missing, what sysfs says is used. Check with `nvidia-smi` and `dmesg`.")
    }));
    found
}

/// NCCL topology files, those that were named apart from those that lay around.
#[derive(Default)]
struct NcclFiles {
    named: nccl::Places,
    found: nccl::Places,
}

impl NcclFiles {
    /// A named file must be good; a found one that is not is noted. `tree` is where to look for files; an hwloc export
    /// has none.
    fn read(sources: &Sources, tree: Option<&Tree>, scan: &Scan, notes: &mut Vec<String>) -> Result<Self> {
        let by_environment = || std::env::var_os("NCCL_TOPO_FILE").filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(path) = &sources.nccl_topo {
            return Self::named(nccl::read(path)?, &path.display().to_string(), scan, notes);
        }
        if let Some(path) = by_environment() {
            let places = nccl::read(&path).context(
                "$NCCL_TOPO_FILE is set but cannot be used; correct or unset it, or name another file with --nccl-topo",
            )?;
            return Self::named(places, &format!("$NCCL_TOPO_FILE ({})", path.display()), scan, notes);
        }
        let Some(tree) = tree else { return Ok(Self::default()) };
        for path in nccl::usual_files(tree) {
            match nccl::read(&path) {
                Ok(found) => return Ok(Self { found, ..Self::default() }),
                Err(error) => notes.push(format!("{error:#}. It was ignored; correct or remove it.")),
            }
        }
        Ok(Self { found: vendor_file(tree, scan, notes), ..Self::default() })
    }

    fn named(named: nccl::Places, what: &str, scan: &Scan, notes: &mut Vec<String>) -> Result<Self> {
        if !scan.gpus.is_empty() && !addresses(scan).any(|address| named.contains_key(&address)) {
            notes.push(format!(
                "{what} names none of this machine's GPUs, so it changes nothing. It is probably about another kind of \
                 instance."
            ));
        }
        Ok(Self { named, ..Self::default() })
    }
}

fn addresses(scan: &Scan) -> impl Iterator<Item = PciAddress> {
    scan.gpus.iter().filter_map(|gpu| gpu.pci)
}

/// Among the files that an image carries for several kinds of instances, what those say that name all GPUs; nothing
/// if they contradict each other.
fn vendor_file(tree: &Tree, scan: &Scan, notes: &mut Vec<String>) -> nccl::Places {
    let mut answers: Vec<(PathBuf, BTreeMap<PciAddress, nccl::Place>)> = Vec::new();
    if addresses(scan).next().is_none() {
        return nccl::Places::new();
    }
    for path in nccl::vendor_files(tree) {
        let Ok(places) = nccl::read(&path) else { continue };
        if addresses(scan).all(|address| places.contains_key(&address)) {
            let ours = addresses(scan).filter_map(|address| Some((address, places.get(&address)?.clone())));
            answers.push((path, ours.collect()));
        }
    }
    let nodes = |places: &nccl::Places| places.values().map(|place| place.node).collect::<Vec<_>>();
    match answers.split_first() {
        None => nccl::Places::new(),
        Some(((_, first), rest)) if rest.iter().all(|(_, places)| nodes(places) == nodes(first)) => first.clone(),
        Some(_) => {
            let names: Vec<String> = answers.iter().map(|(path, _)| path.display().to_string()).collect();
            notes.push(format!(
                "Several NCCL topology files fit this machine's GPUs and disagree ({}); none was used. Name the right \
                 one with --nccl-topo FILE.",
                names.join(", ")
            ));
            nccl::Places::new()
        }
    }
}

/// One note for all GPUs that are unknown for the same reason.
fn unknown_homes(gpus: &[Gpu]) -> Vec<String> {
    let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for gpu in gpus {
        if let Home::Unknown { reason } = &gpu.home {
            by_reason.entry(reason).or_default().push(label(gpu));
        }
    }
    let sentence =
        |(reason, labels): (&str, Vec<String>)| format!("{}: home unknown: {reason}. {WAY_OUT}", labels.join(", "));
    by_reason.into_iter().map(sentence).collect()
}

fn shared_devices(found: Vec<(Vendor, super::CharDevice)>, gpus: &[Gpu]) -> Vec<SharedDevice> {
    let serves = |vendor: Vendor, gpu: &Gpu| {
        let vfio = gpu.driver.as_deref().is_some_and(|driver| driver.contains("vfio"));
        if vendor == Vendor::Other { vfio } else { gpu.vendor == vendor && !vfio }
    };
    let shared = found.into_iter().map(|(vendor, device)| SharedDevice {
        vendor,
        device,
        gpus: gpus.iter().filter(|gpu| serves(vendor, gpu)).map(|gpu| gpu.index).collect(),
    });
    shared.collect()
}
