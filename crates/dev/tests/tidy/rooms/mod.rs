//! Rooms: the modules at the top of a crate, each a file or a folder. Arrows between the rooms of a
//! crate run one way, and no more than two files hold each other.

mod graph;
mod python;
mod rust;

use std::collections::BTreeSet;

use crate::tree::{File, holds};
use graph::{Graph, steps};

/// The folder of the Python package.
const PYTHON: &str = "python/kvdepot/";
/// Places of an arrow that are shown.
const SHOWN: usize = 3;

/// The room of a file; what stands in `lib.rs` is a room too.
fn room(file: &str) -> &str {
    let top = file.split('/').next().unwrap_or(file);
    top.strip_suffix(".rs").unwrap_or(top)
}

/// The shortest circle of at least so many, and arrows without which there is none.
fn judge(what: &str, graph: &Graph, least: usize) -> Vec<String> {
    let Some(circle) = graph.circle(least, &BTreeSet::new()) else {
        return Vec::new();
    };
    let mut offences = vec![format!("{what}: a circle:")];
    for arrow in steps(&circle) {
        let places: Vec<&str> = graph.arrows[&arrow].iter().map(String::as_str).collect();
        let shown = places[..places.len().min(SHOWN)].join(", ");
        let (from, to) = arrow;
        offences.push(format!(
            "  {from} -> {to}: {} places: {shown}",
            places.len()
        ));
    }
    offences.push(format!("  without these {what} has none:"));
    let cut = graph.cut(least).into_iter();
    offences.extend(cut.map(|(from, to)| format!("    {from} -> {to}")));
    offences
}

/// Circles of rooms, and those of three files and more.
fn crate_offences(files: &[File], name: &str) -> Vec<String> {
    let graph = rust::arrows(files, &format!("crates/{name}/src/"));
    let mut above = Graph::default();
    for ((from, to), places) in &graph.arrows {
        for place in places {
            above.add(room(from), room(to), place);
        }
    }
    let mut offences = judge(name, &above, 2);
    offences.extend(judge(name, &graph, 3));
    offences
}

fn rooms_run_one_way(files: &[File]) -> Vec<String> {
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
        .flat_map(|name| crate_offences(files, name))
        .collect();
    offences.extend(judge(PYTHON, &python::arrows(files, PYTHON), 3));
    offences
}

#[test]
fn rooms_have_an_order_and_at_most_two_files_hold_each_other() {
    holds(rooms_run_one_way);
}

/// Whether a made-up tree offends.
fn offends(files: &[(&str, &str)]) -> bool {
    let files: Vec<File> = files
        .iter()
        .map(|(path, text)| File::new(path, text))
        .collect();
    !rooms_run_one_way(&files).is_empty()
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
