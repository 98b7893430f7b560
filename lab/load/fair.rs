//! Micro-benchmarks of the scheduling path: what switching, waking, forking, yielding and barriers cost. And small
//! workloads: a build, requests, and calls of a GPU.

mod make;
mod request;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::gpu::{DeviceKind, Gpu, Queue, SubmitKind};
use crate::report;
use crate::sample::Histogram;
use crate::shared::map_shared;
use crate::sys::{self, Children, MS, fork_child, futex_wait, futex_wake, now_ns};
use crate::work::{UNITS_PER_MS, work};

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct FairArgs {
    /// Which benchmark; may be given several times
    #[arg(long, value_enum, default_value = "all")]
    pub what: Vec<What>,
    /// How often each is repeated; the build a third as often
    #[arg(long, default_value_t = 3)]
    pub runs: usize,
    /// About how long each repetition takes, in s
    #[arg(long, default_value_t = 0.4)]
    pub seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// All of them
    All,
    /// A byte to and fro between two processes on one CPU
    PingpongSame,
    /// The same on two CPUs
    PingpongCross,
    /// The same wherever the scheduler puts them
    PingpongFree,
    /// Groups of senders and receivers that exchange messages through pipes, like hackbench
    Exchange,
    /// fork, exit and wait
    Fork,
    /// Create and join a thread
    Thread,
    /// sched_yield between two threads on one CPU
    Yield,
    /// A thread a CPU, work, and a barrier at which they sleep
    Barrier,
    /// The same with a barrier at which they spin
    BarrierSpin,
    /// Barrier, with as many hogs beside
    BarrierHogs,
    /// `make -j` of a small C project in memory
    Make,
    /// Requests to a server at 90 % load: their median latency
    RequestP50,
    /// The same: their 99th percentile
    RequestP99,
    /// An ioctl on a GPU's device, again and again; the last, because it makes the benchmark a feeder
    IoctlLoop,
}

/// Results of one benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct FairReport {
    /// Which benchmark.
    pub what: What,
    /// Unit of the numbers: `steps/s`, where more is better, or `ns/op`, `ms/build` or `µs`, where less is.
    pub unit: &'static str,
    /// Median of all repetitions.
    pub median: f64,
    /// Largest minus smallest, as a fraction of the median.
    pub spread: f64,
    /// Each repetition.
    pub runs: Vec<f64>,
}

/// `lab_load fair`.
pub fn main(args: &FairArgs) -> Result<()> {
    let reports = run(args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
    } else {
        report::print_fair(&reports);
    }
    Ok(())
}

/// Runs the benchmarks that `args` asks for.
pub fn run(args: &FairArgs) -> Result<Vec<FairReport>> {
    anyhow::ensure!(args.runs > 0 && args.seconds > 0.0, "nothing would be measured");
    if !args.what.contains(&What::All) {
        return args.what.iter().map(|&what| what.repeat(args)).collect();
    }
    let all = What::value_variants().iter().copied().filter(|&what| what != What::All);
    let possible = all.filter(|what| match what.missing() {
        Some(missing) => {
            eprintln!("{} is left out: {missing}", what.name());
            false
        }
        None => true,
    });
    possible.map(|what| what.repeat(args)).collect()
}

impl What {
    fn repeat(self, args: &FairArgs) -> Result<FairReport> {
        let once = |_| self.once(args.seconds).with_context(|| format!("benchmark {self:?}"));
        // A build takes as long as all repetitions of another benchmark.
        let repetitions = if self == Self::Make { args.runs.div_ceil(3) } else { args.runs };
        let runs = (0..repetitions).map(once).collect::<Result<Vec<f64>>>()?;
        let mut sorted = runs.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        let spread = (sorted[sorted.len() - 1] - sorted[0]) / median;
        Ok(FairReport { what: self, unit: self.unit(), median, spread, runs })
    }

    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Barrier | Self::BarrierSpin | Self::BarrierHogs => "steps/s",
            Self::Make => "ms/build",
            Self::RequestP50 | Self::RequestP99 => "µs",
            _ => "ns/op",
        }
    }

    /// What this machine lacks for it.
    fn missing(self) -> Option<&'static str> {
        match self {
            Self::Make if !make::is_possible() => Some("make or gcc is not installed"),
            Self::IoctlLoop if Gpu::find(DeviceKind::Auto, None).is_err() => Some("there is no render node"),
            _ => None,
        }
    }

    /// Measures once, in a child of its own, which is killed if it takes far too long.
    pub fn once(self, seconds: f64) -> Result<f64> {
        const LIMIT_NS: u64 = 60_000 * MS;
        let result = shared::<AtomicU64>()?;
        let for_ns = (seconds * 1e9) as u64;
        let mut children = Children::default();
        children.add(fork_child("benchmark", || {
            let value = self.measure(for_ns)?;
            result.store(value.to_bits(), Ordering::Release);
            Ok(())
        })?);
        children.wait(now_ns() + for_ns + LIMIT_NS)?;
        Ok(f64::from_bits(result.load(Ordering::Acquire)))
    }

    fn measure(self, for_ns: u64) -> Result<f64> {
        /// How much longer requests take: percentiles need many.
        const REQUESTS: u64 = 5;
        let cpus = sys::affinity()?;
        let two = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
        match self {
            Self::All => anyhow::bail!("not one benchmark"),
            Self::PingpongSame => pingpong(Some([two[0], two[0]]), for_ns),
            Self::PingpongCross => pingpong(Some(two), for_ns),
            Self::PingpongFree => pingpong(None, for_ns),
            Self::Exchange => exchange(for_ns),
            Self::Fork => fork_exit_wait(for_ns),
            Self::Thread => Ok(repeat_for(for_ns, || {
                std::thread::spawn(|| ()).join().map_err(|_| anyhow::anyhow!("a thread panicked"))
            })?),
            Self::Yield => yields(two[0], for_ns),
            Self::Barrier => barrier(cpus.len(), false, 0, for_ns),
            Self::BarrierSpin => barrier(cpus.len(), true, 0, for_ns),
            Self::BarrierHogs => barrier(cpus.len(), false, cpus.len(), for_ns),
            Self::Make => make::build(cpus.len()),
            Self::RequestP50 => request::latency_us(cpus.len(), 0.5, shared::<Histogram>()?, REQUESTS * for_ns),
            Self::RequestP99 => request::latency_us(cpus.len(), 0.99, shared::<Histogram>()?, REQUESTS * for_ns),
            Self::IoctlLoop => ioctl_loop(for_ns),
        }
    }
}

/// A zeroed `T` that children share, for the life of the process. Only for types of atomics.
fn shared<T>() -> Result<&'static T> {
    // SAFETY: the mapping is zeroed, which is valid for types of atomics, page-aligned and never unmapped.
    Ok(unsafe { &*map_shared(size_of::<T>())?.cast::<T>() })
}

/// Repeats `operation` for `for_ns` and returns ns per repetition.
fn repeat_for(for_ns: u64, mut operation: impl FnMut() -> Result<()>) -> Result<f64> {
    /// Operations between two looks at the clock, which is slow in the lab.
    const BATCH: u64 = 32;
    (0..BATCH).try_for_each(|_| operation())?;
    let start_ns = now_ns();
    for batches in 1.. {
        (0..BATCH).try_for_each(|_| operation())?;
        let passed_ns = now_ns() - start_ns;
        if passed_ns >= for_ns {
            return Ok(passed_ns as f64 / (batches * BATCH) as f64);
        }
    }
    anyhow::bail!("no time passed")
}

/// ns per ioctl on the first GPU.
fn ioctl_loop(for_ns: u64) -> Result<f64> {
    let gpus = Gpu::find(DeviceKind::Auto, Some(1))?;
    let queue = Queue::open(&gpus[0], SubmitKind::Ioctl)?;
    repeat_for(for_ns, || Ok(queue.submit()?))
}

/// ns for a byte to go there and back between two processes.
fn pingpong(cpus: Option<[usize; 2]>, for_ns: u64) -> Result<f64> {
    let pin = |side: usize| cpus.map_or(Ok(()), |cpus| sys::set_affinity(&[cpus[side]]));
    let (mut ping_reader, mut ping_writer) = std::io::pipe()?;
    let (mut pong_reader, mut pong_writer) = std::io::pipe()?;
    let mut byte = [0];
    let mut children = Children::default();
    let partner = || {
        pin(1)?;
        loop {
            ping_reader.read_exact(&mut byte)?;
            pong_writer.write_all(&byte)?;
        }
    };
    children.add(fork_child("partner", partner)?);
    pin(0)?;
    let mut byte = [0];
    // The partner is killed when the children are dropped.
    repeat_for(for_ns, || {
        ping_writer.write_all(&byte)?;
        pong_reader.read_exact(&mut byte)?;
        Ok(())
    })
}

/// ns per message of 100 bytes in two groups of twenty senders, each sending to each of twenty receivers, as hackbench's are.
/// Through pipes, as it has them on demand: with sockets the network stack takes nearly all of the time.
fn exchange(for_ns: u64) -> Result<f64> {
    const GROUPS: usize = 2;
    const PER_GROUP: usize = 20;
    const MESSAGE: [u8; 100] = [1; 100];
    /// Guess of the time a message takes; only the length of the benchmark depends on it.
    const GUESS_NS: u64 = 5000;
    #[derive(Debug)]
    struct Gate {
        ready: AtomicU32,
        open: AtomicU32,
        done_ns: AtomicU64,
    }
    let pairs = (GROUPS * PER_GROUP * PER_GROUP) as u64;
    let loops = (for_ns / GUESS_NS / pairs).max(1) as usize;
    let gate = shared::<Gate>()?;
    let wait_at_gate = || {
        gate.ready.fetch_add(1, Ordering::Relaxed);
        while gate.open.load(Ordering::Acquire) == 0 {
            futex_wait(&gate.open, 0, false);
        }
    };
    let mut children = Children::default();
    for _ in 0..GROUPS {
        let pipes = (0..PER_GROUP).map(|_| std::io::pipe()).collect::<std::io::Result<Vec<_>>>()?;
        for (receiver, _) in &pipes {
            children.add(fork_child("receiver", || {
                let mut receiver = receiver;
                wait_at_gate();
                for _ in 0..loops * PER_GROUP {
                    receiver.read_exact(&mut [0; MESSAGE.len()])?;
                }
                gate.done_ns.fetch_max(now_ns(), Ordering::Relaxed);
                Ok(())
            })?);
        }
        for _ in 0..PER_GROUP {
            children.add(fork_child("sender", || {
                wait_at_gate();
                for _ in 0..loops {
                    pipes.iter().try_for_each(|(_, sender)| { sender }.write_all(&MESSAGE))?;
                }
                Ok(())
            })?);
        }
    }
    while (gate.ready.load(Ordering::Relaxed) as usize) < GROUPS * PER_GROUP * 2 {
        children.reap()?;
        sys::sleep_ns(2 * MS);
    }
    let start_ns = now_ns();
    gate.open.store(1, Ordering::Release);
    futex_wake(&gate.open, i32::MAX, false);
    children.wait(start_ns + for_ns + 50_000 * MS)?;
    Ok((gate.done_ns.load(Ordering::Relaxed) - start_ns) as f64 / (loops as u64 * pairs) as f64)
}

/// ns to fork a process that exits at once, and to wait for it.
fn fork_exit_wait(for_ns: u64) -> Result<f64> {
    repeat_for(for_ns, || {
        // SAFETY: this process has one thread; the child does nothing but exit.
        let pid = sys::check(unsafe { libc::fork() })?;
        if pid == 0 {
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: a null status is allowed.
        sys::check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) })?;
        Ok(())
    })
}

/// ns per sched_yield of two threads that yield to each other on `cpu`.
fn yields(cpu: usize, for_ns: u64) -> Result<f64> {
    sys::set_affinity(&[cpu])?;
    let stop = AtomicBool::new(false);
    let other = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
                other.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut own = 0;
        let mut before = 0;
        let start_ns = now_ns();
        let ns_per_own = repeat_for(for_ns, || {
            std::thread::yield_now();
            own += 1;
            if own == 1 {
                before = other.load(Ordering::Relaxed);
            }
            Ok(())
        });
        let passed_ns = (now_ns() - start_ns) as f64;
        let both = own + other.load(Ordering::Relaxed) - before;
        stop.store(true, Ordering::Relaxed);
        ns_per_own.map(|_| passed_ns / both as f64)
    })
}

/// Steps per second of `threads` threads that each do 0.2 ms of work and then wait for the others.
fn barrier(threads: usize, spin: bool, hogs: usize, for_ns: u64) -> Result<f64> {
    const STEP_UNITS: u64 = UNITS_PER_MS / 5;
    let mut children = Children::default();
    for _ in 0..hogs {
        children.add(fork_child("hog", || {
            loop {
                work(UNITS_PER_MS);
            }
        })?);
    }
    let gate = Barrier { threads: threads as u32, spin, arrived: AtomicU32::new(0), turn: AtomicU32::new(0) };
    // The step after which all stop. A plain flag would be seen one barrier too early by a thread that is late.
    let last_step = AtomicU32::new(u32::MAX);
    let start_ns = now_ns();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| {
                let mut step = 0;
                while step < last_step.load(Ordering::Relaxed) {
                    work(STEP_UNITS);
                    gate.wait();
                    step += 1;
                }
            });
        }
        let mut step = 0;
        while step < last_step.load(Ordering::Relaxed) {
            work(STEP_UNITS);
            step += 1;
            if now_ns() - start_ns >= for_ns {
                last_step.store(step, Ordering::Relaxed);
            }
            gate.wait();
        }
    });
    let steps = last_step.load(Ordering::Relaxed);
    Ok(f64::from(steps) * 1e9 / (now_ns() - start_ns) as f64)
}

/// A barrier at which threads sleep or spin.
struct Barrier {
    threads: u32,
    spin: bool,
    arrived: AtomicU32,
    turn: AtomicU32,
}

impl Barrier {
    fn wait(&self) {
        let turn = self.turn.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.turn.store(turn.wrapping_add(1), Ordering::Release);
            if !self.spin {
                futex_wake(&self.turn, i32::MAX, false);
            }
            return;
        }
        while self.turn.load(Ordering::Acquire) == turn {
            if self.spin {
                std::hint::spin_loop();
            } else {
                futex_wait(&self.turn, turn, false);
            }
        }
    }
}
