//! How well feeders are served: what the scheduler must reach, against EEVDF and SCHED_FIFO feeders in the same boot.

use std::process::Command;

use serde_json::Value;

use crate::guest::lab;
use crate::load::binary;
use crate::stoker::{BINARY, LOAD_LIMIT_S, stop_shared};

/// What the counted lab can tell apart in a latency, in ns.
const RESOLUTION_NS: f64 = 1e6;
/// CPUs of the guest.
const CPUS: f64 = 4.0;

#[test]
fn feeders_are_served_nearly_as_by_sched_fifo_and_nothing_else_is_lost() {
    let _lab = lab();
    stop_shared();
    let json = std::env::temp_dir().join("figures.json");
    let mut compare = Command::new(binary());
    compare.args(["compare", "--seconds", "3", "--scheduler", &format!("scx_stoker={BINARY}"), "--json"]).arg(&json);
    let output = compare.output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    println!("{table}");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let comparison: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let by_role = |role: &str| {
        let contenders = comparison["contenders"].as_array().unwrap();
        contenders.iter().find(|contender| contender["role"] == role).unwrap()
    };
    let (eevdf, ceiling, judged) = (by_role("baseline"), by_role("ceiling"), by_role("judged"));
    let mut failures = Vec::new();
    let mut hold = |what: String, holds: bool| {
        if !holds {
            failures.push(what);
        }
    };
    let load_s = judged["load_s"].as_f64().unwrap();
    hold(format!("attached after {load_s:.1} s"), load_s <= LOAD_LIMIT_S);

    let runs = judged["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4, "every scenario was run");
    for (index, run) in runs.iter().enumerate() {
        let scenario = run["scenario"].as_str().unwrap();
        let of = |contender: &Value, key: &str| contender["runs"][index]["feed"][key].as_f64().unwrap();
        let own = |key: &str| of(judged, key);

        hold(format!("{scenario}: run delay {:.4}", own("delay_share")), own("delay_share") <= 0.02);
        let busy = own("gpu_busy") / of(ceiling, "gpu_busy");
        // What feeds the feeders from other processes is not detected yet.
        let wanted = if scenario == "loaders" { 0.9 } else { 0.97 };
        hold(format!("{scenario}: GPU busy {busy:.3} of the ceiling's, not {wanted}"), busy >= wanted);
        let (late, limit) = (own("wake_p99_ns"), 1.3 * of(ceiling, "wake_p99_ns").max(RESOLUTION_NS));
        hold(format!("{scenario}: wake-up p99 {late} ns, not {limit}"), late <= limit);
        hold(format!("{scenario}: at home {:.4}", own("home_share")), own("home_share") >= 0.99);
        let work = own("total_units") / of(eevdf, "total_units");
        hold(format!("{scenario}: work {work:.3} of EEVDF's"), work >= 0.98);
        hold(format!("{scenario}: {:.3} CPUs idle", own("idle_cpus")), own("idle_cpus") <= 0.01 * CPUS);
    }
    assert!(failures.is_empty(), "missed: {failures:#?}\n{table}");
}
