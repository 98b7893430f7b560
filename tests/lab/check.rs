//! `scx_stoker check` on a kernel that has all it takes.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::guest::{lab, state};
use crate::stoker::{BINARY, stop_shared, with_shared};

/// Runs it as `user` and returns whether it says that scx_stoker can run, and all items.
fn check(user: u32) -> (bool, Vec<Value>) {
    let mut command = Command::new(BINARY);
    let output = command.args(["check", "--json"]).uid(user).gid(user).stdin(Stdio::null()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let items = report["items"].as_array().unwrap().clone();
    assert_eq!(report["can_run"].as_bool(), Some(output.status.success()), "{items:?}");
    (output.status.success(), items)
}

fn state_of<'a>(items: &'a [Value], name: &str) -> &'a str {
    let item = items.iter().find(|item| item["name"] == name);
    item.unwrap_or_else(|| panic!("no {name} in {items:?}"))["state"].as_str().unwrap()
}

#[test]
fn check_finds_what_the_scheduler_uses_and_starts_nothing() {
    let _lab = lab();
    stop_shared();
    let (can_run, items) = check(0);
    println!("{items:#?}");
    assert!(can_run, "{items:?}");
    let used = ["security_file_open", "security_file_ioctl", "security_mmap_file", "irq_handler_entry", "processes"];
    for name in used.into_iter().chain(["GPUs", "GPU device files", "GPU interrupts", "GPU homes"]) {
        assert_eq!(state_of(&items, name), "there", "{name}: {items:?}");
    }
    assert_eq!(state(), "disabled");
}

#[test]
fn check_says_yes_beside_a_running_scx_stoker_and_lets_it_be() {
    let _lab = lab();
    with_shared(|stoker| {
        let (can_run, items) = check(0);
        assert!(can_run, "{items:?}");
        assert_eq!((stoker.exit_status(), state().as_str()), (None, "enabled"));
    });
}

#[test]
fn without_root_check_looks_at_what_it_can_and_asks_for_root() {
    /// `nobody`.
    const NOBODY: u32 = 65534;

    let _lab = lab();
    stop_shared();
    let (can_run, items) = check(NOBODY);
    assert!(!can_run);
    assert_eq!(state_of(&items, "rights"), "missing");
    assert_eq!(state_of(&items, "processes"), "unseen");
    for name in ["sched_ext", "BTF", "security_file_ioctl", "GPU homes"] {
        assert_eq!(state_of(&items, name), "there", "{name}: {items:?}");
    }
}
