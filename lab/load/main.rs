//! The emulated GPU load and its neighbours.
fn main() {}
