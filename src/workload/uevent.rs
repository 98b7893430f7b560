//! The kernel's own messages about devices that come and go: see `NETLINK_KOBJECT_UEVENT` in netlink(7).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The multicast group of the kernel; udev has another one for what it makes of that.
const KERNEL: u32 = 1;

/// More messages than this at one look need not be told apart.
const MANY: u32 = 4096;

/// The kernel limits a message to this, with what surrounds it.
const LENGTH: usize = 8192;

/// A socket that receives them.
#[derive(Debug)]
pub struct Uevents(OwnedFd);

impl Uevents {
    /// Receives all that come from now on.
    ///
    /// # Errors
    /// The kernel does not let us, as in some containers.
    pub fn listen() -> io::Result<Self> {
        // SAFETY: takes numbers only; the descriptor is ours alone.
        let socket = unsafe {
            let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let fd = libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: an address of all zeroes is one.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        address.nl_groups = KERNEL;
        let length = size_of_val(&address) as libc::socklen_t;
        // SAFETY: address and length belong together, and outlive the call.
        if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(socket))
    }

    /// Whether a message came since the last call that GPUs may have to do with.
    pub fn concern_gpus(&self) -> bool {
        let mut message = [0u8; LENGTH];
        let mut is_told = false;
        for _ in 0..MANY {
            // SAFETY: the buffer and its length belong together.
            let length = unsafe { libc::recv(self.0.as_raw_fd(), message.as_mut_ptr().cast(), LENGTH, 0) };
            match usize::try_from(length) {
                Ok(length) => is_told |= concerns_gpus(&message[..length]),
                // Nothing more; or some were lost, and who knows which.
                Err(_) => return is_told || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// Whether a message is about a device, a driver or a module that may be a GPU's.
fn concerns_gpus(message: &[u8]) -> bool {
    let value = |key: &str| {
        let fields = message.split(|&byte| byte == 0).filter_map(|field| std::str::from_utf8(field).ok());
        fields.filter_map(|field| field.split_once('=')).find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    match value("SUBSYSTEM") {
        // A change is a monitor's.
        Some("drm") => value("ACTION") != Some("change"),
        Some("accel" | "vfio" | "vfio-dev" | "kfd" | "misc" | "module" | "pci") => true,
        Some(other) => other.starts_with("nvidia"),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_about_gpus_are_told_from_those_about_other_devices() {
        let message = |action: &str, subsystem: &str| {
            format!("{action}@/devices/x\0ACTION={action}\0DEVPATH=/devices/x\0SUBSYSTEM={subsystem}\0SEQNUM=7\0")
        };
        for (action, subsystem, concerns) in [
            ("add", "drm", true),
            ("remove", "drm", true),
            ("change", "drm", false),
            ("bind", "pci", true),
            ("add", "module", true),
            ("add", "nvidia-uvm", true),
            ("add", "block", false),
            ("change", "power_supply", false),
        ] {
            assert_eq!(concerns_gpus(message(action, subsystem).as_bytes()), concerns, "{action} {subsystem}");
        }
        assert!(!concerns_gpus(b"libudev\0\xfe\xed\xca\xfe"));
    }
}
