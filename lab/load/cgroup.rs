//! Control groups (v2) that a run makes and removes again.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::sys::{MS, mount, now_ns, sleep_ns};

/// Where cgroups are.
pub const ROOT: &str = "/sys/fs/cgroup";

/// The root of the hierarchy, which is mounted if nobody has.
///
/// # Errors
/// It is not there and cannot be mounted.
pub fn root() -> Result<PathBuf> {
    let root = PathBuf::from(ROOT);
    if !root.join("cgroup.controllers").exists() {
        mount(c"cgroup2", c"/sys/fs/cgroup", c"cgroup2", 0).context("mounting cgroups v2 (needs root)")?;
    }
    Ok(root)
}

/// Lets the groups in `parent` have `controller`.
///
/// # Errors
/// The kernel's, with what was tried.
pub fn delegate(parent: &Path, controller: &str) -> Result<()> {
    write(parent, "cgroup.subtree_control", &format!("+{controller}"))
}

/// Writes `value` to `file` of the group `group`.
///
/// # Errors
/// The kernel's, with what was tried.
pub fn write(group: &Path, file: &str, value: &str) -> Result<()> {
    fs::write(group.join(file), value).with_context(|| format!("writing {value} to {}/{file}", group.display()))
}

/// Moves the calling process into `group`.
///
/// # Errors
/// The kernel's, with what was tried.
pub fn join(group: &Path) -> Result<()> {
    write(group, "cgroup.procs", "0")
}

/// CPU time that the tasks in and below `group` have used, in ns.
///
/// # Errors
/// The file cannot be read, or does not say.
pub fn usage_ns(group: &Path) -> Result<u64> {
    let path = group.join("cpu.stat");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let usec = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse::<u64>().ok());
    Ok(usec.with_context(|| format!("{}: no usage_usec", path.display()))? * 1000)
}

/// Groups that are removed when this is dropped, the last one first. Their tasks must have ended by then.
#[derive(Default)]
pub struct Groups(Vec<PathBuf>);

impl Groups {
    /// Makes the group `path`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make(&mut self, path: &Path) -> Result<()> {
        fs::create_dir(path).with_context(|| format!("making the cgroup {}", path.display()))?;
        self.0.push(path.to_path_buf());
        Ok(())
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        /// A task that has been reaped may count for its group a moment longer.
        const LIMIT_NS: u64 = 2000 * MS;
        let limit_ns = now_ns() + LIMIT_NS;
        while let Some(path) = self.0.pop() {
            while let Err(error) = fs::remove_dir(&path) {
                if now_ns() >= limit_ns {
                    eprintln!("lab_load: the cgroup {} is left behind: {error}", path.display());
                    break;
                }
                sleep_ns(MS);
            }
        }
    }
}
