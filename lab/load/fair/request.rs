//! Requests as a server has them, after schbench: message threads hand them to workers that sleep until they get one.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use anyhow::Result;

use crate::sample::{Histogram, Merged};
use crate::sys::{MS, no_timer_slack, now_ns, sleep_until};
use crate::work::{Sequence, UNITS_PER_MS, at_once, work};

/// Threads that hand out requests.
const MESSENGERS: usize = 2;
/// Workers for each CPU.
const WORKERS_PER_CPU: usize = 4;
/// Share of the CPUs' time that the requests take, with what it costs to hand them over.
const LOAD: f64 = 0.9;
/// Work in a request, in units: 0.5 to 1.5 ms of a CPU of which nobody else takes turns.
const REQUEST_UNITS: (u64, u64) = (UNITS_PER_MS / 2, UNITS_PER_MS * 3 / 2);

/// Requests that wait for one worker, by when they came, in ns; `None` ends it.
#[derive(Default)]
struct Inbox {
    waiting: Mutex<VecDeque<Option<u64>>>,
    changed: Condvar,
}

impl Inbox {
    fn put(&self, request: Option<u64>) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(request);
        self.changed.notify_one();
    }

    fn take(&self) -> Option<u64> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(request) = waiting.pop_front() {
                return request;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Serves requests for `for_ns` on `cpus` CPUs, and returns how long `fraction` of them took at most, from when they
/// came to when they were done, in µs.
pub fn latency_us(cpus: usize, fraction: f64, latencies: &Histogram, for_ns: u64) -> Result<f64> {
    let inboxes: Vec<Inbox> = (0..cpus * WORKERS_PER_CPU).map(|_| Inbox::default()).collect();
    let mean_gap_ns = alone_ns() * MESSENGERS as f64 / (LOAD * at_once(cpus));
    let start_ns = now_ns() + MS;
    // The first tenth fills the machine.
    let (counts_from_ns, end_ns) = (start_ns + for_ns / 10, start_ns + for_ns);
    std::thread::scope(|scope| {
        for (index, inbox) in inboxes.iter().enumerate() {
            scope.spawn(move || {
                let mut sequence = Sequence::new(MESSENGERS + index);
                while let Some(came_ns) = inbox.take() {
                    work(sequence.between(REQUEST_UNITS.0, REQUEST_UNITS.1));
                    if came_ns >= counts_from_ns {
                        latencies.add(now_ns().saturating_sub(came_ns));
                    }
                }
            });
        }
        let messengers: Vec<_> = (0..MESSENGERS)
            .map(|messenger| {
                let inboxes = &inboxes;
                scope.spawn(move || {
                    no_timer_slack();
                    let mut sequence = Sequence::new(messenger);
                    let mut due_ns = start_ns;
                    for turn in 0.. {
                        due_ns += sequence.between(0, 2 * mean_gap_ns as u64);
                        if due_ns >= end_ns {
                            break;
                        }
                        sleep_until(due_ns);
                        inboxes[(turn * MESSENGERS + messenger) % inboxes.len()].put(Some(due_ns));
                    }
                })
            })
            .collect();
        for messenger in messengers {
            messenger.join().map_err(|_| anyhow::anyhow!("a messenger panicked"))?;
        }
        inboxes.iter().for_each(|inbox| inbox.put(None));
        anyhow::Ok(())
    })?;
    let merged = Merged::of([latencies].into_iter());
    Ok(merged.percentile_ns(fraction) as f64 / 1e3)
}

/// CPU time that a request of average length takes, with what it costs to hand it over and to wait for it, in ns: nothing
/// else runs meanwhile.
fn alone_ns() -> f64 {
    const REQUESTS: u64 = 40;
    let (inbox, outbox) = (Inbox::default(), Inbox::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Some(request) = inbox.take() {
                work((REQUEST_UNITS.0 + REQUEST_UNITS.1) / 2);
                outbox.put(Some(request));
            }
        });
        let start_ns = now_ns();
        for request in 0..REQUESTS {
            inbox.put(Some(request));
            outbox.take();
        }
        inbox.put(None);
        (now_ns() - start_ns) as f64 / REQUESTS as f64
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::map_shared;

    #[test]
    fn a_request_takes_as_long_as_its_work_at_least() -> Result<()> {
        // SAFETY: zeroed memory is an empty histogram, and is never unmapped.
        let latencies = unsafe { &*map_shared(size_of::<Histogram>())?.cast::<Histogram>() };
        let start_ns = now_ns();
        work(REQUEST_UNITS.0);
        let least_us = (now_ns() - start_ns) as f64 / 1e3;
        // A host is faster than the lab: half, for the noise of it.
        assert!(latency_us(2, 0.5, latencies, 100 * MS)? > least_us / 2.0);
        Ok(())
    }
}
