//! Threads and processes of the test itself that use a GPU's device file and then do no more than sleep and wake.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

/// Time between two wake-ups of whoever ticks.
const TICK: Duration = Duration::from_millis(10);

/// The render nodes of the devices with `part` in their path below /sys/devices.
pub fn render_nodes(part: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir("/sys/class/drm").unwrap().flatten();
    let mut nodes: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("renderD")))
        .filter(|entry| fs::canonicalize(entry.path()).unwrap().to_str().unwrap().contains(part))
        .map(|entry| Path::new("/dev/dri").join(entry.file_name()))
        .collect();
    nodes.sort();
    nodes
}

/// The CPUs local to the GPU of a render node, in the kernel's format.
pub fn home_of(node: &Path) -> String {
    let device = fs::canonicalize(Path::new("/sys/class/drm").join(node.file_name().unwrap())).unwrap();
    let list = device.ancestors().find_map(|path| fs::read_to_string(path.join("local_cpulist")).ok());
    list.unwrap().trim().to_string()
}

/// An open render node.
pub struct Device(File);

impl Device {
    /// Opens `path` and uses it as CUDA does at its start: an ioctl and an mmap.
    pub fn use_by_mmap(path: &Path) -> Self {
        let device = Self::use_by_ioctl(path);
        map(device.0.as_raw_fd());
        device
    }

    /// Opens `path` and does one ioctl.
    pub fn use_by_ioctl(path: &Path) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        submit(file.as_raw_fd());
        Self(file)
    }
}

/// struct drm_version, with no buffers: every DRM driver answers DRM_IOCTL_VERSION.
pub fn submit(fd: RawFd) {
    let mut version = [0u64; 8];
    let request = (3u64 << 30) | ((size_of_val(&version) as u64) << 16) | ((b'd' as u64) << 8);
    // SAFETY: the request carries the size of the argument, which outlives the call.
    unsafe { libc::ioctl(fd, request as _, version.as_mut_ptr()) };
}

/// Tries to map the device. It is refused for want of an object, but only after the kernel has asked its hooks.
fn map(fd: RawFd) {
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
}

/// A thread that wakes a hundred times a second.
pub struct Ticker {
    thread: JoinHandle<BTreeMap<u32, u32>>,
    is_over: Arc<AtomicBool>,
}

impl Ticker {
    /// Starts it on `cpu`, lets it do `first`, frees it to run anywhere and lets it tick, with what `first` returned,
    /// until [`Self::stop`].
    pub fn start<T>(cpu: u32, first: impl FnOnce() -> T + Send + 'static) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let asked = is_over.clone();
        let thread = std::thread::spawn(move || {
            let all = affinity();
            set_affinity(&[cpu]);
            let _held = first();
            set_affinity(&all);
            let mut cpus = BTreeMap::new();
            while !asked.load(Ordering::Relaxed) {
                sleep(TICK);
                // SAFETY: no arguments.
                *cpus.entry(unsafe { libc::sched_getcpu() } as u32).or_default() += 1;
            }
            cpus
        });
        Self { thread, is_over }
    }

    /// Ends it. Returns how often it found itself on each CPU.
    pub fn stop(self) -> BTreeMap<u32, u32> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn affinity() -> Vec<u32> {
    // SAFETY: an all-zero cpu_set_t is the empty set; it and its size belong together.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &mut set), 0);
        (0..libc::CPU_SETSIZE as u32).filter(|&cpu| libc::CPU_ISSET(cpu as usize, &set)).collect()
    }
}

/// Ties the calling thread to `cpus`.
pub fn set_affinity(cpus: &[u32]) {
    // SAFETY: as above, and all CPUs came from affinity() or are the guest's first few.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|&cpu| libc::CPU_SET(cpu as usize, &mut set));
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

/// A process that wakes a hundred times a second, or sleeps.
pub struct Process(libc::pid_t);

impl Process {
    /// Forks one; with `device` it first opens and maps that.
    pub fn fork(device: Option<&Path>) -> Self {
        Self::fork_to(device, |_| {
            // SAFETY: takes a number only.
            unsafe { libc::usleep(TICK.as_micros() as libc::c_uint) };
        })
    }

    /// Forks one that opens and maps `device` and then sleeps.
    pub fn hold(device: &Path) -> Self {
        Self::fork_to(Some(device), |_| {
            // SAFETY: takes nothing.
            unsafe { libc::pause() };
        })
    }

    /// Forks one that does something, given the open device, a hundred times a second: system calls and computing only.
    pub fn fork_doing(device: &Path, tick: impl Fn(RawFd)) -> Self {
        Self::fork_to(Some(device), |fd| {
            tick(fd);
            // SAFETY: takes a number only.
            unsafe { libc::usleep(TICK.as_micros() as libc::c_uint) };
        })
    }

    /// Forks one that does such a thing again and again, without a pause.
    pub fn fork_always_doing(device: &Path, step: impl Fn(RawFd)) -> Self {
        Self::fork_to(Some(device), step)
    }

    /// Forks one that goes on with `step` for ever, which must make system calls and compute only. It gets the open device,
    /// or -1.
    fn fork_to(device: Option<&Path>, step: impl Fn(RawFd)) -> Self {
        let path = device.map(|path| std::ffi::CString::new(path.to_str().unwrap()).unwrap());
        // SAFETY: the child makes system calls only; it takes no lock and allocates nothing.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let mut fd = -1;
                if let Some(path) = path {
                    fd = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                    if fd < 0 {
                        libc::_exit(1);
                    }
                    submit(fd);
                    map(fd);
                }
                loop {
                    step(fd);
                }
            }
            assert!(pid > 0, "fork failed");
            Self(pid)
        }
    }

    /// Forks one that uses no device and has the PID `pid`, which must be free.
    pub fn fork_with_pid(pid: libc::pid_t) -> Self {
        // Another process may be quicker.
        for _ in 0..20 {
            fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).unwrap();
            let process = Self::fork(None);
            if process.0 == pid {
                return process;
            }
        }
        panic!("could not get PID {pid} again");
    }

    /// Its PID.
    pub fn pid(&self) -> libc::pid_t {
        self.0
    }

    /// Its only thread.
    pub fn tid(&self) -> u32 {
        self.0 as u32
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SAFETY: takes integers only; the child is unreaped, so its PID is its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}
