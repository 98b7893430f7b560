//! Cgroups that tests make.

use std::ffi::CString;
use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};

use crate::guest::within;

/// A cgroup of the test's. Removed when dropped, which takes that its processes have ended.
pub struct Group(PathBuf);

impl Group {
    /// Makes it, with extended attributes `words`.
    pub fn new(name: &str, words: &[(&str, &str)]) -> Self {
        let path = PathBuf::from("/sys/fs/cgroup").join(name);
        fs::create_dir(&path).unwrap();
        let target = CString::new(path.to_str().unwrap()).unwrap();
        for (attribute, value) in words {
            let name = CString::new(*attribute).unwrap();
            // SAFETY: the strings live through the call, and the length is the value's.
            let set = unsafe { libc::setxattr(target.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
            assert_eq!(set, 0, "{attribute}: {}", std::io::Error::last_os_error());
        }
        Self(path)
    }

    /// Writes `value` to its file `file`.
    pub fn set(&self, file: &str, value: &str) {
        fs::write(self.0.join(file), value).unwrap_or_else(|error| panic!("{value} for {file}: {error}"));
    }

    /// Moves a process into it.
    pub fn take(&self, pid: impl Display) {
        self.set("cgroup.procs", &pid.to_string());
    }

    /// CPU time that its tasks have used, in seconds.
    pub fn used_s(&self) -> f64 {
        let stat = fs::read_to_string(self.0.join("cpu.stat")).unwrap();
        stat.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap().parse::<f64>().unwrap() / 1e6
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that was killed just now may take a moment to be gone.
        within(5.0, || fs::remove_dir(&self.0).is_ok());
    }
}

/// A cgroup with a process that spins on one CPU, after a shell has run `first`.
pub struct Spinning {
    child: Child,
    pub group: Group,
}

impl Spinning {
    /// `file` of the group has `value`.
    pub fn start(name: &str, file: &str, value: &str, cpu: u32, first: &str) -> Self {
        let group = Group::new(name, &[]);
        group.set(file, value);
        let script = format!("{first}\nwhile :; do :; done");
        let child = Command::new("taskset").args(["-c", &cpu.to_string(), "sh", "-c", &script]).spawn().unwrap();
        group.take(child.id());
        Self { child, group }
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}
