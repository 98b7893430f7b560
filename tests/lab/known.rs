//! What the scheduler that runs says of a thread.

use scx_stoker::metrics::{Role, Thread, ask_threads};

/// What is known of a thread, if anything is.
pub fn thread(tid: u32) -> Option<Thread> {
    ask_threads().unwrap().into_iter().find(|thread| thread.tid == tid)
}

/// Whether a thread is known as a feeder.
pub fn is_feeder(tid: u32) -> bool {
    thread(tid).is_some_and(|thread| thread.role == Role::Feeder)
}
