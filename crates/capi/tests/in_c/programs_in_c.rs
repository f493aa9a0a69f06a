//! Programs in C: the example, and what engines do right and wrong.

use std::path::{Path, PathBuf};

use crate::programs::{Link, Program, answer, build, build_with, root};

const EXAMPLE: &str = "examples/conversation.c";

fn talk(program: &Program, directory: &Path, what: &str, tokens: usize) -> String {
    let mut command = program.command();
    command.arg(directory).arg(what).arg(tokens.to_string());
    answer(&mut command).trim().to_owned()
}

/// All files below a directory.
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
fn a_conversation_comes_back_in_another_process() {
    for link in [Link::Shared, Link::Static, Link::Versioned] {
        let Some(program) = build(EXAMPLE, link) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        assert_eq!(talk(&program, at, "restore", 1600), "restored 0");
        assert_eq!(talk(&program, at, "save", 1000), "cached 0 written 1000");
        // Three pieces are full; the fourth has grown.
        assert_eq!(talk(&program, at, "save", 1500), "cached 768 written 732");
        assert_eq!(talk(&program, at, "restore", 1600), "restored 1500");
        assert_eq!(talk(&program, at, "restore", 1200), "restored 1000");
    }
}

#[test]
fn what_rots_is_never_restored() {
    let Some(program) = build(EXAMPLE, Link::Shared) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    talk(&program, at, "save", 1000);
    let before = files(&at.join("blocks"));
    talk(&program, at, "save", 1500);
    let grown = files(&at.join("blocks"));
    // A piece of the longer one: larger than its manifest and its object.
    let own = grown.iter().filter(|path| !before.contains(path));
    let piece = own.max_by_key(|path| path.metadata().unwrap().len());
    flip(piece.unwrap());
    // The program itself compares each byte of what it says was restored.
    assert_eq!(talk(&program, at, "restore", 1600), "restored 1000");
    before.iter().for_each(|path| flip(path));
    assert_eq!(talk(&program, at, "restore", 1600), "restored 0");
}

fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_engine_is_told_what_it_does_wrong() {
    let Some(program) = build("tests/c/behaviour.c", Link::Shared) else {
        return;
    };
    assert_eq!(answer(&mut program.command()).trim(), "done");
}

#[test]
fn what_is_opened_and_closed_leaves_no_memory() {
    let Some(program) = build("tests/c/behaviour.c", Link::Sanitized) else {
        return;
    };
    assert_eq!(answer(&mut program.command()).trim(), "done");
}

/// Whether a process may reach another's memory is the system's to say: where it may not, the same
/// bytes go over connections.
fn moves(link: Link) {
    let Some(program) = build("tests/c/transfer.c", link) else {
        return;
    };
    let said = answer(&mut program.command());
    assert!(["done near", "done"].contains(&said.trim()), "{said}");
}

#[test]
fn bytes_go_between_processes_both_ways() {
    moves(Link::Shared);
}

#[test]
fn engines_leave_no_memory() {
    moves(Link::Sanitized);
}

/// Runs a program that is given a directory of its own.
fn is_done(source: &str, name: &str) {
    runs(|link| build(source, link), name);
}

fn runs(build: impl Fn(Link) -> Option<Program>, name: &str) {
    for link in [Link::Shared, Link::Sanitized] {
        let Some(program) = build(link) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let mut command = program.command();
        let said = answer(command.arg(directory.path().join(name)));
        assert_eq!(said.lines().last(), Some("done"), "{said}");
    }
}

/// The examples of the header's comments, and how many there are.
fn examples() -> (String, usize) {
    let header = std::fs::read_to_string(root().join("include/kvdepot.h")).unwrap();
    let (mut code, mut count, mut is_example) = (String::new(), 0, false);
    for line in header.lines() {
        let begins = line.contains("Example: ");
        count += usize::from(begins);
        is_example = (is_example || begins) && !line.ends_with("*/");
        if let Some(line) = line.strip_prefix(" *     ").filter(|_| is_example) {
            code += line;
            code += "\n";
        }
    }
    (code, count)
}

#[test]
fn each_group_of_the_header_has_an_example_that_runs() {
    let header = std::fs::read_to_string(root().join("include/kvdepot.h")).unwrap();
    let groups = header.lines().filter(|line| line.starts_with("/* ---- "));
    let (code, count) = examples();
    assert_eq!(groups.count(), count);
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("header_examples.h"), code).unwrap();
    let build = |link| build_with("tests/c/header_examples.c", link, directory.path());
    runs(build, "socket");
}

#[test]
fn blocks_are_reserved_and_pinned_by_one_and_moved_by_another() {
    is_done("tests/c/two_phase.c", "socket");
}

#[test]
fn what_stands_beside_depots_answers() {
    is_done("tests/c/beside.c", "");
}
