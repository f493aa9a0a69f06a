//! The tier `Posix` in the place of a shelf's own storage: it answers at once here, and the shelf
//! says when that is heard.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kvdepot_arena::format::file_header::{self, FileHeader, LEN};
use kvdepot_arena::format::file_note::{self, FileNote};
use kvdepot_arena::{Place, Refused, Reserved, Token, Wanted, parts};
use kvdepot_host::dir::annotate;
use kvdepot_media::checksum::{self, compose};
use kvdepot_media::{Buffer, Checksum, MacKey};
use kvdepot_store::{Identity, Key, NamespaceId, Reply, Tier, ask};

use super::memory::Memory;
use super::stored::Stored;

/// Folders of the directory.
pub const FAN_OUT: u32 = 3;

/// The tier, while it is open.
pub struct OnDisk {
    pub tier: Arc<dyn Tier>,
}

impl OnDisk {
    /// What the tier answers, which has no threads here.
    fn ask<T: Send + 'static>(&self, put: impl FnOnce(&dyn Tier, Reply<T>)) -> Option<T> {
        let (reply, pending) = ask();
        put(self.tier.as_ref(), reply);
        let heard = Arc::new(Mutex::new(None));
        let says = Arc::clone(&heard);
        pending.then(None, move |answer| {
            *says.lock().unwrap_or_else(PoisonError::into_inner) = answer;
        });
        heard.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub fn probe(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let found = self.ask(|tier, reply| tier.probe(namespace, keys, reply));
        found.unwrap_or_else(|| vec![false; keys.len()])
    }

    pub fn pin(&self, namespace: NamespaceId, key: Key) -> Option<Place> {
        let pinned = self.ask(|tier, reply| tier.pin(namespace, &[key], &[], reply));
        pinned?.pop()?
    }

    pub fn unpin(&self, token: Token) {
        let nobody = Identity {
            namespace: NamespaceId([0; 16]),
            key: Key([0; 32]),
        };
        let place = Place {
            token,
            ..Place::of(nobody)
        };
        self.tier.unpin(&[place]);
    }

    pub fn reserve(&self, namespace: NamespaceId, one: &Wanted) -> Result<Reserved, Refused> {
        let reserved = self.ask(|tier, reply| tier.reserve(namespace, &[*one], reply));
        let reserved = reserved.and_then(|mut all| all.pop());
        reserved.unwrap_or(Err(Refused::Declined))
    }

    pub fn commit(&self, reserved: Reserved, sum: Checksum, pinned: bool) -> bool {
        let stored = self.ask(|tier, reply| tier.commit(vec![(reserved, sum)], pinned, reply));
        stored.is_some_and(|stored| stored == [true])
    }

    pub fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let removed = self.ask(|tier, reply| tier.remove(namespace, keys, reply));
        removed.unwrap_or_else(|| vec![false; keys.len()])
    }

    pub fn discard(&self, places: &[Place]) -> usize {
        let gone = self.ask(|tier, reply| tier.discard(places, reply));
        gone.unwrap_or(0)
    }

    pub fn clear(&self, namespace: NamespaceId) -> usize {
        let cleared = self.ask(|tier, reply| tier.clear(namespace, reply));
        cleared.unwrap_or(0)
    }

    pub fn all(&self, namespace: NamespaceId) -> Vec<(Key, u64)> {
        let (mut all, mut from) = (Vec::new(), Some(0));
        while let Some(at) = from {
            let page = self.ask(|tier, reply| tier.list(namespace, at, 100, reply));
            let (blocks, next) = page.unwrap_or_default();
            all.extend(blocks);
            from = next;
        }
        all
    }

    /// Pins, and reservations.
    pub fn held(&self) -> (u64, u64) {
        let stats = self.tier.stats();
        (stats.pinned_blocks, stats.reserved_blocks)
    }
}

/// How a block's file is called.
pub fn name_of(identity: &Identity) -> String {
    format!("{}-{}", identity.key, identity.namespace)
}

/// Where a directory has a block.
pub fn file_of(path: &Path, identity: &Identity) -> Option<PathBuf> {
    let name = name_of(identity);
    let folders = fs::read_dir(path.join("blocks")).ok()?;
    let mut files = folders.flatten().map(|folder| folder.path().join(&name));
    files.find(|file| file.exists())
}

/// What a block's file says, and its payload.
pub fn read(path: &Path, identity: &Identity) -> Option<Stored> {
    let bytes = fs::read(file_of(path, identity)?).ok()?;
    let (page, payload) = bytes.split_first_chunk::<LEN>()?;
    let header = FileHeader::decode(page).filter(|header| header.identity == *identity)?;
    // What rots is payload.
    let leaves = file_header::leaves(page).unwrap();
    if header.parts == 1 && !leaves.is_empty() {
        let id = parts::part_id(identity, 0, 1);
        assert_eq!(compose(&id, header.len, leaves), header.checksum);
    }
    let payload = payload.get(..header.len as usize)?;
    let memory = Memory::Here(Buffer::from_vec(payload.to_vec()));
    Some(Stored::new(
        memory,
        header.len,
        header.parts,
        header.checksum,
    ))
}

/// What keys are derived from, where there are any.
pub const SECRET: [u8; 32] = [0xA5; 32];

/// Whether a block has MACs that are not its bytes'.
pub fn is_forged(path: &Path, identity: &Identity) -> bool {
    let found = file_of(path, identity).and_then(|file| fs::read(file).ok());
    let macs = found.and_then(|bytes| Some(file_header::macs(bytes.first_chunk::<LEN>()?)));
    let (Some(macs), Some(stored)) = (macs, read(path, identity)) else {
        return false;
    };
    let (bytes, key) = (
        stored.memory.to_vec(),
        MacKey::derive(&SECRET, &identity.namespace.0),
    );
    let found = stored.table(identity, &bytes).unwrap_or_default();
    let mut each = found.iter().enumerate().zip(macs);
    each.any(|((number, part), mac)| {
        let id = parts::part_id(identity, number as u32, stored.parts);
        key.of(&id, &bytes[part.offset as usize..][..part.len as usize]) != mac
    })
}

/// Turns a byte of a block in one part over, and writes all that does not take a key anew.
fn forge(file: &Path, identity: &Identity, stored: &Stored, at: u64) {
    let mut bytes = stored.memory.to_vec();
    bytes[at as usize] ^= 1;
    let found = fs::read(file).unwrap();
    let header = FileHeader {
        identity: *identity,
        len: stored.len,
        parts: 1,
        checksum: checksum::of(&parts::part_id(identity, 0, 1), &bytes),
        created: 0,
    };
    let macs = file_header::macs(found.first_chunk::<LEN>().unwrap());
    let note = FileNote {
        len: stored.len,
        parts: 1,
        checksum: header.checksum,
        mac: macs.first().copied(),
    };
    let file = fs::File::options().write(true).open(file).unwrap();
    // Where it is not kept, the header is read.
    let _kept = annotate(&file, file_note::NAME, &note.encode(identity));
    file.write_all_at(&header.encode(&macs, &[]), 0).unwrap();
    file.write_all_at(&bytes, LEN as u64).unwrap();
}

/// Turns a byte of a payload over; false where it is not there. A block that has a MAC fits its
/// checksum after that.
pub fn rot(path: &Path, identity: &Identity, at: u64) -> bool {
    let (Some(file), Some(stored)) = (file_of(path, identity), read(path, identity)) else {
        return false;
    };
    let is_proven = fs::read(&file).is_ok_and(|bytes| {
        let page = bytes.first_chunk::<LEN>();
        page.is_some_and(|page| !file_header::macs(page).is_empty())
    });
    if is_proven && stored.parts == 1 {
        forge(&file, identity, &stored, at % stored.len);
        return true;
    }
    let at = LEN as u64 + at % stored.len;
    let file = fs::File::options().read(true).write(true).open(file);
    let file = file.unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    true
}
