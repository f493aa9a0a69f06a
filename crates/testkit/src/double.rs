//! Doubles of libraries that machines without their hardware do not have.

use std::path::PathBuf;
use std::process::Command;

/// Builds `<name>/double.c` of this crate's folder beside the binary that runs, where it is built
/// anew like it; its path.
///
/// # Panics
///
/// When it cannot be built: doubles need the system's C compiler, `cc`.
#[must_use]
pub fn build(name: &str) -> PathBuf {
    let source = format!("{}/{name}/double.c", env!("CARGO_MANIFEST_DIR"));
    let made = std::env::current_exe().unwrap();
    let made = made.with_extension(format!("{name}.so"));
    let built = Command::new("cc")
        .args([
            "-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Werror", "-o",
        ])
        .args([made.as_os_str(), source.as_ref()])
        .status()
        .unwrap();
    assert!(built.success(), "the double was not built");
    made
}
