//! Builds the BPF scheduler and the Rust views of it (skeleton and shared types).

fn main() -> anyhow::Result<()> {
    scx_cargo::BpfBuilder::new()?
        .enable_intf("src/bpf/intf.h", "bpf_intf.rs")
        .enable_skel("src/bpf/main.bpf.c", "bpf")
        .build()
}
