//! The hook in ioctl(2) looks only now and then while some CPU calls it so often that what it costs would be felt: with an
//! ioctl that does next to nothing it is more than a tenth of the time, wherever the ioctl goes to.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Scheduler;

/// Calls a second on one CPU from which on the hook is off in between. Below, it takes four percent of a CPU at most: each
/// call some 190 instructions.
const BUSY_PER_S: f64 = 200_000.0;
/// How long it looks. A thread that submits 20 times a second is seen often enough in that for a feeder.
const LOOK: Duration = Duration::from_millis(200);
/// How long it is off then: to turn it off and on again takes the kernel a hundredth or two of that.
const PAUSE: Duration = Duration::from_secs(2);
/// When it is tried again if it could not be turned on.
const RETRY: Duration = Duration::from_secs(10);

/// When the hook is on.
#[derive(Debug)]
pub(super) struct Pace {
    pause: Duration,
    now: Phase,
}

#[derive(Debug)]
enum Phase {
    /// On.
    Looking {
        /// Since then ...
        since: Instant,
        /// ... each CPU has called it so often more.
        calls: Vec<u32>,
    },
    /// Off.
    Pausing {
        until: Instant,
        /// Ends when the kernel is sure that nobody is in it any more.
        ending: Option<JoinHandle<()>>,
    },
}

impl Pace {
    /// Begins with a look. Evidence holds for `evidence_ttl`, and is not to run out in a pause.
    pub(super) fn new(evidence_ttl: Duration) -> Self {
        Self { pause: PAUSE.min(evidence_ttl / 2), now: Phase::Looking { since: Instant::now(), calls: Vec::new() } }
    }
}

impl Scheduler<'_> {
    /// Turns the hook in ioctl(2) on or off, if it is time. To be called some ten times a second.
    pub fn pace_hooks(&mut self) {
        let now = Instant::now();
        match &self.pace.now {
            Phase::Looking { since, calls } => {
                let elapsed = now - *since;
                if elapsed < LOOK {
                    return;
                }
                let calls_now = self.ioctls();
                let is_busy = is_busy(elapsed, calls, &calls_now);
                self.pace.now = match self.skel.links.stoker_file_ioctl.take_if(|_| is_busy) {
                    // In a thread of its own, because the kernel takes long for it on a busy machine. If there can be none
                    // it is dropped here.
                    Some(link) => {
                        let ending = std::thread::Builder::new().spawn(move || drop(link)).ok();
                        Phase::Pausing { until: now + self.pace.pause, ending }
                    }
                    None => Phase::Looking { since: now, calls: calls_now },
                };
            }
            Phase::Pausing { until, ending } => {
                if now < *until || ending.as_ref().is_some_and(|ending| !ending.is_finished()) {
                    return;
                }
                self.pace.now = match self.skel.progs.stoker_file_ioctl.attach() {
                    Ok(link) => {
                        self.skel.links.stoker_file_ioctl = Some(link);
                        Phase::Looking { since: Instant::now(), calls: self.ioctls() }
                    }
                    Err(error) => {
                        log::warn!("threads that submit by ioctl are not seen for {} s ({error:#})", RETRY.as_secs());
                        Phase::Pausing { until: now + RETRY, ending: None }
                    }
                };
            }
        }
    }

    /// How often each CPU has called the hook.
    fn ioctls(&self) -> Vec<u32> {
        let bss = self.skel.maps.bss_data.as_ref();
        let cpus = bss.map_or(&[][..], |bss| &bss.cpu_ctxs[..self.layout.nr_cpus as usize]);
        cpus.iter().map(|cpu| cpu.ioctls).collect()
    }
}

/// Whether one of the CPUs that had called the hook `before` times has called it too often in `elapsed`.
fn is_busy(elapsed: Duration, before: &[u32], now: &[u32]) -> bool {
    let most = before.iter().zip(now).map(|(before, now)| now.wrapping_sub(*before)).max().unwrap_or(0);
    f64::from(most) > BUSY_PER_S * elapsed.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cpu_that_calls_too_often_is_enough_and_many_that_do_not_are_not() {
        let is_busy = |now: &[u32]| is_busy(Duration::from_millis(25), &[0, 10, u32::MAX], now);
        assert!(!is_busy(&[4000, 4000, 4000]));
        assert!(is_busy(&[0, 5100, 0]));
        // The counters wrap around.
        assert!(!is_busy(&[0, 10, 4000]));
        assert!(is_busy(&[0, 10, 5100]));
    }

    #[test]
    fn the_first_look_begins_with_nothing_to_compare_with() {
        assert!(!is_busy(LOOK, &[], &[u32::MAX]));
    }
}
