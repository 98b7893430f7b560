//! Tests of the scheduler in a booted kernel. They run inside the lab guest, as `scripts/test` does:
//! `scripts/lab --counted -- target/release/deps/lab-HASH --test-threads=1`.
//!
//! Guest time counts instructions, so bounds hold whatever else the host does ([`hotplug`] is the exception). All tests
//! share one machine and its one scheduler: they run one after the other, and those that need no options of their own
//! share one `scx_stoker`.

// A helper that fails fails its test; clippy's exemption covers only the test functions themselves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod check;
mod detect;
mod fair;
mod figures;
mod group;
mod guest;
mod home;
mod hotplug;
mod known;
mod launch;
mod life;
mod load;
mod nvidia;
mod pace;
mod probe;
mod rule;
mod smoke;
mod stoker;
mod weights;
mod word;
mod workload;
mod zoo;
