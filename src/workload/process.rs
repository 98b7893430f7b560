//! Processes as /proc shows them. Everything here may vanish while it is read; that is "not there", never an error.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::fdinfo::{self, OpenFile};
use crate::scheduler::dev_t;

/// `KCMP_FILE` of kcmp(2).
const KCMP_FILE: libc::c_int = 0;

/// `_IO(KVMIO, 0x80)`, as /proc writes it.
const KVM_RUN: &str = "0xae80";

/// One process. Two are equal only if they are the same one, and not merely of the same PID.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its PID.
    pub pid: u32,
    parent: u32,
    /// When it started, in clock ticks since boot: field 22 of proc_pid_stat(5).
    start_ticks: u64,
}

impl PartialEq for Process {
    /// Its parent does not count: that may end before it.
    fn eq(&self, other: &Self) -> bool {
        (self.pid, self.start_ticks) == (other.pid, other.start_ticks)
    }
}

impl Eq for Process {}

impl Process {
    /// Whether this is the process that started at `start_ns` (`start_boottime`), as near as /proc tells.
    pub fn has_started_at(&self, start_ns: u64) -> bool {
        self.start_ticks == start_ns / tick_ns()
    }
}

/// Length of a clock tick of /proc, in nanoseconds.
fn tick_ns() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    1_000_000_000 / u64::try_from(hz).unwrap_or(100).max(1)
}

/// Reads a /proc.
#[derive(Debug)]
pub struct Reader {
    proc: PathBuf,
}

impl Reader {
    /// `proc` is where it is mounted.
    pub fn new(proc: impl Into<PathBuf>) -> Self {
        Self { proc: proc.into() }
    }

    /// All processes.
    pub fn all(&self) -> Vec<Process> {
        self.numbers(self.proc.clone()).into_iter().filter_map(|pid| self.process(pid)).collect()
    }

    /// The process of this PID.
    pub fn process(&self, pid: u32) -> Option<Process> {
        parse_stat(pid, &fs::read_to_string(self.proc.join(format!("{pid}/stat"))).ok()?)
    }

    /// Its threads.
    pub fn threads(&self, process: &Process) -> Vec<u32> {
        self.numbers(self.proc.join(format!("{}/task", process.pid)))
    }

    /// The name of one of its threads (`comm`).
    pub fn name(&self, process: &Process, tid: u32) -> Option<String> {
        let comm = fs::read(self.proc.join(format!("{}/task/{tid}/comm", process.pid))).ok()?;
        Some(String::from_utf8_lossy(&comm).trim_end_matches('\n').to_string())
    }

    /// Its cgroup in the v2 tree, from the root on: `/system.slice/cron.service`.
    pub fn cgroup(&self, process: &Process) -> Option<String> {
        let groups = fs::read_to_string(self.proc.join(format!("{}/cgroup", process.pid))).ok()?;
        groups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_string)
    }

    /// Its effective user.
    pub fn user(&self, process: &Process) -> Option<u32> {
        parse_user(&fs::read_to_string(self.proc.join(format!("{}/status", process.pid))).ok()?)
    }

    /// Whether a thread waits in KVM_RUN right now. One that runs its guest does not show.
    pub fn waits_in_guest(&self, process: &Process, tid: u32) -> bool {
        let path = self.proc.join(format!("{}/task/{tid}/syscall", process.pid));
        fs::read_to_string(path).is_ok_and(|text| is_kvm_run(&text))
    }

    /// What a process has mapped, as text; empty if it is gone.
    pub fn maps(&self, pid: u32) -> String {
        fs::read_to_string(self.proc.join(format!("{pid}/maps"))).unwrap_or_default()
    }

    /// The file behind a mapping, given as `START-END`, whatever mount namespace it is in, and even if it was deleted.
    ///
    /// # Errors
    /// The mapping is gone.
    pub fn mapped_file(&self, pid: u32, range: &str) -> io::Result<fs::File> {
        fs::File::open(self.proc.join(format!("{pid}/map_files/{range}")))
    }

    /// The GPUs, as bits, whose devices it holds open.
    pub fn held(&self, process: &Process, devices: &BTreeMap<u32, u64>) -> u64 {
        self.open_devices(process.pid, devices).into_values().fold(0, |all, gpus| all | gpus)
    }

    /// The GPU files that it holds open, with what their driver counts for them.
    pub fn gpu_files(&self, process: &Process, devices: &BTreeMap<u32, u64>) -> Vec<OpenFile> {
        let info = self.proc.join(format!("{}/fdinfo", process.pid));
        let client = |fd: u32| fdinfo::parse(BufReader::new(fs::File::open(info.join(fd.to_string())).ok()?));
        self.open_devices(process.pid, devices).into_iter().map(|(fd, gpus)| (gpus, client(fd))).collect()
    }

    /// Whether all GPU files it holds came from its parent by fork(2): a loader, not a user of the GPU.
    pub fn has_inherited(&self, process: &Process, devices: &BTreeMap<u32, u64>) -> bool {
        let parents = self.open_devices(process.parent, devices);
        self.open_devices(process.pid, devices)
            .keys()
            .all(|&fd| parents.contains_key(&fd) && is_same_file(process.pid, process.parent, fd))
    }

    /// Its open files that are GPU devices: file descriptor and GPUs.
    fn open_devices(&self, pid: u32, devices: &BTreeMap<u32, u64>) -> BTreeMap<u32, u64> {
        let dir = self.proc.join(format!("{pid}/fd"));
        let gpus_of = |fd: u32| {
            // Follows the link to the open file itself; the device is not opened.
            let device = fs::metadata(dir.join(fd.to_string())).ok()?.rdev();
            devices.get(&dev_t(libc::major(device), libc::minor(device))).map(|&gpus| (fd, gpus))
        };
        self.numbers(dir.clone()).into_iter().filter_map(gpus_of).collect()
    }

    fn numbers(&self, dir: PathBuf) -> Vec<u32> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
    }
}

/// Whether two processes have the same open file behind a descriptor of the same number.
fn is_same_file(pid: u32, other: u32, fd: u32) -> bool {
    // SAFETY: kcmp takes numbers only.
    unsafe {
        libc::syscall(libc::SYS_kcmp, pid, other, KCMP_FILE, libc::c_ulong::from(fd), libc::c_ulong::from(fd)) == 0
    }
}

/// Whether the text of /proc/PID/task/TID/syscall, a number and its arguments, is ioctl(2) with KVM_RUN.
fn is_kvm_run(text: &str) -> bool {
    let mut fields = text.split_whitespace();
    fields.next().and_then(|number| number.parse().ok()) == Some(libc::SYS_ioctl) && fields.nth(1) == Some(KVM_RUN)
}

/// Parent and start time from the text of /proc/PID/stat. The command in it may hold any characters.
fn parse_stat(pid: u32, stat: &str) -> Option<Process> {
    let (_, after_command) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = after_command.split_whitespace().collect();
    Some(Process { pid, parent: fields.get(1)?.parse().ok()?, start_ticks: fields.get(19)?.parse().ok()? })
}

/// The effective user from the text of /proc/PID/status.
fn parse_user(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_user_is_the_second_of_four() {
        assert_eq!(parse_user("Name:\tUid: 9\nUid:\t1000\t0\t0\t0\n"), Some(0));
        assert_eq!(parse_user("Name:\ta\n"), None);
    }

    #[test]
    fn a_thread_is_read_with_its_own_name_and_its_process_with_user_and_cgroup() {
        let reader = Reader::new("/proc");
        let own = reader.process(std::process::id()).unwrap();
        let asked = reader.process(std::process::id()).unwrap();
        let named = std::thread::Builder::new().name("feeder 0".into());
        let name = named.spawn(move || Reader::new("/proc").name(&asked, unsafe { libc::gettid() } as u32)).unwrap();
        assert_eq!(name.join().unwrap().as_deref(), Some("feeder 0"));
        assert_eq!(reader.user(&own), Some(unsafe { libc::geteuid() }));
        assert!(reader.cgroup(&own).is_none_or(|path| path.starts_with('/')));
    }

    #[test]
    fn a_command_with_spaces_and_brackets_does_not_shift_the_fields() {
        let stat = "7 (a) b) S 3 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        let process = parse_stat(7, stat).unwrap();
        assert_eq!((process.pid, process.parent, process.start_ticks), (7, 3, 4711));
        assert_eq!(parse_stat(7, "7 (a) S 3"), None);
    }

    #[test]
    fn a_thread_that_waits_in_its_guest_is_told_from_one_that_waits_otherwise() {
        let ioctl = libc::SYS_ioctl;
        assert!(is_kvm_run(&format!("{ioctl} 0x1d 0xae80 0x0 0xffffffff 0x0 0x0 0x7f1c 0x7f1d\n")));
        assert!(!is_kvm_run(&format!("{ioctl} 0xae80 0x5401 0x0 0x0 0x0 0x0 0x7f1c 0x7f1d\n")));
        assert!(!is_kvm_run("999 0x1d 0xae80 0x0 0x0 0x0 0x0 0x7f1c 0x7f1d\n"));
        assert!(!is_kvm_run("running\n"));
    }

    #[test]
    fn a_process_whose_parent_ended_is_still_the_same() {
        let process = Process { pid: 7, parent: 3, start_ticks: 100 };
        assert_eq!(process, Process { parent: 1, ..process.clone() });
        assert_ne!(process, Process { start_ticks: 101, ..process.clone() });
    }

    #[test]
    fn a_process_of_the_same_pid_that_started_later_is_another_one() {
        let process = Process { pid: 7, parent: 1, start_ticks: 100 };
        assert!(process.has_started_at(100 * tick_ns() + 1));
        assert!(!process.has_started_at(101 * tick_ns()));
    }

    #[test]
    fn a_gpu_file_comes_with_the_counters_of_its_driver_and_files_of_other_devices_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        let process = Process { pid: 7, parent: 1, start_ticks: 100 };
        for (fd, device, info) in [
            (3, "/dev/null", "pos:\t0\ndrm-driver:\ti915\ndrm-client-id:\t4\ndrm-engine-render:\t9 ns\n"),
            (4, "/dev/full", "pos:\t0\n"),
            (5, "/dev/zero", "pos:\t0\n"),
        ] {
            fs::create_dir_all(root.path().join("7/fd")).unwrap();
            fs::create_dir_all(root.path().join("7/fdinfo")).unwrap();
            std::os::unix::fs::symlink(device, root.path().join(format!("7/fd/{fd}"))).unwrap();
            fs::write(root.path().join(format!("7/fdinfo/{fd}")), info).unwrap();
        }
        // Linux numbers them so everywhere: devices.txt of its documentation.
        let devices = BTreeMap::from([(dev_t(1, 3), 0b01), (dev_t(1, 7), 0b10)]);
        let engines = [("drm-engine-render".to_string(), 9)].into();
        let client = fdinfo::Client { driver: "i915".into(), id: 4, engines };
        let files = Reader::new(root.path()).gpu_files(&process, &devices);
        assert_eq!(files, [(0b01, Some(client)), (0b10, None)]);
    }

    #[test]
    fn a_device_held_open_is_found_and_a_child_that_got_it_by_fork_has_inherited_it() {
        let null = fs::File::open("/dev/null").unwrap();
        let device = null.metadata().unwrap().rdev();
        let devices = BTreeMap::from([(dev_t(libc::major(device), libc::minor(device)), 0b100)]);
        let reader = Reader::new("/proc");
        let own = reader.process(std::process::id()).unwrap();
        assert_eq!(reader.held(&own, &devices), 0b100);

        // A child that only waits; it must not run Rust code after fork in a threaded process.
        let child = unsafe { libc::fork() };
        if child == 0 {
            unsafe {
                libc::pause();
                libc::_exit(0);
            }
        }
        let child_process = reader.process(child as u32).unwrap();
        assert_eq!(reader.held(&child_process, &devices), 0b100);
        assert!(reader.has_inherited(&child_process, &devices));
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(reader.held(&child_process, &devices), 0);
    }
}
