//! Doubles of libraries that machines without their hardware do not have.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `<name>/double.c` of this crate's folder beside the binary that runs, where it is built
/// anew like it; its path.
///
/// # Panics
///
/// When it cannot be built: see [`build_as`].
#[must_use]
pub fn build(name: &str) -> PathBuf {
    let made = std::env::current_exe().unwrap();
    let made = made.with_extension(format!("{name}.so"));
    build_as(name, &made).unwrap();
    made
}

/// Builds `<name>/double.c` of this crate's folder at a path.
///
/// # Errors
///
/// Says what is missing: doubles need the system's C compiler, `cc`, and the sources of this crate.
pub fn build_as(name: &str, made: &Path) -> Result<(), String> {
    let source = format!("{}/{name}/double.c", env!("CARGO_MANIFEST_DIR"));
    let built = Command::new("cc")
        .args([
            "-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Werror", "-o",
        ])
        .args([made.as_os_str(), source.as_ref()])
        .status();
    match built {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cc did not build {source}: {status}")),
        Err(error) => Err(format!(
            "cc, the system's C compiler, builds the double, and does not run: {error}"
        )),
    }
}
