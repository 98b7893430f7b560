//! The members: how each kind of thread is made. One function a kind.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::thread::Scope;

use anyhow::{Context, Result};

use super::cast::{Cast, Part, Truth};
use super::launchers;
use super::link::{LinkKind, wait_readable};
use crate::cgroup;
use crate::feeder::WaitKind;
use crate::gpu::{Gpu, Queue, SubmitKind};
use crate::neighbours;
use crate::nvidia;
use crate::sys::{MS, check, fork_child, futex_wait, futex_wake, mount, now_ns, sleep_ns, sleep_until};
use crate::work::{UNITS_PER_MS, work};

/// Length of a GPU kernel, as of the feeders of `lab_load feed`.
pub const KERNEL_NS: u64 = 10 * MS;
/// CPU work in a feeder's step, likewise.
pub const STEP_UNITS: u64 = UNITS_PER_MS;
/// CPU work in a batch, at each depth.
const BATCH_UNITS: u64 = UNITS_PER_MS / 2;

/// Those that run before the scheduler does.
pub fn early(cast: &mut Cast, gpus: &[Gpu]) -> Result<()> {
    plain_feeder(cast, "ioctl, from before the scheduler", "ze-ioctl", gpus, 0, SubmitKind::Ioctl, WaitKind::Block)?;
    early_doorbell(cast, gpus, gpus.len() - 1)
}

/// Those of the early ones that take stand-ins.
pub fn early_with_stand_ins(cast: &mut Cast, gpus: &[Gpu]) -> Result<()> {
    let kind = "launches beside a pool of 16 threads, from before the scheduler";
    launchers::pool(cast, gpus, gpus.len() - 1, "zel-pool", kind, (16, WaitKind::Block))?;
    let keeper = cast.add("keeps the stand-in for /dev/nvidia0", "ze-nvidia0", Truth::SupplierAtMost)?;
    cast.fork("keeper of a device", || {
        keeper.introduce();
        let mut device = nvidia::Device::create()?;
        keeper.enter();
        loop {
            device.serve_one()?;
            keeper.step();
        }
    })
}

/// Those of the late ones that take stand-ins.
pub fn late_with_stand_ins(cast: &mut Cast, gpus: &[Gpu]) -> Result<()> {
    let kind = "launches beside a pool of 4 threads, spins";
    launchers::pool(cast, gpus, 0, "zl-spin", kind, (4, WaitKind::Spin))?;
    launchers::in_turns(cast, gpus, 0)?;
    // NVML says so: see `nvidia::let_nvml_say()`.
    let device = Gpu { name: "nvidia0".to_string(), device: Some(nvidia::PATH.into()), ..gpus[0].clone() };
    let part = cast.add("ioctl on /dev/nvidia0", "z-nvidia", Truth::Feeder { gpu: 0 })?;
    cast.fork("feeder of /dev/nvidia0", || feed(&part, &device, SubmitKind::Ioctl, WaitKind::Block, || Ok(())))
}

/// Those that start under the scheduler.
pub fn late(cast: &mut Cast, gpus: &[Gpu]) -> Result<()> {
    let last = gpus.len() - 1;
    parent_and_child(cast, gpus, 0)?;
    for gpu in 1..gpus.len() {
        let comm = format!("z-ioctl{gpu}");
        plain_feeder(cast, "ioctl", &comm, gpus, gpu, SubmitKind::Ioctl, WaitKind::Block)?;
    }
    for gpu in 0..gpus.len() {
        let comm = format!("z-bell{gpu}");
        plain_feeder(cast, "doorbell, sleeps", &comm, gpus, gpu, SubmitKind::Doorbell, WaitKind::Block)?;
    }
    plain_feeder(cast, "doorbell, spins", "z-spin", gpus, last, SubmitKind::Doorbell, WaitKind::Spin)?;
    let kinds = [
        (LinkKind::Pipe, "pipe", "pipe, another process"),
        (LinkKind::Socket, "sock", "socket pair, another process"),
        (LinkKind::SharedMemory, "shm", "futex in shared memory, another process"),
        (LinkKind::Futex, "futex", "futex, another thread"),
    ];
    for (index, (link, name, kind)) in kinds.into_iter().enumerate() {
        chain(cast, link, name, kind, gpus, index % gpus.len())?;
    }
    mps(cast, gpus, 0)?;
    two_gpus(cast, gpus)?;
    container(cast, gpus, last)?;
    pool(cast, gpus, last)?;
    served(cast, gpus, 0)?;
    recycled(cast, gpus, 0)?;
    monitor(cast, gpus, 0)?;
    abuser(cast, gpus, 0)
}

/// Neighbours that compute without a pause.
pub fn hogs(cast: &mut Cast, count: usize) -> Result<()> {
    for index in 0..count {
        let part = cast.add("hog", format!("z-hog{index}"), Truth::Ordinary)?;
        cast.fork("hog", || {
            part.introduce();
            neighbours::hog(part.control, part.slot);
            Ok(())
        })?;
    }
    Ok(())
}

pub fn open(gpu: &Gpu, submit: SubmitKind) -> Result<Queue> {
    let queue = Queue::open(gpu, submit)?;
    anyhow::ensure!(
        submit == SubmitKind::Ioctl || queue.has_doorbell(),
        "{}: no memory to map, so there is no doorbell feeder",
        gpu.name
    );
    Ok(queue)
}

/// Submits a kernel and waits for it.
fn submit_and_wait(queue: &Queue, wait: WaitKind) -> Result<()> {
    queue.submit().context("submitting a kernel")?;
    wait_for(now_ns() + KERNEL_NS, wait);
    Ok(())
}

/// Waits until `deadline_ns`, when a kernel is done.
pub fn wait_for(deadline_ns: u64, wait: WaitKind) {
    match wait {
        WaitKind::Block => sleep_until(deadline_ns),
        WaitKind::Spin => {
            while now_ns() < deadline_ns {
                work(1);
            }
        }
    }
}

/// Opens `gpu` and feeds it for good: takes a batch, works on it, submits a kernel, waits for it.
fn feed(
    part: &Part,
    gpu: &Gpu,
    submit: SubmitKind,
    wait: WaitKind,
    mut take_batch: impl FnMut() -> Result<()>,
) -> Result<()> {
    part.introduce();
    let queue = open(gpu, submit)?;
    part.enter();
    loop {
        take_batch()?;
        work(STEP_UNITS);
        submit_and_wait(&queue, wait)?;
        part.step();
    }
}

/// Runs `body` in a thread beside the process's first one.
pub fn beside<'scope>(scope: &'scope Scope<'scope, '_>, body: impl FnOnce() -> Result<()> + Send + 'scope) {
    scope.spawn(|| or_exit(body()));
}

/// Ends the process if something failed: other threads of it would go on for good.
pub fn or_exit(result: Result<()>) {
    if let Err(error) = result {
        eprintln!("lab_load: {error:#}");
        // SAFETY: ends the process without running the parent's exit handlers.
        unsafe { libc::_exit(1) };
    }
}

/// Sleeps for good.
pub fn rest() -> Result<()> {
    loop {
        // SAFETY: no arguments.
        unsafe { libc::pause() };
    }
}

fn plain_feeder(
    cast: &mut Cast,
    kind: &'static str,
    comm: &str,
    gpus: &[Gpu],
    gpu: usize,
    submit: SubmitKind,
    wait: WaitKind,
) -> Result<()> {
    let part = cast.add(kind, comm, Truth::Feeder { gpu })?;
    cast.fork(comm, || feed(&part, &gpus[gpu], submit, wait, || Ok(())))
}

/// A doorbell feeder that opened and mapped before the scheduler came, and a thread beside it that has nothing to do
/// with the GPU.
fn early_doorbell(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    let feeder = cast.add("doorbell, from before the scheduler", "ze-bell", Truth::Feeder { gpu })?;
    let other = cast.add("timer thread in a doorbell feeder from before", "ze-timer", Truth::Ordinary)?;
    cast.fork("early doorbell feeder", || {
        std::thread::scope(|scope| {
            beside(scope, || {
                other.enter();
                loop {
                    sleep_ns(100 * MS);
                    work(UNITS_PER_MS / 10);
                    other.step();
                }
            });
            or_exit(feed(&feeder, &gpus[gpu], SubmitKind::Doorbell, WaitKind::Block, || Ok(())));
        });
        Ok(())
    })
}

/// An ioctl feeder that forked a child after it had opened the GPU. The child has the file too, and computes.
fn parent_and_child(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    let feeder = cast.add("ioctl", format!("z-ioctl{gpu}"), Truth::Feeder { gpu })?;
    let child = cast.add("child that inherited the file, computes", "z-inherit", Truth::Ordinary)?;
    cast.fork("ioctl feeder with a child", || {
        feeder.introduce();
        let queue = open(&gpus[gpu], SubmitKind::Ioctl)?;
        fork_child("inheriting child", || {
            child.introduce();
            neighbours::hog(child.control, child.slot);
            Ok(())
        })?;
        feeder.enter();
        loop {
            work(STEP_UNITS);
            submit_and_wait(&queue, WaitKind::Block)?;
            feeder.step();
        }
    })
}

/// A feeder that asks a loader for each batch, which asks a decoder for what goes into it.
fn chain(cast: &mut Cast, link: LinkKind, name: &str, kind: &'static str, gpus: &[Gpu], gpu: usize) -> Result<()> {
    let feeder = cast.add("ioctl, waits for a loader", format!("z-{name}-feed"), Truth::Feeder { gpu })?;
    let loader = cast.add(kind, format!("z-{name}-load"), Truth::Supplier { depth: 1 })?;
    let decoder = cast.add(kind, format!("z-{name}-dec"), Truth::Supplier { depth: 2 })?;
    let (mut batches, mut makes_batches) = link.pair()?;
    let (mut pieces, mut makes_pieces) = link.pair()?;
    let decode = move || {
        decoder.enter();
        loop {
            makes_pieces.serve(|| {
                work(BATCH_UNITS);
                Ok(())
            })?;
            decoder.step();
        }
    };
    let load = move || {
        loader.enter();
        loop {
            makes_batches.serve(|| {
                pieces.ask()?;
                work(BATCH_UNITS);
                Ok(())
            })?;
            loader.step();
        }
    };
    let mut feed = move || feed(&feeder, &gpus[gpu], SubmitKind::Ioctl, WaitKind::Block, || batches.ask());
    if link != LinkKind::Futex {
        cast.fork("decoder", decode)?;
        cast.fork("loader", load)?;
        return cast.fork("feeder with a loader", feed);
    }
    cast.fork("feeder with a loader thread", || {
        std::thread::scope(|scope| {
            beside(scope, decode);
            beside(scope, load);
            or_exit(feed());
        });
        Ok(())
    })
}

/// A server that submits what clients hand it over sockets. It takes requests while kernels run, as MPS does, so that
/// every client wakes it.
fn mps(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    const CLIENTS: usize = 2;
    let server = cast.add("server that submits for its clients", "z-mps", Truth::Feeder { gpu })?;
    let mut sockets = Vec::new();
    for index in 0..CLIENTS {
        let comm = format!("z-mps-client{index}");
        let client = cast.add("client of that server, by a socket", comm, Truth::Supplier { depth: 1 })?;
        let (mut socket, at_server) = UnixStream::pair()?;
        sockets.push(at_server);
        cast.fork("client", || {
            client.enter();
            loop {
                work(BATCH_UNITS);
                socket.write_all(&[1])?;
                socket.read_exact(&mut [0])?;
                client.step();
            }
        })?;
    }
    cast.fork("server", || {
        server.introduce();
        let queue = open(&gpus[gpu], SubmitKind::Ioctl)?;
        let fds: Vec<RawFd> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        server.enter();
        // Kernels in the order in which they run: when each ends, and whose it is.
        let mut running: VecDeque<(u64, usize)> = VecDeque::new();
        loop {
            let can_read = wait_readable(&fds, running.front().map(|&(end_ns, _)| end_ns))?;
            for client in (0..CLIENTS).filter(|&client| can_read[client]) {
                sockets[client].read_exact(&mut [0])?;
                work(STEP_UNITS / 2);
                queue.submit().context("submitting a kernel")?;
                let start_ns = running.back().map_or(0, |&(end_ns, _)| end_ns).max(now_ns());
                running.push_back((start_ns + KERNEL_NS, client));
            }
            while let Some(&(end_ns, client)) = running.front()
                && end_ns <= now_ns()
            {
                running.pop_front();
                sockets[client].write_all(&[1])?;
                server.step();
            }
        }
    })
}

/// A process with a feeder thread for each GPU, and a first thread that only waits for them.
fn two_gpus(cast: &mut Cast, gpus: &[Gpu]) -> Result<()> {
    let first = cast.add_waiting("first thread of that process, waits", "z-multi")?;
    let mut feeders = Vec::new();
    for gpu in 0..gpus.len() {
        let kind = "ioctl, a thread for each GPU in one process";
        feeders.push(cast.add(kind, format!("z-multi{gpu}"), Truth::Feeder { gpu })?);
    }
    cast.fork("process of several GPUs", || {
        std::thread::scope(|scope| {
            for (feeder, gpu) in feeders.iter().zip(gpus) {
                beside(scope, || feed(feeder, gpu, SubmitKind::Ioctl, WaitKind::Block, || Ok(())));
            }
            first.enter();
            or_exit(rest());
        });
        Ok(())
    })
}

/// An ioctl feeder in PID and mount namespaces and a cgroup of its own.
fn container(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    let runtime = cast.add_waiting("process that started the container, waits", "z-runtime")?;
    let inside = cast.add("ioctl, in namespaces and a cgroup of its own", "z-boxed", Truth::Feeder { gpu })?;
    cast.fork("container", || {
        runtime.introduce();
        // SAFETY: takes integers only.
        check(unsafe { libc::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWNS) }).context("unshare (needs root)")?;
        // SAFETY: this process has one thread.
        let pid = check(unsafe { libc::fork() })?;
        if pid == 0 {
            // SAFETY: takes integers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            or_exit(boxed_feeder(&inside, &gpus[gpu]));
        }
        // The feeder knows itself as 1.
        inside.slot.tid.store(pid as u64, Relaxed);
        runtime.enter();
        // SAFETY: a null status is allowed.
        check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) })?;
        anyhow::bail!("the feeder in the container ended")
    })
}

/// The container's cgroup.
fn own_cgroup() -> std::path::PathBuf {
    Path::new(cgroup::ROOT).join("lab_load_zoo")
}

fn boxed_feeder(part: &Part, gpu: &Gpu) -> Result<()> {
    part.take_name();
    mount(c"none", c"/", c"", libc::MS_REC | libc::MS_PRIVATE).context("making mounts private")?;
    mount(c"proc", c"/proc", c"proc", 0).context("mounting /proc")?;
    let root = cgroup::root()?;
    let own = own_cgroup();
    fs::create_dir_all(&own).with_context(|| own.display().to_string())?;
    // As systemd and container runtimes do; without it the group has no weight of its own.
    if let Err(error) = cgroup::delegate(&root, "cpu") {
        eprintln!("lab_load: the container's cgroup has no cpu controller: {error:#}");
    }
    cgroup::join(&own)?;
    let queue = open(gpu, SubmitKind::Ioctl)?;
    part.control.ready_and_wait();
    loop {
        work(STEP_UNITS);
        submit_and_wait(&queue, WaitKind::Block)?;
        part.step();
    }
}

/// Removes the container's cgroup, if it is there and empty.
pub fn remove_own_cgroup() {
    let _ = fs::remove_dir(own_cgroup());
}

/// A pool of threads as OpenMP has: whoever uses it wakes all of them, and the last to be done wakes him.
#[derive(Default)]
pub struct Pool {
    round: AtomicU32,
    busy: AtomicU32,
}

impl Pool {
    /// One of its threads.
    pub fn serve(&self, worker: &Part) -> Result<()> {
        worker.introduce();
        let mut seen = self.round.load(SeqCst);
        worker.enter();
        loop {
            while self.round.load(SeqCst) == seen {
                futex_wait(&self.round, seen, true);
            }
            seen = seen.wrapping_add(1);
            work(UNITS_PER_MS / 5);
            worker.step();
            if self.busy.fetch_sub(1, SeqCst) == 1 {
                futex_wake(&self.busy, 1, true);
            }
        }
    }

    /// Lets all `threads` do their part and waits for them.
    pub fn run(&self, threads: u32) {
        self.busy.store(threads, SeqCst);
        self.round.fetch_add(1, SeqCst);
        futex_wake(&self.round, i32::MAX, true);
        loop {
            match self.busy.load(SeqCst) {
                0 => return,
                left => futex_wait(&self.busy, left, true),
            }
        }
    }
}

/// A feeder with a pool of threads.
fn pool(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    const THREADS: u32 = 16;
    let feeder = cast.add("ioctl, with a pool of 16 threads", "z-pool", Truth::Feeder { gpu })?;
    let mut workers = Vec::new();
    for index in 0..THREADS {
        workers.push(cast.add("thread of that pool", format!("z-pool{index}"), Truth::SupplierAtMost)?);
    }
    cast.fork("feeder with a pool", || {
        let pool = Pool::default();
        std::thread::scope(|scope| {
            for worker in &workers {
                beside(scope, || pool.serve(worker));
            }
            or_exit(feed(&feeder, &gpus[gpu], SubmitKind::Ioctl, WaitKind::Block, || {
                pool.run(THREADS);
                Ok(())
            }));
        });
        Ok(())
    })
}

/// A feeder that answers a request about twice a second, and has a thread that writes its log and now and then says
/// that it is on disk. Both wake the feeder; it waits for neither.
fn served(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    /// Lines between two times that the log is on disk.
    const FLUSH_LINES: u64 = 64;
    let feeder = cast.add("ioctl, with RPC and logging threads", "z-served", Truth::Feeder { gpu })?;
    let rpc = cast.add("RPC thread, wakes a feeder twice a second", "z-rpc", Truth::Ordinary)?;
    let logger = cast.add("logging thread, woken by a feeder in each step", "z-logger", Truth::Ordinary)?;
    cast.fork("feeder with helpers", || {
        let (mut news, mut news_from_rpc) = std::io::pipe()?;
        let mut news_from_logger = news_from_rpc.try_clone()?;
        let (mut log, mut log_writer) = std::io::pipe()?;
        std::thread::scope(|scope| {
            beside(scope, move || {
                rpc.enter();
                loop {
                    sleep_ns(500 * MS);
                    work(UNITS_PER_MS / 5);
                    news_from_rpc.write_all(&[1])?;
                    rpc.step();
                }
            });
            beside(scope, move || {
                logger.enter();
                for line in 1_u64.. {
                    log.read_exact(&mut [0])?;
                    work(UNITS_PER_MS / 20);
                    if line.is_multiple_of(FLUSH_LINES) {
                        news_from_logger.write_all(&[1])?;
                    }
                    logger.step();
                }
                Ok(())
            });
            let mut body = || {
                feeder.introduce();
                let queue = open(&gpus[gpu], SubmitKind::Ioctl)?;
                feeder.enter();
                loop {
                    work(STEP_UNITS);
                    queue.submit().context("submitting a kernel")?;
                    let deadline_ns = now_ns() + KERNEL_NS;
                    log_writer.write_all(&[1])?;
                    while now_ns() < deadline_ns {
                        if wait_readable(&[news.as_raw_fd()], Some(deadline_ns))?[0] {
                            news.read_exact(&mut [0])?;
                        }
                    }
                    feeder.step();
                }
            };
            or_exit(body());
        });
        Ok(())
    })
}

/// A feeder that ends, and an ordinary process that gets its PID and its rhythm.
fn recycled(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    const FEEDS_NS: u64 = 400 * MS;
    let parent = cast.add_waiting("process that recycles a PID, waits", "z-recycler")?;
    let part = cast.add("bursty process with the PID of an ended feeder", "z-recycled", Truth::Ordinary)?;
    cast.fork("recycler", || {
        parent.introduce();
        let first = fork_child("feeder that ends", || {
            part.introduce();
            let queue = open(&gpus[gpu], SubmitKind::Ioctl)?;
            let window = part.control.ready_and_wait();
            while now_ns() < window.start_ns + FEEDS_NS {
                work(STEP_UNITS);
                submit_and_wait(&queue, WaitKind::Block)?;
            }
            Ok(())
        })?;
        parent.enter();
        let mut status = 0;
        // SAFETY: the status outlives the call.
        check(unsafe { libc::waitpid(first, &mut status, 0) })?;
        anyhow::ensure!(status == 0, "the feeder that was to end failed");
        let pid = fork_as(first).context("taking an ended process's PID")?;
        if pid == 0 {
            // SAFETY: takes integers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            part.introduce();
            neighbours::bursty(part.control, part.slot, 0);
            or_exit(Ok(()));
        }
        anyhow::ensure!(pid == first, "got PID {pid} instead of {first}");
        rest()
    })
}

/// fork(2) with a PID of the caller's choice, which has one thread.
fn fork_as(pid: libc::pid_t) -> std::io::Result<libc::pid_t> {
    let set_tid = [pid];
    // SAFETY: zeros are a valid clone_args.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    args.set_tid = set_tid.as_ptr() as u64;
    args.set_tid_size = 1;
    // SAFETY: without flags and a stack this is fork; the arguments and the list they name outlive the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &args, size_of_val(&args)) };
    check(pid as libc::c_int)
}

/// Holds the GPU open all day and asks it something every two seconds.
fn monitor(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    let part = cast.add("monitor: holds the device, an ioctl every 2 s", "z-monitor", Truth::Ordinary)?;
    cast.fork("monitor", || {
        part.introduce();
        let queue = open(&gpus[gpu], SubmitKind::Ioctl)?;
        part.enter();
        loop {
            queue.submit()?;
            part.step();
            sleep_ns(2000 * MS);
        }
    })
}

/// Opens the render node again and again between its computing, and never uses it.
fn abuser(cast: &mut Cast, gpus: &[Gpu], gpu: usize) -> Result<()> {
    let part = cast.add("abuser: opens the device in a loop", "z-abuser", Truth::Ordinary)?;
    cast.fork("abuser", || {
        let path = gpus[gpu].device.as_ref().context("no device to open")?;
        part.enter();
        loop {
            File::options().read(true).write(true).open(path)?;
            work(UNITS_PER_MS / 10);
            part.step();
        }
    })
}
