//! Stand-in for libcuda.so.1, for the lab, which has no NVIDIA GPU: the calls that launch work and wait for it, doing
//! nothing but count. A copy of it must be named `libcuda.so.1` to be taken for the driver's library.

#![allow(non_snake_case, clippy::missing_safety_doc, missing_docs, clippy::too_many_arguments)]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

const SUCCESS: c_int = 0;

/// Calls so far, of each function its own: functions with the same body would become one.
static CALLS: [AtomicU64; 6] = [const { AtomicU64::new(0) }; 6];

/// In two steps, though one may get lost between threads: uprobes refuse a function that begins with a locked instruction.
fn count(which: usize) -> c_int {
    let before = CALLS[which].load(Ordering::Relaxed);
    CALLS[which].store(before + 1, Ordering::Relaxed);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    count(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    _function: *mut c_void,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared_bytes: c_uint,
    _stream: *mut c_void,
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    count(1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(_graph: *mut c_void, _stream: *mut c_void) -> c_int {
    count(2)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(_to: u64, _from: *const c_void, _bytes: usize, _stream: *mut c_void) -> c_int {
    count(3)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(_stream: *mut c_void) -> c_int {
    count(4)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    count(5)
}
