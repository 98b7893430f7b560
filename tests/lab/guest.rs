//! The guest: whether this is one, and what its kernel says.

use std::fs;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Where the kernel says whether a sched_ext scheduler is active.
const STATE: &str = "/sys/kernel/sched_ext/state";

/// Takes the machine for one test. Refuses outside the lab: tests take CPUs offline, unload drivers and kill.
pub fn lab() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::new(());
    assert!(
        std::env::var_os("LAB_GUEST").is_some(),
        "this is not the lab guest, and these tests would disturb a real machine: run scripts/test, or \
         scripts/lab --counted -- {} --test-threads=1",
        std::env::current_exe().unwrap().display()
    );
    assert!(fs::exists(STATE).unwrap(), "this guest's kernel has no sched_ext ({STATE} is missing)");
    // That another test failed says nothing against this one.
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a sched_ext scheduler is active.
pub fn is_enabled() -> bool {
    state() == "enabled"
}

/// What the kernel says of sched_ext: `enabled`, `disabled` or on its way.
pub fn state() -> String {
    fs::read_to_string(STATE).unwrap().trim().to_string()
}

/// Waits until `is_true`, and says whether it became so within `seconds`.
pub fn within(seconds: f64, mut is_true: impl FnMut() -> bool) -> bool {
    let limit = Instant::now() + Duration::from_secs_f64(seconds);
    loop {
        if is_true() {
            return true;
        }
        if Instant::now() >= limit {
            return false;
        }
        sleep(Duration::from_millis(20));
    }
}

/// Brings a CPU online or takes it offline.
pub fn set_online(cpu: u32, is_online: bool) {
    fs::write(format!("/sys/devices/system/cpu/cpu{cpu}/online"), if is_online { "1" } else { "0" }).unwrap();
}

/// Runs modprobe.
pub fn modprobe(arguments: &[&str]) {
    let output = Command::new("modprobe").args(arguments).output().unwrap();
    assert!(output.status.success(), "modprobe {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The threads of all descendants of `pid`, with their names in /proc.
pub fn threads_below(pid: u32) -> Vec<u32> {
    let children = |pid: u32| -> Vec<u32> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
    };
    let mut threads = Vec::new();
    for child in children(pid) {
        let tasks = fs::read_dir(format!("/proc/{child}/task")).into_iter().flatten().flatten();
        threads.extend(tasks.filter_map(|task| task.file_name().to_str()?.parse::<u32>().ok()));
        threads.extend(threads_below(child));
    }
    threads
}

/// A line of /proc/TID/status.
pub fn status_of(tid: u32, key: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.trim().to_string())
}
