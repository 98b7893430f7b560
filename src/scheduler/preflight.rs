//! What must hold before anything is touched: each failure says the way out.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use scx_utils::compat;

const SCHED_EXT: &str = "/sys/kernel/sched_ext";
const BTF: &str = "/sys/kernel/btf/vmlinux";

/// The name under which the kernel knows this scheduler.
pub const OPS: &str = "stoker";

/// The need that the kernel has sched_ext at all.
pub const SCHED_EXT_ITSELF: &str = "sched_ext";
const NEED_BTF: &str = "BTF";
/// The need that no sched_ext scheduler runs yet.
pub const NO_OTHER: &str = "no other scheduler";

/// One thing that must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// What it is.
    pub name: &'static str,
    /// What there is of it, or what is missing.
    pub found: Result<String, Lack>,
}

/// Something that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// What, and what that means.
    pub what: String,
    /// The way out.
    pub way_out: String,
}

impl Need {
    fn new(name: &'static str, found: Result<String, (String, &str)>) -> Self {
        Self { name, found: found.map_err(|(what, way_out)| Lack { what, way_out: way_out.into() }) }
    }
}

/// Whom the needs are checked for.
#[derive(Clone, Copy, Debug)]
struct Caller {
    is_root: bool,
    /// Its effective capabilities, as bits; all of them where nobody says.
    capabilities: u64,
}

impl Caller {
    fn this() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self { is_root: is_root(), capabilities: parse_capabilities(&status).unwrap_or(u64::MAX) }
    }

    /// What a root that is not the machine's, as in a container, lacks.
    fn lacks(self) -> Option<(String, &'static str)> {
        /// Numbers of capabilities that loading takes: linux/capability.h.
        const NEEDED: [(&str, u32); 2] = [("CAP_PERFMON", 38), ("CAP_BPF", 39)];
        /// Stands for both of them.
        const SYS_ADMIN: u64 = 1 << 21;
        let lacks = NEEDED.iter().filter(|(_, number)| self.capabilities & (SYS_ADMIN | 1 << number) == 0);
        let names: Vec<&str> = lacks.map(|(name, _)| *name).collect();
        (!names.is_empty()).then(|| {
            (format!("this is root without {}", names.join(" and ")), "add them to the container, or run it privileged")
        })
    }
}

/// Effective capabilities from the text of /proc/PID/status.
fn parse_capabilities(status: &str) -> Option<u64> {
    u64::from_str_radix(status.lines().find_map(|line| line.strip_prefix("CapEff:"))?.trim(), 16).ok()
}

/// Whether the caller is root.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Checks that a scheduler can be loaded here and now.
///
/// # Errors
/// Names what is missing and what to do.
pub fn check() -> Result<()> {
    for need in needs() {
        if let Err(Lack { what, way_out }) = need.found {
            bail!("{what}: {way_out}");
        }
    }
    Ok(())
}

/// All that must hold for a scheduler to be loaded here and now. Changes nothing.
pub fn needs() -> Vec<Need> {
    let mut needs = needs_at(Path::new("/"), Caller::this());
    let has = |name| needs.iter().any(|need| need.name == name && need.found.is_ok());
    if has(SCHED_EXT_ITSELF) && has(NEED_BTF) {
        // Without BTF this would panic.
        let has_functions = compat::ksym_exists("scx_bpf_select_cpu_dfl").unwrap_or(true);
        needs.push(Need::new(
            "sched_ext functions",
            match has_functions {
                true => Ok("in the kernel's BTF".into()),
                false => Err((
                    "this kernel's BTF has no sched_ext functions: its sched_ext is too old or its BTF incomplete"
                        .into(),
                    "boot 6.12 or newer",
                )),
            },
        ));
    }
    needs
}

/// [`needs`] as files tell them, for a caller.
fn needs_at(root: &Path, caller: Caller) -> Vec<Need> {
    let has_sched_ext = below(root, SCHED_EXT).exists();
    let sched_ext = match has_sched_ext {
        true => Ok("in this kernel".into()),
        false => Err((
            format!("this kernel has no sched_ext ({SCHED_EXT} is missing)"),
            "boot 6.12 or newer built with CONFIG_SCHED_CLASS_EXT=y",
        )),
    };
    let btf = match below(root, BTF).exists() {
        true => Ok("in this kernel".into()),
        false => Err((
            format!("this kernel has no BTF ({BTF} is missing), without which no BPF scheduler loads"),
            "boot one built with CONFIG_DEBUG_INFO_BTF=y",
        )),
    };
    let rights = match caller.is_root {
        true => caller.lacks().map_or(Ok("root".into()), Err),
        false => Err(("loading a scheduler takes root".into(), "run this with sudo, or from the systemd unit")),
    };
    let mut needs = vec![Need::new(SCHED_EXT_ITSELF, sched_ext), Need::new(NEED_BTF, btf), Need::new("rights", rights)];
    if has_sched_ext {
        needs.push(Need::new(NO_OTHER, other_scheduler(root)));
    }
    needs
}

/// The name of the sched_ext scheduler that runs now; empty if the kernel does not tell.
pub fn running() -> Option<String> {
    running_at(Path::new("/"))
}

fn running_at(root: &Path) -> Option<String> {
    let read = |name: &str| std::fs::read_to_string(below(root, SCHED_EXT).join(name)).unwrap_or_default();
    matches!(read("state").trim(), "enabled" | "enabling").then(|| read("root/ops").trim().to_string())
}

fn other_scheduler(root: &Path) -> Result<String, (String, &'static str)> {
    let Some(name) = running_at(root) else { return Ok("the kernel's own is at work".into()) };
    let name = if name.is_empty() { String::new() } else { format!(" ({name})") };
    Err((
        format!("another sched_ext scheduler is running{name}"),
        "stop it first (its own unit is often scx.service or scx_loader.service)",
    ))
}

fn below(root: &Path, absolute: &str) -> PathBuf {
    root.join(absolute.trim_start_matches('/'))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use super::*;

    /// A directory that stands for `/`, with these files in it.
    pub(crate) fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    /// All that is missing, as people read it.
    fn lacks(files: &[(&str, &str)], caller: Caller) -> Vec<String> {
        let needs = needs_at(root(files).path(), caller);
        needs
            .into_iter()
            .filter_map(|need| need.found.err().map(|lack| format!("{}: {}", lack.what, lack.way_out)))
            .collect()
    }

    const ROOT: Caller = Caller { is_root: true, capabilities: u64::MAX };
    const KERNEL: (&str, &str) = ("sys/kernel/sched_ext/state", "disabled\n");
    const WITH_BTF: (&str, &str) = ("sys/kernel/btf/vmlinux", "");

    #[test]
    fn a_kernel_with_all_it_takes_passes() {
        assert!(lacks(&[KERNEL, WITH_BTF], ROOT).is_empty());
    }

    #[test]
    fn each_missing_thing_is_named_with_the_way_out_and_the_kernels_come_first() {
        let all = lacks(&[], Caller { is_root: false, capabilities: 0 });
        let words = ["CONFIG_SCHED_CLASS_EXT", "CONFIG_DEBUG_INFO_BTF", "sudo"];
        assert_eq!(all.len(), words.len());
        assert!(all.iter().zip(words).all(|(lack, word)| lack.contains(word)), "{all:?}");
    }

    #[test]
    fn a_root_that_may_not_load_is_told_which_capabilities_it_lacks() {
        let lacks = |capabilities| lacks(&[KERNEL, WITH_BTF], Caller { is_root: true, capabilities });
        let status = |bits: u64| parse_capabilities(&format!("CapPrm:\t0\nCapEff:\t{bits:016x}\n")).unwrap();
        assert!(lacks(status(1 << 21)).is_empty(), "CAP_SYS_ADMIN stands for both");
        assert!(lacks(status(1 << 38 | 1 << 39)).is_empty());
        assert!(lacks(status(1 << 38))[0].starts_with("this is root without CAP_BPF:"));
        assert!(lacks(status(0))[0].contains("CAP_PERFMON and CAP_BPF"));
    }

    #[test]
    fn another_scheduler_is_named() {
        let files =
            [("sys/kernel/sched_ext/state", "enabled\n"), ("sys/kernel/sched_ext/root/ops", "rusty\n"), WITH_BTF];
        assert!(lacks(&files, ROOT)[0].contains("(rusty)"));
    }
}
