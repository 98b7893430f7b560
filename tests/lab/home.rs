//! Where feeders run: at home, unless their user says otherwise or home is full of feeders.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use crate::guest::{lab, modprobe, status_of, threads_below, within};
use crate::load;
use crate::probe::{Device, Ticker, render_nodes};
use crate::stoker::{BINARY, with_shared};

/// The homes of the guest's two GPUs.
pub const HOMES: [&str; 2] = ["0-1", "2-3"];

#[test]
fn each_feeder_runs_at_its_gpus_home_though_started_on_the_other_node() {
    let _lab = lab();
    with_shared(|stoker| {
        let mut counters = stoker.counters();
        load::feed("--hogs 8 --start-on other-node --warmup-s 0.5 --seconds 2").assert_served(&HOMES);
        let counted = counters.interval();
        assert_eq!(counted.gpus.len(), 2);
        for gpu in counted.gpus.values() {
            assert!(gpu.at_home() >= 0.99 && gpu.home_ns > 0 && gpu.wakeups > 100, "the counters disagree: {gpu:?}");
            assert!(gpu.displacements > 0 && gpu.spills() == 0, "{gpu:?}");
        }
    });
}

#[test]
fn a_process_that_feeds_two_gpus_has_a_thread_in_each_home() {
    let _lab = lab();
    with_shared(|_| {
        let load = "--one-process --hogs 8 --start-on other-node --warmup-s 0.5 --seconds 2";
        load::feed(load).assert_served(&HOMES);
    });
}

#[test]
fn a_feeder_that_its_user_pinned_elsewhere_stays_there_and_no_mask_is_changed() {
    let _lab = lab();
    with_shared(|stoker| {
        for (pinned, allowed) in [("0-1", vec![0, 1]), ("3", vec![3])] {
            let mut counters = stoker.counters();
            let load = load::start(&format!("--hogs 4 --pin-feeders {pinned} --warmup-s 0.5 --seconds 2"));
            let masks = || -> Vec<(u32, String)> {
                let mask = |tid| Some((tid, status_of(tid, "Cpus_allowed_list")?));
                threads_below(load.pid()).into_iter().filter_map(mask).collect()
            };
            let is_set_up = || masks().iter().filter(|(_, mask)| mask == pinned).count() == 2;
            assert!(within(10.0, is_set_up), "the load did not pin its feeders: {:?}", masks());
            let before = masks();
            assert_eq!(before.iter().filter(|(_, mask)| mask == "0-3").count(), 4, "the hogs are free: {before:?}");
            sleep(Duration::from_secs(2));
            assert_eq!(masks(), before, "an affinity mask was changed");
            let report = load.finish();
            for feeder in &report.feeders {
                assert!(
                    feeder.cpus.keys().all(|cpu| allowed.contains(cpu)),
                    "left the CPUs it is pinned to: {feeder:?}"
                );
                assert!(feeder.gpu_busy > 0.5, "a pinned feeder is a feeder all the same: {feeder:?}");
            }
            let counted = counters.interval();
            for gpu in counted.gpus.values() {
                let is_home = gpu.home.contains(&pinned[..1]) || gpu.home.contains(&pinned[pinned.len() - 1..]);
                assert_eq!(gpu.at_home(), if is_home { 1.0 } else { 0.0 }, "{gpu:?}");
                let of_affinity = gpu.spills_affinity as f64 / gpu.wakeups as f64;
                assert!(if is_home { of_affinity == 0.0 } else { of_affinity > 0.9 }, "the reason is counted: {gpu:?}");
            }
        }
    });
}

#[test]
fn four_feeders_at_a_home_of_two_cpus_spill_for_that_reason_and_starve_nobody() {
    let _lab = lab();
    with_shared(|stoker| {
        let mut counters = stoker.counters();
        let options = "--gpus 1 --feeders-per-gpu 4 --work-us 2000 --hogs 8 --start-on home --warmup-s 0.5 --seconds 3";
        let report = load::feed(options);
        let gpu = counters.of_home(report.feeders[0].home.as_deref().unwrap());
        println!("{gpu:?}");
        assert!(gpu.spills_home_full > 10, "no spill though home was full: {gpu:?}");
        assert_eq!((gpu.spills_affinity, gpu.spills_no_grant), (0, 0), "{gpu:?}");
        assert!((0.5..0.995).contains(&gpu.at_home()), "home first, but not at any price: {gpu:?}");
        let away = report.feeders.iter().any(|feeder| feeder.home_share < Some(0.99));
        assert!(away, "the counters say that feeders spilled, and none was seen away: {report:?}");

        // Feeders may take 80 % of their home's two CPUs ahead of the hogs, which is 40 % of the four; those away have
        // their fair share there.
        assert!(report.background_share() >= 0.5, "hogs got {:.3}", report.background_share());
        let hogs = report.hogs.as_ref().unwrap();
        assert!(hogs.max_gap_ms < 250.0, "a hog was starved: {hogs:?}");
        assert!(report.feeders.iter().all(|feeder| feeder.max_gap_ms < 250.0), "a feeder was starved: {report:?}");
        assert!(report.idle_cpus < 0.04, "CPUs idled while hogs waited: {report:?}");
    });
}

#[test]
fn a_gpu_of_unknown_home_is_said_to_be_and_its_feeder_is_not_moved() {
    /// Takes the driver out again, however the test ends.
    struct Vgem;
    impl Drop for Vgem {
        fn drop(&mut self) {
            modprobe(&["-r", "vgem"]);
        }
    }

    let _lab = lab();
    with_shared(|stoker| {
        let skip = stoker.output().len();
        modprobe(&["vgem"]);
        let vgem = Vgem;
        stoker.wait_restarted(skip, "GPUs have come or gone");
        let output = stoker.output();
        let warning = output[skip..].lines().find(|line| line.contains("home unknown"));
        assert!(warning.is_some_and(|line| line.contains("WARN") && line.contains("(vgem)")), "not said:\n{output}");

        let node = render_nodes("vgem").pop().expect("vgem makes a render node");
        let mut counters = stoker.counters();
        for cpu in [1, 2] {
            let path = node.clone();
            let ticker = Ticker::start(cpu, move || Device::use_by_mmap(&path));
            sleep(Duration::from_millis(1500));
            let cpus = ticker.stop();
            let gpu = counters.of_home("");
            assert!(gpu.wakeups > 100, "its feeder is one: {gpu:?}");
            assert_eq!((gpu.spills(), gpu.displacements_away), (0, 0), "{gpu:?}");
            // CPUs are idle nearly always, and nearly always found so.
            assert!(gpu.displacements * 20 <= gpu.wakeups, "{gpu:?}");
            // On its node, that is: its CPU may be busy at times.
            let there: u32 = cpus.iter().filter(|(seen, _)| *seen / 2 == cpu / 2).map(|(_, times)| times).sum();
            let all: u32 = cpus.values().sum();
            assert!(there * 10 > all * 9, "moved away from CPU {cpu}, where it could stay: {cpus:?}");
        }
        let skip = stoker.output().len();
        drop(vgem);
        stoker.wait_restarted(skip, "GPUs have come or gone");
        load::feed("--hogs 4 --warmup-s 0.5 --seconds 1").assert_served(&HOMES);
    });
}

#[test]
fn the_topology_shows_both_gpus_at_home() {
    let _lab = lab();
    let output = Command::new(BINARY).args(["topology", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let machine: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let gpus = machine["gpus"].as_array().unwrap();
    let mut homes: Vec<String> = gpus.iter().map(|gpu| gpu["home"]["cpus"].to_string()).collect();
    homes.sort();
    assert_eq!(homes, ["[0,1]", "[2,3]"]);
}
