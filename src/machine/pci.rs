//! PCI addresses, whose domain may be wider than the 16 bits that most tools allow for.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Where a device sits on PCI. Serialises as the kernel writes it (`0000:3b:00.0`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Domain (segment). Virtual ones, for example behind Intel VMD or Hyper-V, exceed 0xffff.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device on the bus, 0 to 31.
    pub device: u8,
    /// Function of the device, 0 to 7.
    pub function: u8,
}

/// The text was no PCI address.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAnAddress;

impl fmt::Display for NotAnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a PCI address (expected for example 0000:3b:00.0)")
    }
}

impl std::error::Error for NotAnAddress {}

/// Accepts the kernel's form and NVML's, which pads the domain to eight digits and uses capitals.
impl FromStr for PciAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        // from_str_radix alone would take a sign.
        let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
            let plain = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            plain.then(|| u32::from_str_radix(text, 16).ok()).flatten().ok_or(NotAnAddress)
        };
        let mut parts = text.trim().split(':');
        let (Some(domain), Some(bus), Some(rest), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(NotAnAddress);
        };
        let (device, function) = rest.split_once('.').ok_or(NotAnAddress)?;
        let (device, function) = (hex(device, 2..=2)?, hex(function, 1..=1)?);
        if device > 31 || function > 7 {
            return Err(NotAnAddress);
        }
        Ok(Self {
            domain: hex(domain, 4..=8)?,
            bus: hex(bus, 2..=2)? as u8,
            device: device as u8,
            function: function as u8,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_above_16_bits_survives() {
        let address: PciAddress = "10000:e1:00.0".parse().unwrap();
        assert_eq!((address.domain, address.bus), (0x10000, 0xe1));
        assert_eq!(address.to_string(), "10000:e1:00.0");
    }

    #[test]
    fn nvml_and_the_kernel_mean_the_same_device() {
        assert_eq!("00000000:3B:00.0".parse::<PciAddress>(), "0000:3b:00.0".parse());
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in ["", "card0", "pci0000:00", "3b:00.0", "0000:3b:00", "0000:3b:20.0", "0000:3b:00.8", "+000:3b:00.0"]
        {
            assert_eq!(text.parse::<PciAddress>(), Err(NotAnAddress), "{text}");
        }
    }
}
