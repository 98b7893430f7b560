//! One file per command of the command line.

pub mod topology;
