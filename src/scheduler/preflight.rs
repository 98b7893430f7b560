//! What must hold before anything is touched: each failure says the way out.

use std::path::Path;

use anyhow::{Result, bail};
use scx_utils::compat;

const SCHED_EXT: &str = "/sys/kernel/sched_ext";
const BTF: &str = "/sys/kernel/btf/vmlinux";

/// Checks that a scheduler can be loaded here and now.
///
/// # Errors
/// Names what is missing and what to do.
pub fn check() -> Result<()> {
    // SAFETY: geteuid has no preconditions and cannot fail.
    check_at(Path::new("/"), unsafe { libc::geteuid() } == 0)?;
    if !compat::ksym_exists("scx_bpf_select_cpu_dfl").unwrap_or(true) {
        bail!(
            "this kernel's BTF has no sched_ext functions: its sched_ext is too old or its BTF incomplete. Boot 6.12 or newer."
        );
    }
    Ok(())
}

/// [`check`] with the file system to look at and whether the caller is root, for tests.
fn check_at(root: &Path, is_root: bool) -> Result<()> {
    let path = |absolute: &str| root.join(absolute.trim_start_matches('/'));
    if !path(SCHED_EXT).exists() {
        bail!(
            "this kernel has no sched_ext ({SCHED_EXT} is missing): boot 6.12 or newer built with CONFIG_SCHED_CLASS_EXT=y"
        );
    }
    if !path(BTF).exists() {
        bail!(
            "this kernel has no BTF ({BTF} is missing), without which no BPF scheduler loads: boot one built with CONFIG_DEBUG_INFO_BTF=y"
        );
    }
    if !is_root {
        bail!("loading a scheduler takes root: run this with sudo, or from the systemd unit");
    }
    let state = std::fs::read_to_string(path(&format!("{SCHED_EXT}/state"))).unwrap_or_default();
    if matches!(state.trim(), "enabled" | "enabling") {
        let ops = std::fs::read_to_string(path(&format!("{SCHED_EXT}/root/ops"))).unwrap_or_default();
        bail!(
            "another sched_ext scheduler is running{}: stop it first (its own unit is often scx.service or scx_loader.service)",
            if ops.trim().is_empty() { String::new() } else { format!(" ({})", ops.trim()) }
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn failure(files: &[(&str, &str)], is_root: bool) -> String {
        check_at(root(files).path(), is_root).unwrap_err().to_string()
    }

    const KERNEL: (&str, &str) = ("sys/kernel/sched_ext/state", "disabled\n");
    const WITH_BTF: (&str, &str) = ("sys/kernel/btf/vmlinux", "");

    #[test]
    fn a_kernel_with_all_it_takes_passes() {
        check_at(root(&[KERNEL, WITH_BTF]).path(), true).unwrap();
    }

    #[test]
    fn each_missing_thing_is_named_with_the_way_out() {
        assert!(failure(&[], true).contains("CONFIG_SCHED_CLASS_EXT"));
        assert!(failure(&[KERNEL], true).contains("CONFIG_DEBUG_INFO_BTF"));
        assert!(failure(&[KERNEL, WITH_BTF], false).contains("sudo"));
    }

    #[test]
    fn another_scheduler_is_named() {
        let files =
            [("sys/kernel/sched_ext/state", "enabled\n"), ("sys/kernel/sched_ext/root/ops", "rusty\n"), WITH_BTF];
        assert!(failure(&files, true).contains("(rusty)"));
    }
}
