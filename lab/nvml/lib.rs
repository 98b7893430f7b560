//! Stand-in for libnvidia-ml.so.1, for tests and for the lab, which have no NVIDIA GPU.
//!
//! Answers from the JSON file named by `$STOKER_NVML_FILE`, read anew at each call, so that a test may change it
//! meanwhile. Without the variable, there are no GPUs. For example:
//!
//! ```json
//! {
//!   "errors": { "nvmlInitWithFlags": 9 },
//!   "hang_ms": { "nvmlDeviceGetUUID": 500 },
//!   "gpus": [{
//!     "name": "NVIDIA H100", "uuid": "GPU-1", "pci": "0000:3b:00.0", "minor": 0,
//!     "cpus": "0-3", "nodes": "0",
//!     "mig": [{ "uuid": "MIG-1", "name": "1g.10gb" }],
//!     "compute": [{ "pid": 7, "used": 1048576, "gi": 0, "ci": 0 }], "graphics": [], "mps": [],
//!     "samples": [{ "pid": 7, "sm": 90, "time": 1 }],
//!     "busy": 90, "memory": 85899345920, "memory_used": 1048576,
//!     "errors": { "*": 15 }, "hang_ms": { "nvmlDeviceGetUUID": 500 }
//!   }]
//! }
//! ```
//!
//! `errors` gives the NVML return code of calls by name, `*` of all; `hang_ms` how long they take first. Inside a GPU,
//! both are about calls on that GPU. A missing `cpus` or `nodes` is "not supported", a blank one an empty set; a
//! missing `mig` is "not supported", an empty list is MIG without instances.
//!
//! Like some real drivers, it takes two calls at once badly: it ends the program, so that a test notices.

#![allow(non_snake_case, clippy::missing_safety_doc, missing_docs)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_ulonglong};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;

const SUCCESS: c_uint = 0;
const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const NOT_FOUND: c_uint = 6;
const INSUFFICIENT_SIZE: c_uint = 7;
const UNKNOWN: c_uint = 999;

/// As many slots as a GPU has, most of them empty.
const MIG_SLOTS: c_uint = 7;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct State {
    gpus: Vec<Gpu>,
    errors: HashMap<String, c_uint>,
    hang_ms: HashMap<String, u64>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Gpu {
    name: String,
    uuid: String,
    pci: String,
    minor: Option<c_uint>,
    cpus: Option<String>,
    nodes: Option<String>,
    mig: Option<Vec<Mig>>,
    compute: Vec<Process>,
    graphics: Vec<Process>,
    mps: Vec<Process>,
    samples: Vec<Sample>,
    busy: c_uint,
    memory: u64,
    memory_used: u64,
    errors: HashMap<String, c_uint>,
    hang_ms: HashMap<String, u64>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Mig {
    uuid: String,
    name: String,
}

/// As NVML lays it out: 24 bytes. A process outside MIG has all ones for its instances.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
#[repr(C)]
pub struct Process {
    pid: c_uint,
    #[serde(default)]
    used: c_ulonglong,
    #[serde(default = "no_instance")]
    gi: c_uint,
    #[serde(default = "no_instance")]
    ci: c_uint,
}

fn no_instance() -> c_uint {
    c_uint::MAX
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sample {
    pid: c_uint,
    #[serde(default)]
    sm: c_uint,
    #[serde(default)]
    time: c_ulonglong,
}

#[repr(C)]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
pub struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    id: c_uint,
    subsystem: c_uint,
    bus_id: [c_char; 32],
}

#[repr(C)]
pub struct ProcessSample {
    pid: c_uint,
    time: c_ulonglong,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// A device handle. Never a pointer: bits 0 to 15 are the GPU's index plus one, the bits above the MIG slot plus one.
type Handle = usize;

static BUSY: AtomicBool = AtomicBool::new(false);

/// Runs one call: alone, after its hang, unless it is to fail.
fn call(name: &str, answer: impl FnOnce(&State) -> Result<(), c_uint>) -> c_uint {
    if BUSY.swap(true, Ordering::SeqCst) {
        eprintln!("{name} was called during another NVML call; a real driver may crash the machine");
        std::process::abort();
    }
    let result = read().and_then(|state| {
        misbehave(name, &state.errors, &state.hang_ms)?;
        answer(&state)
    });
    BUSY.store(false, Ordering::SeqCst);
    result.err().unwrap_or(SUCCESS)
}

fn read() -> Result<State, c_uint> {
    let Some(path) = std::env::var_os("STOKER_NVML_FILE") else { return Ok(State::default()) };
    let text = std::fs::read_to_string(&path).map_err(|error| error.to_string());
    let state = text.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()));
    state.map_err(|error| {
        eprintln!("{}: {error}", path.to_string_lossy());
        UNKNOWN
    })
}

fn misbehave(name: &str, errors: &HashMap<String, c_uint>, hang_ms: &HashMap<String, u64>) -> Result<(), c_uint> {
    if let Some(milliseconds) = hang_ms.get(name).or_else(|| hang_ms.get("*")) {
        std::thread::sleep(Duration::from_millis(*milliseconds));
    }
    errors.get(name).or_else(|| errors.get("*")).map_or(Ok(()), |code| Err(*code))
}

/// Runs one call on a GPU or a MIG instance of it.
fn on(name: &str, handle: Handle, answer: impl FnOnce(&Gpu, Option<&Mig>) -> Result<(), c_uint>) -> c_uint {
    call(name, |state| {
        let index = (handle & 0xffff).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
        let gpu = state.gpus.get(index).ok_or(INVALID_ARGUMENT)?;
        misbehave(name, &gpu.errors, &gpu.hang_ms)?;
        let slot = (handle >> 16).checked_sub(1);
        let mig = slot.and_then(|slot| gpu.mig.as_ref()?.get(slot));
        if slot.is_some() != mig.is_some() {
            return Err(INVALID_ARGUMENT);
        }
        answer(gpu, mig)
    })
}

/// Writes to a place that the caller gave.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), c_uint> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: NVML's callers give places that are valid for what the call writes.
    unsafe { place.write(value) };
    Ok(())
}

unsafe fn put_text(place: *mut c_char, length: c_uint, text: &str) -> Result<(), c_uint> {
    if place.is_null() || text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller gave `length` bytes, which hold the text and its end.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

/// Writes a list such as `0-3,8` as a bit mask.
unsafe fn put_mask(place: *mut c_ulong, words: c_uint, list: &Option<String>) -> Result<(), c_uint> {
    let list = list.as_ref().ok_or(NOT_SUPPORTED)?;
    let mut mask = vec![0 as c_ulong; words as usize];
    for part in list.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else { return Err(UNKNOWN) };
        for bit in first..=last {
            *mask.get_mut(bit / 64).ok_or(INSUFFICIENT_SIZE)? |= 1 << (bit % 64);
        }
    }
    for (index, word) in mask.into_iter().enumerate() {
        // SAFETY: the caller gave that many words.
        unsafe { put(place.add(index), word)? };
    }
    Ok(())
}

/// Writes a list in NVML's manner: a first call with too little room learns the length.
unsafe fn put_list<T: Copy>(place: *mut T, count: *mut c_uint, list: &[T]) -> Result<(), c_uint> {
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and the caller's.
    let room = unsafe { count.replace(list.len() as c_uint) };
    if (room as usize) < list.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (index, item) in list.iter().enumerate() {
        // SAFETY: the caller has room for that many.
        unsafe { put(place.add(index), *item)? };
    }
    Ok(())
}

fn characters<const N: usize>(text: &str) -> [c_char; N] {
    let mut characters = [0; N];
    characters.iter_mut().take(N - 1).zip(text.bytes()).for_each(|(place, byte)| *place = byte as c_char);
    characters
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    call("nvmlInit_v2", |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_uint {
    call("nvmlInitWithFlags", |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    call("nvmlShutdown", |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let text: &CStr = match code {
        0 => c"Success",
        3 => c"Not Supported",
        9 => c"Driver Not Loaded",
        15 => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(place: *mut c_char, length: c_uint) -> c_uint {
    call("nvmlSystemGetDriverVersion", |_| unsafe { put_text(place, length, "999.0") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetNVMLVersion(place: *mut c_char, length: c_uint) -> c_uint {
    call("nvmlSystemGetNVMLVersion", |_| unsafe { put_text(place, length, "12.999.0") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> c_uint {
    call("nvmlSystemGetCudaDriverVersion_v2", |_| unsafe { put(version, 12080) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    call("nvmlDeviceGetCount_v2", |state| unsafe { put(count, state.gpus.len() as c_uint) })
}

/// Hands out a handle, unless the GPU is to fail.
unsafe fn hand_out(name: &str, handle: *mut Handle, which: impl Fn(&State) -> Option<usize>) -> c_uint {
    call(name, |state| {
        let index = which(state).ok_or(NOT_FOUND)?;
        let gpu = state.gpus.get(index).ok_or(INVALID_ARGUMENT)?;
        misbehave(name, &gpu.errors, &gpu.hang_ms)?;
        // SAFETY: NVML's callers give a place for the handle.
        unsafe { put(handle, index + 1) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut Handle) -> c_uint {
    unsafe { hand_out("nvmlDeviceGetHandleByIndex_v2", handle, |_| Some(index as usize)) }
}

/// The text a caller passed.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: NVML's callers pass C strings.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().ok()).flatten()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, handle: *mut Handle) -> c_uint {
    let wanted = unsafe { text(uuid) };
    let which = |state: &State| state.gpus.iter().position(|gpu| Some(gpu.uuid.as_str()) == wanted);
    unsafe { hand_out("nvmlDeviceGetHandleByUUID", handle, which) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, handle: *mut Handle) -> c_uint {
    let wanted = unsafe { text(address) }.and_then(address_parts);
    let which = |state: &State| state.gpus.iter().position(|gpu| wanted.is_some() && address_parts(&gpu.pci) == wanted);
    unsafe { hand_out("nvmlDeviceGetHandleByPciBusId_v2", handle, which) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(handle: Handle, place: *mut c_char, length: c_uint) -> c_uint {
    on("nvmlDeviceGetName", handle, |gpu, mig| unsafe {
        put_text(place, length, mig.map_or(&gpu.name, |mig| &mig.name))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(handle: Handle, place: *mut c_char, length: c_uint) -> c_uint {
    on("nvmlDeviceGetUUID", handle, |gpu, mig| unsafe {
        put_text(place, length, mig.map_or(&gpu.uuid, |mig| &mig.uuid))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(handle: Handle, index: *mut c_uint) -> c_uint {
    on("nvmlDeviceGetIndex", handle, |_, _| unsafe { put(index, (handle & 0xffff) as c_uint - 1) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMinorNumber(handle: Handle, minor: *mut c_uint) -> c_uint {
    on("nvmlDeviceGetMinorNumber", handle, |gpu, _| unsafe { put(minor, gpu.minor.ok_or(NOT_SUPPORTED)?) })
}

/// Domain, bus and device of `0000:3b:00.0`.
fn address_parts(address: &str) -> Option<(c_uint, c_uint, c_uint)> {
    let mut parts = address.split([':', '.']).map(|part| c_uint::from_str_radix(part, 16));
    Some((parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(handle: Handle, info: *mut PciInfo) -> c_uint {
    on("nvmlDeviceGetPciInfo_v3", handle, |gpu, _| {
        let (domain, bus, device) = address_parts(&gpu.pci).ok_or(UNKNOWN)?;
        let info_now = PciInfo {
            // Real NVML, too, has no room for more than 16 bits of the domain here.
            legacy: characters(&format!("{:04X}:{bus:02X}:{device:02X}.0", domain & 0xffff)),
            domain,
            bus,
            device,
            id: 0x2330_10de,
            subsystem: 0,
            bus_id: characters(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
        };
        unsafe { put(info, info_now) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCpuAffinity(handle: Handle, words: c_uint, set: *mut c_ulong) -> c_uint {
    on("nvmlDeviceGetCpuAffinity", handle, |gpu, _| unsafe { put_mask(set, words, &gpu.cpus) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCpuAffinityWithinScope(
    handle: Handle,
    words: c_uint,
    set: *mut c_ulong,
    _scope: c_uint,
) -> c_uint {
    on("nvmlDeviceGetCpuAffinityWithinScope", handle, |gpu, _| unsafe { put_mask(set, words, &gpu.cpus) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryAffinity(
    handle: Handle,
    words: c_uint,
    set: *mut c_ulong,
    _scope: c_uint,
) -> c_uint {
    on("nvmlDeviceGetMemoryAffinity", handle, |gpu, _| unsafe { put_mask(set, words, &gpu.nodes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(handle: Handle, rates: *mut Utilization) -> c_uint {
    on("nvmlDeviceGetUtilizationRates", handle, |gpu, _| unsafe {
        put(rates, Utilization { gpu: gpu.busy, memory: 0 })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: Handle, memory: *mut Memory) -> c_uint {
    on("nvmlDeviceGetMemoryInfo_v2", handle, |gpu, _| {
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null; the caller fills in the version.
        let version = unsafe { (*memory).version };
        let free = gpu.memory.saturating_sub(gpu.memory_used);
        unsafe { put(memory, Memory { version, total: gpu.memory, reserved: 0, free, used: gpu.memory_used }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    handle: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> c_uint {
    on("nvmlDeviceGetComputeRunningProcesses_v3", handle, |gpu, _| unsafe { put_list(list, count, &gpu.compute) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    handle: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> c_uint {
    on("nvmlDeviceGetGraphicsRunningProcesses_v3", handle, |gpu, _| unsafe { put_list(list, count, &gpu.graphics) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    handle: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> c_uint {
    on("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle, |gpu, _| unsafe { put_list(list, count, &gpu.mps) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    handle: Handle,
    samples: *mut ProcessSample,
    count: *mut c_uint,
    since: c_ulonglong,
) -> c_uint {
    on("nvmlDeviceGetProcessUtilization", handle, |gpu, _| {
        let fresh: Vec<&Sample> = gpu.samples.iter().filter(|sample| sample.time > since).collect();
        if fresh.is_empty() {
            return Err(NOT_FOUND);
        }
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the caller's.
        let room = unsafe { count.replace(fresh.len() as c_uint) };
        if samples.is_null() || (room as usize) < fresh.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        for (index, Sample { pid, sm, time }) in fresh.into_iter().copied().enumerate() {
            let sample = ProcessSample { pid, time, sm, memory: 0, encoder: 0, decoder: 0 };
            // SAFETY: the caller has room for that many.
            unsafe { put(samples.add(index), sample)? };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(handle: Handle, current: *mut c_uint, pending: *mut c_uint) -> c_uint {
    on("nvmlDeviceGetMigMode", handle, |gpu, _| {
        gpu.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        unsafe { put(current, 1).and_then(|()| put(pending, 1)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(handle: Handle, count: *mut c_uint) -> c_uint {
    on("nvmlDeviceGetMaxMigDeviceCount", handle, |gpu, _| unsafe {
        put(count, if gpu.mig.is_some() { MIG_SLOTS } else { 0 })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    handle: Handle,
    slot: c_uint,
    instance: *mut Handle,
) -> c_uint {
    on("nvmlDeviceGetMigDeviceHandleByIndex", handle, |gpu, _| {
        let instances = gpu.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        instances.get(slot as usize).ok_or(NOT_FOUND)?;
        unsafe { put(instance, handle | (slot as usize + 1) << 16) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(handle: Handle, answer: *mut c_uint) -> c_uint {
    on("nvmlDeviceIsMigDeviceHandle", handle, |_, mig| unsafe { put(answer, c_uint::from(mig.is_some())) })
}
