//! The few system calls the load needs, each behind a safe function.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Nanoseconds in a millisecond.
pub const MS: u64 = 1_000_000;

/// CLOCK_MONOTONIC in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec. The call cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Sleeps until CLOCK_MONOTONIC reads `deadline_ns`; returns at once if it has passed.
pub fn sleep_until(deadline_ns: u64) {
    let time = libc::timespec {
        tv_sec: (deadline_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (deadline_ns % 1_000_000_000) as libc::c_long,
    };
    loop {
        // SAFETY: the request outlives the call; with TIMER_ABSTIME no remainder is written.
        let rc =
            unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &time, std::ptr::null_mut()) };
        if rc != libc::EINTR {
            return;
        }
    }
}

/// Sleeps for `ns` nanoseconds.
pub fn sleep_ns(ns: u64) {
    std::thread::sleep(Duration::from_nanos(ns));
}

/// Names this thread, so that people can tell it from others; the kernel keeps 15 characters.
pub fn set_name(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name) {
        // SAFETY: the name outlives the call.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    }
}

/// Makes this thread's timers expire on time instead of up to 50 µs late, as a device's interrupt would.
pub fn no_timer_slack() {
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

/// The CPU this thread runs on.
pub fn cpu() -> usize {
    // SAFETY: no arguments.
    let cpu = unsafe { libc::sched_getcpu() };
    cpu.max(0) as usize
}

/// This thread's kernel identifier.
pub fn tid() -> u64 {
    // SAFETY: no arguments.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    tid as u64
}

/// The CPUs this thread may use.
pub fn affinity() -> io::Result<Vec<usize>> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set and its size belong together.
    check(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) })?;
    // SAFETY: CPU_ISSET only reads within the set for cpu < CPU_SETSIZE.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Restricts this thread to `cpus`.
pub fn set_affinity(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: cpu is below CPU_SETSIZE.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the set and its size belong together.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) }).map(drop)
}

/// Makes this thread SCHED_FIFO with `priority`.
pub fn set_fifo(priority: i32) -> io::Result<()> {
    set_scheduler(libc::SCHED_FIFO, priority)
}

/// While this lives, the thread that made it runs as soon as it wakes, whoever else wants to. What it starts does not.
pub struct Punctual(());

impl Punctual {
    /// Makes the calling thread punctual, which takes root.
    pub fn new() -> io::Result<Self> {
        set_scheduler(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1).map(Self)
    }
}

impl Drop for Punctual {
    fn drop(&mut self) {
        let _ = set_policy(TaskPolicy::Normal);
    }
}

fn set_scheduler(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    // SAFETY: an all-zero sched_param is valid.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = priority;
    // SAFETY: the parameter outlives the call.
    check(unsafe { libc::sched_setscheduler(0, policy, &param) }).map(drop)
}

/// A scheduling policy of the fair class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TaskPolicy {
    /// SCHED_OTHER
    Normal,
    /// SCHED_BATCH
    Batch,
    /// SCHED_IDLE
    Idle,
}

/// Gives this thread `policy`; its nice value stays.
pub fn set_policy(policy: TaskPolicy) -> io::Result<()> {
    let policy = match policy {
        TaskPolicy::Normal => libc::SCHED_OTHER,
        TaskPolicy::Batch => libc::SCHED_BATCH,
        TaskPolicy::Idle => libc::SCHED_IDLE,
    };
    set_scheduler(policy, 0)
}

/// Gives this thread the nice value `nice`.
pub fn set_nice(nice: i32) -> io::Result<()> {
    // SAFETY: takes integers only. On Linux the target 0 is the calling thread, not its process.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) }).map(drop)
}

/// Forks a child that runs `body` and exits, with status 1 and a line on stderr if it fails. It dies with its parent.
///
/// The caller has one thread only, so the child may use everything the parent could. Threads that a scope waited for may
/// still be about to end, and hold a lock that the child would wait for in vain: they are waited for here.
///
/// # Errors
/// There are other threads, which do not end.
pub fn fork_child(name: &str, body: impl FnOnce() -> anyhow::Result<()>) -> io::Result<libc::pid_t> {
    wait_for_threads()?;
    // SAFETY: no arguments.
    let parent = unsafe { libc::getpid() };
    // SAFETY: the caller is single-threaded, so no lock can be held by a thread that the child lacks.
    let pid = check(unsafe { libc::fork() })?;
    if pid != 0 {
        return Ok(pid);
    }
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    set_name(name);
    // The parent may have died before the line above.
    // SAFETY: no arguments.
    let orphan = unsafe { libc::getppid() } != parent;
    let status = match body {
        _ if orphan => 1,
        body => match body() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("lab_load: {name}: {error:#}");
                1
            }
        },
    };
    // SAFETY: ends the process without running the parent's exit handlers.
    unsafe { libc::_exit(status) }
}

/// Waits until the calling thread is the only one of its process.
fn wait_for_threads() -> io::Result<()> {
    const LIMIT_NS: u64 = 5_000 * MS;
    let limit_ns = now_ns() + LIMIT_NS;
    while std::fs::read_dir("/proc/self/task")?.count() > 1 {
        if now_ns() > limit_ns {
            return Err(io::Error::other("a process with several threads is not to be forked"));
        }
        sleep_ns(MS);
    }
    Ok(())
}

/// Does `work` in a child that ends then, and waits for it.
pub fn in_child(work: impl FnOnce()) -> io::Result<()> {
    // SAFETY: the caller is single-threaded, so no lock can be held by a thread that the child lacks.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        work();
        // SAFETY: ends the process without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: a null status is allowed.
    check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) })?;
    Ok(())
}

/// Children that were forked here; those still alive are killed when this is dropped.
#[derive(Default)]
pub struct Children(Vec<libc::pid_t>);

impl Children {
    /// Takes charge of `pid`.
    pub fn add(&mut self, pid: libc::pid_t) {
        self.0.push(pid);
    }

    /// Reaps what has ended. Err if one ended badly, Ok(true) if none is left.
    pub fn reap(&mut self) -> anyhow::Result<bool> {
        let mut failed = None;
        self.0.retain(|&pid| {
            let mut status = 0;
            // SAFETY: status outlives the call; pid is our own unreaped child.
            let ended = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } != 0;
            if ended && status != 0 {
                failed = Some((pid, status));
            }
            !ended
        });
        match failed {
            Some((_, status)) if libc::WIFSIGNALED(status) => {
                anyhow::bail!("a task was killed by signal {}", libc::WTERMSIG(status))
            }
            Some((_, status)) => anyhow::bail!("a task failed with status {}", libc::WEXITSTATUS(status)),
            None => Ok(self.0.is_empty()),
        }
    }

    /// Waits until all have ended well. Err if one ends badly or `limit_ns` on CLOCK_MONOTONIC passes.
    pub fn wait(&mut self, limit_ns: u64) -> anyhow::Result<()> {
        while !self.reap()? {
            anyhow::ensure!(now_ns() < limit_ns, "{} tasks did not end in time", self.0.len());
            sleep_ns(2 * MS);
        }
        Ok(())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for &pid in &self.0 {
            // SAFETY: pid is our own child and unreaped, so it cannot have been recycled.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        for &pid in &self.0 {
            // SAFETY: a null status is allowed.
            unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
        }
    }
}

/// Sleeps until `word` is woken, if it holds `expected`. It may return without a reason. `private`: only threads of this
/// process wait on it.
pub fn futex_wait(word: &AtomicU32, expected: u32, private: bool) {
    let operation = libc::FUTEX_WAIT | if private { libc::FUTEX_PRIVATE_FLAG } else { 0 };
    // SAFETY: the word outlives the call; a null time-out is none.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, std::ptr::null::<libc::timespec>()) };
}

/// Wakes at most `threads` that wait on `word`.
pub fn futex_wake(word: &AtomicU32, threads: i32, private: bool) {
    let operation = libc::FUTEX_WAKE | if private { libc::FUTEX_PRIVATE_FLAG } else { 0 };
    // SAFETY: the word outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, threads) };
}

/// Mounts a file system of `kind`.
pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the strings outlive the call; a null data is none.
    check(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) }).map(drop)
}

/// Turns the −1 of a system call into the error it stands for.
pub fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc == -1 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// Parses the kernel's CPU list format, such as `0-3,8`.
pub fn parse_cpulist(text: &str) -> anyhow::Result<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>()?..=last.parse::<usize>()?);
    }
    Ok(cpus)
}

/// Writes CPUs in ascending order as the kernel does, such as `0-3,8`.
pub fn format_cpulist(cpus: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let parts = ranges.iter().map(|&(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    parts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_survive_a_round_trip() -> anyhow::Result<()> {
        assert_eq!(parse_cpulist("0-2,5\n")?, [0, 1, 2, 5]);
        assert_eq!(format_cpulist(&[0, 1, 2, 5]), "0-2,5");
        assert_eq!(parse_cpulist("")?, [0usize; 0]);
        assert!(parse_cpulist("x").is_err());
        Ok(())
    }
}
