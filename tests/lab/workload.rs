//! What user space finds out about processes that use GPUs.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::sleep;
use std::time::Duration;

use scx_stoker::metrics::{Role, ask_threads};

use crate::guest::{lab, modprobe, within};
use crate::known::{is_feeder, thread};
use crate::probe::{Process, Ticker, render_nodes};
use crate::stoker::{Stoker, stop_shared};

#[test]
fn processes_that_do_not_fit_into_the_map_are_found_in_proc() {
    /// The map has room for as many processes as there may be threads when the scheduler starts.
    const LIMIT: &str = "/proc/sys/kernel/threads-max";
    /// Threads that the scheduler and the test may start meanwhile.
    const SPARE: usize = 60;
    /// Lifts the limit, however the test ends.
    struct Limit(String);
    impl Drop for Limit {
        fn drop(&mut self) {
            fs::write(LIMIT, &self.0).unwrap();
        }
    }

    let _lab = lab();
    stop_shared();
    let load = fs::read_to_string("/proc/loadavg").unwrap();
    let threads: usize = load.split(['/', ' ']).nth(4).unwrap().parse().unwrap();
    let room = threads + SPARE;
    let limit = Limit(fs::read_to_string(LIMIT).unwrap());
    fs::write(LIMIT, room.to_string()).unwrap();
    let stoker = Stoker::start(&["--evidence-s", "2"]);
    drop(limit);

    let node = render_nodes("pci").remove(0);
    let _many: Vec<Process> = (0..room).map(|_| Process::hold(&node)).collect();
    let late = Process::fork(Some(&node));
    assert!(within(5.0, || stoker.output().contains("looked for in /proc")), "not said:\n{}", stoker.output());
    // What BPF saw of it holds for 2 s only, and open files are read every 5 s.
    sleep(Duration::from_secs(6));
    for _ in 0..4 {
        sleep(Duration::from_millis(1000));
        let thread = thread(late.tid()).expect("the scheduler knows it");
        assert_eq!(thread.role, Role::Feeder, "{thread:?}");
    }
    stoker.stop();
}

#[test]
fn a_device_file_that_a_gpu_gets_later_is_known_without_a_restart() {
    const CLASS: &str = "/sys/class/drm";

    let _lab = lab();
    stop_shared();
    let links: Vec<(PathBuf, PathBuf)> = fs::read_dir(CLASS)
        .unwrap()
        .filter_map(|entry| Some((entry.as_ref().ok()?.path(), fs::read_link(entry.as_ref().ok()?.path()).ok()?)))
        .collect();
    let node = render_nodes("pci").remove(0);
    let device = fs::read_link(Path::new(CLASS).join(node.file_name().unwrap())).unwrap();
    let is_card = |(path, target): &(PathBuf, PathBuf)| {
        target.parent() == device.parent() && path.file_name().is_some_and(|name| !name.to_str().unwrap().contains('-'))
    };
    let (late, target) = links.iter().find(|link| is_card(link) && link.1 != device).unwrap();
    let listed = Covered::new(Path::new(CLASS));
    links.iter().filter(|(path, _)| path != late).for_each(|(path, target)| symlink(target, path).unwrap());
    let mut stoker = Stoker::start(&[]);
    let card = Path::new("/dev/dri").join(late.file_name().unwrap());
    let process = Process::fork(Some(&card));
    sleep(Duration::from_secs(3));
    assert_eq!(thread(process.tid()), None, "that is the device of a GPU, as far as anybody tells");
    drop(process);

    symlink(target, late).unwrap();
    let is_said = within(10.0, || stoker.output().contains("device files of GPUs have come or gone"));
    assert!(is_said, "not noticed:\n{}", stoker.output());
    let process = Process::fork(Some(&card));
    assert!(within(5.0, || is_feeder(process.tid())), "{:?}", thread(process.tid()));
    assert!(!stoker.output().contains("starting again"), "it restarted:\n{}", stoker.output());
    assert_eq!(stoker.exit_status(), None);
    drop((process, listed));
    stoker.stop();
}

/// A directory of sysfs with other contents, empty ones at first, until it is dropped.
struct Covered(PathBuf);

impl Covered {
    fn new(path: &Path) -> Self {
        run("mount", &["-t", "tmpfs", "none", path.to_str().unwrap()]);
        Self(path.to_path_buf())
    }
}

impl Drop for Covered {
    fn drop(&mut self) {
        run("umount", &["--lazy", self.0.to_str().unwrap()]);
    }
}

fn run(command: &str, arguments: &[&str]) {
    let output = Command::new(command).args(arguments).output().unwrap();
    assert!(output.status.success(), "{command} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_virtual_cpus_of_a_guest_feed_the_gpu_that_it_was_given() {
    const KVM_RUN: u64 = 0xae80;
    /// Plays the VFIO group: a device that nobody else has open. devices.txt of the kernel's documentation numbers it.
    const GROUP: (&str, &str) = ("/dev/full", "1:7");

    let _lab = lab();
    stop_shared();
    // The lab has no IOMMU, so VFIO takes no GPU. What sysfs says of one that it has taken is put over the GPU's own.
    modprobe(&["vfio"]);
    let node = fs::canonicalize(Path::new("/sys/class/drm").join(render_nodes("pci")[0].file_name().unwrap())).unwrap();
    let gpu = node.ancestors().find(|path| path.join("local_cpulist").exists()).unwrap().to_path_buf();
    let files = ["class", "vendor", "device", "numa_node", "local_cpulist", "local_cpus"];
    let texts = files.map(|file| (gpu.join(file), fs::read(gpu.join(file)).unwrap()));
    let gpu_covered = Covered::new(&gpu);
    texts.iter().for_each(|(path, text)| fs::write(path, text).unwrap());
    symlink("../../../bus/pci/drivers/vfio-pci", gpu.join("driver")).unwrap();
    symlink("../../../kernel/iommu_groups/7", gpu.join("iommu_group")).unwrap();
    let class = Path::new("/sys/class/vfio");
    let class_covered = Covered::new(class);
    fs::create_dir(class.join("7")).unwrap();
    fs::write(class.join("7/dev"), GROUP.1).unwrap();
    let stoker = Stoker::start(&[]);

    let guest = Arc::new(fs::File::open(GROUP.0).unwrap());
    let (tell, told) = channel();
    let tickers = [KVM_RUN, 0].map(|request| {
        let (tell, guest) = (tell.clone(), guest.clone());
        Ticker::start(0, move || {
            let (pipe, _) = std::io::pipe().unwrap();
            // SAFETY: a pipe knows no such requests; the hook for ioctls sees them nevertheless.
            unsafe { libc::ioctl(pipe.as_raw_fd(), request as _, 0) };
            // SAFETY: takes nothing.
            tell.send((request, unsafe { libc::gettid() } as u32)).unwrap();
            guest
        })
    });
    let tids: BTreeMap<u64, u32> = told.iter().take(2).collect();
    // The GPU is open since after the start, or is found with the next reading of open files.
    assert!(within(8.0, || is_feeder(tids[&KVM_RUN])), "{:?}", ask_threads());
    let vcpu = thread(tids[&KVM_RUN]).unwrap();
    assert!(vcpu.evidence.contains(&"vcpu".to_string()), "{vcpu:?}");
    assert!(!is_feeder(tids[&0]), "not all threads of the program are virtual CPUs: {:?}", thread(tids[&0]));
    for ticker in tickers {
        ticker.stop();
    }
    drop((guest, class_covered, gpu_covered));
    stoker.stop();
}
