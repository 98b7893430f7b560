//! `scx_stoker check` and the configuration file, by the program itself, on whatever machine this is.

// A helper that fails fails its test; clippy's exemption covers only the test functions themselves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn scx_stoker(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_scx_stoker")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn check_names_sched_ext_as_there_or_as_missing_with_the_way_out() {
    let output = scx_stoker(&["check"]);
    let (list, reason) = (text(&output.stdout), text(&output.stderr));
    let line = list.lines().find(|line| line.contains(" sched_ext ")).unwrap_or_else(|| panic!("{list}"));
    if Path::new("/sys/kernel/sched_ext").exists() {
        assert!(line.starts_with("ok "), "{line}");
    } else {
        assert!(line.starts_with("NEEDED ") && list.contains("CONFIG_SCHED_CLASS_EXT=y"), "{list}");
        assert_eq!(output.status.code(), Some(1), "{reason}");
        assert!(reason.contains("cannot run here") && reason.contains("sched_ext"), "{reason}");
    }
}

#[test]
fn checks_json_has_the_same_verdict_as_its_exit_status_and_names_each_thing_once() {
    let output = scx_stoker(&["check", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["can_run"].as_bool(), Some(output.status.success()));
    let items = report["items"].as_array().unwrap();
    let mut names: Vec<&str> = items.iter().map(|item| item["name"].as_str().unwrap()).collect();
    for name in ["sched_ext", "BTF", "rights", "security_file_ioctl", "uprobes", "NVML", "GPUs", "configuration"] {
        assert!(names.contains(&name), "no {name} in {names:?}");
    }
    let unhelpful = items.iter().find(|item| item["state"] != "there" && item["way_out"].is_null());
    assert_eq!(unhelpful, None, "not there, and no word on what to do");
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all, "{names:?}");
}

#[test]
fn a_mistake_in_the_configuration_file_ends_the_program_with_file_and_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("stoker.toml");
    std::fs::write(&file, "slice-us = 1000\nfeeder-cap = 500\n").unwrap();
    let place = format!("{}:2: ", file.display());
    for arguments in [&["--config"][..], &["check", "--config"]] {
        let output = scx_stoker(&[arguments, &[file.to_str().unwrap()]].concat());
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&place) && said.contains("1..=95"), "{said}");
    }
}
