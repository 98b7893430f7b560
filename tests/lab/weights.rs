//! The measure of cgroups itself, held against what the kernel's own scheduler does for certain.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::guest::lab;
use crate::load::binary;
use crate::stoker::stop_shared;

#[test]
fn limits_of_groups_are_seen_to_be_kept_and_no_group_is_left_behind() {
    let _lab = lab();
    stop_shared();
    let mut weights = Command::new(binary());
    weights.args(["weights", "--json", "--trees", "max,idle", "--seconds", "1.5", "--warmup-s", "0.3"]);
    let output = weights.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let trees: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (max, idle) = (&trees[0], &trees[1]);

    let limits = max["limits"].as_array().unwrap();
    assert_eq!(limits.len(), 5);
    for limit in limits {
        let (used, limit_cpus) = (limit["used_cpus"].as_f64().unwrap(), limit["limit_cpus"].as_f64().unwrap());
        // A period, 0.1 s, may have been begun before, and another not be over.
        assert!(used > 0.5 * limit_cpus && used < 1.15 * limit_cpus, "{limit}");
    }
    for tree in [max, idle] {
        let rows = tree["rows"].as_array().unwrap();
        let sum = |key: &str| rows.iter().map(|row| row[key].as_f64().unwrap()).sum::<f64>();
        assert!((sum("share") - 1.0).abs() < 1e-9 && (sum("due") - 1.0).abs() < 1e-9, "{tree}");
    }
    assert!(idle["idle_share"].as_f64().unwrap() < 0.02, "{idle}");
    let left =
        fs::read_dir("/sys/fs/cgroup").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    assert_eq!(left.filter(|name| name.starts_with("lab_load")).collect::<Vec<_>>(), [""; 0]);
}
