//! Who is a feeder, and for how long: whatever came first, with system calls or without, and never by PID alone.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use crate::guest::{lab, modprobe, within};
use crate::home::HOMES;
use crate::load;
use crate::probe::{Device, Process, Ticker, home_of, render_nodes};
use crate::stoker::{Stoker, of_home, stop_shared, wakeups, with_shared};

fn gpu() -> PathBuf {
    render_nodes("pci").remove(0)
}

#[test]
fn feeders_that_ran_before_the_start_are_found_with_and_without_system_calls() {
    let _lab = lab();
    stop_shared();
    let common = "--start-on other-node --warmup-s 7 --seconds 2";
    let doorbell = load::start(&format!("--submit doorbell {common}"));
    let ioctl = load::start(&format!("--submit ioctl {common}"));
    // Until they have opened their GPUs and run.
    sleep(Duration::from_secs(1));
    let stoker = Stoker::start(&[]);
    assert!(stoker.load_s < 5.0, "measuring began before it was there: {} s", stoker.load_s);
    // Not before: beside them the scheduler itself takes long to load in the lab.
    let _hogs = load::start("--feeders-per-gpu 0 --hogs 8 --seconds 60");
    doorbell.finish().assert_served(&HOMES);
    ioctl.finish().assert_served(&HOMES);
    stoker.stop();
}

#[test]
fn feeders_without_system_calls_stay_feeders_beyond_the_time_of_evidence() {
    let _lab = lab();
    let stoker = Stoker::start(&["--evidence-s", "2"]);
    let mut counters = stoker.counters();
    let load = load::start("--submit doorbell --hogs 8 --start-on other-node --warmup-s 4 --seconds 4");
    sleep(Duration::from_secs(5));
    // On a full machine the answer may take a second: enough of the load is to come after it.
    counters.interval();
    load.finish().assert_served(&HOMES);
    let used = wakeups(&counters.interval());
    // 50 for each second of the load that came after 5 s.
    assert!(used > 150, "on time, but not by this scheduler's doing: {used} wake-ups");
    stoker.stop();
}

#[test]
fn a_thread_whose_gpu_use_has_ended_is_no_feeder_and_others_still_are() {
    let _lab = lab();
    let stoker = Stoker::start(&["--evidence-s", "1"]);
    let mut counters = stoker.counters();
    let nodes = render_nodes("pci");
    let (own, other) = (home_of(&nodes[0]), home_of(&nodes[1]));
    // With it GPUs are in use all the time, and each thread's own evidence is what counts.
    let stays = Process::fork(Some(&nodes[1]));
    let has_closed = Arc::new(AtomicBool::new(false));
    let asked = has_closed.clone();
    let ticker = Ticker::start(0, move || {
        let device = Device::use_by_mmap(&nodes[0]);
        std::thread::spawn(move || {
            while !asked.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(50));
            }
            drop(device);
        })
    });
    sleep(Duration::from_secs(3));
    let mut second = || {
        counters.interval();
        sleep(Duration::from_secs(1));
        let counted = counters.interval();
        (of_home(&counted, &own).wakeups, of_home(&counted, &other).wakeups)
    };
    let used = second();
    assert!(
        used.0 > 50 && used.1 > 50,
        "{used:?} wake-ups of two that mapped and hold a GPU and wake 100 times a second"
    );

    has_closed.store(true, Ordering::Relaxed);
    // Open files are read every 5 s, and then the evidence holds for 1 s.
    let is_over = within(9.0, || second().0 == 0);
    let used = second();
    let cpus = ticker.stop();
    drop(stays);
    assert!(is_over && used.0 == 0, "still a feeder 9 s after it closed the GPU");
    assert!(used.1 > 50, "{} wake-ups of one that goes on", used.1);
    assert!(cpus.values().sum::<u32>() > 300, "it woke all the time: {cpus:?}");
    stoker.stop();
}

#[test]
fn a_process_that_got_the_pid_of_a_feeder_is_none() {
    let _lab = lab();
    with_shared(|stoker| {
        let mut counters = stoker.counters();
        let feeder = Process::fork(Some(&gpu()));
        sleep(Duration::from_millis(1500));
        let used = wakeups(&counters.interval());
        assert!(used > 80, "{used} wake-ups of a process that uses a GPU and wakes 100 times a second");
        let pid = feeder.pid();
        drop(feeder);

        let other = Process::fork_with_pid(pid);
        counters.interval();
        sleep(Duration::from_millis(2500));
        assert_eq!(wakeups(&counters.interval()), 0, "PID {pid} is another process now");
        drop(other);
    });
}

#[test]
fn a_driver_loaded_after_the_scheduler_is_noticed_and_its_gpus_are_served() {
    /// Brings the driver back, however the test ends.
    struct Driver;
    impl Drop for Driver {
        fn drop(&mut self) {
            modprobe(&["virtio_gpu"]);
        }
    }

    let _lab = lab();
    stop_shared();
    modprobe(&["-r", "virtio_gpu"]);
    let driver = Driver;
    let mut stoker = Stoker::start(&[]);
    assert!(stoker.output().contains("no GPU here yet"), "not said:\n{}", stoker.output());
    let skip = stoker.output().len();
    drop(driver);
    stoker.wait_restarted(skip, "GPUs have come or gone");
    load::feed("--hogs 8 --start-on other-node --warmup-s 0.5 --seconds 1").assert_served(&HOMES);
    stoker.stop();
}
