//! What hosts ask each other by the engine's calls: a byte that is the version, and the question as
//! postcard writes it. No bytes of payloads are in them, but for those that stand behind a payload:
//! part tables and MACs.

use kvdepot_arena::{Cause, Identity, Key, NamespaceId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Another version is not understood, and not answered.
const VERSION: u8 = 2;

/// Most keys, blocks, names or numbers of calls of one question: what a home does for one host at a
/// time is bounded.
pub(super) const KEYS_MAX: usize = 16_384;

/// Most bytes behind a payload, a table and MACs of as many parts as a block may have.
pub(super) const TAIL_MAX: u32 = 4 << 20;

/// The name of what is pinned or reserved at a home.
pub(super) type Id = u64;

/// A question.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    Contains(Keys),
    /// `macs`: bytes of MACs that stand behind each payload, for each of its parts. `used`: the
    /// stamps of the blocks, as the depot that reads them counts uses; none where they are not
    /// used.
    Pin {
        keys: Keys,
        call: u64,
        macs: u8,
        used: Vec<u64>,
    },
    Reserve {
        namespace: [u8; 16],
        call: u64,
        blocks: Vec<Block>,
    },
    Commit {
        blocks: Vec<Written>,
        pinned: bool,
    },
    /// Ends pins and reservations, and whatever those calls have pinned or reserved, or will.
    Release {
        ids: Vec<Id>,
        calls: Vec<u64>,
    },
    /// Unpublishes what is pinned and did not verify.
    Discard(Vec<Id>),
    Remove(Keys),
    Clear([u8; 16]),
    List {
        namespace: [u8; 16],
        from: u32,
        limit: u32,
    },
    Namespaces,
    Describe {
        namespace: [u8; 16],
        text: String,
    },
    /// Which blocks it has and, as it sees the hosts, is a home of.
    Keeps(Keys),
    /// To be lent what an initiator has pinned, as long as that has it pinned.
    Borrow {
        holder: [u8; 16],
        ids: Vec<Id>,
    },
    /// Which host it is: its address may have been another one's.
    Name,
}

impl Ask {
    /// Returns true if each list is within the bound of a request.
    pub(super) fn is_bounded(&self) -> bool {
        let longest = match self {
            Ask::Contains(keys) | Ask::Remove(keys) | Ask::Keeps(keys) => keys.keys.len(),
            Ask::Pin { keys, used, .. } => keys.keys.len().max(used.len()),
            Ask::Reserve { blocks, .. } => blocks.len(),
            Ask::Commit { blocks, .. } => blocks.len(),
            Ask::Release { ids, calls } => ids.len().max(calls.len()),
            Ask::Discard(ids) | Ask::Borrow { ids, .. } => ids.len(),
            Ask::Clear(_)
            | Ask::List { .. }
            | Ask::Namespaces
            | Ask::Describe { .. }
            | Ask::Name => 0,
        };
        longest <= KEYS_MAX
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Keys {
    pub(super) namespace: [u8; 16],
    pub(super) keys: Vec<[u8; 32]>,
}

impl Keys {
    pub(super) fn new(namespace: NamespaceId, keys: impl Iterator<Item = Key>) -> Keys {
        Keys {
            namespace: namespace.0,
            keys: keys.map(|key| key.0).collect(),
        }
    }

    pub(super) fn keys(&self) -> Vec<Key> {
        self.keys.iter().map(|key| Key(*key)).collect()
    }

    pub(super) fn id(&self) -> NamespaceId {
        NamespaceId(self.namespace)
    }
}

/// A block that wants room.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Block {
    pub(super) key: [u8; 32],
    /// With all that stands behind the payload.
    pub(super) len: u64,
    pub(super) parts: u16,
    pub(super) copy: bool,
    pub(super) evict: bool,
    /// As the depot that offers it counts uses; 0 for a block that is moved.
    pub(super) stamp: u64,
}

/// A block that was written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) id: Id,
    pub(super) checksum: [u8; 16],
    /// What stands last: the part table, where there are several parts, and MACs.
    pub(super) tail: Vec<u8>,
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    Flags(Vec<bool>),
    Pinned(Vec<Option<Pinned>>),
    Reserved(Vec<Result<Room, Why>>),
    /// Which were stored; of those that are pinned, the grant to read them.
    Stored(Vec<Option<u32>>),
    Count(u64),
    Page(Vec<([u8; 32], u64)>, Option<u32>),
    Namespaces(Vec<([u8; 16], Option<String>, u64, u64)>),
    Done,
    /// Grants to read, of what there is.
    Lent(Vec<Option<u32>>),
    Name(String),
}

/// A block that is pinned, and the grant to read it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Pinned {
    pub(super) id: Id,
    pub(super) grant: u32,
    pub(super) len: u64,
    pub(super) parts: u16,
    pub(super) checksum: [u8; 16],
    /// As [`Written::tail`].
    pub(super) tail: Vec<u8>,
}

/// Room for a block, and the grant to write it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Room {
    pub(super) id: Id,
    pub(super) grant: u32,
}

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Why {
    Present,
    Reserved,
    Declined,
    /// Free bytes, of how many.
    Full(u64, u64),
    /// The eviction limit of the prompt protects all blocks that could be evicted.
    Limit,
}

impl Why {
    pub(super) fn of(cause: Cause) -> Why {
        match cause {
            Cause::Space { free, capacity } => Why::Full(free, capacity),
            Cause::Limit => Why::Limit,
            _ => Why::Declined,
        }
    }
}

/// As it goes over the wire.
pub(super) fn encode(message: &impl Serialize) -> Option<Vec<u8>> {
    postcard::to_extend(message, vec![VERSION]).ok()
}

/// What was said, if it is a message of this version and nothing else.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (version, body) = bytes.split_first()?;
    let (message, rest) = postcard::take_from_bytes(body).ok()?;
    (*version == VERSION && rest.is_empty()).then_some(message)
}

/// Where a block is among all.
pub(super) fn bytes_of(name: &Identity) -> [u8; 48] {
    let mut bytes = [0; 48];
    bytes[..16].copy_from_slice(&name.namespace.0);
    bytes[16..].copy_from_slice(&name.key.0);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_said_is_heard_and_nothing_else() {
        let keys = Keys {
            namespace: [1; 16],
            keys: vec![[2; 32]; 3],
        };
        let ask = Ask::Pin {
            keys,
            call: 4,
            macs: 16,
            used: vec![1 << 40; 3],
        };
        let bytes = encode(&ask).unwrap();
        let heard: Ask = decode(&bytes).unwrap();
        assert_eq!(format!("{heard:?}"), format!("{ask:?}"));
        assert!(decode::<Ask>(&[&bytes[..], &[0]].concat()).is_none());
        let mut newer = bytes.clone();
        newer[0] += 1;
        assert!(decode::<Ask>(&newer).is_none());
        for end in 0..bytes.len() {
            assert!(decode::<Ask>(&bytes[..end]).is_none());
        }
    }

    #[test]
    fn version_and_limit_are_those_of_the_page() {
        let page = include_str!("../../../../docs/design/transfer.md");
        let (_, calls) = page.split_once("## Calls of the tier `Peer`").unwrap();
        assert!(calls.contains(&format!("a version byte, {VERSION}, and")));
        let limit = format!("{},{:03} keys", KEYS_MAX / 1000, KEYS_MAX % 1000);
        assert!(calls.contains(&limit), "{limit}");
    }

    proptest! {
        #[test]
        fn no_bytes_at_all_are_trouble(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(first) = bytes.first_mut() {
                *first = VERSION;
            }
            let _ask = decode::<Ask>(&bytes);
            let _said = decode::<Said>(&bytes);
        }
    }
}
