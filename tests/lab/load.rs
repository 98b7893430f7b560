//! `lab_load feed` as a child process, and its report.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::Deserialize;

/// The load generator, which cargo builds beside the program.
pub fn binary() -> PathBuf {
    Path::new(crate::stoker::BINARY).with_file_name("examples").join("lab_load")
}

/// What `lab_load feed --json` prints, as far as tests look at it.
#[derive(Debug, Deserialize)]
pub struct Report {
    /// The scheduler that was active at the end, or `kernel`.
    pub scheduler: String,
    /// Work of hogs and bursty tasks.
    pub background_units: u64,
    /// All work that was done.
    pub total_units: u64,
    /// How hogs fared; none without hogs.
    pub hogs: Option<Hogs>,
    /// How many CPUs were idle on average.
    pub idle_cpus: f64,
    /// Each feeder.
    pub feeders: Vec<Feeder>,
}

/// How hogs fared.
#[derive(Debug, Deserialize)]
pub struct Hogs {
    /// Work of the hog that did least.
    pub min_units: u64,
    /// Work of the hog that did most.
    pub max_units: u64,
    /// Longest time a hog went without progress.
    pub max_gap_ms: f64,
}

/// How one feeder fared. Shares are of the measured time.
#[derive(Debug, Deserialize)]
pub struct Feeder {
    /// Its GPU's CPUs; none if unknown.
    pub home: Option<String>,
    /// With its kernel on the GPU.
    pub gpu_busy: f64,
    /// Runnable but not running.
    pub delay_share: Option<f64>,
    /// Of samples at home; none if home is unknown.
    pub home_share: Option<f64>,
    /// Samples by the CPU it was seen on.
    pub cpus: BTreeMap<u32, u32>,
    /// Longest time between two ends of a wait.
    pub max_gap_ms: f64,
}

impl Report {
    /// Share of all work that was the background's.
    pub fn background_share(&self) -> f64 {
        self.background_units as f64 / self.total_units as f64
    }

    /// Fails unless each feeder was at home and on time, which takes `homes` in some order.
    pub fn assert_served(&self, homes: &[&str]) {
        assert!(self.scheduler.starts_with("stoker"), "the scheduler left during the run: {self:?}");
        let mut found: Vec<&str> = self.feeders.iter().map(|feeder| feeder.home.as_deref().unwrap_or("")).collect();
        found.sort_unstable();
        assert_eq!(found, homes);
        for feeder in &self.feeders {
            assert!(feeder.home_share >= Some(0.99), "not at home: {feeder:?}");
            assert!(feeder.delay_share.is_some_and(|share| share <= 0.02), "runnable but not running: {feeder:?}");
        }
    }
}

/// A load that runs. Killed when dropped, and all its tasks with it.
pub struct Load(Child);

/// Starts `lab_load feed` with `options`, separated by spaces.
pub fn start(options: &str) -> Load {
    let mut command = Command::new(binary());
    command.args(["feed", "--json"]).args(options.split_whitespace());
    Load(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap())
}

/// Runs `lab_load feed` with `options` to its end.
pub fn feed(options: &str) -> Report {
    start(options).finish()
}

impl Load {
    /// Its parent process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits for its end; it must have gone well.
    pub fn finish(mut self) -> Report {
        let mut text = Vec::new();
        self.0.stdout.take().unwrap().read_to_end(&mut text).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "lab_load failed: {status}");
        let report = serde_json::from_slice(&text).unwrap();
        // libtest shows this when the test fails.
        println!("{report:?}");
        report
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Both do nothing to one that has finished.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
