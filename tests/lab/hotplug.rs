//! CPUs that come and go. In counted time the guest's timers stand still for seconds while a CPU is offline (on every
//! CPU and whatever scheduler), so `scripts/test` runs this in a boot of its own, in ordinary time. Nothing here
//! bounds a latency.

use std::thread::sleep;
use std::time::Duration;

use crate::guest::{lab, set_online};
use crate::load;
use crate::stoker::Stoker;

/// The CPU that goes.
const CPU: u32 = 3;

#[test]
fn it_restarts_when_cpus_come_and_go_and_serves_feeders_on_those_there_are() {
    /// Brings the CPU back, however the test ends.
    struct Online;
    impl Drop for Online {
        fn drop(&mut self) {
            set_online(CPU, true);
        }
    }

    let _lab = lab();
    let mut stoker = Stoker::start(&[]);
    // Runs through all of it. Each scheduler finds its feeders anew, which have been there before it.
    let _through = load::start("--submit doorbell --hogs 1 --seconds 600");
    sleep(Duration::from_secs(2));
    assert_at_home(&stoker, &["0-1", "2-3"]);

    let skip = stoker.output().len();
    set_online(CPU, false);
    let online = Online;
    stoker.wait_restarted(skip, "CPUs have come or gone");
    assert!(stoker.output()[skip..].contains("home is CPUs 2,"), "the home is what is left:\n{}", stoker.output());
    assert_at_home(&stoker, &["0-1", "2"]);

    let skip = stoker.output().len();
    drop(online);
    stoker.wait_restarted(skip, "CPUs have come or gone");
    assert_at_home(&stoker, &["0-1", "2-3"]);
    stoker.stop();
}

/// Fails unless a feeder of each of the GPUs at home on `homes` wakes, and is there.
fn assert_at_home(stoker: &Stoker, homes: &[&str]) {
    let mut counters = stoker.counters();
    sleep(Duration::from_secs(3));
    let counted = counters.interval();
    let found: Vec<&str> = counted.gpus.values().map(|gpu| gpu.home.as_str()).collect();
    assert_eq!(found, homes, "{counted:?}");
    for gpu in counted.gpus.values() {
        assert!(gpu.wakeups > 30 && gpu.home_ns > 0, "its feeder is not served: {gpu:?}");
        // A home is full for the moment in which its CPUs are between two tasks, and a home of one CPU in ordinary time is so for
        // a good part of the wake-ups. Without a home it would be half and a third. tests/lab/smoke.rs is strict, in counted time.
        assert!(gpu.at_home() >= 0.75, "its feeder is not at home: {gpu:?}");
    }
}
