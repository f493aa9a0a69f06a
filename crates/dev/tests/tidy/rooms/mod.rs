//! Rooms: the modules at the top of a crate, each a file or a folder. Arrows between the rooms of a
//! crate run one way, and no more than two files hold each other.

mod exceptions;
mod graph;
mod python;
mod rust;

use std::collections::BTreeSet;

use crate::tree::{File, holds};
use exceptions::Exceptions;
use graph::{Arrow, Graph, steps};

/// The folder of the Python package.
const PYTHON: &str = "python/kvdepot/";
/// Places of an arrow that are shown.
const SHOWN: usize = 3;

/// The room of a file; what stands in `lib.rs` is a room too.
fn room(file: &str) -> &str {
    let top = file.split('/').next().unwrap_or(file);
    top.strip_suffix(".rs").unwrap_or(top)
}

/// Circles that exceptions leave, and exceptions that nothing needs.
fn judge(what: &str, graph: &Graph, least: usize, listed: Exceptions) -> Vec<String> {
    let listed = listed.iter().find(|(name, _)| *name == what);
    let arrows = listed.map_or(&[][..], |(_, arrows)| arrows);
    let except: BTreeSet<Arrow> = arrows
        .iter()
        .map(|(from, to)| ((*from).to_owned(), (*to).to_owned()))
        .collect();
    let mut offences: Vec<String> = except
        .iter()
        .filter(|arrow| {
            let others: BTreeSet<Arrow> =
                except.iter().filter(|one| one != arrow).cloned().collect();
            !graph.arrows.contains_key(*arrow) || graph.through(arrow, least, &others).is_none()
        })
        .map(|(from, to)| format!("{what}: {from} -> {to} makes no circle: no exception is needed"))
        .collect();
    if let Some(circle) = graph.circle(least, &except) {
        offences.push(format!("{what}: a circle:"));
        for arrow in steps(&circle) {
            let places: Vec<&str> = graph.arrows[&arrow].iter().map(String::as_str).collect();
            let shown = places[..places.len().min(SHOWN)].join(", ");
            let (from, to) = arrow;
            offences.push(format!(
                "  {from} -> {to}: {} places: {shown}",
                places.len()
            ));
        }
    }
    if !offences.is_empty() {
        let cut = graph.cut(least);
        offences.push(format!("  these would do as {what}'s exceptions:"));
        offences.extend(
            cut.iter()
                .map(|(from, to)| format!("            (\"{from}\", \"{to}\"),")),
        );
    }
    offences
}

/// Arrows between rooms, and those between files but for what rooms are excepted.
fn crate_offences(files: &[File], name: &str, rooms: Exceptions, pairs: Exceptions) -> Vec<String> {
    let graph = rust::arrows(files, &format!("crates/{name}/src/"));
    let mut above = Graph::default();
    for ((from, to), places) in &graph.arrows {
        for place in places {
            above.add(room(from), room(to), place);
        }
    }
    let mut offences = judge(name, &above, 2, rooms);
    let excepted = rooms.iter().find(|(one, _)| *one == name);
    let excepted = excepted.map_or(&[][..], |(_, arrows)| arrows);
    let mut rest = Graph::default();
    for (arrow, places) in graph.arrows {
        if !excepted.contains(&(room(&arrow.0), room(&arrow.1))) {
            rest.arrows.insert(arrow, places);
        }
    }
    offences.extend(judge(name, &rest, 3, pairs));
    offences
}

fn offences(files: &[File], rooms: Exceptions, pairs: Exceptions) -> Vec<String> {
    let crates: BTreeSet<&str> = files
        .iter()
        .filter_map(|file| {
            file.path
                .strip_prefix("crates/")?
                .strip_suffix("/src/lib.rs")
        })
        .collect();
    let mut offences: Vec<String> = crates
        .iter()
        .flat_map(|name| crate_offences(files, name, rooms, pairs))
        .collect();
    let python = python::arrows(files, PYTHON);
    offences.extend(judge(PYTHON, &python, 3, pairs));
    let gone = [rooms, pairs].into_iter().flatten().map(|(name, _)| *name);
    let gone = gone.filter(|name| *name != PYTHON && !crates.contains(name));
    offences.extend(gone.map(|name| format!("{name}: there is no such crate: no exceptions")));
    offences
}

fn rooms_run_one_way(files: &[File]) -> Vec<String> {
    offences(files, exceptions::ROOMS, exceptions::PAIRS)
}

#[test]
fn rooms_have_an_order_and_at_most_two_files_hold_each_other() {
    holds(rooms_run_one_way);
}

/// What a made-up tree offends, without exceptions.
fn offends(files: &[(&str, &str)]) -> bool {
    let files: Vec<File> = files
        .iter()
        .map(|(path, text)| File::new(path, text))
        .collect();
    !offences(&files, &[], &[]).is_empty()
}

#[test]
fn a_circle_of_two_rooms_is_seen() {
    let lib = (
        "crates/x/src/lib.rs",
        "mod a;\nmod b;\nmod error;\npub use error::Error;\n",
    );
    let error = ("crates/x/src/error.rs", "pub enum Error { A }\n");
    let a = |text| {
        [
            lib,
            error,
            ("crates/x/src/a.rs", text),
            ("crates/x/src/b.rs", "pub fn b() { crate::a::a() }\n"),
        ]
    };
    for up in [
        "use crate::b::b;\n",
        "pub fn a() { super::b::b() }\n",
        "pub fn a() { vec![crate::b::b()] }\n",
        "pub use crate::b::b;\npub fn a() { b() }\n",
        "use crate::{error, b};\npub fn a() { b::b() }\n",
        "mod inner { use super::super::b::b; }\n",
        "#[cfg(not(test))]\nuse crate::b::b;\n",
        // Past what only tests have.
        "struct A {\n#[cfg(test)] c: u8,\nb: crate::b::B }\n",
        "#[cfg(test)]\nfn t(a: u8, b: u8) {}\nuse crate::b::b;\n",
    ] {
        assert!(offends(&a(up)), "{up}");
    }
    for fine in [
        "",
        "use crate::Error;\npub fn a() { Error::A }\n",
        "#[cfg(test)]\nmod tests { use crate::b::b; }\n",
        "#[cfg(all(test, not(miri)))]\nuse crate::b::b;\n",
        "pub use crate::b::b;\n",
        "use std::b::b;\n",
        "// crate::b::b\n/// [`crate::b::b`]\npub fn a() { \"crate::b::b\" }\n",
    ] {
        assert!(!offends(&a(fine)), "{fine}");
    }
}

#[test]
fn what_lib_rs_has_itself_is_a_room() {
    let lib = (
        "crates/x/src/lib.rs",
        "mod a;\nuse a::a;\npub const OK: i32 = 0;\n",
    );
    assert!(offends(&[lib, ("crates/x/src/a.rs", "use crate::OK;\n")]));
    assert!(!offends(&[lib, ("crates/x/src/a.rs", "pub fn a() {}\n")]));
}

#[test]
fn a_circle_of_three_files_is_seen() {
    let tree = |last| {
        [
            ("crates/x/src/lib.rs", "mod r;\n"),
            (
                "crates/x/src/r/mod.rs",
                "mod a;\nmod b;\nmod c;\npub use a::A;\npub struct R;\n",
            ),
            (
                "crates/x/src/r/a.rs",
                "use super::b::B;\nuse super::R;\npub struct A;\n",
            ),
            (
                "crates/x/src/r/b.rs",
                "use super::{R, c::C};\npub struct B;\n",
            ),
            ("crates/x/src/r/c.rs", last),
        ]
    };
    assert!(offends(&tree("use super::A;\n")));
    assert!(!offends(&tree("use super::b::B;\n")));
}

#[test]
fn a_circle_of_three_python_files_is_seen() {
    let tree = |last| {
        [
            (
                "python/kvdepot/__init__.py",
                "from kvdepot.a import A\n__all__ = [\"A\"]\n",
            ),
            ("python/kvdepot/a.py", "from .b import B\n"),
            ("python/kvdepot/b.py", "import kvdepot.e.c\n"),
            ("python/kvdepot/e/__init__.py", ""),
            ("python/kvdepot/e/c.py", last),
        ]
    };
    for up in [
        "from kvdepot import (\n    A,\n)\n",
        "from .. import a\n",
        "try:\n    from ..a import A\nexcept ImportError:\n    pass\n",
    ] {
        assert!(offends(&tree(up)), "{up}");
    }
    for fine in [
        "from kvdepot.b import B\n",
        "if TYPE_CHECKING:\n    from kvdepot.a import A\n",
        "def f():\n    from kvdepot.a import A\n",
        "\"\"\"\nfrom kvdepot.a import A\n\"\"\"\n",
    ] {
        assert!(!offends(&tree(fine)), "{fine}");
    }
}

#[test]
fn an_exception_that_is_not_needed_fails() {
    let files = [
        File::new("crates/x/src/lib.rs", "mod a;\nmod b;\n"),
        File::new("crates/x/src/a.rs", "use crate::b::B;\n"),
        File::new("crates/x/src/b.rs", ""),
    ];
    let listed: Exceptions = &[("x", &[("a", "b")])];
    assert!(!offences(&files, listed, &[]).is_empty());
    assert!(!offences(&files, &[("gone", &[])], &[]).is_empty());
}
