//! What engines in C do in the middle of a save, at the end, and in children.

use crate::programs::{Link, answer, build};

#[test]
fn a_save_stands_whatever_happens_meanwhile() {
    for link in [Link::Shared, Link::Sanitized] {
        let Some(program) = build("tests/c/meanwhile.c", link) else {
            return;
        };
        assert_eq!(answer(&mut program.command()).trim(), "done");
    }
}
