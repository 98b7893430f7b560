//! Micro-benchmarks.
use anyhow::Result;
use clap::Args;
/// x
#[derive(Args)]
pub struct FairArgs {}
/// x
pub fn main(_: &FairArgs) -> Result<()> {
    anyhow::bail!("not there yet")
}
