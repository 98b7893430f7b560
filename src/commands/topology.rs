//! `scx_stoker topology`: shows the machine as the scheduler sees it. Needs no root and changes nothing.

use std::fmt::{self, Write};
use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::machine::{CpuSet, Gpu, Home, Machine, Node, NvmlSource, Sources};

/// Show CPUs, caches, nodes and GPUs, and where each GPU is at home
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TopologyArgs {
    /// Print JSON for programs instead of a tree for people
    #[arg(long)]
    pub json: bool,

    /// Read another machine from an hwloc XML export (`lstopo FILE.xml`)
    #[arg(long, value_name = "FILE", conflicts_with = "sysroot")]
    pub hwloc_xml: Option<PathBuf>,

    /// Read another machine from a directory with a copy of its /sys and /proc
    #[arg(long, value_name = "DIR")]
    pub sysroot: Option<PathBuf>,

    /// NCCL topology file that says where GPUs are [default: $NCCL_TOPO_FILE, then the usual places]
    #[arg(long, value_name = "FILE")]
    pub nccl_topo: Option<PathBuf>,

    /// NVML library to ask [default: the driver's, for this machine only]
    #[arg(long, value_name = "PATH")]
    pub nvml_lib: Option<PathBuf>,
}

/// Discovers and prints the machine.
///
/// # Errors
/// As [`Machine::discover`], or standard output cannot be written.
pub fn run(args: &TopologyArgs) -> Result<()> {
    let sources = Sources {
        hwloc_xml: args.hwloc_xml.clone(),
        sysroot: args.sysroot.clone(),
        nccl_topo: args.nccl_topo.clone(),
        nvml: args.nvml_lib.clone().map_or(NvmlSource::Auto, NvmlSource::Library),
        ..Sources::default()
    };
    let machine = Machine::discover(&sources)?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&machine).context("cannot write the machine as JSON")? + "\n",
        false => tree(&machine),
    };
    match io::Write::write_all(&mut io::stdout(), text.as_bytes()) {
        // `topology | head` is no failure.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("cannot write"),
        _ => Ok(()),
    }
}

/// The machine as a tree in which each GPU hangs where it lives.
pub fn tree(machine: &Machine) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_tree(&mut text, machine);
    text
}

fn write_tree(out: &mut String, machine: &Machine) -> fmt::Result {
    let online = machine.cpus.iter().filter(|cpu| cpu.online).count();
    let cores: CpuSet = machine.cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.core).collect();
    writeln!(
        out,
        "Machine: {}, {}, {}, {}, {}, {}",
        count(machine.packages.len(), "package"),
        count(machine.nodes.len(), "node"),
        count(machine.llcs.len(), "LLC"),
        count(cores.len(), "core"),
        count(online, "CPU"),
        count(machine.gpus.len(), "GPU"),
    )?;
    let offline: CpuSet = machine.cpus.iter().filter(|cpu| !cpu.online).map(|cpu| cpu.id).collect();
    if !offline.is_empty() {
        writeln!(out, "  offline CPUs {offline}")?;
    }

    for package in &machine.packages {
        writeln!(out, "  Package {}: CPUs {}", package.id, package.cpus)?;
        for node in machine.nodes.iter().filter(|node| !node.cpus.intersection(&package.cpus).is_empty()) {
            write_node(out, machine, node, &package.cpus)?;
        }
    }
    for node in machine.nodes.iter().filter(|node| node.is_cpuless()) {
        writeln!(out, "  Node {} (memory only, no CPUs; never a home): {}", node.id, size(node.memory_bytes))?;
    }

    let spread = |gpu: &&Gpu| matches!(&gpu.home, Home::Known { node: None, .. });
    write_gpus(out, "  At home on several nodes:", machine.gpus.iter().filter(spread))?;
    let unknown = |gpu: &&Gpu| matches!(gpu.home, Home::Unknown { .. });
    write_gpus(out, "  Home unknown:", machine.gpus.iter().filter(unknown))?;

    if !machine.shared_devices.is_empty() {
        writeln!(out, "  Shared devices:")?;
        for shared in &machine.shared_devices {
            let device = &shared.device;
            write!(out, "    {} {}:{}", device.path.display(), device.major, device.minor)?;
            let gpus: CpuSet = shared.gpus.iter().copied().collect();
            writeln!(out, " for {}", if gpus.is_empty() { "no GPU here".into() } else { format!("GPUs {gpus}") })?;
        }
    }
    if !machine.left_out.is_empty() {
        writeln!(out, "  Not GPUs:")?;
        for left in &machine.left_out {
            let address = left.pci.map(|address| format!(" at {address}")).unwrap_or_default();
            writeln!(out, "    {}{address}: {}", left.name, left.reason)?;
        }
    }
    if !machine.notes.is_empty() {
        writeln!(out, "\nNotes:")?;
        machine.notes.iter().try_for_each(|note| writeln!(out, "  - {note}"))?;
    }
    Ok(())
}

fn write_node(out: &mut String, machine: &Machine, node: &Node, package: &CpuSet) -> fmt::Result {
    let here = node.cpus.intersection(package);
    writeln!(out, "    Node {}: CPUs {here}, {}", node.id, size(node.memory_bytes))?;
    for llc in machine.llcs.iter().filter(|llc| llc.cpus.is_subset(&here)) {
        write!(out, "      LLC {}: CPUs {}", llc.id, llc.cpus)?;
        let mut capacities: Vec<u32> =
            machine.cpus.iter().filter(|cpu| llc.cpus.contains(cpu.id)).map(|cpu| cpu.capacity).collect();
        capacities.sort_unstable();
        match (capacities.first(), capacities.last()) {
            (Some(least), Some(most)) if least != most => writeln!(out, ", capacity {least} to {most}")?,
            (Some(all), _) if *all != 1024 => writeln!(out, ", capacity {all}")?,
            _ => writeln!(out)?,
        }
    }
    let at_home = machine.gpus.iter().filter(|gpu| match &gpu.home {
        // A node that several packages share shows its GPUs once.
        Home::Known { node: Some(home), cpus, .. } => {
            *home == node.id && cpus.iter().next().is_some_and(|cpu| here.contains(cpu))
        }
        _ => false,
    });
    at_home.into_iter().try_for_each(|gpu| write_gpu(out, "      ", gpu))
}

fn write_gpus<'a>(out: &mut String, title: &str, gpus: impl Iterator<Item = &'a Gpu>) -> fmt::Result {
    let mut gpus = gpus.peekable();
    if gpus.peek().is_some() {
        writeln!(out, "{title}")?;
    }
    gpus.try_for_each(|gpu| write_gpu(out, "    ", gpu))
}

fn write_gpu(out: &mut String, indent: &str, gpu: &Gpu) -> fmt::Result {
    write!(out, "{indent}GPU {}: {}", gpu.index, gpu.name)?;
    if let Some(address) = gpu.pci {
        write!(out, " at {address}")?;
    }
    if let Some(driver) = &gpu.driver {
        write!(out, ", driver {driver}")?;
    }
    if let Some(uuid) = &gpu.uuid {
        write!(out, ", {uuid}")?;
    }
    writeln!(out)?;
    match &gpu.home {
        Home::Known { cpus, source, .. } => writeln!(out, "{indent}  home: CPUs {cpus} (from {source})")?,
        Home::Unknown { reason } => writeln!(out, "{indent}  home: unknown, {reason}")?,
    }
    if !gpu.devices.is_empty() {
        let devices = gpu.devices.iter();
        let list: Vec<String> =
            devices.map(|device| format!("{} {}:{}", device.path.display(), device.major, device.minor)).collect();
        writeln!(out, "{indent}  devices: {}", list.join(", "))?;
    }
    if !gpu.irqs.is_empty() {
        // The list format suits interrupt numbers as well.
        writeln!(out, "{indent}  interrupts: {}", gpu.irqs.iter().copied().collect::<CpuSet>())?;
    }
    for instance in &gpu.mig_instances {
        let name = instance.name.as_deref().unwrap_or("MIG instance");
        writeln!(out, "{indent}  MIG: {name}, {}", instance.uuid)?;
    }
    if gpu.mig && gpu.mig_instances.is_empty() {
        writeln!(out, "{indent}  MIG: on, no instances")?;
    }
    Ok(())
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn size(bytes: u64) -> String {
    match bytes {
        0 => "memory of unknown size".into(),
        _ if bytes < 1 << 30 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.0} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}
