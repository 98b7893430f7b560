//! What feeders leave to others, and what is left alone where no GPU is in use.

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use crate::guest::{lab, status_of, threads_below, within};
use crate::load::{self, Report};
use crate::probe;
use crate::stoker::{Stoker, with_shared};

/// A feeder that spins for each CPU, and twice as many hogs.
const SPINNING: &str = "--feeders-per-gpu 2 --wait spin --hogs 8 --warmup-s 0.5 --seconds 3";

fn assert_hogs_get(report: &Report, range: std::ops::Range<f64>) {
    let share = report.background_share();
    assert!(range.contains(&share), "hogs got {share:.3} of the CPU time, not {range:?}: {report:?}");
    let hogs = report.hogs.as_ref().unwrap();
    // The kernel's watchdog ends a scheduler that lets a task wait 30 s.
    assert!(hogs.max_gap_ms < 500.0, "a hog was starved: {hogs:?}");
    assert!(hogs.min_units * 2 > hogs.max_units, "hogs were treated unequally: {hogs:?}");
    assert!(report.feeders.iter().all(|feeder| feeder.max_gap_ms < 500.0), "a feeder was starved: {report:?}");
    assert!(report.idle_cpus < 0.04, "CPUs idled while hogs waited: {report:?}");
}

#[test]
fn hogs_keep_what_the_cap_leaves_them_beside_a_spinning_feeder_on_every_cpu() {
    let _lab = lab();
    with_shared(|stoker| {
        let mut counters = stoker.counters();
        let report = load::feed(SPINNING);
        let counted = counters.interval();
        assert!(counted.gpus.values().all(|gpu| gpu.cap_hits > 0), "the grant never ran out: {counted:?}");
        // The cap is 80 %. Beyond it a feeder still has its fair share of the rest.
        assert_hogs_get(&report, 0.15..0.25);
    });
}

#[test]
fn the_cap_is_what_the_user_set() {
    let _lab = lab();
    let stoker = Stoker::start(&["--feeder-cap", "40"]);
    // The same as above; a third is the feeders' fair share.
    assert_hogs_get(&load::feed(SPINNING), 0.48..0.68);
    stoker.stop();
}

#[test]
fn nothing_is_preempted_where_no_gpu_is_in_use() {
    /// Turns of an ordinary task, in ns: the default of `--slice-us`.
    const SLICE_NS: f64 = 3e6;

    let _lab = lab();
    with_shared(|stoker| {
        let mut counters = stoker.counters();
        let load = load::start("--feeders-per-gpu 0 --hogs 4 --bursty 12 --warmup-s 0.2 --seconds 3");
        assert!(within(10.0, || threads_below(load.pid()).len() == 16), "the load did not start");
        let sum = |value: fn(u32) -> Option<u64>| threads_below(load.pid()).into_iter().filter_map(value).sum::<u64>();
        let lost_cpu = |tid| status_of(tid, "nonvoluntary_ctxt_switches")?.parse().ok();
        let ran_ns = |tid| {
            let schedstat = fs::read_to_string(format!("/proc/{tid}/schedstat")).ok()?;
            schedstat.split(' ').next()?.parse().ok()
        };
        sleep(Duration::from_millis(500));
        let before = (sum(lost_cpu), sum(ran_ns));
        sleep(Duration::from_secs(2));
        let (lost, ran) = (sum(lost_cpu) - before.0, sum(ran_ns) - before.1);
        load.finish();
        let turns = ran as f64 / SLICE_NS;
        println!("lost the CPU {lost} times in {turns:.0} turns of CPU time");
        assert!((lost as f64) < 1.1 * turns, "{lost} times a task lost its CPU in {turns:.0} turns of CPU time");
        for gpu in counters.interval().gpus.values() {
            let counted = (gpu.wakeups, gpu.displacements, gpu.displacements_away, gpu.home_ns, gpu.away_ns);
            assert_eq!(counted, (0, 0, 0, 0, 0), "feeders where no GPU is in use");
        }
    });
}

#[test]
fn a_yield_leaves_the_cpu_to_what_waits_for_a_turn() {
    const SECONDS: f64 = 1.0;

    let _lab = lab();
    with_shared(|_| {
        let (spins, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let yields = std::thread::scope(|scope| {
            scope.spawn(|| {
                probe::set_affinity(&[0]);
                spins.store(true, Ordering::Relaxed);
                while !stop.load(Ordering::Relaxed) {
                    // A pause now and then, as lab_load has it: each ends a CPU's turn in the counted lab.
                    (0..50_000).for_each(|step| {
                        std::hint::black_box(step);
                    });
                    std::hint::spin_loop();
                }
            });
            let yielder = scope.spawn(|| {
                probe::set_affinity(&[0]);
                // As long as it is alone, each yield returns at once.
                while !spins.load(Ordering::Relaxed) {
                    sleep(Duration::from_millis(1));
                }
                let mut yields = 0;
                while !stop.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                    yields += 1;
                }
                yields
            });
            sleep(Duration::from_secs_f64(SECONDS));
            stop.store(true, Ordering::Relaxed);
            yielder.join().unwrap()
        });
        // Each gives the hog a turn, of 5 ms and what is left of a tick; a yield alone takes some microseconds.
        assert!((10..=(SECONDS * 300.0) as u32).contains(&yields), "{yields} yields in {SECONDS} s beside a hog");
    });
}

#[test]
fn a_crowd_that_wakes_at_once_lets_others_run_before_all_of_it_had_a_turn() {
    let _lab = lab();
    with_shared(|_| {
        let mut storm = Command::new(load::binary());
        storm.args(["storm", "--json", "--storms", "tasks", "--tasks", "2000", "--seconds", "1"]);
        let output = storm.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let storms: Value = serde_json::from_slice(&output.stdout).unwrap();
        println!("{}", storms[0]);
        // Turns of all, 4 ms each, on four CPUs take 2 s. The task beside them is a group's equal.
        assert!(storms[0]["longest_stall_ms"].as_f64().unwrap() < 300.0, "{}", storms[0]);
    });
}
