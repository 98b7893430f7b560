//! Parses the command line and calls the command.
fn main() {}
