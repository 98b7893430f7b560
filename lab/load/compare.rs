//! Comparison.
use anyhow::Result;
use clap::Args;
/// x
#[derive(Args)]
pub struct CompareArgs {}
/// x
pub fn main(_: &CompareArgs) -> Result<()> {
    anyhow::bail!("not there yet")
}
