//! What the kernel counts of each BPF program, once it is told to: how often it ran, and for how long.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use libbpf_rs::ProgramType;
use libbpf_rs::libbpf_sys;
use libbpf_rs::query::ProgInfoIter;

use crate::sys::check;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Counting, for as long as this lives.
pub struct Counting {
    before: String,
}

impl Counting {
    /// Lets the kernel count.
    ///
    /// # Errors
    /// It cannot be told to, which takes root.
    pub fn start() -> Result<Self> {
        let before = fs::read_to_string(SWITCH).context(SWITCH)?;
        fs::write(SWITCH, "1").with_context(|| format!("writing {SWITCH} (needs root)"))?;
        Ok(Self { before })
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let _ = fs::write(SWITCH, &self.before);
    }
}

/// What was counted of one program.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name; the kernel keeps 15 characters.
    pub name: String,
    /// Whether it is a callback of a scheduler, and not a hook beside it.
    pub is_callback: bool,
    /// How often it ran.
    pub calls: u64,
    /// For how long in all, in ns.
    pub ns: u64,
}

/// All programs that are loaded now, by their identifiers.
pub fn programs() -> BTreeMap<u32, Program> {
    let program = |info: libbpf_rs::query::ProgramInfo| {
        let name = info.name.to_string_lossy().into_owned();
        let is_callback = info.ty == ProgramType::StructOps;
        (info.id, Program { name, is_callback, calls: info.run_cnt, ns: info.run_time_ns })
    };
    ProgInfoIter::default().map(program).collect()
}

/// What those programs did between `before` and `after` that did anything, the callbacks first.
pub fn between(before: &BTreeMap<u32, Program>, after: BTreeMap<u32, Program>) -> Vec<Program> {
    let mut programs: Vec<Program> = after
        .into_iter()
        .map(|(id, mut program)| {
            if let Some(before) = before.get(&id) {
                program.calls -= before.calls;
                program.ns -= before.ns;
            }
            program
        })
        .filter(|program| program.calls > 0)
        .collect();
    programs.sort_by(|a, b| b.is_callback.cmp(&a.is_callback).then(b.ns.cmp(&a.ns)));
    programs
}

/// ns that counting itself adds to each call: what it says that a program takes which does nothing. Counting must be on.
pub fn overhead_ns() -> Result<f64> {
    const CALLS: u32 = 1000;
    let program = trivial_program().context("loading a program that does nothing")?;
    for _ in 0..CALLS {
        // SAFETY: all-zero options are valid but for their size, which is set.
        let mut options: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
        options.sz = size_of_val(&options) as _;
        // SAFETY: the options outlive the call.
        let rc = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut options) };
        anyhow::ensure!(rc == 0, "running it: {}", std::io::Error::from_raw_os_error(-rc));
    }
    let counted = programs().into_values().find(|program| program.name == TRIVIAL.to_string_lossy());
    let counted = counted.context("the kernel does not list it")?;
    anyhow::ensure!(counted.calls > 0, "the kernel did not count it");
    Ok(counted.ns as f64 / counted.calls as f64)
}

const TRIVIAL: &std::ffi::CStr = c"lab_trivial";

/// `return 0`.
fn trivial_program() -> Result<OwnedFd> {
    const MOV64_R0_0: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    let instruction = |code| {
        // SAFETY: an all-zero instruction is valid memory; its code is set.
        let mut instruction: libbpf_sys::bpf_insn = unsafe { std::mem::zeroed() };
        instruction.code = code;
        instruction
    };
    let instructions = [instruction(MOV64_R0_0), instruction(EXIT)];
    // SAFETY: all-zero options are valid but for their size, which is set.
    let mut options: libbpf_sys::bpf_prog_load_opts = unsafe { std::mem::zeroed() };
    options.sz = size_of_val(&options) as _;
    options.prog_flags = libbpf_sys::BPF_F_SLEEPABLE;
    // SAFETY: all pointers outlive the call.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SYSCALL,
            TRIVIAL.as_ptr(),
            c"GPL".as_ptr(),
            instructions.as_ptr(),
            instructions.len() as _,
            &mut options,
        )
    };
    // libbpf returns the error itself, and sets errno too.
    check(if fd < 0 { -1 } else { fd })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_ran_in_between_counts() {
        let program = |name: &str, is_callback, calls, ns| Program { name: name.to_string(), is_callback, calls, ns };
        let before = BTreeMap::from([(1, program("a", true, 10, 100)), (2, program("b", true, 5, 50))]);
        let after = BTreeMap::from([
            (1, program("a", true, 13, 160)),
            (2, program("b", true, 5, 50)),
            (3, program("hook", false, 1, 1000)),
        ]);
        let found: Vec<(String, u64, u64)> =
            between(&before, after).into_iter().map(|program| (program.name, program.calls, program.ns)).collect();
        assert_eq!(found, [("a".to_string(), 3, 60), ("hook".to_string(), 1, 1000)]);
    }
}
