//! Reads NCCL topology files, with which clouds tell their guests where the GPUs are when the guest's own sysfs
//! does not.
//!
//! `numaid` is trusted. `affinity` is no more than a hint: it counts CPUs of the instance size that the file was
//! written for, and files exist in which every node has the same mask.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::cpuset::CpuSet;
use super::pci::PciAddress;
use super::sysfs::Tree;
use super::xml::attribute;

/// What a file says of one PCI device. A file names NICs, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// NUMA node, if the file names one.
    pub node: Option<u32>,
    /// CPU mask, if the file has one that no other node shares.
    pub affinity: Option<CpuSet>,
}

/// Places by PCI address.
pub type Places = BTreeMap<PciAddress, Place>;

/// Reads one file.
///
/// # Errors
/// XML that is broken, or that is no NCCL topology (`<system>` with `<cpu>` inside).
pub fn parse(input: impl BufRead) -> Result<Places> {
    let mut reader = Reader::from_reader(input);
    let mut places = Places::new();
    let mut masks: Vec<CpuSet> = Vec::new();
    let mut current: Option<Place> = None;
    let (mut in_system, mut cpus) = (false, 0);
    let mut buffer = Vec::new();
    loop {
        let at = reader.buffer_position();
        let event = reader.read_event_into(&mut buffer).with_context(|| format!("broken XML near byte {at}"))?;
        match &event {
            Event::Eof => break,
            Event::Start(tag) | Event::Empty(tag) => {
                let opens = matches!(event, Event::Start(_));
                match tag.name().as_ref() {
                    b"system" => in_system = true,
                    b"cpu" if in_system => {
                        cpus += 1;
                        let place = cpu_place(tag)?;
                        masks.extend(place.affinity.clone());
                        current = opens.then_some(place);
                    }
                    b"pci" => {
                        if let (Some(place), Some(text)) = (&current, attribute(tag, "busid")?) {
                            // Switches carry made-up addresses (ffff:ff:01.0), which no device will have.
                            let address = text.parse().with_context(|| format!("busid \"{text}\""))?;
                            places.insert(address, place.clone());
                        }
                    }
                    _ => {}
                }
            }
            Event::End(tag) if tag.name().as_ref() == b"cpu" => current = None,
            _ => {}
        }
        buffer.clear();
    }
    if cpus == 0 {
        bail!("not an NCCL topology: it has no <cpu> inside <system>");
    }
    for place in places.values_mut() {
        place.affinity = place.affinity.take().filter(|mask| masks.iter().filter(|other| *other == mask).count() == 1);
    }
    Ok(places)
}

fn cpu_place(tag: &BytesStart<'_>) -> Result<Place> {
    let node = match attribute(tag, "numaid")? {
        // Negative is "unknown", as in sysfs.
        Some(text) => u32::try_from(text.trim().parse::<i64>().with_context(|| format!("numaid \"{text}\""))?).ok(),
        None => None,
    };
    // A hint is not worth refusing the file for.
    let affinity = attribute(tag, "affinity")?.and_then(|text| CpuSet::from_mask(&text).ok());
    Ok(Place { node, affinity: affinity.filter(|mask| !mask.is_empty()) })
}

/// Reads the file at `path`.
///
/// # Errors
/// As [`parse`], or the file cannot be read; the error names the file.
pub fn read(path: &Path) -> Result<Places> {
    let file =
        std::fs::File::open(path).with_context(|| format!("cannot read the NCCL topology file {}", path.display()))?;
    parse(std::io::BufReader::new(file))
        .with_context(|| format!("the NCCL topology file {} is not usable", path.display()))
}

/// Where NCCL's own configuration says its topology file is (`NCCL_TOPO_FILE=…`).
pub fn configured(nccl_conf: impl BufRead) -> Option<PathBuf> {
    nccl_conf
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| {
            let (name, value) = line.split_once('=')?;
            (name.trim() == "NCCL_TOPO_FILE" && !value.trim().is_empty()).then(|| PathBuf::from(value.trim()))
        })
        .last()
}

/// Directories in which cloud images keep one file for each kind of instance.
const VENDOR_DIRECTORIES: [&str; 5] = [
    "opt/microsoft",
    "opt/microsoft/ncv4",
    "opt/amazon/ofi-nccl/share/aws-ofi-nccl/xml",
    "opt/aws-ofi-nccl/share/aws-ofi-nccl/xml",
    "usr/local/share/aws-ofi-nccl/xml",
];

/// Files that are about this machine if they exist: the one NCCL's configuration names, and NCCL's own default.
pub fn usual_files(tree: &Tree) -> Vec<PathBuf> {
    let below_root = |path: &Path| tree.root().join(path.strip_prefix("/").unwrap_or(path));
    let conf = tree.text("etc/nccl.conf").and_then(|text| configured(text.as_bytes()));
    [conf, Some(PathBuf::from("/var/run/nvidia-topologyd/virtualTopology.xml"))]
        .into_iter()
        .flatten()
        .map(|path| below_root(&path))
        .filter(|path| path.is_file())
        .collect()
}

/// Files that may be about another kind of instance, and count only if they name all of this machine's GPUs.
pub fn vendor_files(tree: &Tree) -> Vec<PathBuf> {
    let files = VENDOR_DIRECTORIES.iter().flat_map(|directory| {
        let names = tree.names(directory).into_iter();
        names
            .filter(|name| name.contains("topo") && name.ends_with(".xml"))
            .map(move |name| tree.root().join(directory).join(name))
    });
    files.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str, address: &str) -> Place {
        parse(text.as_bytes()).unwrap()[&address.parse().unwrap()].clone()
    }

    #[test]
    fn a_device_below_a_switch_belongs_to_the_node_around_it() {
        let text = r#"<system version="1"><cpu numaid="0"/><cpu numaid="3" affinity="f0"><pci busid="ffff:ff:01.0">
            <pci busid="0001:00:00.0" class="0x030200"/></pci></cpu></system>"#;
        assert_eq!(place(text, "0001:00:00.0").node, Some(3));
    }

    #[test]
    fn a_mask_that_two_nodes_share_says_nothing() {
        let text = r#"<system><cpu numaid="0" affinity="ff"><pci busid="0001:00:00.0"/></cpu>
            <cpu numaid="1" affinity="ff"><pci busid="0002:00:00.0"/></cpu></system>"#;
        assert_eq!(place(text, "0002:00:00.0"), Place { node: Some(1), affinity: None });
    }

    #[test]
    fn a_negative_numaid_is_unknown_and_not_node_0() {
        let text = r#"<system><cpu numaid="-1" affinity="f0"><pci busid="0001:00:00.0"/></cpu></system>"#;
        let place = place(text, "0001:00:00.0");
        assert_eq!(place.node, None);
        assert_eq!(place.affinity, Some(CpuSet::from_list("4-7").unwrap()));
    }

    #[test]
    fn other_xml_is_refused_with_the_reason() {
        let error = parse("<topology><object type=\"Machine\"/></topology>".as_bytes()).unwrap_err();
        assert!(error.to_string().contains("<cpu>"), "{error}");
        assert!(parse("<system><cpu numaid=\"0\"></system>".as_bytes()).is_err());
        assert!(parse("<system><cpu numaid=\"zero\"/></system>".as_bytes()).is_err());
    }

    #[test]
    fn the_last_setting_in_nccl_conf_counts_and_comments_do_not() {
        let text = "# NCCL_TOPO_FILE=/no\nNCCL_DEBUG=INFO\nNCCL_TOPO_FILE=/a.xml\nNCCL_TOPO_FILE=/b.xml\n";
        assert_eq!(configured(text.as_bytes()), Some(PathBuf::from("/b.xml")));
        assert_eq!(configured("NCCL_TOPO_FILE=\n".as_bytes()), None);
    }
}
