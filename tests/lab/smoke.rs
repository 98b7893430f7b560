//! What must hold on every kernel: it loads, feeds and unloads. `scripts/test` runs these on the oldest one, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use crate::guest::{lab, state};
use crate::home::HOMES;
use crate::load;
use crate::stoker::{Stoker, stop_shared};
use crate::weights::{assert_idle_waits, assert_limit_holds, assert_limits_hold, measured};

#[test]
fn it_loads_keeps_feeders_at_home_and_unloads() {
    let _lab = lab();
    let stoker = Stoker::start(&[]);
    load::feed("--hogs 8 --start-on other-node --warmup-s 0.5 --seconds 2").assert_served(&HOMES);
    let spinning = "--submit doorbell --wait spin --hogs 8 --start-on other-node --warmup-s 0.5 --seconds 2";
    load::feed(spinning).assert_served(&HOMES);
    stoker.stop();
    assert_eq!(state(), "disabled");
    assert_eq!(load::feed("--hogs 4 --warmup-s 0.1 --seconds 0.5").scheduler, "kernel");
}

#[test]
fn limits_that_groups_get_while_it_runs_hold_within_a_second() {
    let _lab = lab();
    let stoker = Stoker::start(&[]);
    let trees = measured("max,idle", "1.5");
    stoker.stop();
    assert_limits_hold(&trees[0]);
    assert_idle_waits(&trees[1]);
}

#[test]
fn limits_that_groups_had_before_it_started_hold() {
    const SECONDS: f64 = 2.0;
    /// A group with one that spins on a CPU.
    struct Spinning(PathBuf, Child);
    impl Spinning {
        fn start(name: &str, file: &str, value: &str, cpu: &str) -> Self {
            let group = Path::new("/sys/fs/cgroup").join(name);
            fs::create_dir(&group).unwrap();
            fs::write(group.join(file), value).unwrap();
            let spin = "echo 0 >$0/cgroup.procs && exec taskset -c $1 sh -c 'while :; do :; done'";
            let child = Command::new("sh").args(["-c", spin, group.to_str().unwrap(), cpu]).spawn().unwrap();
            Self(group, child)
        }

        fn used_s(&self) -> f64 {
            let stat = fs::read_to_string(self.0.join("cpu.stat")).unwrap();
            stat.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap().parse::<f64>().unwrap() / 1e6
        }
    }
    impl Drop for Spinning {
        fn drop(&mut self) {
            let _ = self.1.kill().and_then(|()| self.1.wait());
            let _ = fs::remove_dir(&self.0);
        }
    }

    let _lab = lab();
    stop_shared();
    fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu").unwrap();
    let groups = [
        Spinning::start("limited", "cpu.max", "25000 100000", "2"),
        Spinning::start("other", "cpu.weight", "100", "2"),
        Spinning::start("idle", "cpu.idle", "1", "3"),
        Spinning::start("busy", "cpu.weight", "100", "3"),
    ];
    let stoker = Stoker::start(&[]);
    sleep(Duration::from_millis(500));
    let before = groups.each_ref().map(Spinning::used_s);
    sleep(Duration::from_secs_f64(SECONDS));
    let after = groups.each_ref().map(Spinning::used_s);
    stoker.stop();
    let [limited, _, idle, busy] = [0, 1, 2, 3].map(|index| (after[index] - before[index]) / SECONDS);
    assert_limit_holds(limited, 0.25, SECONDS);
    assert!(idle < 0.05 && busy > 0.8, "the idle group had {idle} CPUs, the other one {busy}");
}
