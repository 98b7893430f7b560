//! Notices that GPUs or their drivers came or went, or that a GPU's device or interrupt numbers changed.

use crate::machine::devices::{Scan, scan};
use crate::machine::sysfs::Tree;

use super::uevent::Uevents;

/// Looks between two that are made without a uevent: for what the kernel does not tell, such as interrupts that a
/// driver allocates when its GPU is first used, and for containers that no uevent reaches.
const SCAN_EVERY: u32 = 5;

/// The GPUs that were there when it looked last.
#[derive(Debug)]
pub struct GpuWatch {
    tree: Tree,
    scan: Scan,
    /// None where the kernel does not let us listen: then every look is a reading.
    uevents: Option<Uevents>,
    looks: u32,
}

/// What became of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// They have other device or interrupt numbers, or control devices: [`GpuWatch::scan`] has them.
    Numbers,
    /// They, or their drivers, are others.
    Gpus,
}

impl GpuWatch {
    /// Remembers what is there now.
    pub fn new() -> Self {
        // Before the first reading, so that nothing is missed.
        let uevents = Uevents::listen();
        if let Err(error) = &uevents {
            log::debug!("no uevents ({error}): GPUs are looked for once a second");
        }
        Self::at(Tree::new("/"), uevents.ok())
    }

    fn at(tree: Tree, uevents: Option<Uevents>) -> Self {
        Self { scan: scan(&tree), tree, uevents, looks: 0 }
    }

    /// Compares what is there with what was there at the last look.
    pub fn look(&mut self) -> Change {
        self.looks = self.looks.wrapping_add(1);
        let is_told = self.uevents.as_ref().is_none_or(Uevents::concern_gpus);
        if !is_told && !self.looks.is_multiple_of(SCAN_EVERY) {
            return Change::None;
        }
        let before = std::mem::replace(&mut self.scan, scan(&self.tree));
        if before == self.scan {
            Change::None
        } else if before.has_the_gpus_of(&self.scan) {
            Change::Numbers
        } else {
            Change::Gpus
        }
    }

    /// What was there at the last look.
    pub fn scan(&self) -> &Scan {
        &self.scan
    }
}

impl Default for GpuWatch {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A node of a DRM device on PCI.
    fn drm(root: &Path, name: &str, dev: &str) {
        let device = format!("sys/devices/pci0000:00/0000:03:00.0/drm/{name}");
        write(root, &format!("{device}/dev"), dev);
        fs::create_dir_all(root.join("sys/class/drm")).unwrap();
        symlink(format!("../../{}", &device[4..]), root.join("sys/class/drm").join(name)).unwrap();
    }

    #[test]
    fn gpus_that_come_are_told_from_numbers_that_change_and_a_monitor_is_neither() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let device = "sys/bus/pci/devices/0000:03:00.0";
        write(root, &format!("{device}/class"), "0x030200\n");
        write(root, &format!("{device}/vendor"), "0x1002\n");
        write(root, &format!("{device}/device"), "0x740f\n");
        drm(root, "card0", "226:0");
        drm(root, "renderD128", "226:128");
        let mut watch = GpuWatch::at(Tree::new(root), None);
        assert_eq!(watch.look(), Change::None);

        drm(root, "card0-DP-1", "226:7");
        assert_eq!(watch.look(), Change::None, "a monitor");
        write(root, &format!("{device}/msi_irqs/77"), "msi\n");
        assert_eq!(watch.look(), Change::Numbers, "its first user came");
        write(root, "sys/class/kfd/kfd/dev", "235:0");
        assert_eq!(watch.look(), Change::Numbers);
        assert_eq!(watch.look(), Change::None, "that is known now");
        fs::remove_file(root.join("sys/class/drm/card0")).unwrap();
        assert_eq!(watch.look(), Change::Numbers);
        write(root, "sys/bus/pci/devices/0000:04:00.0/class", "0x120000\n");
        assert_eq!(watch.look(), Change::Gpus);
        fs::remove_dir_all(root.join(device)).unwrap();
        fs::remove_dir_all(root.join("sys/class/drm")).unwrap();
        assert_eq!(watch.look(), Change::Gpus);
    }

    #[test]
    fn where_the_kernel_tells_of_devices_they_are_read_now_and_then_only() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        // Which a test may do, as everybody may. What this machine says meanwhile may only make it look more often.
        let mut watch = GpuWatch::at(Tree::new(root), Some(Uevents::listen().unwrap()));
        write(root, "sys/bus/pci/devices/0000:04:00.0/class", "0x120000\n");
        let looks: Vec<Change> = (0..SCAN_EVERY).map(|_| watch.look()).collect();
        assert_eq!(looks.iter().filter(|&&change| change == Change::Gpus).count(), 1, "{looks:?}");
    }
}
