//! The stand-in for CUDA's library, loaded as a program loads the real one.

use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// The stand-in as cargo builds it, beside this program.
const STAND_IN: &str = "libcuda_stand_in.so";

/// The functions of a copy of the stand-in that is named as the driver's library is.
#[derive(Clone, Copy)]
pub struct Cuda {
    graph_launch: extern "C" fn(*mut c_void, *mut c_void) -> i32,
    copy: extern "C" fn(u64, *const c_void, usize, *mut c_void) -> i32,
}

impl Cuda {
    /// Loads a copy of the program's own, as one that came with a container image.
    pub fn load(program: &str) -> Result<Self> {
        let folder = folder().join(program);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let copy = folder.join("libcuda.so.1");
        let original = std::env::current_exe()?.with_file_name(STAND_IN);
        fs::copy(&original, &copy).with_context(|| format!("{} (cargo build --examples)", original.display()))?;
        let path = CString::new(copy.as_os_str().as_bytes())?;
        // SAFETY: the stand-in has nothing that runs when it is loaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        anyhow::ensure!(!library.is_null(), "{} cannot be loaded", copy.display());
        let symbol = |name: &CStr| {
            // SAFETY: the library stays loaded, and the name is a string.
            let address = unsafe { libc::dlsym(library, name.as_ptr()) };
            anyhow::ensure!(!address.is_null(), "the stand-in has no {}", name.to_string_lossy());
            Ok(address)
        };
        // SAFETY: the stand-in defines them so.
        unsafe {
            Ok(Self {
                graph_launch: std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void, *mut c_void) -> i32>(
                    symbol(c"cuGraphLaunch")?,
                ),
                copy: std::mem::transmute::<*mut c_void, extern "C" fn(u64, *const c_void, usize, *mut c_void) -> i32>(
                    symbol(c"cuMemcpyHtoDAsync_v2")?,
                ),
            })
        }
    }

    /// Copies a batch and launches a graph of kernels, as a step of a training or inference program does.
    pub fn launch(&self) {
        (self.copy)(0, std::ptr::null(), 0, std::ptr::null_mut());
        (self.graph_launch)(std::ptr::null_mut(), std::ptr::null_mut());
    }
}

fn folder() -> PathBuf {
    std::env::temp_dir().join("lab_load.cuda")
}

/// Removes all copies.
pub fn remove_copies() {
    let _ = fs::remove_dir_all(folder());
}
