//! The skeleton of the BPF scheduler, made by libbpf-cargo from `src/bpf/main.bpf.c`.
#![allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]

include!(concat!(env!("OUT_DIR"), "/bpf_skel.rs"));
