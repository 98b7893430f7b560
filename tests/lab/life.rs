//! How the scheduler comes, goes and comes again, whatever happens to it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::guest::{is_enabled, lab, state, status_of};
use crate::load;
use crate::stoker::{BINARY, LOAD_LIMIT_S, Stoker, stop_shared, with_shared};

#[test]
fn it_loads_quickly_and_stays_small() {
    /// Resident memory of the program, in kB.
    const MEMORY_LIMIT_KB: u64 = 50 * 1024;

    let _lab = lab();
    let stoker = Stoker::start(&[]);
    load::feed("--feeders-per-gpu 8 --hogs 4 --warmup-s 0.2 --seconds 1");
    let peak: u64 = status_of(stoker.pid(), "VmHWM").unwrap().trim_end_matches(" kB").parse().unwrap();
    println!("attached after {:.2} s, {peak} kB at most", stoker.load_s);
    assert!(stoker.load_s < LOAD_LIMIT_S, "{} s", stoker.load_s);
    assert!(peak < MEMORY_LIMIT_KB, "{peak} kB");
    stoker.stop();
}

#[test]
fn sigterm_detaches_it_and_the_reason_is_printed() {
    let _lab = lab();
    let (status, output) = Stoker::start(&[]).end_by(libc::SIGTERM);
    assert!(status.success(), "{status}:\n{output}");
    assert!(output.contains("EXIT: unregistered from user space"), "no reason:\n{output}");
}

#[test]
fn when_it_is_killed_the_kernels_scheduler_takes_over_and_the_load_goes_on() {
    let _lab = lab();
    let stoker = Stoker::start(&[]);
    let load = load::start("--hogs 8 --warmup-s 2 --seconds 2");
    sleep(Duration::from_secs(1));
    assert!(is_enabled());
    let (status, _) = stoker.end_by(libc::SIGKILL);
    assert!(!status.success());
    let report = load.finish();
    assert_eq!(report.scheduler, "kernel");
    assert!(report.feeders.iter().all(|feeder| feeder.gpu_busy > 0.2), "feeders did not go on: {report:?}");
    assert!(report.hogs.as_ref().unwrap().max_gap_ms < 1000.0, "hogs did not go on: {report:?}");
}

#[test]
fn a_second_one_is_refused_and_the_first_runs_on() {
    let _lab = lab();
    with_shared(|stoker| {
        let second = Command::new(BINARY).stdin(Stdio::null()).output().unwrap();
        let message = failure(&second);
        let running = fs::read_to_string("/sys/kernel/sched_ext/root/ops").unwrap();
        assert!(running.starts_with("stoker"), "{running}");
        assert!(message.contains(running.trim()) && message.contains("stop it first"), "{message}");
        assert_eq!((stoker.exit_status(), state().as_str()), (None, "enabled"), "the first is disturbed");
        // It still serves its counters, on the socket that a second one would have taken.
        assert_eq!(stoker.counters().interval().gpus.len(), 2);
    });
}

#[test]
fn without_root_it_says_so_and_touches_nothing() {
    /// `nobody`.
    const NOBODY: u32 = 65534;

    let _lab = lab();
    stop_shared();
    let output = Command::new(BINARY).uid(NOBODY).gid(NOBODY).stdin(Stdio::null()).output().unwrap();
    assert!(failure(&output).contains("takes root"), "{}", failure(&output));
    assert_eq!(state(), "disabled");
}

#[test]
fn the_monitor_prints_what_a_running_one_counts() {
    let _lab = lab();
    with_shared(|_| {
        let load = load::start("--hogs 2 --warmup-s 0.2 --seconds 5");
        sleep(Duration::from_secs(1));
        let mut command = Command::new("timeout");
        command.args(["--signal=INT", "4", BINARY, "--monitor", "1"]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        load.finish();
        let text = String::from_utf8(output.stdout).unwrap();
        // The first line is of no time at all.
        let of_both =
            |line: &str| line.matches(": 1 feeders, ").count() == 2 && line.matches("100.0 % at home").count() == 2;
        assert!(text.lines().skip(1).any(of_both), "{text}");
    });
}

/// What a program that must fail said of it.
fn failure(output: &Output) -> String {
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it did not fail: {message}");
    message
}
