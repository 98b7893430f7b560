//! Tests that run inside the lab guest.
