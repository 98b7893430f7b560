//! What the machine is found to be: made-up machines, real ones, and what NVML adds.

// A helper that fails fails its test; clippy's exemption covers only the test functions themselves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/sysroot.rs"]
mod sysroot;

#[path = "support/stand_in.rs"]
mod stand_in;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use scx_stoker::machine::{CpuSet, Gpu, Home, HomeSource, Machine, NvmlSource, Sources, UNPLACED, Vendor};
use serde_json::{Value, json};
use stand_in::stand_in;
use sysroot::{Device, Shape, Sysroot, nvidia};

const TWO_SOCKETS: Shape = Shape { packages: 2, nodes: 1, cores: 4, threads: 2 };
const ONE_NODE: Shape = Shape { packages: 1, nodes: 1, cores: 4, threads: 1 };

fn of_tree(root: &Path) -> Machine {
    discover(Sources { sysroot: Some(root.into()), ..Sources::default() })
}

fn of_xml(path: &Path) -> Machine {
    discover(Sources { hwloc_xml: Some(path.into()), ..Sources::default() })
}

fn discover(sources: Sources) -> Machine {
    let machine = Machine::discover(&sources).unwrap_or_else(|error| panic!("{sources:?}: {error:#}"));
    check(&machine);
    machine
}

/// What must hold for every machine.
fn check(machine: &Machine) {
    let online: CpuSet = machine.cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.id).collect();
    for cpu in machine.cpus.iter().filter(|cpu| cpu.online) {
        let llc = &machine.llcs[cpu.llc as usize];
        assert!(llc.cpus.contains(cpu.id) && llc.node == cpu.node, "{cpu:?} {llc:?}");
        let node = machine.nodes.iter().find(|node| node.id == cpu.node).unwrap();
        assert!(node.cpus.contains(cpu.id), "{cpu:?} {node:?}");
        assert!(machine.packages[cpu.package as usize].cpus.contains(cpu.id), "{cpu:?}");
        assert!((1..=1024).contains(&cpu.capacity), "{cpu:?}");
    }
    let nodes_of_cpu = |cpu: u32| machine.nodes.iter().filter(|node| node.cpus.contains(cpu)).count();
    assert!(online.iter().all(|cpu| nodes_of_cpu(cpu) == 1), "a CPU is on one node");
    for (gpu, index) in machine.gpus.iter().zip(0..) {
        assert_eq!(gpu.index, index);
        if let Home::Known { cpus, order, node, .. } = &gpu.home {
            assert!(!cpus.is_empty() && cpus.is_subset(&online), "{gpu:?}");
            let sorted: CpuSet = order.iter().copied().collect();
            assert!(order.len() == online.len() && sorted == online, "the order has every online CPU once: {gpu:?}");
            assert!(order[..cpus.len()].iter().all(|cpu| cpus.contains(*cpu)), "home comes first: {gpu:?}");
            let on_node = |id: &u32| machine.nodes.iter().any(|node| node.id == *id && !node.is_cpuless());
            assert!(node.iter().all(on_node), "a memory-only node is no home: {gpu:?}");
        }
    }
}

/// Each GPU's home node; `None` for unknown.
fn home_nodes(machine: &Machine) -> Vec<Option<u32>> {
    machine.gpus.iter().map(|gpu| home(gpu).and_then(|(_, node, _)| node)).collect()
}

/// Home CPUs, node and source.
fn home(gpu: &Gpu) -> Option<(String, Option<u32>, HomeSource)> {
    match &gpu.home {
        Home::Known { cpus, node, source, .. } => Some((cpus.to_string(), *node, *source)),
        Home::Unknown { .. } => None,
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn noted(machine: &Machine, words: &str) -> bool {
    machine.notes.iter().any(|note| note.contains(words))
}

// Made-up machines.

/// Two sockets of 8 CPUs with 4 GPUs each; no driver.
fn eight_gpus() -> Sysroot {
    let root = Sysroot::new(TWO_SOCKETS);
    for index in 0..8 {
        root.pci(&nvidia(&format!("0000:{:02x}:00.0", 0x11 + 0x10 * index), index / 4));
    }
    root
}

#[test]
fn eight_gpus_on_two_sockets_are_at_home_on_their_own_socket() {
    let machine = of_tree(eight_gpus().path());
    assert_eq!(home_nodes(&machine), [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
    assert_eq!(home(&machine.gpus[0]), Some(("0-3,8-11".into(), Some(0), HomeSource::Sysfs)));
    let Home::Known { order, .. } = &machine.gpus[7].home else { panic!() };
    assert_eq!(order[..], [4, 5, 6, 7, 12, 13, 14, 15, 0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!((machine.packages.len(), machine.llcs.len(), machine.notes.len()), (2, 2, 0), "{:?}", machine.notes);
    assert_eq!(machine.cpus[8].core, machine.cpus[0].core, "CPUs 0 and 8 are threads of one core");
}

#[test]
fn an_hwloc_export_gives_the_same_homes() {
    let machine = of_xml(&fixture("two-sockets-8-gpus.xml"));
    assert_eq!(home_nodes(&machine), [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
    assert_eq!(home(&machine.gpus[4]), Some(("4-7".into(), Some(1), HomeSource::Hwloc)));
    assert!(machine.gpus.iter().all(|gpu| gpu.vendor == Vendor::Nvidia));
}

#[test]
fn with_eight_nodes_the_order_goes_by_distance() {
    let root = Sysroot::new(Shape { packages: 2, nodes: 4, cores: 2, threads: 1 });
    for node in 0..8 {
        root.pci(&nvidia(&format!("0000:{:02x}:00.0", 0x10 + node), node));
    }
    let machine = of_tree(root.path());
    assert_eq!(home_nodes(&machine), (0..8).map(Some).collect::<Vec<_>>());
    let Home::Known { order, .. } = &machine.gpus[4].home else { panic!() };
    let nodes: Vec<u32> = order.iter().step_by(2).map(|cpu| cpu / 2).collect();
    assert_eq!(nodes, [4, 5, 6, 7, 3, 2, 1, 0], "the same package first, although node 3 is next to node 4");
}

#[test]
fn a_gpu_on_a_one_node_machine_has_all_of_it_as_home() {
    let root = Sysroot::new(ONE_NODE);
    root.pci(&nvidia("0000:01:00.0", 0));
    assert_eq!(home(&of_tree(root.path()).gpus[0]), Some(("0-3".into(), Some(0), HomeSource::Sysfs)));
}

#[test]
fn minus_one_on_a_one_node_machine_can_only_be_that_node() {
    let root = Sysroot::new(ONE_NODE);
    root.pci(&nvidia("0000:01:00.0", -1));
    assert_eq!(home(&of_tree(root.path()).gpus[0]), Some(("0-3".into(), Some(0), HomeSource::OnlyNode)));
}

#[test]
fn minus_one_on_two_nodes_is_unknown_and_said_once() {
    let root = Sysroot::new(TWO_SOCKETS);
    root.pci(&nvidia("0000:01:00.0", -1));
    root.pci(&nvidia("0000:02:00.0", -1));
    let machine = of_tree(root.path());
    assert_eq!(home_nodes(&machine), [None, None]);
    assert_eq!(machine.notes.len(), 1, "{:?}", machine.notes);
    assert!(noted(&machine, "0000:01:00.0") && noted(&machine, "0000:02:00.0") && noted(&machine, "--nccl-topo"));
}

#[test]
fn memory_nodes_of_gpus_are_marked_and_are_no_homes() {
    let root = Sysroot::new(TWO_SOCKETS);
    root.memory_nodes(&[2, 3, 10]);
    root.pci(&nvidia("0009:01:00.0", 0));
    root.pci(&nvidia("0019:01:00.0", 1));
    let machine = of_tree(root.path());
    let memory_only: Vec<u32> = machine.nodes.iter().filter(|node| node.is_cpuless()).map(|node| node.id).collect();
    assert_eq!(memory_only, [2, 3, 10]);
    assert_eq!(home_nodes(&machine), [Some(0), Some(1)]);
    // A device that firmware puts on a memory node goes to the nearest with CPUs.
    root.write("sys/bus/pci/devices/0019:01:00.0/numa_node", "10");
    root.write("sys/bus/pci/devices/0019:01:00.0/local_cpulist", "");
    let machine = of_tree(root.path());
    assert_eq!(home_nodes(&machine), [Some(0), Some(1)]);
    assert!(noted(&machine, "no online CPU"), "{:?}", machine.notes);
}

#[test]
fn a_memory_node_takes_no_cpus_from_the_node_that_has_them_however_it_is_numbered() {
    let root = Sysroot::new(Shape { packages: 1, nodes: 2, cores: 2, threads: 1 });
    root.write("sys/devices/system/node/node0/cpumap", "0");
    root.write("sys/devices/system/node/node1/cpumap", "f");
    // The firmware (HMAT) says that node 1's CPUs are the ones to use node 0.
    std::fs::create_dir_all(root.join("sys/devices/system/node/node0/access0/initiators/node1")).unwrap();
    root.pci(&nvidia("0000:01:00.0", 1));
    let machine = of_tree(root.path());
    assert!(machine.nodes[0].is_cpuless(), "{:?}", machine.nodes);
    assert_eq!(machine.nodes[1].cpus.to_string(), "0-3");
}

#[test]
fn without_a_shared_cache_the_cpus_of_a_package_count_as_one_llc() {
    let root = Sysroot::new(TWO_SOCKETS);
    for cpu in 0..16 {
        let cache = format!("sys/devices/system/cpu/cpu{cpu}/cache");
        root.remove(&format!("{cache}/index3"));
        root.write(&format!("{cache}/index2/level"), "2");
        root.write(&format!("{cache}/index2/type"), "Unified");
        root.write(&format!("{cache}/index2/size"), "2048K");
        root.write(&format!("{cache}/index2/shared_cpu_map"), &format!("{:08x}", 0x0101 << (cpu % 8)));
    }
    let llcs: Vec<String> = of_tree(root.path()).llcs.iter().map(|llc| llc.cpus.to_string()).collect();
    assert_eq!(llcs, ["0-3,8-11", "4-7,12-15"]);
}

#[test]
fn a_cache_that_spans_nodes_is_split_by_node() {
    let root = Sysroot::new(Shape { packages: 1, nodes: 2, cores: 2, threads: 1 });
    for cpu in 0..4 {
        root.write(&format!("sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_map"), "0000000f");
    }
    let llcs: Vec<(String, u32)> =
        of_tree(root.path()).llcs.iter().map(|llc| (llc.cpus.to_string(), llc.node)).collect();
    assert_eq!(llcs, [("0-1".into(), 0), ("2-3".into(), 1)]);
}

#[test]
fn fast_cores_of_a_hybrid_lead_at_home() {
    let root = Sysroot::new(ONE_NODE);
    root.pci(&nvidia("0000:01:00.0", 0));
    for cpu in 0..4 {
        let figure = if cpu < 2 { "39" } else { "64" };
        root.write(&format!("sys/devices/system/cpu/cpu{cpu}/acpi_cppc/highest_perf"), figure);
    }
    let machine = of_tree(root.path());
    assert_eq!(machine.cpus.iter().map(|cpu| cpu.capacity).collect::<Vec<_>>(), [624, 624, 1024, 1024]);
    let Home::Known { order, .. } = &machine.gpus[0].home else { panic!() };
    assert_eq!(order[..], [2, 3, 0, 1]);
}

#[test]
fn offline_cpus_are_listed_and_are_nobodys_home() {
    let root = eight_gpus();
    root.offline(&[5, 13, 15]);
    let machine = of_tree(root.path());
    let offline: Vec<u32> = machine.cpus.iter().filter(|cpu| !cpu.online).map(|cpu| cpu.id).collect();
    assert_eq!(offline, [5, 13, 15]);
    assert_eq!(machine.cpus[5].llc, UNPLACED);
    assert_eq!(home(&machine.gpus[4]).unwrap().0, "4,6-7,12,14");
}

#[test]
fn a_pci_domain_above_16_bits_keeps_its_address_and_home() {
    let root = Sysroot::new(TWO_SOCKETS);
    root.pci(&nvidia("10000:e1:00.0", 1));
    root.pci(&nvidia("0000:e1:00.0", 0));
    for machine in [of_tree(root.path()), of_xml(&fixture("pci-domain-0x10000.xml"))] {
        let gpu = machine.gpus.iter().find(|gpu| gpu.pci.is_some_and(|address| address.domain == 0x10000)).unwrap();
        assert_eq!(gpu.pci.unwrap().to_string(), "10000:e1:00.0");
        assert_eq!(home(gpu).unwrap().1, Some(1));
    }
    assert_eq!(of_tree(root.path()).gpus.len(), 2, "the domains are not mixed up");
}

#[test]
fn a_bmc_and_offline_cpus_in_an_hwloc_export_are_told_apart() {
    let machine = of_xml(&fixture("one-node-bmc-offline.xml"));
    assert_eq!(machine.gpus.len(), 1);
    assert_eq!(machine.gpus[0].vendor, Vendor::Amd);
    assert_eq!(machine.left_out.len(), 1);
    assert_eq!(machine.cpus.iter().filter(|cpu| !cpu.online).count(), 4);
}

#[test]
fn every_device_of_a_gpu_is_found_and_shared_ones_are_nobodys() {
    let root = Sysroot::new(TWO_SOCKETS);
    root.write(
        "proc/devices",
        "Character devices:\n195 nvidia\n507 nvidia-uvm\n508 nvidia-caps\n\nBlock devices:\n  8 sd",
    );
    root.pci(&Device { driver: Some("nvidia"), drm: Some((1, true)), ..nvidia("0000:01:00.0", 0) });
    root.nvidia_driver("0000:01:00.0", 3);
    root.write("proc/driver/nvidia/capabilities/gpu3/mig/gi1/access", "DeviceFileMinor: 12\nDeviceFileMode: 292");
    root.write("proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0/access", "DeviceFileMinor: 13");
    root.write("sys/bus/pci/devices/0000:01:00.0/msi_irqs/101", "msix");
    root.write("sys/bus/pci/devices/0000:01:00.0/msi_irqs/100", "msix");
    let amd = Device { vendor: 0x1002, device: 0x740f, class: 0x038000, ..nvidia("0000:41:00.0", 1) };
    root.pci(&Device { driver: Some("amdgpu"), drm: Some((0, true)), ..amd });
    root.write("sys/bus/pci/devices/0000:41:00.0/unique_id", "18f68e602b8a790f");
    root.write("sys/class/kfd/kfd/dev", "510:0");
    let machine = of_tree(root.path());
    let numbers = |gpu: &Gpu| gpu.devices.iter().map(|device| (device.major, device.minor)).collect::<Vec<_>>();
    assert_eq!(numbers(&machine.gpus[0]), [(226, 1), (226, 129), (508, 12), (508, 13), (195, 3)]);
    assert_eq!(machine.gpus[0].name, "NVIDIA H100");
    assert_eq!(machine.gpus[0].irqs, [100, 101]);
    assert_eq!(numbers(&machine.gpus[1]), [(226, 0), (226, 128)]);
    assert_eq!(machine.gpus[1].uuid.as_deref(), Some("GPU-18f68e602b8a790f"));
    assert_eq!((machine.gpus[1].vendor, &machine.gpus[1].irqs[..]), (Vendor::Amd, &[11][..]));
    let shared: Vec<_> = machine
        .shared_devices
        .iter()
        .map(|shared| {
            (shared.device.path.to_str().unwrap(), shared.device.major, shared.device.minor, &shared.gpus[..])
        })
        .collect();
    let expected: [(&str, u32, u32, &[u32]); 5] = [
        ("/dev/nvidia-modeset", 195, 254, &[0]),
        ("/dev/nvidiactl", 195, 255, &[0]),
        ("/dev/nvidia-uvm", 507, 0, &[0]),
        ("/dev/nvidia-uvm-tools", 507, 1, &[0]),
        ("/dev/kfd", 510, 0, &[1]),
    ];
    assert_eq!(shared, expected);
    assert!(!noted(&machine, "no NVML"), "the NVML of another machine is not missed");
}

#[test]
fn virtio_counts_through_its_virtio_device_and_display_only_chips_do_not() {
    let root = Sysroot::new(TWO_SOCKETS);
    let virtio = Device { vendor: 0x1af4, device: 0x1050, class: 0x038000, ..nvidia("0000:02:00.0", 1) };
    root.pci(&virtio);
    root.drm("devices/pci0000:02/0000:02:00.0/virtio1", 0, true);
    let chip = |address, vendor, device| Device { vendor, device, class: 0x030000, ..nvidia(address, 0) };
    root.pci(&Device { drm: Some((1, false)), ..chip("0000:05:00.0", 0x1a03, 0x2000) });
    root.pci(&Device { drm: Some((2, false)), ..chip("0000:06:00.0", 0x102b, 0x0538) });
    root.pci(&Device { drm: Some((3, true)), ..chip("0000:07:00.0", 0x1002, 0x515e) });
    root.pci(&chip("0000:08:00.0", 0x1234, 0x1111));
    let machine = of_tree(root.path());
    assert_eq!(machine.gpus.len(), 1, "{:?}", machine.gpus);
    let gpu = &machine.gpus[0];
    assert_eq!((gpu.vendor, home(gpu).unwrap().1), (Vendor::Virtio, Some(1)));
    assert_eq!(gpu.devices.iter().map(|device| device.minor).collect::<Vec<_>>(), [0, 128]);
    assert_eq!(machine.left_out.len(), 4);
}

#[test]
fn a_drm_device_outside_pci_has_an_unknown_home_and_that_is_said() {
    let root = Sysroot::new(ONE_NODE);
    root.drm("devices/platform/vgem", 0, true);
    root.drm("devices/platform/vkms", 1, false);
    let machine = of_tree(root.path());
    assert_eq!(machine.gpus.len(), 1);
    assert_eq!((machine.gpus[0].name.as_str(), machine.gpus[0].pci, home(&machine.gpus[0])), ("vgem", None, None));
    assert!(noted(&machine, "vgem"), "{:?}", machine.notes);
}

#[test]
fn the_partitions_of_an_amd_gpu_belong_to_it() {
    let root = Sysroot::new(TWO_SOCKETS);
    let amd = Device { vendor: 0x1002, device: 0x74a1, class: 0x120000, ..nvidia("0000:9f:00.0", 1) };
    root.pci(&Device { drm: Some((0, true)), ..amd });
    root.drm("devices/platform/amdgpu_xcp_0", 1, true);
    root.write(
        "sys/class/kfd/kfd/topology/nodes/3/properties",
        &format!("cpu_cores_count 0\ndomain 0\ndrm_render_minor 129\nlocation_id {}", 0x9f << 8 | 1),
    );
    let machine = of_tree(root.path());
    let minors: Vec<u32> = machine.gpus[0].devices.iter().map(|device| device.minor).collect();
    assert_eq!(minors, [0, 1, 128, 129]);
    assert_eq!((machine.gpus.len(), machine.left_out.len()), (1, 0));
    assert_eq!(home_nodes(&machine), [Some(1)]);
}

#[test]
fn an_accelerator_and_a_gpu_handed_to_a_guest_are_found() {
    let root = Sysroot::new(TWO_SOCKETS);
    let gaudi = Device { vendor: 0x1da3, device: 0x1020, class: 0x120000, ..nvidia("0000:19:00.0", 0) };
    root.pci(&Device { driver: Some("habanalabs"), ..gaudi });
    root.write("sys/devices/pci0000:19/0000:19:00.0/accel/accel0/dev", "261:0");
    std::fs::create_dir_all(root.join("sys/class/accel")).unwrap();
    std::os::unix::fs::symlink(
        "../../devices/pci0000:19/0000:19:00.0/accel/accel0",
        root.join("sys/class/accel/accel0"),
    )
    .unwrap();
    root.pci(&Device { driver: Some("vfio-pci"), ..nvidia("0000:81:00.0", 1) });
    std::os::unix::fs::symlink(
        "../../../kernel/iommu_groups/42",
        root.join("sys/bus/pci/devices/0000:81:00.0/iommu_group"),
    )
    .unwrap();
    root.write("sys/class/vfio/42/dev", "243:0");
    root.write("sys/class/misc/vfio/dev", "10:196");
    let machine = of_tree(root.path());
    let device = |gpu: usize| (machine.gpus[gpu].devices[0].path.to_str().unwrap(), machine.gpus[gpu].devices[0].major);
    assert_eq!([device(0), device(1)], [("/dev/accel/accel0", 261), ("/dev/vfio/42", 243)]);
    let vfio = machine.shared_devices.iter().find(|shared| shared.device.path == Path::new("/dev/vfio/vfio")).unwrap();
    assert_eq!(vfio.gpus, [1]);
}

// NCCL topology files.

fn nccl_file(root: &Sysroot, path: &str, places: &[(&str, i32)]) -> PathBuf {
    let cpus = places.iter().map(|(address, node)| {
        // Every node with the same mask, as in a real one.
        format!("<cpu numaid=\"{node}\" affinity=\"00ff\"><pci busid=\"{address}\" class=\"0x030200\"/></cpu>")
    });
    root.write(path, &format!("<system version=\"1\">{}</system>", cpus.collect::<String>()));
    root.join(path)
}

fn hidden_gpus() -> Sysroot {
    let root = Sysroot::new(TWO_SOCKETS);
    root.pci(&nvidia("0001:00:00.0", -1));
    root.pci(&nvidia("0002:00:00.0", -1));
    root
}

#[test]
fn a_named_nccl_file_says_where_gpus_are_by_node_not_by_mask() {
    let root = hidden_gpus();
    let file = nccl_file(&root, "topo.xml", &[("0001:00:00.0", 1), ("0002:00:00.0", 0)]);
    let machine = discover(Sources { sysroot: Some(root.path().into()), nccl_topo: Some(file), ..Sources::default() });
    assert_eq!(home_nodes(&machine), [Some(1), Some(0)]);
    assert_eq!(home(&machine.gpus[0]), Some(("4-7,12-15".into(), Some(1), HomeSource::NcclTopo)));
    assert!(machine.notes.is_empty(), "{:?}", machine.notes);
}

#[test]
fn the_file_that_nccls_configuration_names_is_found() {
    let root = hidden_gpus();
    nccl_file(&root, "opt/some/topo.xml", &[("0001:00:00.0", 1), ("0002:00:00.0", 1)]);
    root.write("etc/nccl.conf", "NCCL_TOPO_FILE=/opt/some/topo.xml");
    assert_eq!(home_nodes(&of_tree(root.path())), [Some(1), Some(1)]);
}

#[test]
fn of_a_vendors_files_the_one_that_fits_is_taken_and_a_tie_is_said() {
    let root = hidden_gpus();
    nccl_file(&root, "opt/microsoft/a-topo.xml", &[("0001:00:00.0", 1), ("0002:00:00.0", 0)]);
    nccl_file(&root, "opt/microsoft/b-topo.xml", &[("0001:00:00.0", 0)]);
    assert_eq!(home_nodes(&of_tree(root.path())), [Some(1), Some(0)], "b names one GPU of two");
    nccl_file(&root, "opt/microsoft/c-topo.xml", &[("0001:00:00.0", 0), ("0002:00:00.0", 1)]);
    let machine = of_tree(root.path());
    assert_eq!(home_nodes(&machine), [None, None]);
    assert!(noted(&machine, "disagree"), "{:?}", machine.notes);
}

#[test]
fn nccl_topo_file_in_the_environment_counts_as_named() {
    let root = hidden_gpus();
    let file = nccl_file(&root, "topo.xml", &[("0001:00:00.0", 1), ("0002:00:00.0", 0)]);
    let output = topology(&root, &[], &[("NCCL_TOPO_FILE", file.to_str().unwrap())]);
    assert_eq!(output["gpus"][0]["home"]["node"], 1);
    assert_eq!(output["gpus"][0]["home"]["source"], "nccl_topo");
}

#[test]
fn an_nccl_file_about_another_machine_is_said_to_change_nothing() {
    let root = hidden_gpus();
    let file = nccl_file(&root, "topo.xml", &[("0009:00:00.0", 1)]);
    let machine = discover(Sources { sysroot: Some(root.path().into()), nccl_topo: Some(file), ..Sources::default() });
    assert_eq!(home_nodes(&machine), [None, None]);
    assert!(noted(&machine, "names none"), "{:?}", machine.notes);
}

// The command.

/// Runs `topology` in this environment and no other: the caller's may name another machine (`NCCL_TOPO_FILE`), and ours
/// holds hwloc's variables for as long as another test of this process loads a machine.
fn stoker(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_scx_stoker"));
    command.arg("topology").args(arguments).env_clear();
    command.envs(environment.iter().copied()).output().unwrap()
}

/// What `topology --json` says about a tree.
fn topology(root: &Sysroot, arguments: &[&str], environment: &[(&str, &str)]) -> Value {
    let mut all = vec!["--json", "--sysroot", root.path().to_str().unwrap()];
    all.extend(arguments);
    let output = stoker(&all, environment);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn in_the_tree_for_people_a_gpu_hangs_below_its_node() {
    let root = eight_gpus();
    let output = stoker(&["--sysroot", root.path().to_str().unwrap()], &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    let position = |words: &str| text.find(words).unwrap_or_else(|| panic!("no {words} in {text}"));
    assert!(position("Node 0") < position("GPU 3") && position("GPU 3") < position("Node 1"), "{text}");
    assert!(position("Node 1") < position("GPU 4"), "{text}");
    assert!(text.contains("home: CPUs 4-7,12-15 (from sysfs)"), "{text}");
}

#[test]
fn this_machine_is_shown_without_root_or_gpus() {
    let output = stoker(&["--json"], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let machine: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(!machine["cpus"].as_array().unwrap().is_empty());
}

#[test]
fn the_environment_does_not_make_it_another_machine() {
    let root = eight_gpus();
    let xml = fixture("one-node-bmc-offline.xml");
    let misleading =
        [("HWLOC_XMLFILE", xml.to_str().unwrap()), ("HWLOC_SYNTHETIC", "pu:3"), ("HWLOC_FSROOT", "/nowhere")];
    let machine = topology(&root, &[], &misleading);
    assert_eq!(machine["cpus"].as_array().unwrap().len(), 16);
    let note = machine["notes"][0].as_str().unwrap();
    assert!(note.contains("HWLOC_XMLFILE") && note.contains("--hwloc-xml"), "{note}");
    let machine = topology(&hidden_gpus(), &[], &[("HWLOC_PCI_LOCALITY", "0001:00 0x0f0f;0002:00 0x0f0f")]);
    assert_eq!(machine["gpus"][0]["home"]["state"], "unknown");
}

#[test]
fn bad_input_gets_an_error_that_names_it_and_the_way_out() {
    let empty = tempfile::tempdir().unwrap();
    let directory = empty.path().to_str().unwrap();
    let rubbish = empty.path().join("rubbish.xml");
    std::fs::write(&rubbish, "<topology version=\"2.0\"><object").unwrap();
    let rubbish = rubbish.to_str().unwrap();
    let cases: [(&[&str], &[&str]); 6] = [
        (&["--hwloc-xml", "/nowhere.xml"], &["/nowhere.xml", "cannot read"]),
        (&["--hwloc-xml", rubbish], &[rubbish, "lstopo"]),
        (&["--sysroot", directory], &[directory, "copy of /sys"]),
        (&["--sysroot", "/", "--hwloc-xml", rubbish], &["cannot be used with"]),
        (&["--nccl-topo", "/nowhere.xml"], &["/nowhere.xml", "cannot read"]),
        (&["--nccl-topo", rubbish], &[rubbish, "NCCL topology"]),
    ];
    for (arguments, words) in cases {
        let output = stoker(arguments, &[]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(words.iter().all(|word| text.contains(word)), "{arguments:?}: {text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

// NVML.

fn with_nvml(root: &Sysroot, nvml: Value) -> Value {
    let file = root.join("nvml.json");
    std::fs::write(&file, nvml.to_string()).unwrap();
    topology(root, &["--nvml-lib", stand_in()], &[("STOKER_NVML_FILE", file.to_str().unwrap())])
}

/// NVML's view of [`eight_gpus`].
fn eight_by_nvml() -> Vec<Value> {
    let gpu = |index: u32| {
        json!({
            "name": "NVIDIA H100", "uuid": format!("GPU-{index}"), "minor": index,
            "pci": format!("0000:{:02x}:00.0", 0x11 + 0x10 * index),
            "cpus": if index < 4 { "0-3,8-11" } else { "4-7,12-15" }, "nodes": (index / 4).to_string(),
        })
    };
    (0..8).map(gpu).collect()
}

fn notes(machine: &Value) -> String {
    machine["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn nvml_adds_names_uuids_and_device_numbers() {
    let machine = with_nvml(&eight_gpus(), json!({ "gpus": eight_by_nvml() }));
    for index in 0..8 {
        let gpu = &machine["gpus"][index];
        assert_eq!((&gpu["name"], &gpu["uuid"]), (&json!("NVIDIA H100"), &json!(format!("GPU-{index}"))));
        assert_eq!(gpu["devices"], json!([{ "path": format!("/dev/nvidia{index}"), "major": 195, "minor": index }]));
        assert_eq!(gpu["home"]["node"], json!(index / 4));
    }
    assert_eq!(notes(&machine), "");
}

#[test]
fn nvml_tells_the_home_where_sysfs_does_not() {
    let root = Sysroot::new(TWO_SOCKETS);
    root.pci(&nvidia("0000:11:00.0", -1));
    root.pci(&nvidia("0000:21:00.0", -1));
    let mut gpus = eight_by_nvml();
    gpus.truncate(2);
    gpus[0]["cpus"] = json!("4-7,12-15");
    gpus[1]["cpus"] = json!("");
    gpus[1]["nodes"] = json!("0");
    let machine = with_nvml(&root, json!({ "gpus": gpus }));
    assert_eq!(machine["gpus"][0]["home"]["node"], 1);
    assert_eq!(machine["gpus"][1]["home"]["node"], 0, "by its memory affinity");
    assert_eq!(machine["gpus"][1]["home"]["source"], "nvml");
}

#[test]
fn an_empty_affinity_is_no_preference() {
    let mut gpus = eight_by_nvml();
    for gpu in &mut gpus {
        gpu["cpus"] = json!("");
        gpu["nodes"] = json!("");
    }
    let machine = with_nvml(&eight_gpus(), json!({ "gpus": gpus }));
    assert_eq!(machine["gpus"][7]["home"]["node"], 1);
    assert_eq!(machine["gpus"][7]["home"]["source"], "sysfs");
    assert_eq!(notes(&machine), "");
    let machine = with_nvml(&hidden_gpus(), json!({ "gpus": [{ "pci": "0001:00:00.0", "cpus": "", "nodes": "" }] }));
    assert_eq!(machine["gpus"][0]["home"]["state"], "unknown");
}

#[test]
fn an_affinity_that_disagrees_with_sysfs_is_reported_with_what_was_taken() {
    let mut gpus = eight_by_nvml();
    gpus[2]["cpus"] = json!("4-7");
    let machine = with_nvml(&eight_gpus(), json!({ "gpus": gpus }));
    assert_eq!(machine["gpus"][2]["home"]["node"], 0);
    let notes = notes(&machine);
    assert!(notes.contains("0000:31:00.0") && notes.contains("sysfs was taken"), "{notes}");
    assert_eq!(notes.lines().count(), 1, "{notes}");
}

#[test]
fn mig_instances_are_listed_below_their_gpu() {
    let mut gpus = eight_by_nvml();
    gpus[1]["mig"] = json!([{ "uuid": "MIG-a", "name": "1g" }, { "uuid": "MIG-b", "name": "2g" }]);
    let machine = with_nvml(&eight_gpus(), json!({ "gpus": gpus }));
    assert_eq!(machine["gpus"].as_array().unwrap().len(), 8, "an instance is no GPU of its own");
    assert_eq!((&machine["gpus"][0]["mig"], &machine["gpus"][1]["mig"]), (&json!(false), &json!(true)));
    let instances = json!([{ "uuid": "MIG-a", "name": "1g" }, { "uuid": "MIG-b", "name": "2g" }]);
    assert_eq!(machine["gpus"][1]["mig_instances"], instances);
}

#[test]
fn a_gpu_that_errors_costs_no_other_gpu_anything() {
    let mut gpus = eight_by_nvml();
    gpus[3]["errors"] = json!({ "*": 15 });
    gpus[5]["errors"] = json!({ "nvmlDeviceGetCpuAffinityWithinScope": 3, "nvmlDeviceGetUUID": 999 });
    let machine = with_nvml(&eight_gpus(), json!({ "gpus": gpus }));
    assert_eq!((&machine["gpus"][3]["uuid"], &machine["gpus"][3]["home"]["node"]), (&Value::Null, &json!(0)));
    assert_eq!((&machine["gpus"][5]["uuid"], &machine["gpus"][5]["name"]), (&Value::Null, &json!("NVIDIA H100")));
    assert_eq!(machine["gpus"][4]["uuid"], "GPU-4");
    assert_eq!(machine["gpus"][7]["uuid"], "GPU-7");
    let notes = notes(&machine);
    assert!(notes.contains("its GPU 3") && notes.lines().count() == 1, "{notes}");
}

#[test]
fn an_nvml_that_hangs_or_fails_leaves_what_sysfs_knows() {
    let root = eight_gpus();
    let mut gpus = eight_by_nvml();
    gpus[2]["hang_ms"] = json!({ "nvmlDeviceGetUUID": 60_000 });
    let started = std::time::Instant::now();
    let machine = with_nvml(&root, json!({ "gpus": gpus }));
    assert!(started.elapsed().as_secs() < 30, "{:?}", started.elapsed());
    assert_eq!(machine["gpus"][1]["uuid"], "GPU-1");
    assert_eq!((&machine["gpus"][2]["uuid"], &machine["gpus"][2]["home"]["node"]), (&Value::Null, &json!(0)));
    assert!(notes(&machine).contains("did not answer"), "{}", notes(&machine));

    let machine = with_nvml(&root, json!({ "errors": { "nvmlInitWithFlags": 9 } }));
    assert_eq!(machine["gpus"].as_array().unwrap().len(), 8);
    assert!(notes(&machine).contains("driver is not loaded"), "{}", notes(&machine));
}

#[test]
fn a_driver_without_gpus_is_no_error() {
    let root = Sysroot::new(TWO_SOCKETS);
    let machine = with_nvml(&root, json!({ "gpus": [] }));
    assert_eq!((&machine["gpus"], notes(&machine).as_str()), (&json!([]), ""));
}

#[test]
fn a_gpu_that_only_nvml_sees_is_a_gpu_with_its_home() {
    let root = Sysroot::new(TWO_SOCKETS);
    let gpu = json!({ "name": "vGPU", "uuid": "GPU-v", "pci": "10001:05:00.0", "cpus": "4-7,12-15", "minor": 0 });
    let machine = with_nvml(&root, json!({ "gpus": [gpu] }));
    assert_eq!(machine["gpus"][0]["pci"], "10001:05:00.0");
    assert_eq!((&machine["gpus"][0]["home"]["node"], &machine["gpus"][0]["vendor"]), (&json!(1), &json!("nvidia")));
}

#[test]
fn a_missing_nvml_library_that_was_named_is_said() {
    let root = eight_gpus();
    let nvml = NvmlSource::Library("/nowhere/libnvidia-ml.so.1".into());
    let machine = discover(Sources { sysroot: Some(root.path().into()), nvml, ..Sources::default() });
    assert!(noted(&machine, "NVML does not work"), "{:?}", machine.notes);
}

// Real machines.

/// The folder of real machines' topologies, if there is one.
fn topologies() -> Option<PathBuf> {
    let named = std::env::var_os("STOKER_TOPOLOGIES").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/topologies"));
    if !folder.is_dir() {
        println!("skipped: there is no {} (set STOKER_TOPOLOGIES to the folder)", folder.display());
        return None;
    }
    Some(folder)
}

/// What must come out for a real machine.
#[derive(Default)]
struct Expected {
    packages: usize,
    nodes: usize,
    memory_only: &'static [u32],
    online: usize,
    offline: usize,
    llcs: usize,
    /// Home CPUs of each GPU.
    homes: &'static [&'static str],
    left_out: usize,
}

fn expect(machine: &Machine, name: &str, expected: &Expected) {
    let online = machine.cpus.iter().filter(|cpu| cpu.online).count();
    let memory_only: Vec<u32> = machine.nodes.iter().filter(|node| node.is_cpuless()).map(|node| node.id).collect();
    let homes: Vec<String> =
        machine.gpus.iter().map(|gpu| home(gpu).map_or("unknown".into(), |(cpus, ..)| cpus)).collect();
    assert_eq!(machine.packages.len(), expected.packages, "{name}: packages");
    assert_eq!(machine.nodes.len(), expected.nodes, "{name}: nodes");
    assert_eq!(memory_only, expected.memory_only, "{name}: memory-only nodes");
    assert_eq!(online, expected.online, "{name}: online CPUs");
    assert_eq!(machine.cpus.len() - online, expected.offline, "{name}: offline CPUs");
    assert_eq!(machine.llcs.len(), expected.llcs, "{name}: LLCs");
    assert_eq!(homes, expected.homes, "{name}: homes");
    assert_eq!(machine.left_out.len(), expected.left_out, "{name}: display controllers");
}

const DGX2: [&str; 16] = [
    "0-1", "0-1", "0-1", "0-1", "0-1", "0-1", "0-1", "0-1", "24-25", "24-25", "24-25", "24-25", "24-25", "24-25",
    "24-25", "24-25",
];

#[test]
fn real_machines_exported_by_hwloc_come_out_right() {
    let Some(folder) = topologies() else { return };
    let power8 =
        &["0-1,8-9,16-17,24-25", "0-1,8-9,16-17,24-25", "80-81,88-89,96-97,104-105", "80-81,88-89,96-97,104-105"];
    let expected: [(&str, Expected); 11] = [
        (
            "16em64t-4s2c2t-offlines",
            Expected { packages: 4, nodes: 1, online: 7, offline: 9, llcs: 4, ..Expected::default() },
        ),
        ("16intel64-manyVFs", Expected { packages: 2, nodes: 2, online: 16, llcs: 2, ..Expected::default() }),
        (
            "192em64t-24n8c2t",
            Expected { packages: 24, nodes: 24, online: 384, llcs: 24, left_out: 1, ..Expected::default() },
        ),
        (
            "64intel64-heteromem",
            Expected { packages: 1, nodes: 8, memory_only: &[4, 5, 6, 7], online: 64, llcs: 4, ..Expected::default() },
        ),
        (
            "96em64t-4n4d3ca2co-pci",
            Expected { packages: 16, nodes: 4, online: 96, llcs: 16, left_out: 1, ..Expected::default() },
        ),
        ("AMD-19h-Zen4-2xEpyc-9654", Expected { packages: 2, nodes: 1, online: 384, llcs: 24, ..Expected::default() }),
        ("cxlmem+dax.v3", Expected { packages: 1, nodes: 1, online: 4, llcs: 1, left_out: 1, ..Expected::default() }),
        (
            "fakepcilocalities",
            Expected { packages: 4, nodes: 4, online: 40, llcs: 4, left_out: 1, ..Expected::default() },
        ),
        ("nvidia-dgx-gb10", Expected { packages: 1, nodes: 1, online: 20, llcs: 2, ..Expected::default() }),
        ("nvidiaDGX2", Expected { packages: 2, nodes: 2, online: 4, llcs: 2, homes: &DGX2, ..Expected::default() }),
        (
            "power8gpudistances",
            Expected { packages: 2, nodes: 2, online: 16, llcs: 8, homes: power8, ..Expected::default() },
        ),
    ];
    for (name, expected) in expected {
        let machine = of_xml(&folder.join(format!("{name}.xml")));
        expect(&machine, name, &expected);
        println!("{name}: as expected");
    }
}

#[test]
fn real_machines_trees_come_out_right() {
    let Some(folder) = topologies() else { return };
    let power9 = &["0-15", "0-15", "0-15", "88-103", "88-103", "88-103"];
    let expected: [(&str, Expected); 5] = [
        (
            "20em64t-hybrid-1p6c2t+2ca4co1t",
            Expected { packages: 1, nodes: 1, online: 20, llcs: 1, ..Expected::default() },
        ),
        (
            "2pa-pcidomain32bits",
            Expected { packages: 2, nodes: 1, online: 2, llcs: 2, left_out: 1, ..Expected::default() },
        ),
        (
            "fakepcilocalities",
            Expected { packages: 4, nodes: 4, online: 40, llcs: 4, left_out: 1, ..Expected::default() },
        ),
        ("nvidia-dgx-gb10", Expected { packages: 1, nodes: 1, online: 20, llcs: 2, ..Expected::default() }),
        (
            "nvidiagpunumanodes",
            Expected {
                packages: 2,
                nodes: 8,
                memory_only: &[250, 251, 252, 253, 254, 255],
                online: 32,
                llcs: 4,
                homes: power9,
                ..Expected::default()
            },
        ),
    ];
    let unpacked = tempfile::tempdir().unwrap();
    for (name, expected) in expected {
        let archive = folder.join(format!("{name}.tar.bz2"));
        let tar = Command::new("tar").arg("-xjf").arg(&archive).arg("-C").arg(unpacked.path()).status();
        if !tar.is_ok_and(|status| status.success()) {
            panic!("cannot unpack {} (are tar and bzip2 installed?)", archive.display());
        }
        let machine = of_tree(&unpacked.path().join(name));
        expect(&machine, name, &expected);
        match name {
            "20em64t-hybrid-1p6c2t+2ca4co1t" => {
                // Two of the six fast cores turbo higher than the others.
                let fastest: CpuSet =
                    machine.cpus.iter().filter(|cpu| cpu.capacity == 1024).map(|cpu| cpu.id).collect();
                assert_eq!(fastest.to_string(), "4-5,8-9");
                let slow: CpuSet = machine.cpus.iter().filter(|cpu| cpu.kind == 0).map(|cpu| cpu.id).collect();
                assert_eq!(slow.to_string(), "12-19");
                assert!(slow.iter().all(|cpu| machine.cpus[cpu as usize].capacity == 596));
            }
            "nvidia-dgx-gb10" => assert_eq!((machine.cpus[0].capacity, machine.cpus[19].capacity), (718, 1024)),
            "nvidiagpunumanodes" => {
                assert!(machine.gpus.iter().all(|gpu| gpu.vendor == Vendor::Nvidia), "by the driver's files alone");
            }
            _ => {}
        }
        println!("{name}: as expected");
    }
}

#[test]
fn clouds_nccl_files_say_where_their_gpus_are() {
    let Some(folder) = topologies() else { return };
    // For each file: GPUs in order of address, and their nodes.
    type Places = &'static [(&'static str, u32)];
    let files: [(&str, u32, Places); 6] = [
        ("aws-g5.48xl-topo", 2, &[("0000:00:16.0", 0), ("0000:00:19.0", 0), ("0000:00:1a.0", 1), ("0000:00:1d.0", 1)]),
        ("aws-p4d-24xl-topo", 2, &[("0000:10:1c.0", 0), ("0000:20:1d.0", 0), ("0000:90:1c.0", 1), ("0000:a0:1d.0", 1)]),
        ("azure-ncv4-topo", 4, &[("0001:00:00.0", 0), ("0002:00:00.0", 1), ("0003:00:00.0", 2), ("0004:00:00.0", 3)]),
        ("azure-ndv2-topo", 2, &[("0001:00:00.0", 0), ("0004:00:00.0", 0), ("0005:00:00.0", 1), ("0008:00:00.0", 1)]),
        ("azure-ndv4-topo", 4, &[("0001:00:00.0", 1), ("0003:00:00.0", 0), ("000b:00:00.0", 3), ("000d:00:00.0", 2)]),
        ("azure-ndv5-topo", 2, &[("0001:00:00.0", 0), ("0008:00:00.0", 0), ("0009:00:00.0", 1), ("000b:00:00.0", 1)]),
    ];
    for (name, nodes, gpus) in files {
        let root = Sysroot::new(Shape { packages: nodes, nodes: 1, cores: 2, threads: 1 });
        gpus.iter().for_each(|(address, _)| root.pci(&nvidia(address, -1)));
        let nccl_topo = Some(folder.join("nccl").join(format!("{name}.xml")));
        let machine = discover(Sources { sysroot: Some(root.path().into()), nccl_topo, ..Sources::default() });
        let expected: Vec<Option<u32>> = gpus.iter().map(|(_, node)| Some(*node)).collect();
        assert_eq!(home_nodes(&machine), expected, "{name}");
        println!("{name}: as expected");
    }
}
