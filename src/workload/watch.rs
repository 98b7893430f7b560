//! Notices that GPUs or their drivers came or went.

use std::fs;
use std::path::{Path, PathBuf};

/// Where a GPU or its driver leaves a name when it comes.
const PLACES: [&str; 6] = [
    "sys/class/drm",
    "sys/class/accel",
    "sys/class/vfio",
    "sys/class/kfd",
    "proc/driver/nvidia/gpus",
    "sys/module/nvidia_uvm",
];

/// The GPUs that were there when it was made.
#[derive(Debug)]
pub struct GpuWatch {
    root: PathBuf,
    names: Vec<String>,
}

impl GpuWatch {
    /// Remembers what is there now.
    pub fn new() -> Self {
        Self::at(Path::new("/"))
    }

    fn at(root: &Path) -> Self {
        Self { root: root.to_path_buf(), names: names(root) }
    }

    /// Whether something is there that was not, or the other way round.
    pub fn has_changed(&self) -> bool {
        names(&self.root) != self.names
    }
}

impl Default for GpuWatch {
    fn default() -> Self {
        Self::new()
    }
}

fn names(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for place in PLACES {
        for entry in fs::read_dir(root.join(place)).into_iter().flatten().flatten() {
            // A monitor that is plugged in is no GPU.
            let name = entry.file_name().to_string_lossy().into_owned();
            if !(name.starts_with("card") && name.contains('-')) {
                names.push(format!("{place}/{name}"));
            }
        }
    }
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_render_node_is_a_change_and_a_new_monitor_is_not() {
        let root = tempfile::tempdir().unwrap();
        let drm = root.path().join("sys/class/drm");
        fs::create_dir_all(drm.join("card0")).unwrap();
        let watch = GpuWatch::at(root.path());
        assert!(!watch.has_changed());
        fs::create_dir(drm.join("card0-DP-1")).unwrap();
        assert!(!watch.has_changed());
        fs::create_dir(drm.join("renderD128")).unwrap();
        assert!(watch.has_changed());
    }
}
