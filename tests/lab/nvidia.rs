//! NVIDIA's device and NVML, both stand-ins.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use crate::guest::{lab, within};
use crate::known::{is_feeder, thread};
use crate::load;
use crate::probe::{Process, home_of, render_nodes, submit};
use crate::stoker::{BINARY, Stoker, of_home, stop_shared};

const DEVICE: &str = "/dev/nvidia0";

/// Who keeps the device there. Killed when dropped, and the device goes with it.
struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_feeder_of_nvidias_device_is_found_and_at_home_though_the_device_came_after_the_scheduler() {
    let _lab = lab();
    stop_shared();
    let node = render_nodes("pci").remove(0);
    let device = fs::canonicalize(Path::new("/sys/class/drm").join(node.file_name().unwrap()).join("device")).unwrap();
    let pci = device.ancestors().find(|path| path.join("local_cpulist").exists()).unwrap();
    let folder = std::env::temp_dir().join("nvml");
    fs::create_dir_all(&folder).unwrap();
    let stand_in = Path::new(BINARY).with_file_name("examples").join("libnvml_stand_in.so");
    symlink(&stand_in, folder.join("libnvidia-ml.so.1")).unwrap();
    let state = folder.join("state.json");
    let gpu = serde_json::json!({ "name": "A", "uuid": "GPU-a", "pci": pci.file_name().unwrap().to_str(), "minor": 0 });
    fs::write(&state, serde_json::json!({ "gpus": [gpu] }).to_string()).unwrap();

    let stoker = Stoker::start_in(&[("LD_LIBRARY_PATH", &folder), ("STOKER_NVML_FILE", &state)], &[]);
    assert!(!Path::new(DEVICE).exists(), "the device is there before its time");
    let keeper = Keeper(Command::new(load::binary()).arg("nvidia0").spawn().unwrap());
    assert!(within(10.0, || Path::new(DEVICE).exists()), "no device");
    let mut counters = stoker.counters();
    let feeder = Process::fork_doing(Path::new(DEVICE), submit);

    let home = home_of(&node);
    assert!(within(5.0, || is_feeder(feeder.tid())), "{:?}\n{}", thread(feeder.tid()), stoker.output());
    let thread = thread(feeder.tid()).unwrap();
    assert_eq!(thread.gpu, if home == "0-1" { 0 } else { 1 }, "{thread:?}");
    assert!(thread.evidence.contains(&"ioctl".to_string()), "{thread:?}");
    counters.interval();
    sleep(Duration::from_secs(1));
    let served = of_home(&counters.interval(), &home);
    assert!(served.wakeups > 50 && served.at_home() > 0.9, "{served:?}");
    drop(feeder);
    drop(keeper);
    stoker.stop();
}
