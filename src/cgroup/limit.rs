//! What cgroups say of their CPU time beyond weights: `cpu.max`, `cpu.max.burst` and `cpu.idle`
//! (Documentation/admin-guide/cgroup-v2.rst). The kernel tells a scheduler of it by callback from 6.17 and 6.19 on;
//! for older ones it is read here.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What one group says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// The group's ID: its directory's inode number.
    pub cgroup: u64,
    /// CPU time it may use in each period, in ns; 0: no limit.
    pub quota_ns: u64,
    /// That period, in ns.
    pub period_ns: u64,
    /// What it may save beyond a period's quota, in ns.
    pub burst_ns: u64,
    /// Whether it is to run only when no other group wants the CPU.
    pub is_idle: bool,
}

/// What all groups below `root` say that have the cpu controller.
pub fn limits(root: &Path) -> Vec<Limit> {
    let mut found = Vec::new();
    visit(root, &mut found);
    found
}

fn visit(dir: &Path, found: &mut Vec<Limit>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        // Without its file it has no controller, and neither have those below it.
        let Ok(max) = fs::read_to_string(entry.path().join("cpu.max")) else { continue };
        let number = |file: &str| {
            fs::read_to_string(entry.path().join(file)).ok().and_then(|text| text.trim().parse::<u64>().ok())
        };
        if let (Some((quota_ns, period_ns)), Ok(metadata)) = (parse_max(&max), entry.metadata()) {
            found.push(Limit {
                cgroup: metadata.ino(),
                quota_ns,
                period_ns,
                burst_ns: number("cpu.max.burst").unwrap_or(0) * 1000,
                is_idle: number("cpu.idle") == Some(1),
            });
        }
        visit(&entry.path(), found);
    }
}

/// Quota and period, in ns, of the text of cpu.max, which has them in microseconds.
fn parse_max(text: &str) -> Option<(u64, u64)> {
    let (quota, period) = text.trim().split_once(' ')?;
    let quota_us = if quota == "max" { 0 } else { quota.parse().ok()? };
    Some((quota_us * 1000, period.parse::<u64>().ok()? * 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_read_in_nanoseconds_and_max_is_none() {
        assert_eq!(parse_max("50000 100000\n"), Some((50_000_000, 100_000_000)));
        assert_eq!(parse_max("max 100000\n"), Some((0, 100_000_000)));
        assert_eq!(parse_max("nonsense"), None);
    }

    #[test]
    fn groups_without_the_controller_and_those_below_are_left_out() {
        let root = tempfile::tempdir().unwrap();
        for (group, max) in [("a", Some("20000 50000")), ("a/b", Some("max 100000")), ("c", None)] {
            fs::create_dir(root.path().join(group)).unwrap();
            if let Some(max) = max {
                fs::write(root.path().join(group).join("cpu.max"), max).unwrap();
            }
        }
        fs::write(root.path().join("a/cpu.idle"), "1\n").unwrap();
        fs::write(root.path().join("a/cpu.max.burst"), "1000\n").unwrap();
        let found = limits(root.path());
        let ino = |group: &str| fs::metadata(root.path().join(group)).unwrap().ino();
        let a =
            Limit { cgroup: ino("a"), quota_ns: 20_000_000, period_ns: 50_000_000, burst_ns: 1_000_000, is_idle: true };
        let b = Limit { cgroup: ino("a/b"), period_ns: 100_000_000, ..Limit::default() };
        assert_eq!(found, [a, b]);
    }
}
