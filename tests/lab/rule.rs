//! Rules of the configuration file win over what threads do.

use std::ffi::CStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use scx_stoker::machine::{Machine, Sources};
use scx_stoker::metrics::ask_threads;

use crate::guest::{lab, state, within};
use crate::known::{is_feeder, thread};
use crate::probe::{Process, render_nodes};
use crate::stoker::{BINARY, Stoker, stop_shared};

/// Forks a process whose thread is called `name`.
fn fork_named(name: &CStr, device: Option<&Path>) -> Process {
    let mut own = [0 as libc::c_char; 16];
    // SAFETY: both calls take a string of at most 16 bytes with its NUL, or room for one.
    unsafe {
        libc::prctl(libc::PR_GET_NAME, own.as_mut_ptr());
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        let process = Process::fork(device);
        libc::prctl(libc::PR_SET_NAME, own.as_ptr());
        process
    }
}

#[test]
fn rules_by_name_and_user_make_feeders_and_keep_from_being_one_and_the_first_that_matches_counts() {
    /// A user that has no processes.
    const USER: u32 = 4321;

    let _lab = lab();
    stop_shared();
    let machine = Machine::discover(&Sources::default()).unwrap();
    let (first, second) = (machine.gpus[0].index, machine.gpus[1].index);
    let address = machine.gpus[1].pci.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stoker.toml");
    let rules = format!(
        "slice-us = 4000\n\
         [[rule]]\ncomm = 'rule_barred'\nfeeder = false\n\
         [[rule]]\ncomm = 'rule_fe*'\ngpu = '{address}'\n\
         [[rule]]\nuser = {USER}\ncgroup = '/'\nfeeder = true\ngpu = {first}\n\
         [[rule]]\ncomm = 'rule_*'\nuser = 'root'\nfeeder = true\ngpu = {first}\n"
    );
    fs::write(&file, rules).unwrap();

    let node = render_nodes("pci").remove(0);
    let barred = fork_named(c"rule_barred", Some(&node));
    let plain = fork_named(c"other", Some(&node));
    let mut of_user = Command::new("sleep").arg("1000").uid(USER).stdin(Stdio::null()).spawn().unwrap();
    let of_root = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn();
    let mut of_root = of_root.unwrap();
    // Two threads of this process, of which one is named.
    let (tids, started) = channel();
    let mut ends = Vec::new();
    for name in ["rule_fed", "not_named"] {
        let (end, ended) = channel::<()>();
        let tids = tids.clone();
        let run = move || {
            // SAFETY: no preconditions.
            tids.send(unsafe { libc::gettid() } as u32).unwrap();
            let _ = ended.recv();
        };
        std::thread::Builder::new().name(name.into()).spawn(run).unwrap();
        ends.push((end, started.recv().unwrap()));
    }
    let (fed, not_named) = (ends[0].1, ends[1].1);

    let stoker = Stoker::start(&["--config", file.to_str().unwrap()]);
    let (barred_tid, plain_tid) = (barred.tid(), plain.tid());
    let named = within(15.0, || is_feeder(fed) && is_feeder(of_user.id()) && is_feeder(plain_tid));
    let all = ask_threads().unwrap();
    assert!(named, "{fed}, {}, {plain_tid} in {all:#?}", of_user.id());
    let fed = thread(fed).unwrap();
    assert_eq!((fed.gpu, fed.evidence), (second, vec!["word".to_string()]));
    assert_eq!(thread(of_user.id()).unwrap().gpu, first);
    assert!(!is_feeder(not_named) && !is_feeder(of_root.id()), "no rule is about these: {all:#?}");
    // Beyond what it may have been before the first look.
    std::thread::sleep(Duration::from_secs(3));
    assert!(!is_feeder(barred_tid), "barred by the first rule that matches: {all:#?}");
    assert!(is_feeder(plain_tid));
    stoker.stop();
    for process in [&mut of_user, &mut of_root] {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}

#[test]
fn a_rule_about_a_gpu_that_is_not_here_is_refused_with_its_line_before_anything_is_loaded() {
    let _lab = lab();
    stop_shared();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stoker.toml");
    fs::write(&file, "\n[[rule]]\ncomm = 'a'\ngpu = '0000:ff:1f.7'\n").unwrap();
    let output = Command::new(BINARY).arg("--config").arg(&file).stdin(Stdio::null()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{message}");
    assert!(message.contains(&format!("{}:2: ", file.display())) && message.contains("topology"), "{message}");
    assert!(!message.contains("schedules this machine"), "{message}");
    assert_eq!(state(), "disabled");
}
