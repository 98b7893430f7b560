//! Reads a `/sys` and `/proc` tree: this machine's, or a copy of another's.

use std::path::{Component, Path, PathBuf};

/// A directory that holds `sys` and `proc`. Reads answer `None` for what is not there: on some machine,
/// every file is missing.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The tree below `root`, which is `/` for this machine.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where the tree is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether `path` (relative to the root) exists.
    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.root.join(path).exists()
    }

    /// The trimmed text of a file.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = std::fs::read(self.root.join(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_string())
    }

    /// A file that holds one decimal number.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<i64> {
        self.text(path)?.parse().ok()
    }

    /// A file that holds one hexadecimal number with or without `0x`, such as a PCI class.
    pub fn hex(&self, path: impl AsRef<Path>) -> Option<u32> {
        u32::from_str_radix(self.text(path)?.trim_start_matches("0x"), 16).ok()
    }

    /// A `dev` file: `major:minor`.
    pub fn device_number(&self, path: impl AsRef<Path>) -> Option<(u32, u32)> {
        let text = self.text(path)?;
        let (major, minor) = text.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// The sorted names in a directory; none when it is missing.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Where a link points, without its leading `..`: `/sys/class/drm/card0` gives `devices/pci0000:00/…/card0`.
    /// Not resolved on the file system, because copies of `/sys` often lack the target.
    pub fn link(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let target = std::fs::read_link(self.root.join(path)).ok()?;
        Some(target.components().filter(|part| matches!(part, Component::Normal(_))).collect())
    }

    /// The last name of what a link points to, for example a device's driver.
    pub fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(self.link(path)?.file_name()?.to_string_lossy().into_owned())
    }
}

/// The number in a name such as `renderD128` or `card0`; `None` for `card0-HDMI-A-1`.
pub fn numbered(name: &str, prefix: &str) -> Option<u32> {
    let digits = name.strip_prefix(prefix)?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// The capacity of each of `cpus`, 1 to 1024, 1024 being the fastest. `read(cpu, file)` reads a number from the
/// CPU's directory in sysfs.
///
/// The kernel's own figure comes first. Where it has none, the firmware's (it also tells which cores of a server
/// turbo highest), then the highest frequency. A file that some CPU lacks is not used for any: figures of different
/// kinds do not compare.
pub fn capacities(cpus: &[u32], read: impl Fn(u32, &str) -> Option<i64>) -> Vec<u32> {
    let column = |file: &str| -> Option<Vec<i64>> {
        cpus.iter().map(|cpu| read(*cpu, file).filter(|value| *value > 0)).collect()
    };
    if let Some(kernel) = column("cpu_capacity") {
        return kernel.into_iter().map(|value| value.clamp(1, 1024) as u32).collect();
    }
    let known = column("acpi_cppc/highest_perf").or_else(|| column("cpufreq/cpuinfo_max_freq"));
    scale(&known.unwrap_or_else(|| vec![1; cpus.len()]))
}

/// Scales positive figures so that the largest becomes 1024.
pub fn scale(values: &[i64]) -> Vec<u32> {
    let largest = values.iter().copied().max().unwrap_or(1).max(1);
    values.iter().map(|value| (value.saturating_mul(1024) / largest).clamp(1, 1024) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connectors_are_not_cards() {
        assert_eq!(numbered("card0", "card"), Some(0));
        assert_eq!(numbered("renderD128", "renderD"), Some(128));
        assert_eq!(numbered("card0-VGA-1", "card"), None);
        assert_eq!(numbered("card", "card"), None);
    }

    #[test]
    fn hybrid_cores_without_the_kernels_figure_are_scaled_by_firmware() {
        let read = |cpu: u32, file: &str| match file {
            "acpi_cppc/highest_perf" => Some(if cpu < 2 { 64 } else { 39 }),
            _ => None,
        };
        assert_eq!(capacities(&[0, 1, 2], read), [1024, 1024, 624]);
    }

    #[test]
    fn a_figure_that_one_cpu_lacks_is_used_for_none() {
        let read = |cpu: u32, file: &str| match file {
            "cpu_capacity" => (cpu == 0).then_some(512),
            "cpufreq/cpuinfo_max_freq" => Some(2_000_000),
            _ => None,
        };
        assert_eq!(capacities(&[0, 1], read), [1024, 1024]);
        assert_eq!(capacities(&[0, 1], |_, _| None), [1024, 1024]);
    }

    #[test]
    fn the_kernels_capacity_is_taken_as_it_is() {
        assert_eq!(
            capacities(&[0, 1], |cpu, file| (file == "cpu_capacity").then_some(446 + i64::from(cpu))),
            [446, 447]
        );
    }
}
