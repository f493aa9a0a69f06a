//! What engines in C do in the middle of a save, at the end, and in children.

use crate::programs::{Link, answer, build};

/// Children of a process whose threads work: in a program without a sanitizer, whose allocator has
/// locks that a child would wait for.
const BESIDE: &str = "1000";

#[test]
fn a_save_stands_whatever_happens_meanwhile() {
    for (link, beside) in [(Link::Shared, BESIDE), (Link::Sanitized, "0")] {
        let Some(program) = build("tests/c/meanwhile.c", link) else {
            return;
        };
        let mut command = program.command();
        assert_eq!(answer(command.arg(beside)).trim(), "done");
    }
}
