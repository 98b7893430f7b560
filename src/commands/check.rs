//! `scx_stoker check`: whether scx_stoker can run here, and what of all that it uses is there. Loads and changes
//! nothing.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;

use crate::cgroup;
use crate::cli::Cli;
use crate::config::{self, Config};
use crate::machine::nvml::{Absent, NvmlThread};
use crate::machine::{CpuSet, Gpu, Home, Machine, NvmlSource, Sources, Vendor};
use crate::scheduler::features::{self, Feature, Kernel};
use crate::scheduler::preflight::{self, Lack, Need};

/// Options of `scx_stoker check`.
#[derive(Args, Clone, Debug)]
pub struct CheckArgs {
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,

    /// Configuration file to check [default: /etc/scx_stoker.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// All that was found.
#[derive(Debug, Serialize)]
struct Report {
    /// Whether scx_stoker can run here, if the caller starts it.
    can_run: bool,
    items: Vec<Item>,
    /// What discovery says of the machine.
    notes: Vec<String>,
}

/// One thing that scx_stoker uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Item {
    name: String,
    state: State,
    /// Without it scx_stoker does not run.
    is_needed: bool,
    /// What there is of it, or is not.
    found: String,
    /// What its absence means.
    means: Option<String>,
    way_out: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    There,
    Missing,
    /// The caller may not look.
    Unseen,
}

impl Item {
    fn there(name: &str, found: impl Into<String>) -> Self {
        let (state, found) = (State::There, found.into());
        Self { name: name.into(), state, is_needed: false, found, means: None, way_out: None }
    }

    fn missing(name: &str, found: impl Into<String>, means: &str, way_out: &str) -> Self {
        let (means, way_out) = (Some(means.into()), Some(way_out.into()));
        Self { state: State::Missing, means, way_out, ..Self::there(name, found) }
    }

    fn unseen(name: &str, found: impl Into<String>, way_out: &str) -> Self {
        Self { state: State::Unseen, way_out: Some(way_out.into()), ..Self::there(name, found) }
    }

    fn needed(self) -> Self {
        Self { is_needed: true, ..self }
    }
}

/// Prints what is there.
///
/// # Errors
/// scx_stoker cannot run here, or standard output cannot be written.
pub fn run(args: &CheckArgs) -> Result<()> {
    let report = report(args);
    let text = match args.json {
        true => serde_json::to_string_pretty(&report).context("cannot write the report as JSON")? + "\n",
        false => list(&report),
    };
    match io::Write::write_all(&mut io::stdout(), text.as_bytes()) {
        // `check | head` is no failure.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error).context("cannot write"),
        _ => {}
    }
    if !report.can_run {
        let lacks = report.items.iter().filter(|item| item.is_needed && item.state != State::There);
        bail!("scx_stoker cannot run here: {}", lacks.map(|item| item.name.as_str()).collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

fn report(args: &CheckArgs) -> Report {
    let root = Path::new("/");
    let mut items = needs(preflight::needs(), preflight::running());
    let has_sched_ext = items.iter().any(|item| item.name == preflight::SCHED_EXT_ITSELF && item.state == State::There);
    let kernel = Kernel::running().ok();
    items.extend(features::ALL.map(|feature| {
        let can_tell = has_sched_ext || !feature.is_of_sched_ext();
        kernel_item(feature, kernel.as_ref().filter(|_| can_tell).map(|kernel| kernel.has(feature)))
    }));
    items.push(uprobes(root));
    items.extend(cgroups(root));
    items.push(processes(root));

    let config = Config::read(args.config.as_deref());
    let mut notes = Vec::new();
    match discover(config.as_ref().ok(), root) {
        Ok((machine, nvml)) => {
            items.extend(gpus(&machine));
            items.push(nvml);
            items.push(configuration(args.config.as_deref(), &config, Some(&machine)));
            notes = machine.notes;
        }
        Err(error) => {
            let found = format!("{error:#}");
            items.push(Item::missing("machine", found, "nothing can be placed", "correct what is named here").needed());
            items.push(configuration(args.config.as_deref(), &config, None));
        }
    }
    let can_run = items.iter().all(|item| !item.is_needed || item.state == State::There);
    Report { can_run, items, notes }
}

/// The machine as a start would find it, and what there is of NVML.
fn discover(config: Option<&Config>, root: &Path) -> Result<(Machine, Item)> {
    let options = config.map_or(&[][..], |config| &config.options);
    let nccl_topo = Cli::over(options, ["scx_stoker".into()])?.run.nccl_topo;
    // NVML's start may load the driver.
    let is_loaded = root.join("sys/module/nvidia").exists();
    let nvml = if is_loaded { NvmlSource::Auto } else { NvmlSource::Off };
    let sources = Sources { nccl_topo, nvml, ..Sources::default() };
    let thread = NvmlThread::start(&sources.nvml, sources.nvml_timeout);
    let machine = Machine::discover_with(&sources, thread.as_ref().ok())?;
    let has_nvidia = machine.gpus.iter().any(|gpu| gpu.vendor == Vendor::Nvidia);
    Ok((machine, nvml_item(has_nvidia, is_loaded, thread.err())))
}

/// What must hold. That scx_stoker itself runs already is no reason why it could not.
fn needs(needs: Vec<Need>, running: Option<String>) -> Vec<Item> {
    let runs_already = running.is_some_and(|name| name.starts_with(preflight::OPS));
    let item = |Need { name, found }: Need| match found {
        Err(_) if name == preflight::NO_OTHER && runs_already => Item::there(name, "scx_stoker runs already"),
        Ok(found) => Item::there(name, found),
        Err(Lack { what, way_out }) => Item { means: None, ..Item::missing(name, what, "", &way_out) },
    };
    needs.into_iter().map(|need| item(need).needed()).collect()
}

fn kernel_item(feature: Feature, is_there: Option<bool>) -> Item {
    let (name, purpose) = (feature.symbol(), feature.purpose());
    match is_there {
        Some(true) => Item::there(name, purpose),
        Some(false) => Item::missing(
            name,
            format!("not usable in this kernel; it {purpose}"),
            feature.absence(),
            feature.way_out(),
        ),
        None => Item::unseen(name, format!("cannot be told; it {purpose}"), "see sched_ext and BTF above"),
    }
}

fn uprobes(root: &Path) -> Item {
    let name = "uprobes";
    match root.join("sys/bus/event_source/devices/uprobe/type").exists() {
        true => Item::there(name, "library calls can be probed"),
        false => Item::missing(
            name,
            "not in this kernel",
            "library calls that launch GPU work cannot be probed; nothing else needs them",
            "boot a kernel built with CONFIG_UPROBE_EVENTS=y",
        ),
    }
}

fn cgroups(root: &Path) -> Vec<Item> {
    let dir = root.join(cgroup::ROOT.trim_start_matches('/'));
    let read = |name: &str| fs::read_to_string(dir.join(name));
    let has_cpu = |list: &str| list.split_whitespace().any(|controller| controller == "cpu");
    let Ok(controllers) = read("cgroup.controllers") else {
        return vec![Item::missing(
            "cgroup v2",
            format!("not mounted at {}", cgroup::ROOT),
            "weights of groups do not count, and neither rules by cgroup nor what cgroups' owners say",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )];
    };
    let below = read("cgroup.subtree_control").unwrap_or_default();
    let means = "cpu.weight of groups does not count";
    let controller = match (has_cpu(&controllers), has_cpu(&below)) {
        (false, _) => Item::missing(
            "cpu controller",
            "not in this kernel, or in use by cgroup v1",
            means,
            "boot with systemd.unified_cgroup_hierarchy=1 and without cgroup_disable=cpu",
        ),
        (true, false) => Item::missing(
            "cpu controller",
            "on for no group",
            means,
            "give a unit CPUWeight=, then systemd turns it on; or write +cpu into /sys/fs/cgroup/cgroup.subtree_control",
        ),
        (true, true) => Item::there("cpu controller", "on for groups below the root"),
    };
    let attributes = match cgroup::takes_attributes(&dir) {
        Ok(true) => Item::there("cgroup xattrs", "cgroups' owners can say who feeds a GPU"),
        Ok(false) => Item::missing(
            "cgroup xattrs",
            "not in this kernel",
            "user.stoker.feeder and user.stoker.gpu cannot be set",
            "say it by a [[rule]] of the configuration file",
        ),
        Err(error) => Item::unseen("cgroup xattrs", error.to_string(), "run this as root"),
    };
    vec![Item::there("cgroup v2", format!("at {}", cgroup::ROOT)), controller, attributes]
}

/// Whether other processes can be looked at.
fn processes(root: &Path) -> Item {
    /// Number of the first PID namespace: `PROC_PID_INIT_INO` of the kernel.
    const FIRST: &str = "pid:[4026531836]";
    let name = "processes";
    let means = "processes that hold a GPU from before the start are not found";
    let namespace = fs::read_link(root.join("proc/self/ns/pid")).unwrap_or_default();
    if namespace != Path::new(FIRST) {
        return Item::missing(
            name,
            "this is a PID namespace of its own, whose numbers are not the kernel's",
            means,
            "run it in the host's (hostPID: true, --pid=host)",
        );
    }
    match fs::read_dir(root.join("proc/1/fd")) {
        Ok(_) => Item::there(name, "their open files can be read"),
        Err(_) if !preflight::is_root() => {
            Item::unseen(name, "only root can tell whether their open files can be read", "run this as root")
        }
        Err(error) => {
            Item::missing(name, format!("their open files cannot be read: {error}"), means, "give it CAP_SYS_PTRACE")
        }
    }
}

fn gpus(machine: &Machine) -> Vec<Item> {
    if machine.gpus.is_empty() {
        let way_out = "if there is one, load its driver: it is noticed when it comes";
        return vec![Item::missing("GPUs", "none here", "all tasks are ordinary until one comes", way_out)];
    }
    let name_of = |gpu: &Gpu| {
        let pci = gpu.pci.map(|pci| format!(" at {pci}")).unwrap_or_default();
        format!("{} ({}{pci})", gpu.index, gpu.name)
    };
    let unless = |name: &str, all: &str, lacks: fn(&Gpu) -> bool, means: &str, way_out: &str| {
        let without: CpuSet = machine.gpus.iter().filter(|gpu| lacks(gpu)).map(|gpu| gpu.index).collect();
        match without.is_empty() {
            true => Item::there(name, all),
            false => Item::missing(name, format!("not of GPU {without}"), means, way_out),
        }
    };
    vec![
        Item::there("GPUs", machine.gpus.iter().map(name_of).collect::<Vec<_>>().join(", ")),
        unless(
            "GPU device files",
            "of all GPUs",
            |gpu| gpu.devices.is_empty(),
            "who uses such a GPU is not seen",
            "load its driver",
        ),
        unless(
            "GPU interrupts",
            "of all GPUs",
            |gpu| gpu.irqs.is_empty(),
            "threads that sleep until such a GPU is done are found by what else they do only",
            "none, if its driver uses no interrupts; some have them only while the GPU is in use",
        ),
        unless(
            "GPU homes",
            "of all GPUs",
            |gpu| matches!(gpu.home, Home::Unknown { .. }),
            "feeders of such a GPU run at once, but anywhere",
            "if you know where it is, say so with --nccl-topo FILE",
        ),
    ]
}

fn nvml_item(has_nvidia: bool, is_loaded: bool, absent: Option<Absent>) -> Item {
    let means = "UUIDs, MIG instances and what NVML knows of processes are missing";
    match absent {
        None => Item::there("NVML", "answers"),
        Some(_) if !has_nvidia => Item::there("NVML", "not needed: no NVIDIA GPU here"),
        Some(_) if !is_loaded => {
            Item::missing("NVML", "not asked: NVIDIA's driver is not loaded", means, "load the driver")
        }
        Some(Absent::NotThere) => {
            let way_out = "install the driver's NVML library, or ignore this";
            Item::missing("NVML", "no libnvidia-ml.so.1 here", means, way_out)
        }
        Some(Absent::Broken(reason)) => {
            Item::missing("NVML", format!("does not work: {reason}"), means, "check with `nvidia-smi`")
        }
    }
}

fn configuration(named: Option<&Path>, config: &Result<Config>, machine: Option<&Machine>) -> Item {
    let name = "configuration";
    let file = named.unwrap_or(Path::new(config::USUAL));
    let faulty = |error: &anyhow::Error| Item {
        means: None,
        ..Item::missing(name, format!("{error:#}"), "", &format!("correct {}", file.display())).needed()
    };
    let config = match config {
        Ok(config) => config,
        Err(error) => return faulty(error),
    };
    if let Some(Err(error)) = machine.map(|machine| Config::check_gpus(&config.rules, machine)) {
        return faulty(&error);
    }
    let found = match file.exists() {
        true => format!("{}: {} options, {} rules", file.display(), config.options.len(), config.rules.len()),
        false => format!("no {}: all defaults", file.display()),
    };
    Item::there(name, found).needed()
}

/// The report for people.
fn list(report: &Report) -> String {
    let width = report.items.iter().map(|item| item.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for item in &report.items {
        let state = match item.state {
            State::There => "ok",
            State::Missing if item.is_needed => "NEEDED",
            State::Missing => "missing",
            State::Unseen => "unseen",
        };
        text += &format!("{state:<8} {:<width$}  {}\n", item.name, item.found);
        let more = [("means", &item.means), ("way out", &item.way_out)];
        for (what, said) in more.into_iter().filter_map(|(what, said)| Some((what, said.as_ref()?))) {
            text += &format!("{:<8} {:<width$}    {what}: {said}\n", "", "");
        }
    }
    if !report.notes.is_empty() {
        text += "\nNotes:\n";
        report.notes.iter().for_each(|note| text += &format!("  - {note}\n"));
    }
    if report.can_run {
        text += "\nscx_stoker can run here.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scheduler::preflight::tests::root;

    fn need(name: &'static str, is_there: bool) -> Need {
        let lack = Lack { what: "not there".into(), way_out: "get it".into() };
        Need { name, found: if is_there { Ok("there".into()) } else { Err(lack) } }
    }

    #[test]
    fn what_is_needed_and_missing_is_told_with_the_way_out() {
        let items = needs(vec![need("a", true), need("b", false)], None);
        assert!(items.iter().all(|item| item.is_needed));
        assert_eq!([items[0].state, items[1].state], [State::There, State::Missing]);
        let text = list(&Report { can_run: false, items, notes: vec!["a note".into()] });
        assert!(text.contains("NEEDED   b  not there\n") && text.contains("way out: get it\n"), "{text}");
        assert!(text.contains("- a note") && !text.contains("can run"), "{text}");
    }

    #[test]
    fn that_scx_stoker_runs_already_is_fine_and_that_another_does_is_not() {
        let state = |running: &str| needs(vec![need(preflight::NO_OTHER, false)], Some(running.into()))[0].state;
        assert_eq!(state("stoker"), State::There);
        assert_eq!(state("rusty"), State::Missing);
    }

    #[test]
    fn a_feature_that_cannot_be_looked_for_is_unseen_and_not_missing() {
        assert_eq!(kernel_item(Feature::FileIoctl, Some(true)).state, State::There);
        let missing = kernel_item(Feature::FileIoctl, Some(false));
        assert_eq!((missing.state, missing.is_needed), (State::Missing, false));
        assert_eq!(missing.means.as_deref(), Some(Feature::FileIoctl.absence()));
        assert_eq!(kernel_item(Feature::FileIoctl, None).state, State::Unseen);
    }

    #[test]
    fn the_cpu_controller_counts_only_where_it_is_turned_on() {
        let states = |files: &[(&str, &str)]| {
            cgroups(root(files).path()).iter().map(|item| (item.name.clone(), item.state)).collect::<Vec<_>>()
        };
        assert_eq!(states(&[]), [("cgroup v2".to_string(), State::Missing)]);
        let (here, on) = ("sys/fs/cgroup/cgroup.controllers", "sys/fs/cgroup/cgroup.subtree_control");
        let controller = |files: &[(&str, &str)]| states(files)[1].clone();
        let of = |state| ("cpu controller".to_string(), state);
        assert_eq!(controller(&[(here, "cpuset memory\n"), (on, "memory\n")]), of(State::Missing));
        assert_eq!(controller(&[(here, "cpuset cpu\n"), (on, "memory\n")]), of(State::Missing));
        assert_eq!(controller(&[(here, "cpuset cpu\n"), (on, "cpu\n")]), of(State::There));
    }

    #[test]
    fn a_pid_namespace_of_its_own_is_told() {
        let root = root(&[("proc/self/ns/user", ""), ("proc/1/fd/0", "")]);
        let link = root.path().join("proc/self/ns/pid");
        symlink("pid:[4026531836]", &link).unwrap();
        assert_eq!(processes(root.path()).state, State::There);
        fs::remove_file(&link).unwrap();
        symlink("pid:[4026532000]", &link).unwrap();
        let item = processes(root.path());
        assert!(item.state == State::Missing && item.way_out.as_ref().unwrap().contains("hostPID"), "{item:?}");
    }

    #[test]
    fn nvml_is_missing_only_where_there_is_an_nvidia_gpu() {
        assert_eq!(nvml_item(true, true, None).state, State::There);
        assert_eq!(nvml_item(false, false, Some(Absent::NotThere)).state, State::There);
        assert!(nvml_item(true, false, Some(Absent::NotThere)).found.contains("not loaded"));
        assert!(nvml_item(true, true, Some(Absent::NotThere)).found.contains("libnvidia-ml"));
        assert!(nvml_item(true, true, Some(Absent::Broken("torn".into()))).found.contains("torn"));
    }

    #[test]
    fn a_faulty_configuration_is_in_the_way() {
        let dir = root(&[("good.toml", "verbose = true\n"), ("bad.toml", "verbos = true\n")]);
        let item = |name: &str| {
            let file = dir.path().join(name);
            configuration(Some(&file), &Config::read(Some(&file)), None)
        };
        assert!(item("good.toml").found.contains("1 options, 0 rules"));
        let bad = item("bad.toml");
        assert!(bad.is_needed && bad.state == State::Missing && bad.found.contains("bad.toml:1"), "{bad:?}");
    }
}
