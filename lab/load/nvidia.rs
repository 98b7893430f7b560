//! A stand-in for an NVIDIA GPU: `/dev/nvidia0` with NVIDIA's device number, kept by this program through CUSE, and an
//! NVML that says which PCI device it belongs to. It can be opened, and answers each ioctl with success. CUSE has no mmap:
//! the kernel refuses it, after its hooks have seen the attempt.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::gpu::Gpu;

/// Where the device appears.
pub const PATH: &str = "/dev/nvidia0";
const MAJOR: u32 = 195;
const MINOR: u32 = 0;

/// Numbers of the FUSE protocol, from linux/fuse.h.
mod fuse {
    pub const MAJOR: u32 = 7;
    pub const MINOR: u32 = 31;
    pub const OPEN: u32 = 14;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FORGET: u32 = 2;
    pub const FLUSH: u32 = 25;
    pub const INTERRUPT: u32 = 36;
    pub const IOCTL: u32 = 39;
    pub const CUSE_INIT: u32 = 4096;
    /// struct fuse_in_header.
    pub const IN_HEADER_BYTES: usize = 40;
    /// struct fuse_out_header.
    pub const OUT_HEADER_BYTES: usize = 16;
    /// What a read must have room for, at least.
    pub const MIN_READ_BYTES: usize = 8192;
}

/// The device. It goes away when this is dropped.
pub struct Device {
    channel: File,
    buffer: Vec<u8>,
}

impl Device {
    /// Makes it appear.
    pub fn create() -> Result<Self> {
        let loaded = Command::new("modprobe").arg("cuse").status().is_ok_and(|status| status.success());
        anyhow::ensure!(loaded, "the kernel has no module `cuse`, which the stand-in for {PATH} takes");
        let channel = File::options().read(true).write(true).open("/dev/cuse").context("/dev/cuse (needs root)")?;
        let mut device = Self { channel, buffer: vec![0; fuse::MIN_READ_BYTES] };
        let (opcode, unique) = device.next()?;
        anyhow::ensure!(opcode == fuse::CUSE_INIT, "CUSE began with request {opcode}");
        // struct cuse_init_out: versions, unused, flags, longest read and write, device number, ten spare; then names.
        let mut numbers = [0_u32; 18];
        numbers[..8].copy_from_slice(&[fuse::MAJOR, fuse::MINOR, 0, 0, 4096, 4096, MAJOR, MINOR]);
        let mut answer: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        answer.extend_from_slice(b"DEVNAME=nvidia0\0");
        device.answer(unique, 0, &answer)?;
        anyhow::ensure!(Path::new(PATH).exists(), "the kernel did not make {PATH}: is its number taken?");
        Ok(device)
    }

    /// Answers one request of whoever uses the device, and waits for it first.
    pub fn serve_one(&mut self) -> Result<()> {
        let (opcode, unique) = self.next()?;
        let success = |bytes: usize| vec![0; bytes];
        match opcode {
            // struct fuse_open_out.
            fuse::OPEN => self.answer(unique, 0, &success(16)),
            // struct fuse_ioctl_out.
            fuse::IOCTL => self.answer(unique, 0, &success(16)),
            // struct fuse_write_out: nothing is taken.
            fuse::WRITE => self.answer(unique, 0, &success(8)),
            fuse::RELEASE | fuse::FLUSH => self.answer(unique, 0, &[]),
            // These want no answer.
            fuse::FORGET | fuse::INTERRUPT => Ok(()),
            _ => self.answer(unique, -libc::ENOSYS, &[]),
        }
    }

    /// Waits for a request. Returns its operation and what its answer must carry.
    fn next(&mut self) -> Result<(u32, u64)> {
        let bytes = loop {
            match self.channel.read(&mut self.buffer) {
                // One that was taken back before it was read, or a signal.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => {}
                other => break other.context("reading from /dev/cuse")?,
            }
        };
        anyhow::ensure!(bytes >= fuse::IN_HEADER_BYTES, "a request of {bytes} bytes");
        let opcode = u32::from_ne_bytes(self.buffer[4..8].try_into()?);
        let unique = u64::from_ne_bytes(self.buffer[8..16].try_into()?);
        Ok((opcode, unique))
    }

    fn answer(&mut self, unique: u64, error: i32, body: &[u8]) -> Result<()> {
        let length = (fuse::OUT_HEADER_BYTES + body.len()) as u32;
        let answer = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &unique.to_ne_bytes(), body].concat();
        match self.channel.write_all(&answer) {
            // Whoever asked does not wait any more.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other.context("writing to /dev/cuse"),
        }
    }
}

/// `lab_load nvidia0`: keeps the device until it is killed.
pub fn main() -> Result<()> {
    let mut device = Device::create()?;
    loop {
        device.serve_one()?;
    }
}

/// Lets programs that this one starts see an NVML which says that the device is `gpu`. The caller has one thread only.
pub fn let_nvml_say(gpu: &Gpu) -> Result<()> {
    let folder = std::env::temp_dir().join("lab_load.nvml");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let library = folder.join("libnvidia-ml.so.1");
    let original = std::env::current_exe()?.with_file_name("libnvml_stand_in.so");
    anyhow::ensure!(original.exists(), "{} is missing (cargo build --examples)", original.display());
    match symlink(&original, &library) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).context("linking NVML"),
        _ => {}
    }
    let address = gpu.pci_address().with_context(|| format!("{} is not on PCI", gpu.name))?;
    let state = folder.join("nvml.json");
    let gpus = format!(
        r#"{{"gpus": [{{"name": "stand-in", "uuid": "GPU-stand-in", "pci": "{address}", "minor": {MINOR}}}]}}"#
    );
    fs::write(&state, gpus).with_context(|| state.display().to_string())?;
    // SAFETY: no other thread reads the environment, says the caller.
    unsafe {
        std::env::set_var("LD_LIBRARY_PATH", &folder);
        std::env::set_var("STOKER_NVML_FILE", &state);
    }
    Ok(())
}
