//! One file per command of the command line.

mod check;
mod run;
mod threads;
mod topology;

pub use check::{CheckArgs, run as check};
pub use run::run;
pub use threads::{ThreadsArgs, run as threads};
pub use topology::{TopologyArgs, run as topology};
