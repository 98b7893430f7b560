//! Who is taken for what: every way to feed a GPU or to supply a feeder, and everyone who only looks like it.

use std::process::Command;

use serde_json::Value;

use crate::guest::lab;
use crate::load::binary;
use crate::stoker::{BINARY, stop_shared};

/// Shows the zoo to a scheduler with `options`, and fails unless all are taken for what they are.
fn show(options: &str, zoo: &[&str]) {
    let _lab = lab();
    stop_shared();
    let json = std::env::temp_dir().join("zoo.json");
    let mut command = Command::new(binary());
    command.args(["zoo", "--scheduler", &format!("{BINARY} {options}"), "--json"]).arg(&json).args(zoo);
    let output = command.output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    println!("{table}");
    assert!(output.status.success(), "{table}\n{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let totals = &report["totals"];
    assert_eq!((&totals["false_feeders"], &totals["missed_feeders"]), (&Value::from(0), &Value::from(0)), "{table}");
}

#[test]
fn every_feeder_is_found_and_nobody_else_is_and_suppliers_are() {
    show("", &[]);
}

#[test]
fn with_their_launches_probed_feeders_are_found_that_nothing_else_tells_from_their_processs_threads() {
    show("--probe-launches", &["--stand-ins", "--seconds", "8", "--hogs", "4"]);
}
