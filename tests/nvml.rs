//! NVML on its one thread, with the stand-in. One test, because it sets the environment of its process.

// A helper that fails fails its test; clippy's exemption covers only the test functions themselves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/stand_in.rs"]
mod stand_in;

use std::time::{Duration, Instant};

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use scx_stoker::machine::nvml::{Absent, NoAnswer, NvmlSource, NvmlThread};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn one_thread_answers_about_processes_and_outlives_a_hang() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nvml.json");
    let mut state = json!({ "gpus": [
        { "name": "A", "uuid": "GPU-a", "pci": "0000:11:00.0", "busy": 90, "memory": 1000, "memory_used": 400,
          "compute": [{ "pid": 7, "used": 100 }, { "pid": 8 }], "graphics": [{ "pid": 9 }], "mps": [{ "pid": 10 }],
          "samples": [{ "pid": 7, "sm": 80, "time": 5 }] },
        { "name": "B", "uuid": "GPU-b", "pci": "10000:12:00.0", "mig": [{ "uuid": "MIG-b", "name": "1g" }] },
    ] });
    std::fs::write(&file, state.to_string()).unwrap();
    // SAFETY: this process has no other test, so no other thread reads the environment.
    unsafe { std::env::set_var("STOKER_NVML_FILE", &file) };
    let source = NvmlSource::Library(stand_in::stand_in().into());
    let nvml = NvmlThread::start(&source, PATIENCE).unwrap();

    let pids = nvml.ask(PATIENCE, |nvml| {
        let gpu = nvml.device_by_uuid("GPU-a")?;
        let compute = gpu.running_compute_processes()?;
        let lists = [compute, gpu.running_graphics_processes()?, gpu.mps_running_compute_processes()?];
        Ok::<_, NvmlError>(lists.map(|list| list.iter().map(|process| process.pid).collect::<Vec<_>>()))
    });
    assert_eq!(pids.unwrap().unwrap(), [vec![7, 8], vec![9], vec![10]]);

    let figures = nvml.ask(PATIENCE, |nvml| {
        let gpu = nvml.device_by_index(0)?;
        let recent = gpu.process_utilization_stats(0u64)?;
        Ok::<_, NvmlError>((gpu.utilization_rates()?.gpu, gpu.memory_info()?.used, recent[0].pid, recent[0].sm_util))
    });
    assert_eq!(figures.unwrap().unwrap(), (90, 400, 7, 80));
    let none =
        nvml.ask(PATIENCE, |nvml| nvml.device_by_index(1)?.process_utilization_stats(0u64).map(|list| list.len()));
    assert!(matches!(none, Ok(Err(NvmlError::NotFound))), "as of a GPU without samples: {none:?}");
    let unsupported = nvml.ask(PATIENCE, |nvml| nvml.device_by_index(0)?.clock_info(Clock::SM));
    assert!(matches!(unsupported, Ok(Err(_))), "what the stand-in lacks is an error, not a crash");

    let instance = nvml.ask(PATIENCE, |nvml| {
        let gpu = nvml.device_by_pci_bus_id("00010000:12:00.0")?;
        Ok::<_, NvmlError>((gpu.index()?, gpu.mig_device_by_index(0)?.uuid()?, gpu.mig_device_by_index(1).is_err()))
    });
    assert_eq!(instance.unwrap().unwrap(), (1, "MIG-b".into(), true));

    let second = NvmlThread::start(&source, PATIENCE);
    assert!(matches!(&second, Err(Absent::Broken(reason)) if reason.contains("in use")), "{second:?}");

    state["hang_ms"] = json!({ "nvmlDeviceGetCount_v2": 1500 });
    std::fs::write(&file, state.to_string()).unwrap();
    let started = Instant::now();
    let answer = nvml.ask(Duration::from_millis(200), |nvml| nvml.device_count());
    assert_eq!(answer.unwrap_err(), NoAnswer);
    assert!(started.elapsed() < Duration::from_millis(1200), "{:?}", started.elapsed());
    std::fs::write(&file, json!({ "gpus": [] }).to_string()).unwrap();
    assert_eq!(nvml.ask(PATIENCE, |nvml| nvml.device_count()).unwrap().unwrap(), 0, "the thread goes on");

    drop(nvml);
    assert!(NvmlThread::start(&source, PATIENCE).is_ok(), "another may start after the first has ended");
}
