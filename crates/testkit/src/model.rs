//! What a depot may answer: a plain map, with every freedom that a cache has.
//!
//! A block may vanish at any time unless it is pinned, so a miss is never wrong. Bytes are: those
//! that a hit delivers were put under that key, whole.

use std::collections::HashMap;

/// The blocks that were put, by key number: all contents that a hit may have.
#[derive(Clone, Debug, Default)]
pub struct Model {
    puts: HashMap<u64, Vec<Version>>,
}

/// One content that was put under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a plain pair of a test")]
pub struct Version {
    /// Says which bytes, see [`crate::bytes::content`].
    pub content: u64,
    /// How many of them.
    pub len: usize,
}

impl Model {
    /// A put has begun: from now on a hit may deliver it.
    pub fn put(&mut self, key: u64, content: u64, len: usize) {
        let versions = self.puts.entry(key).or_default();
        let version = Version { content, len };
        if !versions.contains(&version) {
            versions.push(version);
        }
    }

    /// The keys' blocks are gone for good: hits are wrong until the next put.
    pub fn remove(&mut self, key: u64) {
        self.puts.remove(&key);
    }

    /// Whether a hit may deliver these bytes.
    #[must_use]
    pub fn allows(&self, key: u64, bytes: &[u8]) -> bool {
        self.versions(key)
            .iter()
            .any(|put| put.len == bytes.len() && crate::bytes::is_content(put.content, bytes))
    }

    /// Whether the key may be there.
    #[must_use]
    pub fn may_contain(&self, key: u64) -> bool {
        !self.versions(key).is_empty()
    }

    /// What was put under a key.
    #[must_use]
    pub fn versions(&self, key: u64) -> &[Version] {
        self.puts.get(&key).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::content;

    #[test]
    fn only_what_was_put_is_allowed() {
        let mut model = Model::default();
        model.put(1, 10, 100);
        assert!(model.allows(1, &content(10, 100)));
        assert!(!model.allows(1, &content(10, 99)));
        assert!(!model.allows(1, &content(11, 100)));
        assert!(!model.allows(2, &content(10, 100)));
        model.remove(1);
        assert!(!model.may_contain(1));
    }
}
