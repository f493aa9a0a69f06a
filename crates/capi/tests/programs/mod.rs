//! Programs in C, built against the library that these tests are built with.

#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::print_stderr,
    reason = "each test uses some of it, and says what it skips"
)]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Warnings are errors.
pub(crate) const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// What the static library needs of the system.
const SYSTEM: [&str; 5] = ["-lpthread", "-ldl", "-lm", "-lrt", "-lgcc_s"];

/// What the loader looks for: `KVD_VERSION_MAJOR` stands in it.
pub(crate) const SONAME: &str = "libkvdepot.so.1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Shared,
    Static,
    /// The shared one as it is installed: made of the static one, with versions of its names.
    Versioned,
    /// The shared one, with the compiler's look at what the program, and the memory of both, do.
    Sanitized,
}

/// A program, and the directory that it goes with.
pub(crate) struct Program {
    directory: tempfile::TempDir,
}

impl Program {
    pub(crate) fn command(&self) -> Command {
        Command::new(self.directory.path().join("program"))
    }
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn has(command: &str) -> bool {
    let mut command = Command::new(command);
    let found = command.arg("--version").stdout(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

/// The library that was built last: beside this test's program, or a directory above, where Cargo
/// puts what it was asked for by name.
pub(crate) fn library(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    let all = [deps, deps.parent().unwrap()].map(|at| at.join(name));
    let built = all.into_iter().filter_map(|path| {
        let modified = path.metadata().ok()?.modified().ok()?;
        Some((modified, path))
    });
    built
        .max()
        .unwrap_or_else(|| panic!("Cargo has not built {name}"))
        .1
}

fn has_sanitizer(directory: &Path) -> bool {
    let source = directory.join("empty.c");
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let mut command = Command::new("gcc");
    command.arg("-fsanitize=address,undefined").arg(&source);
    let built = command.arg("-o").arg(directory.join("empty")).output();
    built.is_ok_and(|output| output.status.success())
}

/// A compiler, the language's standard, and what a program needs beside the library.
struct Language {
    compiler: &'static str,
    standard: &'static str,
    beside: Vec<String>,
}

/// Builds a program in C, where there is a compiler.
pub(crate) fn build(source: &str, link: Link) -> Option<Program> {
    let language = Language {
        compiler: "gcc",
        standard: "-std=c11",
        beside: Vec::new(),
    };
    build_in(&language, source, link)
}

/// Builds a program in C that includes files of a directory.
pub(crate) fn build_with(source: &str, link: Link, include: &Path) -> Option<Program> {
    let language = Language {
        compiler: "gcc",
        standard: "-std=c11",
        beside: vec![format!("-I{}", include.display())],
    };
    build_in(&language, source, link)
}

/// Builds a program in C++, with other libraries too, where there is a compiler.
pub(crate) fn build_cpp(source: &str, link: Link, beside: Vec<String>) -> Option<Program> {
    let language = Language {
        compiler: "g++",
        standard: "-std=c++17",
        beside,
    };
    build_in(&language, source, link)
}

/// Makes the library that `make capi` installs.
pub(crate) fn link_versioned(into: &Path) {
    let mut command = Command::new(root().join("link.sh"));
    command.env("CC", "gcc").arg(library("libkvdepot.a"));
    answer(command.arg(into));
}

fn build_in(language: &Language, source: &str, link: Link) -> Option<Program> {
    let compiler = language.compiler;
    if !has(compiler) {
        eprintln!("skipped: {compiler} is not installed");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    if link == Link::Sanitized && !has_sanitizer(at) {
        eprintln!("skipped: gcc has no sanitizers");
        return None;
    }
    let mut command = Command::new(compiler);
    command
        .args([language.standard, "-g", "-pthread"])
        .args(STRICT);
    command.arg("-I").arg(root().join("include"));
    command.arg(root().join(source));
    command.arg("-o").arg(at.join("program"));
    match link {
        Link::Shared | Link::Sanitized | Link::Versioned => {
            if link == Link::Sanitized {
                command.arg("-fsanitize=address,undefined");
            }
            // As it is installed: a name to link by, which leads to the one that is loaded.
            match link {
                Link::Versioned => link_versioned(&at.join(SONAME)),
                _ => symlink(library("libkvdepot.so"), at.join(SONAME)).unwrap(),
            }
            symlink(SONAME, at.join("libkvdepot.so")).unwrap();
            command.arg(at.join("libkvdepot.so"));
            command.arg(format!("-Wl,-rpath,{}", at.display()));
        }
        Link::Static => {
            command.arg(library("libkvdepot.a")).args(SYSTEM);
        }
    }
    answer(command.args(&language.beside));
    Some(Program { directory })
}

/// What a command prints; it has to succeed.
pub(crate) fn answer(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}
