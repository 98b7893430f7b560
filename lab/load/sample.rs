//! What is read from the kernel and how latencies are kept: schedstat, /proc/stat, histograms.

use std::fs;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use anyhow::{Context, Result};

/// Buckets in each doubling of the latency: a value is known to 1.6 %.
const STEPS: u64 = 64;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Enough for 2^41 ns, 36 minutes.
const BUCKETS: usize = 36 * STEPS as usize;

/// Latencies in ns, in shared memory, written by one task.
#[repr(C)]
pub struct Histogram {
    count: AtomicU64,
    max_ns: AtomicU64,
    buckets: [AtomicU32; BUCKETS],
}

impl Histogram {
    /// Adds a latency.
    pub fn add(&self, ns: u64) {
        self.count.fetch_add(1, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
        self.buckets[bucket_of(ns)].fetch_add(1, Relaxed);
    }
}

/// Percentiles of several histograms taken together.
pub struct Merged {
    buckets: Vec<u64>,
    count: u64,
    max_ns: u64,
}

impl Merged {
    /// Adds up `histograms`.
    pub fn of<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Self {
        let mut merged = Self { buckets: vec![0; BUCKETS], count: 0, max_ns: 0 };
        for histogram in histograms {
            merged.count += histogram.count.load(Relaxed);
            merged.max_ns = merged.max_ns.max(histogram.max_ns.load(Relaxed));
            for (sum, bucket) in merged.buckets.iter_mut().zip(&histogram.buckets) {
                *sum += u64::from(bucket.load(Relaxed));
            }
        }
        merged
    }

    /// The latency in ns that a `fraction` of all do not exceed; 0 if there are none.
    pub fn percentile_ns(&self, fraction: f64) -> u64 {
        let wanted = (self.count as f64 * fraction).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return middle_of(bucket).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// The largest latency in ns, exact.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }
}

fn bucket_of(ns: u64) -> usize {
    let shift = (63 - (ns | 1).leading_zeros()).saturating_sub(STEP_BITS);
    let bucket = u64::from(shift) * STEPS + (ns >> shift);
    (bucket as usize).min(BUCKETS - 1)
}

fn middle_of(bucket: usize) -> u64 {
    let (row, step) = (bucket as u64 / STEPS, bucket as u64 % STEPS);
    if row == 0 {
        return step;
    }
    let shift = row - 1;
    ((STEPS + step) << shift) + ((1 << shift) >> 1)
}

/// A thread's time in ns since it began, from `/proc/…/schedstat`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Schedstat {
    /// Running.
    pub cpu_ns: u64,
    /// Runnable but not running.
    pub delay_ns: u64,
}

impl Schedstat {
    /// Of the calling thread.
    pub fn of_this_thread() -> Result<Self> {
        Self::parse(&fs::read_to_string("/proc/thread-self/schedstat").context("/proc/thread-self/schedstat")?)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut fields = text.split_whitespace().map(str::parse::<u64>);
        let mut next = || fields.next().context("schedstat: too short")?.context("schedstat: not a number");
        Ok(Self { cpu_ns: next()?, delay_ns: next()? })
    }
}

/// What /proc/stat says at an instant.
#[derive(Default)]
pub struct ProcStat {
    /// Idle time since boot by CPU: (CPU, ns).
    pub idle_ns: Vec<(usize, u64)>,
    /// Context switches since boot.
    pub switches: u64,
}

impl ProcStat {
    /// Reads it.
    pub fn read() -> Result<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").context("/proc/stat")?)
    }

    fn parse(text: &str) -> Result<Self> {
        /// USER_HZ is 100 on every architecture this runs on.
        const TICK_NS: u64 = 10_000_000;
        let mut stat = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let name = words.next().unwrap_or_default();
            let numbers = || words.clone().filter_map(|word| word.parse::<u64>().ok()).collect::<Vec<_>>();
            if name == "ctxt" {
                stat.switches = *numbers().first().context("/proc/stat: ctxt without a number")?;
            } else if let Some(Ok(cpu)) = name.strip_prefix("cpu").map(str::parse::<usize>) {
                // user nice system idle iowait …
                let times = numbers();
                let idle = times.get(3).context("/proc/stat: CPU line too short")? + times.get(4).unwrap_or(&0);
                stat.idle_ns.push((cpu, idle * TICK_NS));
            }
        }
        Ok(stat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_values_within_two_percent() {
        for ns in [0, 1, 63, 64, 65, 127, 128, 1000, 4_900_000, 123_456_789_012] {
            let back = middle_of(bucket_of(ns));
            assert!(back.abs_diff(ns) * 50 <= ns, "{ns} came back as {back}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_come_from_all_histograms() {
        let new = || Histogram {
            count: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            buckets: [const { AtomicU32::new(0) }; BUCKETS],
        };
        let (a, b) = (new(), new());
        (0..99).for_each(|_| a.add(10));
        b.add(5000);
        let merged = Merged::of([&a, &b].into_iter());
        assert_eq!(merged.percentile_ns(0.5), 10);
        assert_eq!(merged.percentile_ns(0.99), 10);
        assert_eq!(merged.percentile_ns(1.0), 5000);
        assert_eq!(merged.max_ns(), 5000);
        assert_eq!(Merged::of(std::iter::empty()).percentile_ns(0.5), 0);
    }

    #[test]
    fn proc_stat_gives_idle_time_and_switches() -> Result<()> {
        let stat = ProcStat::parse("cpu 1 2 3 4 5\ncpu0 1 0 1 100 20 0\ncpu3 1 0 1 7 0 0\nintr 5 6\nctxt 42\n")?;
        assert_eq!(stat.idle_ns, [(0, 1_200_000_000), (3, 70_000_000)]);
        assert_eq!(stat.switches, 42);
        Ok(())
    }

    #[test]
    fn schedstat_is_run_time_then_delay() -> Result<()> {
        assert_eq!(Schedstat::parse("11 22 3\n")?, Schedstat { cpu_ns: 11, delay_ns: 22 });
        assert!(Schedstat::parse("").is_err());
        Ok(())
    }
}
