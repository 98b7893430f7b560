//! `--probe-launches`: who launches work by calling CUDA's library, where nothing else tells.

use std::collections::BTreeSet;
use std::ffi::{CString, c_void};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, sleep};
use std::time::Duration;

use libbpf_rs::query::{LinkInfoIter, LinkTypeInfo};
use scx_stoker::metrics::{Role, Thread, ask_threads};

use crate::group::Group;
use crate::guest::{lab, within};
use crate::probe::{Device, Process, render_nodes};
use crate::stoker::{BINARY, Stoker, stop_shared};

type GraphLaunch = extern "C" fn(*mut c_void, *mut c_void) -> i32;

/// `cuGraphLaunch` of a copy of the stand-in for CUDA's library, which no other test has.
fn load_cuda(test: &str) -> GraphLaunch {
    let folder = std::env::temp_dir().join(test);
    fs::create_dir_all(&folder).unwrap();
    let copy = folder.join("libcuda.so.1");
    fs::copy(std::path::Path::new(BINARY).with_file_name("examples").join("libcuda_stand_in.so"), &copy).unwrap();
    let path = CString::new(copy.to_str().unwrap()).unwrap();
    // SAFETY: the stand-in runs nothing when it is loaded, stays loaded, and has this function with this signature.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "{} cannot be loaded", copy.display());
        let function = libc::dlsym(library, c"cuGraphLaunch".as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut c_void, GraphLaunch>(function)
    }
}

fn threads_of(pid: u32) -> Vec<Thread> {
    ask_threads().unwrap().into_iter().filter(|thread| thread.pid == pid).collect()
}

fn feeders_of(pid: u32) -> BTreeSet<String> {
    threads_of(pid).into_iter().filter(|thread| thread.role == Role::Feeder).map(|thread| thread.comm).collect()
}

/// Libraries with probes on them, now.
fn probed() -> usize {
    LinkInfoIter::default().filter(|link| matches!(link.info, LinkTypeInfo::UprobeMulti(_))).count()
}

#[test]
fn the_thread_that_launches_is_found_among_others_like_it_and_probes_go_away_after_a_sample() {
    let _lab = lab();
    stop_shared();
    let launch = load_cuda("one-of-four");
    // Before the scheduler starts, and by another thread: nothing tells who of those below feeds.
    let device = Device::use_by_mmap(&render_nodes("pci").remove(0));
    let (is_over, launches) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let threads: Vec<_> = (0..4)
        .map(|index| {
            let (is_over, launches) = (is_over.clone(), launches.clone());
            let body = move || {
                while !is_over.load(Ordering::Relaxed) {
                    sleep(Duration::from_millis(10));
                    if index == 2 {
                        launch(std::ptr::null_mut(), std::ptr::null_mut());
                        launches.fetch_add(1, Ordering::Relaxed);
                    }
                }
            };
            Builder::new().name(format!("pool{index}")).spawn(body).unwrap()
        })
        .collect();
    let own = std::process::id();
    let stoker = Stoker::start(&["--probe-launches"]);
    let mut counters = stoker.counters();
    let only = BTreeSet::from(["pool2".to_string()]);
    let found = within(5.0, || feeders_of(own) == only);
    assert!(found, "feeders: {:?} of {:?}", feeders_of(own), threads_of(own));
    let known = threads_of(own).into_iter().find(|thread| thread.comm == "pool2").unwrap();
    assert_eq!(known.evidence, ["launch"]);
    let sampled = counters.interval();
    assert!((5..100).contains(&sampled.launch_calls), "{} calls seen, of 100 a second", sampled.launch_calls);
    assert!(sampled.launch_cost_ns > 0, "{sampled:?}");
    // They are turned off in the background, and the time counts once they are.
    let mut probed_ns = sampled.launch_probed_ns;
    let are_off = within(2.0, || {
        probed_ns += counters.interval().launch_probed_ns;
        probed_ns > 0
    });
    assert!(are_off && probed() == 0, "probes are there after the sample");
    assert!((200_000_000..2_000_000_000).contains(&probed_ns), "probes were there for {probed_ns} ns");

    // Samples are ten seconds apart.
    let before = launches.load(Ordering::Relaxed);
    sleep(Duration::from_secs(3));
    let between = counters.interval();
    let launched = launches.load(Ordering::Relaxed) - before;
    assert!(launched > 100, "only {launched} launches in 3 s");
    assert_eq!((between.launch_calls, between.launch_probed_ns), (0, 0), "{launched} launches between samples");
    assert!(within(12.0, || probed() > 0), "no second sample");
    assert!(within(3.0, || probed() == 0), "the second sample does not end");
    assert!(within(1.0, || counters.interval().launch_calls > 0), "nothing was seen in it");
    assert_eq!(feeders_of(own), only);

    is_over.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    stoker.stop();
    drop(device);
}

#[test]
fn without_the_option_nothing_is_probed_and_the_owners_no_wins_over_launches() {
    let _lab = lab();
    stop_shared();
    let launch = load_cuda("owners-no");
    let node = render_nodes("pci").remove(0);
    let tick = |_| {
        launch(std::ptr::null_mut(), std::ptr::null_mut());
    };
    let (plain, barred) = (Process::fork_doing(&node, tick), Process::fork_doing(&node, tick));
    let group = Group::new("lab_launch_barred", &[("user.stoker.feeder", "no")]);
    group.take(barred.pid());

    let stoker = Stoker::start(&[]);
    let mut counters = stoker.counters();
    sleep(Duration::from_secs(2));
    let idle = counters.interval();
    assert_eq!((idle.launch_calls, idle.launch_probed_ns), (0, 0));
    stoker.stop();

    let stoker = Stoker::start(&["--probe-launches"]);
    let has_launched = |pid: libc::pid_t| {
        let threads = threads_of(pid as u32);
        threads.iter().find(|thread| thread.evidence.contains(&"launch".to_string())).map(|thread| thread.role)
    };
    let judged = within(5.0, || has_launched(plain.pid()).is_some() && has_launched(barred.pid()).is_some());
    let roles = [has_launched(plain.pid()), has_launched(barred.pid())];
    assert!(judged, "launches were not seen: {roles:?}\n{}", stoker.output());
    assert_eq!(roles, [Some(Role::Feeder), Some(Role::User)]);
    drop((plain, barred));
    stoker.stop();
}
