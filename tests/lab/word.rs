//! What a cgroup's owner says of its tasks wins over what they do.

use std::time::Duration;

use crate::group::Group;
use crate::guest::{lab, within};
use crate::known::{is_feeder, thread};
use crate::probe::{Process, home_of, render_nodes};
use crate::stoker::with_shared;

#[test]
fn the_word_of_a_cgroups_owner_makes_a_feeder_and_keeps_from_being_one() {
    let _lab = lab();
    with_shared(|_| {
        let node = render_nodes("pci").remove(0);
        // Indexes follow PCI order, and so do the nodes' homes in the lab.
        let gpu = if home_of(&node) == "0-1" { 0 } else { 1 };
        let index = gpu.to_string();
        let said = Group::new("lab_said", &[("user.stoker.feeder", "yes"), ("user.stoker.gpu", &index)]);
        let barred = Group::new("lab_barred", &[("user.stoker.feeder", "no")]);
        let ticks = Process::fork(None);
        let feeds = Process::fork(Some(&node));
        let plain = Process::fork(Some(&node));

        assert!(within(5.0, || is_feeder(feeds.tid()) && is_feeder(plain.tid())), "both map the GPU and wake often");
        assert!(!is_feeder(ticks.tid()), "nothing was said of it yet");
        said.take(ticks.pid());
        barred.take(feeds.pid());
        // Cgroups are looked at every five seconds.
        assert!(within(15.0, || is_feeder(ticks.tid()) && !is_feeder(feeds.tid())), "the word does not hold");
        let named = thread(ticks.tid()).unwrap();
        assert_eq!((named.gpu, named.evidence.as_slice()), (gpu, ["word".to_string()].as_slice()));
        std::thread::sleep(Duration::from_secs(2));
        assert!(!is_feeder(feeds.tid()) && is_feeder(plain.tid()), "signs count for the one that is not barred only");
        drop((ticks, feeds, plain));
    });
}
