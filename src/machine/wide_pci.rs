//! Finds in an hwloc export the PCI devices that hwloc 2 drops when it reads it: those in domains above 0xffff, such
//! as behind Intel VMD and on Hyper-V.

use anyhow::{Context, Result};
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::cpuset::CpuSet;
use super::hwloc::PciObject;
use super::pci::PciAddress;
use super::xml::attribute;

/// The devices, each with the CPUs of the closest object around it that is no I/O object.
///
/// # Errors
/// Broken XML.
pub fn find(xml: &str) -> Result<Vec<(PciObject, CpuSet)>> {
    let mut reader = Reader::from_str(xml);
    let mut found: Vec<(PciObject, CpuSet)> = Vec::new();
    // For each open element: the CPUs around what is inside, and the device whose OS devices are inside.
    let mut open: Vec<(CpuSet, Option<usize>)> = Vec::new();
    loop {
        let at = reader.buffer_position();
        let event = reader.read_event().with_context(|| format!("broken XML near byte {at}"))?;
        let (tag, opens) = match &event {
            Event::Eof => return Ok(found),
            Event::Start(tag) => (tag, true),
            Event::Empty(tag) => (tag, false),
            Event::End(_) => {
                open.pop();
                continue;
            }
            _ => continue,
        };
        let (around, device) = open.last().cloned().unwrap_or_default();
        let mut inside = (around, device);
        if tag.name().as_ref() == b"object" {
            match attribute(tag, "type")?.as_deref() {
                Some("PCIDev") => {
                    let object = pci_object(tag)?.filter(|object| object.address.domain > 0xffff);
                    inside.1 = object.map(|object| {
                        found.push((object, inside.0.clone()));
                        found.len() - 1
                    });
                }
                Some("OSDev") => {
                    if let (Some(device), Some(name)) = (device, attribute(tag, "name")?) {
                        found[device].0.os_devices.push(name);
                    }
                }
                _ => {
                    // I/O objects have no CPU set.
                    let cpus = attribute(tag, "cpuset")?.and_then(|text| CpuSet::from_mask(&text).ok());
                    inside = (cpus.unwrap_or(inside.0), None);
                }
            }
        }
        if opens {
            open.push(inside);
        }
    }
}

/// `pci_busid="10000:e1:00.0" pci_type="0380 [8086:56c0] [8086:4905] 05 00"`.
fn pci_object(tag: &BytesStart<'_>) -> Result<Option<PciObject>> {
    let (Some(address), Some(kind)) = (attribute(tag, "pci_busid")?, attribute(tag, "pci_type")?) else {
        return Ok(None);
    };
    let hex = |text: Option<&str>| u16::from_str_radix(text?, 16).ok();
    let mut parts = kind.split([' ', '[', ']', ':']).filter(|part| !part.is_empty());
    let (class, vendor, device) = (hex(parts.next()), hex(parts.next()), hex(parts.next()));
    let (Ok(address), Some(class), Some(vendor), Some(device)) = (address.parse::<PciAddress>(), class, vendor, device)
    else {
        return Ok(None);
    };
    Ok(Some(PciObject { address, class, vendor, device, name: attribute(tag, "name")?, os_devices: Vec::new() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_that_hwloc_drops_are_found_with_what_is_around_and_below_them() {
        let xml = r#"<topology><object type="Machine" cpuset="0x0000000f"><object type="Package" cpuset="0x0000000c">
            <object type="Bridge" bridge_type="0-1"><object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:2330] x"/>
            <object type="PCIDev" pci_busid="10000:e1:00.0" pci_type="0380 [8086:56c0] [8086:4905] 05 00">
            <object type="OSDev" name="renderD128"/></object><object type="OSDev" name="eth0"/></object></object></object></topology>"#;
        let found = find(xml).unwrap();
        assert_eq!(found.len(), 1);
        let (object, cpus) = &found[0];
        assert_eq!(
            (object.address.domain, object.class, object.vendor, object.device),
            (0x10000, 0x0380, 0x8086, 0x56c0)
        );
        assert_eq!(object.os_devices, ["renderD128"]);
        assert_eq!(cpus.to_string(), "2-3");
    }
}
