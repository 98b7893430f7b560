//! What must hold on every kernel: it loads, feeds and unloads. `scripts/test` runs these on the oldest one, too.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::group::Spinning;
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

    let _lab = lab();
    stop_shared();
    fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu").unwrap();
    let groups = [
        Spinning::start("limited", "cpu.max", "25000 100000", 2, ""),
        Spinning::start("other", "cpu.weight", "100", 2, ""),
        Spinning::start("idle", "cpu.idle", "1", 3, ""),
        Spinning::start("busy", "cpu.weight", "100", 3, ""),
    ];
    let stoker = Stoker::start(&[]);
    sleep(Duration::from_millis(500));
    let before = groups.each_ref().map(|spinning| spinning.group.used_s());
    sleep(Duration::from_secs_f64(SECONDS));
    let after = groups.each_ref().map(|spinning| spinning.group.used_s());
    stoker.stop();
    let [limited, _, idle, busy] = [0, 1, 2, 3].map(|index| (after[index] - before[index]) / SECONDS);
    assert_limit_holds(limited, 0.25, SECONDS);
    assert!(idle < 0.05 && busy > 0.8, "the idle group had {idle} CPUs, the other one {busy}");
}

#[test]
fn a_limit_holds_from_period_to_period_for_a_task_that_nobody_competes_with() {
    const LIMIT: f64 = 0.2;
    let _lab = lab();
    let stoker = Stoker::start(&[]);
    fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu").unwrap();
    // Who has slept often has long turns, of several quotas.
    let sleeps = "i=0; while [ $i -lt 200 ]; do sleep 0.001; i=$((i + 1)); done";
    let alone = Spinning::start("alone", "cpu.max", "max", 2, sleeps);
    sleep(Duration::from_secs(3));
    alone.group.set("cpu.max", "4000 20000");
    sleep(Duration::from_millis(1500));
    let windows: Vec<f64> = (0..20)
        .map(|_| {
            let (begin, before) = (Instant::now(), alone.group.used_s());
            sleep(Duration::from_millis(100));
            (alone.group.used_s() - before) / begin.elapsed().as_secs_f64()
        })
        .collect();
    stoker.stop();
    // Use is known by the timer tick, 4 ms: a quota more or less.
    let holds = |used: &f64| *used > 0.6 * LIMIT && *used < 1.6 * LIMIT;
    assert!(windows.iter().filter(|used| holds(used)).count() >= 18, "{windows:?}");
}
