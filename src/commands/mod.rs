//! One file per command of the command line.

mod run;
mod topology;

pub use run::run;
pub use topology::{TopologyArgs, run as topology};
