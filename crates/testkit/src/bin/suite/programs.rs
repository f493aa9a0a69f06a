//! The test programs that Cargo builds.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// Packages with Rust tests. `kvdepot-python` is tested from Python.
pub(crate) const WORKSPACE: [&str; 3] = ["--workspace", "--exclude", "kvdepot-python"];

/// A test program.
pub(crate) struct Program {
    /// Name of its crate without `kvdepot-`.
    pub(crate) package: String,
    /// Name of its target; `unit` for the unit tests of a library, `bin` for those of a command.
    pub(crate) target: String,
    pub(crate) path: PathBuf,
    /// Directory that Cargo runs it in.
    pub(crate) directory: PathBuf,
}

impl Program {
    pub(crate) fn label(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    fn of(message: &Value) -> Option<Program> {
        let path = message["executable"].as_str()?.into();
        if message["profile"]["test"] != true {
            return None;
        }
        let target = &message["target"];
        let directory = Path::new(message["manifest_path"].as_str()?).parent()?;
        let name = message["package_id"].as_str()?;
        let name = name
            .rsplit(['#', '/'])
            .find(|part| part.starts_with("kvdepot"))?;
        let name = name.split('@').next()?;
        Some(Program {
            package: name.trim_start_matches("kvdepot-").to_owned(),
            target: match target["kind"][0].as_str()? {
                "test" => target["name"].as_str()?.to_owned(),
                "bin" => "bin".to_owned(),
                _ => "unit".to_owned(),
            },
            path,
            directory: directory.to_owned(),
        })
    }
}

/// A Cargo command without the variables that `cargo run` set for this program: build scripts that
/// read them would run again, and their crates would be built again.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new("cargo");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Builds the test programs that `cargo test` selects with `arguments`.
pub(crate) fn build(arguments: &[&str]) -> io::Result<Vec<Program>> {
    let mut command = cargo();
    command.arg("test").args(arguments);
    command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(io::Error::other("the test programs do not build"));
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    let messages = lines
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    Ok(messages
        .filter_map(|message| Program::of(&message))
        .collect())
}
