//! The header for llama.cpp, and its example: a conversation of a model with random weights, which
//! comes back in another process to the bit.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says what it skips"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::programs::{self, Link, Program, answer, build_cpp};

const EXAMPLE: &str = "examples/llama_conversation.cpp";

/// Where the package and `gguf` are, and llama.cpp's headers and libraries in it.
const FIND: &str = "\
import importlib.util as util, pathlib, sys
if not (util.find_spec('llama_cpp') and util.find_spec('gguf')):
    sys.exit('llama-cpp-python is not installed: see `make llama`')
package = pathlib.Path(util.find_spec('llama_cpp').origin).parent
if not (package.parent / 'include' / 'llama.h').exists():
    sys.exit('the package of llama-cpp-python carries no headers')
print(package.parent / 'include', package / 'lib', sep='\\n')";

/// What makes a model: a kind of `tests/llama_cpp/llama_models.py`, where, and a seed.
const MAKE: &str = "\
import pathlib, sys, llama_models
getattr(llama_models, sys.argv[1])(pathlib.Path(sys.argv[2]), int(sys.argv[3]))";

/// The interpreter of `KVDEPOT_PYTHON`, or of the environment that the Makefile makes, or any.
fn python() -> Command {
    let tree = programs::root().parent().unwrap().parent().unwrap();
    let made = tree.join(".venv/bin/python");
    let named = std::env::var_os("KVDEPOT_PYTHON").map(PathBuf::from);
    let any = || {
        PathBuf::from(if made.exists() {
            made.as_path()
        } else {
            Path::new("python3")
        })
    };
    let mut command = Command::new(named.unwrap_or_else(any));
    command.env("PYTHONPATH", tree.join("tests/llama_cpp"));
    command
}

/// The example, where there is all that it needs; or why it is skipped.
fn example(link: Link) -> Option<Program> {
    let found = python().args(["-c", FIND]).output();
    let said = found.map(|found| (found.status.success(), found.stdout, found.stderr));
    let (is_there, places, why) = said.unwrap_or_else(|error| {
        let why = format!("python3: {error}");
        (false, Vec::new(), why.into_bytes())
    });
    if !is_there {
        let why = String::from_utf8_lossy(&why);
        let strict = std::env::var_os("KVDEPOT_NO_SKIPS").is_some_and(|value| value != "0");
        assert!(!strict, "KVDEPOT_NO_SKIPS: {why}");
        eprintln!("skipped: {}", why.trim());
        return None;
    }
    let places = String::from_utf8(places).unwrap();
    let (include, lib) = places.trim().split_once('\n').unwrap();
    let beside = [
        format!("-isystem{include}"),
        format!("-L{lib}"),
        format!("-Wl,-rpath,{lib}"),
        "-lllama".to_owned(),
        "-lggml".to_owned(),
        "-lggml-base".to_owned(),
    ];
    build_cpp(EXAMPLE, link, beside.to_vec())
}

fn model(at: &Path, kind: &str, seed: u32) -> PathBuf {
    let path = at.join(format!("{kind}-{seed}.gguf"));
    let mut command = python();
    command.args(["-c", MAKE, kind]).arg(&path);
    answer(command.arg(seed.to_string()));
    path
}

/// What a process of the example prints: tokens that were restored, that were written, and a hash
/// of the last logits.
fn talk(program: &Program, model: &Path, depot: &Path, words: &[&str]) -> (usize, usize, String) {
    let said = answer(program.command().arg(model).arg(depot).args(words));
    let words: Vec<&str> = said.split_whitespace().collect();
    let ["restored", restored, "written", written, "logits", logits] = words[..] else {
        panic!("{said}");
    };
    let number = |text: &str| text.parse().unwrap();
    (number(restored), number(written), logits.to_owned())
}

/// Saved in one process, restored in another, and computed in a third: the same logits.
fn comes_back(program: &Program, kind: &str, flash: &str) {
    let directory = tempfile::tempdir().unwrap();
    let (at, depot) = (directory.path(), directory.path().join("depot"));
    let model = model(at, kind, 1);
    let run = |what: &str, tokens: &str| talk(program, &model, &depot, &[what, tokens, flash]);
    let (_, _, short) = run("compute", "300");
    let (_, _, long) = run("compute", "600");
    assert_eq!(run("restore", "300"), (0, 0, short.clone()));
    assert_eq!(run("save", "300"), (0, 300, short.clone()));
    assert_eq!(run("restore", "300"), (300, 0, short));
    // Another conversation begins as this one does: what is full of it is there.
    std::fs::rename(&depot, at.join("first")).unwrap();
    assert_eq!(run("save", "600"), (0, 600, long.clone()));
    assert_eq!(run("restore", "600"), (600, 0, long), "{kind} {flash}");
}

#[test]
fn a_conversation_comes_back_to_the_bit_in_another_process() {
    let Some(program) = example(Link::Shared) else {
        return;
    };
    for kind in ["llama", "gemma", "jamba"] {
        for flash in ["flash", "noflash"] {
            comes_back(&program, kind, flash);
        }
    }
}

/// Behind a restore the computation goes on, and only what is new is written.
#[test]
fn a_conversation_that_has_grown_is_written_as_far_as_it_is_new() {
    let Some(program) = example(Link::Sanitized) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let (at, depot) = (directory.path(), directory.path().join("depot"));
    let model = model(at, "llama", 1);
    let run = |what: &str, tokens: &str| talk(&program, &model, &depot, &[what, tokens]);
    run("save", "600");
    // Two pieces of 256 are full; the third has grown.
    let (restored, written, logits) = run("save", "900");
    assert_eq!((restored, written), (600, 388));
    assert_eq!(run("restore", "900"), (900, 0, logits));
    assert_eq!(run("restore", "700").0, 600);
}

fn flip_middle(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(files(&path)),
            false => all.push(path),
        }
    }
    all
}

#[test]
fn flipped_bits_and_other_weights_are_misses() {
    let Some(program) = example(Link::Shared) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let (at, depot) = (directory.path(), directory.path().join("depot"));
    let (own, other) = (model(at, "llama", 1), model(at, "llama", 2));
    let run = |what: &str, tokens: &str| talk(&program, &own, &depot, &[what, tokens]);
    let (_, _, logits) = run("compute", "600");
    // A batch ends there: what is computed behind it is so in the same steps.
    run("save", "512");
    let before = files(&depot.join("blocks"));
    run("save", "600");
    let (restored, _, others) = talk(&program, &other, &depot, &["restore", "600"]);
    let (_, _, expected) = talk(&program, &other, &depot, &["compute", "600"]);
    assert_eq!((restored, &others), (0, &expected));
    assert_ne!(logits, expected, "the weights are the same");
    // A piece of the longer one: larger than its manifest and its objects.
    let grown = files(&depot.join("blocks"));
    let own = grown.iter().filter(|path| !before.contains(path));
    let piece = own.max_by_key(|path| path.metadata().unwrap().len());
    flip_middle(piece.unwrap());
    assert_eq!(run("restore", "600"), (512, 0, logits.clone()));
    before.iter().for_each(|path| flip_middle(path));
    assert_eq!(run("restore", "600"), (0, 0, logits));
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let Some(program) = example(Link::Shared) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let model = model(directory.path(), "mamba", 1);
    let mut command = program.command();
    command.arg(model).arg(directory.path().join("depot"));
    let output = command.args(["save", "100"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("llama.cpp state"), "{errors}");
}
