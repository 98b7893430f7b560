//! What user space finds out about processes that use GPUs.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use scx_stoker::metrics::{Role, Thread, ask_threads};

use crate::guest::{lab, within};
use crate::probe::{Process, render_nodes};
use crate::stoker::Stoker;

fn thread_of(process: &Process) -> Option<Thread> {
    ask_threads().unwrap().into_iter().find(|thread| thread.tid == process.pid() as u32)
}

#[test]
fn processes_that_do_not_fit_into_the_map_are_found_in_proc() {
    /// The map has room for as many processes as there may be threads when the scheduler starts.
    const LIMIT: &str = "/proc/sys/kernel/threads-max";
    /// Threads that the scheduler and the test may start meanwhile.
    const SPARE: usize = 60;
    /// Lifts the limit, however the test ends.
    struct Limit(String);
    impl Drop for Limit {
        fn drop(&mut self) {
            fs::write(LIMIT, &self.0).unwrap();
        }
    }

    let _lab = lab();
    crate::stoker::stop_shared();
    let load = fs::read_to_string("/proc/loadavg").unwrap();
    let threads: usize = load.split(['/', ' ']).nth(4).unwrap().parse().unwrap();
    let room = threads + SPARE;
    let limit = Limit(fs::read_to_string(LIMIT).unwrap());
    fs::write(LIMIT, room.to_string()).unwrap();
    let stoker = Stoker::start(&["--evidence-s", "2"]);
    drop(limit);

    let node = render_nodes("pci").remove(0);
    let _many: Vec<Process> = (0..room).map(|_| Process::hold(&node)).collect();
    let late = Process::fork(Some(&node));
    assert!(within(5.0, || stoker.output().contains("looked for in /proc")), "not said:\n{}", stoker.output());
    // What BPF saw of it holds for 2 s only, and open files are read every 5 s.
    sleep(Duration::from_secs(6));
    for _ in 0..4 {
        sleep(Duration::from_millis(1000));
        let thread = thread_of(&late).expect("the scheduler knows it");
        assert_eq!(thread.role, Role::Feeder, "{thread:?}");
    }
    stoker.stop();
}
