//! The names of ds4's files: 40 hexadecimal digits of a SHA-1, and `.kv`.

use std::fmt::Write;

use sha1::{Digest, Sha1};

/// What every name ends with.
const SUFFIX: &str = ".kv";
/// Digits before it: two for each byte of a SHA-1.
const DIGITS: usize = 40;

/// Returns the name of a file with this rendered text.
#[must_use]
pub fn name_of(text: &[u8]) -> String {
    name(Sha1::new_with_prefix(text))
}

/// Returns the name of a file of ds4's agent, from its title and its creation time in Unix seconds.
///
/// The name stays the same while the session grows. Such files have the flag
/// [`SESSION_TITLE`](super::Flags::SESSION_TITLE).
#[must_use]
pub fn titled_name_of(title: &[u8], created: u64) -> String {
    name(Sha1::new_with_prefix(title).chain_update(created.to_le_bytes()))
}

/// Returns true if ds4 accepts a file with this name as a session. Hexadecimal digits may be of
/// either case.
#[must_use]
pub fn is_name(name: &str) -> bool {
    name.strip_suffix(SUFFIX).is_some_and(|digits| {
        digits.len() == DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// The name that a finished hash makes.
pub(super) fn name(hash: Sha1) -> String {
    let mut name = String::with_capacity(DIGITS + SUFFIX.len());
    for byte in hash.finalize() {
        // A string takes everything: the result says nothing.
        let _ = write!(name, "{byte:02x}");
    }
    name.push_str(SUFFIX);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_sha1_of_the_text() {
        assert_eq!(
            name_of(b"abc"),
            "a9993e364706816aba3e25717850c26c9cd0d89d.kv"
        );
        assert_eq!(name_of(b""), "da39a3ee5e6b4b0d3255bfef95601890afd80709.kv");
    }

    #[test]
    fn a_titled_name_is_the_sha1_of_title_and_time() {
        assert_eq!(titled_name_of(b"ab", 0x63), name_of(b"abc\0\0\0\0\0\0\0"));
    }

    #[test]
    fn only_ds4s_names_are_names() {
        assert!(is_name(&name_of(b"x")));
        assert!(is_name("A9993E364706816ABA3E25717850C26C9CD0D89D.kv"));
        for other in [
            "sysprompt.kv",
            "",
            ".kv",
            "a9993e364706816aba3e25717850c26c9cd0d89d",
        ] {
            assert!(!is_name(other), "{other}");
        }
        assert!(!is_name(&format!("{}.tmp.12", name_of(b"x"))));
    }
}
