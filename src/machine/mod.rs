//! What the machine is: CPUs, caches, nodes and GPUs, behind one `Machine`.
