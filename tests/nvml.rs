//! NVML on its one thread, with the stand-in. One test at a time, because there is one such thread and because the
//! stand-in is told what to say by the environment of this process.

// A helper that fails fails its test; clippy's exemption covers only the test functions themselves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/stand_in.rs"]
mod stand_in;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use scx_stoker::machine::nvml::{Absent, NoAnswer, NvmlSource, NvmlThread};
use scx_stoker::machine::{Machine, Sources};
use scx_stoker::workload::{NvmlProcesses, NvmlUse, Reading};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(10);

/// What the stand-in says, which is this process's only NVML for as long as this lives.
struct Says {
    file: PathBuf,
    _directory: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Says {
    fn new(state: &Value) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("nvml.json");
        // SAFETY: the tests here take turns, and NVML's threads, which alone read the environment, end with them.
        unsafe { std::env::set_var("STOKER_NVML_FILE", &file) };
        let says = Self { file, _directory: directory, _turn: turn };
        says.now(state);
        says
    }

    fn now(&self, state: &Value) {
        // At once, since it may be read at any time.
        let new = self.file.with_extension("new");
        std::fs::write(&new, state.to_string()).unwrap();
        std::fs::rename(&new, &self.file).unwrap();
    }
}

fn start() -> NvmlThread {
    NvmlThread::start(&NvmlSource::Library(stand_in::stand_in().into()), PATIENCE).unwrap()
}

/// The machine that runs this, with the GPUs that the stand-in knows: it finds them all, for they are on no bus.
fn machine(nvml: &NvmlThread) -> Machine {
    let machine = Machine::discover_with(&Sources::default(), Some(nvml)).unwrap();
    let uuids: Vec<_> = machine.gpus.iter().filter_map(|gpu| gpu.uuid.as_deref()).collect();
    assert_eq!(uuids, ["GPU-a", "GPU-b", "GPU-c"]);
    machine
}

/// Three GPUs, of which process 100, 101, 102 uses one each.
fn three_gpus() -> Value {
    let gpu = |(index, name): (u32, &str)| {
        json!({ "uuid": format!("GPU-{name}"), "pci": format!("fff{index}:11:00.0"), "minor": index,
                "compute": [{ "pid": 100 + index }] })
    };
    let gpus = [(0, "a"), (1, "b"), (2, "c")].map(gpu);
    json!({ "gpus": gpus })
}

/// GPUs by the PIDs of the processes that use them.
fn users(reading: &Reading) -> BTreeMap<u32, u64> {
    reading.uses.iter().map(|(&pid, used)| (pid, used.gpus)).collect()
}

#[test]
fn a_gpu_that_hangs_is_asked_rarely_and_the_others_as_before_once_its_call_is_back() {
    let mut state = three_gpus();
    let says = Says::new(&state);
    let nvml = start();
    let mut processes = NvmlProcesses::new(&nvml, &machine(&nvml));
    let now = Instant::now();
    let all = processes.read(now);
    assert_eq!((all.answered, users(&all)), (0b111, [(100, 0b001), (101, 0b010), (102, 0b100)].into()));

    // The stand-in ends this process if it is called from two threads at once.
    state["gpus"][1]["hang_ms"] = json!({ "nvmlDeviceGetComputeRunningProcesses_v3": 2000 });
    says.now(&state);
    let began = Instant::now();
    let during = processes.read(now);
    assert_eq!((during.answered, users(&during)), (0b011, [(100, 0b001)].into()), "of the third, nothing new is said");
    let stuck = processes.read(now);
    assert_eq!(stuck, Reading::default(), "nobody is asked while the call hangs");
    assert!(began.elapsed() < Duration::from_millis(1800), "waited for it: {:?}", began.elapsed());

    while nvml.is_stuck() {
        assert!(began.elapsed() < PATIENCE, "the call did not come back");
        std::thread::sleep(Duration::from_millis(10));
    }
    let began = Instant::now();
    let after = processes.read(now);
    assert_eq!((after.answered, users(&after)), (0b101, [(100, 0b001), (102, 0b100)].into()));
    assert!(began.elapsed() < Duration::from_millis(1500), "the one that hung was asked: {:?}", began.elapsed());

    says.now(&three_gpus());
    assert_eq!(processes.read(now + Duration::from_secs(59)).answered, 0b101, "it is left in peace for a minute");
    let again = processes.read(now + Duration::from_secs(61));
    assert_eq!((again.answered, users(&again).get(&101)), (0b111, Some(&0b010)), "it answers again");
}

#[test]
fn an_error_of_one_gpu_is_its_own_and_a_list_that_a_gpu_lacks_is_none() {
    let mut state = three_gpus();
    let says = Says::new(&state);
    let nvml = start();
    let mut processes = NvmlProcesses::new(&nvml, &machine(&nvml));
    let now = Instant::now();

    // 3 is "not supported", 15 "GPU is lost".
    state["gpus"][0]["errors"] =
        json!({ "nvmlDeviceGetGraphicsRunningProcesses_v3": 3, "nvmlDeviceGetMPSComputeRunningProcesses_v3": 3 });
    state["gpus"][1]["errors"] = json!({ "*": 15 });
    says.now(&state);
    let reading = processes.read(now);
    assert_eq!((reading.answered, users(&reading)), (0b111, [(100, 0b001), (102, 0b100)].into()));
    says.now(&three_gpus());
    assert_eq!(users(&processes.read(now + Duration::from_secs(61))).get(&101), Some(&0b010), "it is back");
}

#[test]
fn samples_of_utilisation_tell_for_whom_a_gpu_worked_unless_clients_of_mps_hide_behind_their_server() {
    let mut state = three_gpus();
    state["gpus"][0]["compute"] = json!([{ "pid": 100 }, { "pid": 200 }]);
    state["gpus"][0]["samples"] = json!([{ "pid": 100, "sm": 80, "time": 5 }, { "pid": 300, "sm": 1, "time": 6 }]);
    state["gpus"][1]["mps"] = json!([{ "pid": 201 }]);
    state["gpus"][2]["errors"] = json!({ "nvmlDeviceGetProcessUtilization": 3 });
    let says = Says::new(&state);
    let nvml = start();
    let mut processes = NvmlProcesses::new(&nvml, &machine(&nvml));
    let used = |gpus, judged, worked| NvmlUse { gpus, judged, worked };
    let first = processes.read(Instant::now());
    let rest = [(101, used(0b010, 0, 0)), (102, used(0b100, 0, 0)), (201, used(0b010, 0, 0))];
    let expected = [(100, used(0b001, 0b001, 0b001)), (200, used(0b001, 0b001, 0))].into_iter().chain(rest);
    assert_eq!(first.uses, expected.collect());

    let second = processes.read(Instant::now());
    assert_eq!(second.uses[&100], used(0b001, 0b001, 0), "that sample was seen before");
    state["gpus"][0]["samples"] = json!([{ "pid": 100, "sm": 80, "time": 5 }, { "pid": 200, "sm": 1, "time": 7 }]);
    says.now(&state);
    let third = processes.read(Instant::now());
    assert_eq!((third.uses[&100].worked, third.uses[&200].worked), (0, 0b001));
}

#[test]
fn one_thread_answers_about_processes_and_outlives_a_hang() {
    let mut state = json!({ "gpus": [
        { "name": "A", "uuid": "GPU-a", "pci": "0000:11:00.0", "busy": 90, "memory": 1000, "memory_used": 400,
          "compute": [{ "pid": 7, "used": 100 }, { "pid": 8 }], "graphics": [{ "pid": 9 }], "mps": [{ "pid": 10 }],
          "samples": [{ "pid": 7, "sm": 80, "time": 5 }] },
        { "name": "B", "uuid": "GPU-b", "pci": "10000:12:00.0", "mig": [{ "uuid": "MIG-b", "name": "1g" }] },
    ] });
    let says = Says::new(&state);
    let source = NvmlSource::Library(stand_in::stand_in().into());
    let nvml = start();

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
    says.now(&state);
    let started = Instant::now();
    let answer = nvml.ask(Duration::from_millis(200), |nvml| nvml.device_count());
    assert_eq!(answer.unwrap_err(), NoAnswer);
    assert!(started.elapsed() < Duration::from_millis(1200), "{:?}", started.elapsed());
    says.now(&json!({ "gpus": [] }));
    assert_eq!(nvml.ask(PATIENCE, |nvml| nvml.device_count()).unwrap().unwrap(), 0, "the thread goes on");

    drop(nvml);
    assert!(NvmlThread::start(&source, PATIENCE).is_ok(), "another may start after the first has ended");
}
