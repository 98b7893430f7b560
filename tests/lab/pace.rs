//! The hook in ioctl(2) is off in between while somebody calls it without a pause, and no feeder is missed for that.

use std::thread::sleep;
use std::time::Duration;

use libbpf_rs::query::{LinkInfoIter, ProgInfoIter};
use scx_stoker::metrics::ask_threads;

use crate::guest::{lab, within};
use crate::known::is_feeder;
use crate::probe::{Process, render_nodes, submit};
use crate::stoker::Stoker;

/// Whether the hook is on. The kernel keeps 15 characters of its name.
fn is_on() -> bool {
    let hook = ProgInfoIter::default().find(|program| program.name == "stoker_file_ioc");
    let hook = hook.expect("the hook is loaded");
    LinkInfoIter::default().any(|link| link.prog_id == hook.id)
}

/// In how many of 100 looks within 5 s the hook is on.
fn looks_with_it_on() -> usize {
    let look = |_: &u32| {
        sleep(Duration::from_millis(50));
        is_on()
    };
    (0..100).filter(look).count()
}

#[test]
fn the_hook_in_ioctl_pauses_while_it_is_called_too_often_and_feeders_are_found_all_the_same() {
    let _lab = lab();
    let stoker = Stoker::start(&["--evidence-s", "3"]);
    let nodes = render_nodes("pci");
    let slow = Process::fork_doing(&nodes[0], submit);
    assert!(within(3.0, || is_feeder(slow.tid())), "nobody is a feeder");
    assert_eq!(looks_with_it_on(), 100, "the hook pauses for 100 calls a second");

    let busy = Process::fork_always_doing(&nodes[1], submit);
    let late = Process::fork_doing(&nodes[0], submit);
    assert!(within(3.0, || is_feeder(busy.tid()) && is_feeder(late.tid())), "not all are feeders: {:?}", ask_threads());
    let on = looks_with_it_on();
    println!("the hook is on in {on} of 100 looks");
    assert!((5..40).contains(&on), "the hook is on in {on} of 100 looks");
    // That was longer than evidence holds.
    assert!(
        [&slow, &busy, &late].into_iter().all(|process| is_feeder(process.tid())),
        "they were forgotten: {:?}",
        ask_threads()
    );

    drop(busy);
    assert!(within(3.0, is_on), "the hook stays off");
    sleep(Duration::from_millis(300));
    assert_eq!(looks_with_it_on(), 100, "the hook pauses for 200 calls a second");
    stoker.stop();
}
