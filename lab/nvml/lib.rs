//! Stand-in for libnvidia-ml.so.1.
