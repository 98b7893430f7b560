//! Counters per GPU, and what they say.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use scx_stats_derive::{Stats, stat_doc};
use serde::{Deserialize, Serialize};

use crate::bpf_intf::{
    stoker_spill_STOKER_SPILL_AFFINITY as AFFINITY, stoker_spill_STOKER_SPILL_HOME_FULL as HOME_FULL,
    stoker_spill_STOKER_SPILL_NO_GRANT as NO_GRANT,
};
use crate::machine::{Home, Machine};
use crate::scheduler::Scheduler;

/// Counters of one GPU's feeders. Times are in nanoseconds.
#[stat_doc]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, Stats)]
pub struct GpuCounters {
    #[stat(desc = "name of the GPU")]
    pub name: String,
    #[stat(desc = "PCI address, empty when it is not on PCI")]
    pub pci: String,
    #[stat(desc = "home CPUs, empty when unknown")]
    pub home: String,
    #[stat(desc = "distinct feeders that ran in the last second")]
    pub feeders: u64,
    #[stat(desc = "wake-ups of feeders")]
    pub wakeups: u64,
    #[stat(desc = "wake-ups served by an idle home CPU")]
    pub idle_home: u64,
    #[stat(desc = "times a feeder displaced ordinary work at home, at a wake-up or to stay there")]
    pub displacements: u64,
    #[stat(desc = "times a feeder displaced ordinary work away from home")]
    pub displacements_away: u64,
    #[stat(desc = "times a supplier displaced ordinary work")]
    pub supplies: u64,
    #[stat(desc = "wake-ups that waited at home for another feeder")]
    pub waits: u64,
    #[stat(
        desc = "times a feeder left home because no home CPU would give way: all ran feeders or higher scheduling classes"
    )]
    pub spills_home_full: u64,
    #[stat(desc = "wake-ups of feeders whose affinity mask has no home CPU")]
    pub spills_affinity: u64,
    #[stat(desc = "times a feeder beyond its cap found an idle CPU only away from home")]
    pub spills_no_grant: u64,
    #[stat(desc = "times the bandwidth grant of the GPU's domain ran out")]
    pub cap_hits: u64,
    #[stat(desc = "time feeders ran on home CPUs (ns)")]
    pub home_ns: u64,
    #[stat(desc = "time feeders ran elsewhere (ns)")]
    pub away_ns: u64,
    #[stat(desc = "time feeders were runnable but not running, summed over feeders (ns)")]
    pub delay_ns: u64,
    #[stat(desc = "time in which feeders were runnable and none of them ran (ns)")]
    pub starvation_ns: u64,
    #[stat(desc = "waits of feeders for a CPU: entry b counts those of 2^b to 2^(b+1) ns")]
    pub delays: Vec<u64>,
}

impl GpuCounters {
    /// Share of feeders' running time spent at home, 0 to 1; 1 when none ran.
    pub fn at_home(&self) -> f64 {
        let total = self.home_ns + self.away_ns;
        if total == 0 { 1.0 } else { self.home_ns as f64 / total as f64 }
    }

    /// All times a feeder left home or could not be there.
    pub fn spills(&self) -> u64 {
        self.spills_home_full + self.spills_affinity + self.spills_no_grant
    }

    /// The wait for a CPU that a share of `quantile` of waits did not exceed, rounded up to a power of two; none
    /// without waits.
    pub fn delay_quantile(&self, quantile: f64) -> Option<Duration> {
        let total: u64 = self.delays.iter().sum();
        let rank = (total as f64 * quantile).ceil() as u64;
        let mut seen = 0;
        let bucket = self.delays.iter().position(|count| {
            seen += count;
            seen >= rank && total > 0
        })?;
        Some(Duration::from_nanos(2 << bucket))
    }

    fn since(&self, earlier: &Self) -> Self {
        let delays = self.delays.iter().enumerate();
        Self {
            name: self.name.clone(),
            pci: self.pci.clone(),
            home: self.home.clone(),
            feeders: self.feeders,
            wakeups: self.wakeups - earlier.wakeups,
            idle_home: self.idle_home - earlier.idle_home,
            displacements: self.displacements - earlier.displacements,
            displacements_away: self.displacements_away - earlier.displacements_away,
            supplies: self.supplies - earlier.supplies,
            waits: self.waits - earlier.waits,
            spills_home_full: self.spills_home_full - earlier.spills_home_full,
            spills_affinity: self.spills_affinity - earlier.spills_affinity,
            spills_no_grant: self.spills_no_grant - earlier.spills_no_grant,
            cap_hits: self.cap_hits - earlier.cap_hits,
            home_ns: self.home_ns - earlier.home_ns,
            away_ns: self.away_ns - earlier.away_ns,
            delay_ns: self.delay_ns - earlier.delay_ns,
            starvation_ns: self.starvation_ns - earlier.starvation_ns,
            delays: delays.map(|(b, count)| count - earlier.delays.get(b).unwrap_or(&0)).collect(),
        }
    }
}

/// Counters of all GPUs, and when they were read.
#[stat_doc]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, Stats)]
#[stat(top)]
pub struct Counters {
    #[stat(desc = "time of the reading, or length of the interval (ns)")]
    pub at_ns: u64,
    #[stat(desc = "processes that use a GPU and were not noted for want of room")]
    pub processes_lost: u64,
    #[stat(desc = "cgroups that were not numbered for want of room: each shares its parent's weight and limits")]
    pub groups_lost: u64,
    #[stat(desc = "periods of cgroups with a cpu.max")]
    pub limited_periods: u64,
    #[stat(desc = "those of them in which a task had to wait for the next")]
    pub throttled_periods: u64,
    #[stat(desc = "calls that launch GPU work seen in samples (--probe-launches)")]
    pub launch_calls: u64,
    #[stat(desc = "time with probes on such calls (ns)")]
    pub launch_probed_ns: u64,
    #[stat(desc = "time that these probes took from the threads that called, estimated (ns)")]
    pub launch_cost_ns: u64,
    #[stat(desc = "counters of each GPU")]
    pub gpus: BTreeMap<usize, GpuCounters>,
}

impl Counters {
    /// Reads all counters.
    pub fn read(scheduler: &Scheduler, machine: &Machine) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let served = machine.gpus.iter().take(scheduler.layout().gpu_domain.len());
        let gpus = served.map(|gpu| {
            let stats = scheduler.gpu_stats(gpu.index);
            let counters = GpuCounters {
                name: gpu.name.clone(),
                pci: gpu.pci.map(|pci| pci.to_string()).unwrap_or_default(),
                home: match &gpu.home {
                    Home::Known { cpus, .. } => cpus.to_string(),
                    Home::Unknown { .. } => String::new(),
                },
                feeders: scheduler.feeders(gpu.index),
                wakeups: stats.wakeups,
                idle_home: stats.idle_home,
                displacements: stats.displacements,
                displacements_away: stats.displacements_away,
                supplies: stats.supplies,
                waits: stats.waits,
                spills_home_full: stats.spills[HOME_FULL as usize],
                spills_affinity: stats.spills[AFFINITY as usize],
                spills_no_grant: stats.spills[NO_GRANT as usize],
                cap_hits: stats.cap_hits,
                home_ns: stats.home_ns,
                away_ns: stats.away_ns,
                delay_ns: stats.delay_ns,
                starvation_ns: stats.starvation_ns,
                delays: stats.delays.to_vec(),
            };
            (gpu.index as usize, counters)
        });
        let limits = scheduler.limit_stats();
        let launches = scheduler.launch_stats();
        Self {
            at_ns: at.as_nanos() as u64,
            processes_lost: scheduler.processes_lost(),
            groups_lost: scheduler.groups_lost(),
            limited_periods: limits.periods,
            throttled_periods: limits.throttled_periods,
            launch_calls: launches.calls,
            launch_probed_ns: launches.probed_ns,
            launch_cost_ns: launches.cost_ns(),
            gpus: gpus.collect(),
        }
    }

    /// What happened since `earlier`, and for how long. Counters that began anew since then are taken as they are.
    pub fn since(&self, earlier: &Self) -> Self {
        let none = GpuCounters::default();
        let gpus = self.gpus.iter().map(|(index, gpu)| {
            let before = earlier.gpus.get(index).filter(|before| before.wakeups <= gpu.wakeups).unwrap_or(&none);
            (*index, gpu.since(before))
        });
        Self {
            at_ns: self.at_ns.saturating_sub(earlier.at_ns),
            processes_lost: self.processes_lost.saturating_sub(earlier.processes_lost),
            groups_lost: self.groups_lost.saturating_sub(earlier.groups_lost),
            limited_periods: self.limited_periods.saturating_sub(earlier.limited_periods),
            throttled_periods: self.throttled_periods.saturating_sub(earlier.throttled_periods),
            launch_calls: self.launch_calls.saturating_sub(earlier.launch_calls),
            launch_probed_ns: self.launch_probed_ns.saturating_sub(earlier.launch_probed_ns),
            launch_cost_ns: self.launch_cost_ns.saturating_sub(earlier.launch_cost_ns),
            gpus: gpus.collect(),
        }
    }

    /// One line for people, of an interval that [`Self::since`] made.
    pub fn status_line(&self) -> String {
        let seconds = self.at_ns as f64 / 1e9;
        let mut line = if self.gpus.is_empty() { "no GPU".to_string() } else { String::new() };
        for (index, gpu) in &self.gpus {
            let separator = if line.is_empty() { "" } else { " | " };
            // Writing to a String cannot fail.
            let _ = write!(
                line,
                "{separator}GPU {index}: {} feeders, {:.0} wake-ups/s, {:.1} % at home, {} displaced, {} spilled \
                 (home full {}, affinity {}, cap {}), starving {:.2} %",
                gpu.feeders,
                gpu.wakeups as f64 / seconds,
                100.0 * gpu.at_home(),
                gpu.displacements + gpu.displacements_away,
                gpu.spills(),
                gpu.spills_home_full,
                gpu.spills_affinity,
                gpu.spills_no_grant,
                gpu.starvation_ns as f64 / seconds / 1e7,
            );
        }
        if self.limited_periods > 0 {
            let _ =
                write!(line, " | cpu.max: {} of {} periods throttled", self.throttled_periods, self.limited_periods);
        }
        if self.launch_probed_ns > 0 {
            let _ = write!(
                line,
                " | {} launches seen in {} ms of probes, which cost {} us",
                self.launch_calls,
                self.launch_probed_ns / 1_000_000,
                self.launch_cost_ns / 1000
            );
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(at_ns: u64, gpu: GpuCounters) -> Counters {
        Counters { at_ns, gpus: BTreeMap::from([(0, gpu)]), ..Counters::default() }
    }

    #[test]
    fn an_interval_is_the_difference_of_two_readings() {
        let before = counters(1_000_000_000, GpuCounters { wakeups: 10, home_ns: 5, ..Default::default() });
        let after = counters(3_000_000_000, GpuCounters { wakeups: 30, home_ns: 6, away_ns: 3, ..Default::default() });
        let interval = after.since(&before);
        assert_eq!(interval.at_ns, 2_000_000_000);
        assert_eq!(interval.gpus[&0].wakeups, 20);
        assert_eq!(interval.gpus[&0].at_home(), 0.25);
        assert!(interval.status_line().contains("10 wake-ups/s, 25.0 % at home"));
    }

    #[test]
    fn probes_are_told_of_in_the_intervals_that_had_some() {
        let probed = |launch_probed_ns| Counters {
            launch_calls: 7,
            launch_cost_ns: 9000,
            launch_probed_ns,
            ..counters(1_000_000_000, GpuCounters::default())
        };
        let line = |counters: Counters| counters.status_line();
        assert!(line(probed(200_000_000)).ends_with("| 7 launches seen in 200 ms of probes, which cost 9 us"));
        assert!(!line(probed(0)).contains("probes"));
    }

    #[test]
    fn a_reading_after_a_restart_is_taken_as_it_is() {
        let before = counters(1, GpuCounters { wakeups: 10, ..Default::default() });
        let after = counters(2, GpuCounters { wakeups: 3, ..Default::default() });
        assert_eq!(after.since(&before).gpus[&0].wakeups, 3);
    }

    #[test]
    fn a_quantile_is_the_end_of_the_bucket_that_reaches_it() {
        let gpu = GpuCounters { delays: vec![0, 0, 90, 0, 10], ..Default::default() };
        assert_eq!(gpu.delay_quantile(0.5), Some(Duration::from_nanos(8)));
        assert_eq!(gpu.delay_quantile(0.99), Some(Duration::from_nanos(32)));
        assert_eq!(GpuCounters::default().delay_quantile(0.5), None);
    }
}
