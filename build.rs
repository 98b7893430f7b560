//! Builds the BPF scheduler and the Rust views of it (skeleton and shared types), and the lab's plain scheduler.

fn main() -> anyhow::Result<()> {
    // Only the lab runs it.
    if std::env::var_os("CARGO_FEATURE_LAB").is_some() {
        scx_cargo::BpfBuilder::new()?.enable_skel("lab/plain/plain.bpf.c", "plain").build()?;
    }
    scx_cargo::BpfBuilder::new()?
        .enable_intf("src/bpf/intf.h", "bpf_intf.rs")
        .enable_skel("src/bpf/main.bpf.c", "bpf")
        .build()
}
