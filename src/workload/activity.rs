//! Which of the GPUs that a process holds truly work for it, as far as counters tell.

use std::time::{Duration, Instant};

/// When GPUs worked for one process.
#[derive(Debug, Default)]
pub struct Activity {
    /// One entry for each GPU of which counters tell.
    gpus: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    gpu: u32,
    /// Counters tell of it since then.
    since: Instant,
    worked: Option<Instant>,
}

impl Activity {
    /// Notes what counters said at `now`, each argument being GPUs as bits: of which of `asked` they tell, and which
    /// of those worked since the last look.
    pub fn note(&mut self, asked: u64, told: u64, worked: u64, now: Instant) {
        self.gpus.retain(|watched| (told | !asked) & 1 << watched.gpu != 0);
        for gpu in (0..u64::BITS).filter(|gpu| told & 1 << gpu != 0) {
            let known = self.gpus.iter().position(|watched| watched.gpu == gpu);
            let place = known.unwrap_or_else(|| {
                self.gpus.push(Watched { gpu, since: now, worked: None });
                self.gpus.len() - 1
            });
            if worked & 1 << gpu != 0 {
                self.gpus[place].worked = Some(now);
            }
        }
    }

    /// Those of `gpus` that may work for the process: where counters tell, the ones that did within `ttl`. While they
    /// have told for less than that and seen no work, all may.
    pub fn working(&self, gpus: u64, ttl: Duration, now: Instant) -> u64 {
        let bits = |is_so: &dyn Fn(&&Watched) -> bool| {
            self.gpus.iter().filter(is_so).fold(0, |bits, watched| bits | 1 << watched.gpu)
        };
        let is_recent = |at: Instant| now.saturating_duration_since(at) <= ttl;
        let told = bits(&|_| true);
        let active = bits(&|watched| watched.worked.is_some_and(is_recent));
        let open = if active & gpus != 0 { 0 } else { bits(&|watched| is_recent(watched.since)) };
        gpus & (!told | active | open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn a_process_that_holds_several_gpus_feeds_the_ones_that_work_for_it() {
        let (mut activity, start) = (Activity::default(), Instant::now());
        activity.note(0b11, 0b11, 0, start);
        assert_eq!(activity.working(0b111, TTL, start), 0b111, "it may be any at first");
        activity.note(0b11, 0b11, 0b10, at(start, 5));
        assert_eq!(activity.working(0b111, TTL, at(start, 5)), 0b110, "of the third, counters say nothing");
        activity.note(0b11, 0b11, 0b01, at(start, 8));
        assert_eq!(activity.working(0b111, TTL, at(start, 8)), 0b111);
    }

    #[test]
    fn a_process_whose_counters_stand_still_for_the_time_of_evidence_does_no_gpu_work() {
        let (mut activity, start) = (Activity::default(), Instant::now());
        activity.note(1, 1, 1, start);
        activity.note(1, 1, 0, at(start, 9));
        assert_eq!(activity.working(1, TTL, at(start, 10)), 1);
        assert_eq!(activity.working(1, TTL, at(start, 11)), 0);
        activity.note(1, 1, 1, at(start, 12));
        assert_eq!(activity.working(1, TTL, at(start, 12)), 1, "it goes on");
    }

    #[test]
    fn where_counters_cease_to_tell_nothing_is_held_against_the_process() {
        let (mut activity, start) = (Activity::default(), Instant::now());
        activity.note(1, 1, 0, start);
        assert_eq!(activity.working(1, TTL, at(start, 11)), 0);
        activity.note(0b10, 0b10, 0, at(start, 12));
        assert_eq!(activity.working(1, TTL, at(start, 12)), 0, "another GPU was asked about");
        activity.note(1, 0, 0, at(start, 13));
        assert_eq!(activity.working(1, TTL, at(start, 13)), 1);
    }
}
