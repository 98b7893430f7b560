//! `scx_stoker` as a child process: started until the kernel says it schedules, stopped as a user would.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use scx_stats::prelude::StatsClient;
use scx_stoker::metrics::{Counters, GpuCounters};

use crate::guest::{is_enabled, state, within};

/// The program under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_scx_stoker");
/// What a scheduler may take to load in the lab, in s.
pub const LOAD_LIMIT_S: f64 = 15.0;
/// How long a test waits for it, in s: in a boot in ordinary time the host's other work counts.
const WAIT_LIMIT_S: f64 = 90.0;
/// What leaving may take, in s.
const STOP_LIMIT_S: f64 = 30.0;

/// The scheduler with default options, for all tests that need no other.
static SHARED: Mutex<Option<Stoker>> = Mutex::new(None);

/// A running scheduler. Killed when dropped, so that a failed test leaves none behind.
pub struct Stoker {
    child: Child,
    log: String,
    /// From its start until the kernel said it was enabled, in s of guest time; 0 before.
    pub load_s: f64,
}

/// Runs `test` with the shared scheduler, which is started if it does not run.
pub fn with_shared<T>(test: impl FnOnce(&mut Stoker) -> T) -> T {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    // A test that fails drops it, whatever state it left it in.
    let kept = shared.take().filter(|_| is_enabled());
    let mut stoker = kept.unwrap_or_else(|| Stoker::start_alone(&[]));
    let result = test(&mut stoker);
    *shared = Some(stoker);
    result
}

/// Makes the kernel's own scheduler the active one.
pub fn stop_shared() {
    if let Some(stoker) = SHARED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        stoker.stop();
    }
}

impl Stoker {
    /// Starts a scheduler with `options` instead of the shared one and waits until it is active.
    pub fn start(options: &[&str]) -> Self {
        stop_shared();
        Self::start_alone(options)
    }

    /// The same, with variables in its environment.
    pub fn start_in(environment: &[(&str, &Path)], options: &[&str]) -> Self {
        stop_shared();
        Self::start_with(environment, options)
    }

    fn start_alone(options: &[&str]) -> Self {
        Self::start_with(&[], options)
    }

    fn start_with(environment: &[(&str, &Path)], options: &[&str]) -> Self {
        assert_eq!(state(), "disabled", "a scheduler is there already");
        let from = Instant::now();
        let mut stoker = Self::spawn(environment, options);
        stoker.wait_enabled();
        stoker.load_s = from.elapsed().as_secs_f64();
        stoker
    }

    fn spawn(environment: &[(&str, &Path)], options: &[&str]) -> Self {
        let log = std::env::temp_dir().join("scx_stoker.log").to_str().unwrap().to_string();
        let file = File::create(&log).unwrap();
        let mut command = Command::new(BINARY);
        command.arg("--verbose").args(options).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Self { child: command.spawn().unwrap(), log, load_s: 0.0 }
    }

    /// Waits until the kernel says that it is active.
    fn wait_enabled(&mut self) {
        let mut ended = None;
        let is_up = within(WAIT_LIMIT_S, || {
            ended = self.exit_status();
            ended.is_some() || is_enabled() && self.output().contains("schedules this machine now")
        });
        assert!(is_up && ended.is_none(), "no scheduler after {WAIT_LIMIT_S} s ({ended:?}):\n{}", self.output());
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended; none while it runs.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// All it printed.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap()).into_owned()
    }

    /// Waits until what it printed after the first `skip` bytes contains `text`, and it is active again and stays so.
    pub fn wait_restarted(&mut self, skip: usize, text: &str) {
        /// It looks for changes once a second; a driver that comes or goes may be more than one of them.
        const SETTLED: Duration = Duration::from_millis(1500);
        let mut printed = 0;
        let mut since = Instant::now();
        let restarted = within(WAIT_LIMIT_S, || {
            let output = self.output();
            let starts =
                output.matches("schedules this machine now").count() + output.matches("starting again").count();
            if starts != printed || !is_enabled() {
                (printed, since) = (starts, Instant::now());
            }
            let new = &output[skip..];
            let is_back = new.find(text).is_some_and(|at| new[at..].contains("schedules this machine now"));
            is_back && since.elapsed() >= SETTLED
        });
        let status = self.exit_status();
        assert!(restarted && status.is_none(), "did not say '{text}' and restart ({status:?}):\n{}", self.output());
    }

    /// Connects to the counters it serves.
    pub fn counters(&self) -> Watch {
        let mut client = StatsClient::new().connect(Some(10_000)).expect("the counters are served");
        // A client gets what happened since it asked last; the first answer begins the first interval.
        request(&mut client);
        Watch(client)
    }

    /// Sends `signal`, waits until it has ended and the kernel's scheduler is back, and tells how it ended and all it
    /// printed.
    pub fn end_by(mut self, signal: libc::c_int) -> (ExitStatus, String) {
        let pid = libc::pid_t::try_from(self.pid()).unwrap();
        assert_eq!(self.exit_status(), None, "ended by itself:\n{}", self.output());
        // SAFETY: takes integers only; the child is unreaped, so its identifier is its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        let mut status = None;
        let is_gone = within(STOP_LIMIT_S, || {
            status = self.exit_status();
            status.is_some() && state() == "disabled"
        });
        assert!(is_gone, "{STOP_LIMIT_S} s after signal {signal}: {status:?}, {}:\n{}", state(), self.output());
        (status.unwrap(), self.output())
    }

    /// Stops it as Ctrl-C does; it must leave cleanly.
    pub fn stop(self) {
        let (status, output) = self.end_by(libc::SIGINT);
        assert!(status.success(), "{status} after SIGINT:\n{output}");
        assert!(output.contains("EXIT: unregistered from user space"), "no reason was printed:\n{output}");
    }
}

impl Drop for Stoker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // libtest shows this, since the test has failed.
            println!("scx_stoker printed:\n{}", self.output());
        }
        if self.exit_status().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
            within(STOP_LIMIT_S, || state() == "disabled");
        }
    }
}

fn request(client: &mut StatsClient) -> Counters {
    client.request("stats", Vec::new()).expect("counters")
}

/// The counters, an interval at a time.
pub struct Watch(StatsClient);

impl Watch {
    /// What was counted since the last call, or since the connection.
    pub fn interval(&mut self) -> Counters {
        request(&mut self.0)
    }

    /// The same of the GPU at home on `home`, in the kernel's format (`0-1`); empty for an unknown home.
    pub fn of_home(&mut self, home: &str) -> GpuCounters {
        of_home(&self.interval(), home)
    }
}

/// What `counters` say of the GPU at home on `home`.
pub fn of_home(counters: &Counters, home: &str) -> GpuCounters {
    let found = counters.gpus.values().find(|gpu| gpu.home == home);
    found.unwrap_or_else(|| panic!("no GPU at home on '{home}': {counters:?}")).clone()
}

/// All wake-ups of feeders.
pub fn wakeups(counters: &Counters) -> u64 {
    counters.gpus.values().map(|gpu| gpu.wakeups).sum()
}
