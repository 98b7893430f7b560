//! Finds the stand-in for NVML.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// The stand-in for NVML, built as the tests are.
pub fn stand_in() -> &'static str {
    static BUILT: OnceLock<String> = OnceLock::new();
    BUILT.get_or_init(|| {
        let directory = Path::new(env!("CARGO_BIN_EXE_scx_stoker")).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(["build", "--quiet", "--example", "nvml_stand_in"]);
        cargo.arg("--target-dir").arg(directory.parent().unwrap());
        if directory.ends_with("release") {
            cargo.arg("--release");
        }
        if cfg!(feature = "lab") {
            // Other features would build the package anew.
            cargo.args(["--features", "lab"]);
        }
        assert!(cargo.status().unwrap().success(), "the stand-in does not build");
        directory.join("examples/libnvml_stand_in.so").to_str().unwrap().into()
    })
}
