//! A build as people run it: `make -j` of a small C project, which forks, runs and waits for many short processes.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::sys::now_ns;

/// C files of the project.
const FILES: usize = 40;
/// Functions in each.
const FUNCTIONS: usize = 6;

/// Whether what a build takes is installed.
pub fn is_possible() -> bool {
    let works = |program: &str| {
        Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    works("make") && works("gcc")
}

/// Builds the project with `jobs` jobs and returns the time in ms.
pub fn build(jobs: usize) -> Result<f64> {
    let project = Project::new()?;
    // The compiler's own files are read from disk once, and not while the clock runs.
    project.make(1, "f0.o")?;
    let start_ns = now_ns();
    project.make(jobs, "all")?;
    Ok((now_ns() - start_ns) as f64 / 1e6)
}

/// The project's folder, removed when dropped.
struct Project(PathBuf);

impl Project {
    /// Writes the project into memory: no disk takes part.
    fn new() -> Result<Self> {
        let base = Path::new("/dev/shm");
        let base = if base.is_dir() { base.to_path_buf() } else { std::env::temp_dir() };
        let folder = base.join(format!("lab_load.make.{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        let project = Self(folder);
        for file in 0..FILES {
            project.write(&format!("f{file}.c"), &source(file)?)?;
        }
        project.write("main.c", &main_source()?)?;
        project.write("Makefile", &makefile())?;
        Ok(project)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        fs::write(self.0.join(name), text).with_context(|| format!("{}/{name}", self.0.display()))
    }

    fn make(&self, jobs: usize, target: &str) -> Result<()> {
        let mut make = Command::new("make");
        make.arg("--silent").arg(format!("--jobs={jobs}")).arg(target).current_dir(&self.0);
        let output = make.output().context("running make")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "make {target}: {}", complaint.trim());
        Ok(())
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn makefile() -> String {
    let objects: Vec<String> = (0..FILES).map(|file| format!("f{file}.o")).collect();
    format!("all: main.o {0}\n\tgcc -o all $^\n%.o: %.c\n\tgcc -O1 -c -o $@ $<\n", objects.join(" "))
}

fn source(file: usize) -> Result<String> {
    let mut text = String::new();
    for function in 0..FUNCTIONS {
        writeln!(
            text,
            "int f{file}_{function}(int n) {{ int s = {function}; for (int i = 0; i < n; i++) s = s * {} + (i ^ s); return s; }}",
            file + 3
        )?;
    }
    Ok(text)
}

fn main_source() -> Result<String> {
    let mut text = String::new();
    for file in 0..FILES {
        writeln!(text, "int f{file}_0(int);")?;
    }
    text.push_str("int main(void) { int s = 0;\n");
    for file in 0..FILES {
        writeln!(text, "s += f{file}_0(s);")?;
    }
    text.push_str("return s == 42; }\n");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_project_builds() -> Result<()> {
        let took_ms = build(2)?;
        assert!(took_ms > 0.0);
        Ok(())
    }
}
