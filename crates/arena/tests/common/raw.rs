//! The raw file of an arena, by the numbers of the format document.

use std::path::Path;

use kvdepot_arena::format::layout::{self, Layout};
use kvdepot_arena::format::record::{self, Packed, Record, Slot, State};
use kvdepot_arena::format::superblock::{self, Superblock};
use kvdepot_arena::{Identity, Key, NamespaceId};
use kvdepot_media::checksum::{self, PartId};
use kvdepot_testkit::rot::Patient;

/// A closed arena's file.
pub struct Raw {
    pub file: Patient,
    pub superblock: Superblock,
    pub layout: Layout,
}

impl Raw {
    pub fn open(path: &Path) -> Raw {
        let file = Patient::open(path);
        let page = |offset| {
            let page: [u8; superblock::LEN] =
                file.read(offset, superblock::LEN).try_into().unwrap();
            Superblock::decode(&page)
        };
        let superblock = [page(0), page(layout::SUPERBLOCK_B)]
            .into_iter()
            .flatten()
            .max_by_key(|copy| copy.generation)
            .unwrap();
        let layout = Layout::new(superblock.capacity, superblock.records).unwrap();
        Raw {
            file,
            superblock,
            layout,
        }
    }

    pub fn slot(&self, slot: u32) -> Slot {
        let bytes: [u8; record::LEN] = self.bytes(slot).try_into().unwrap();
        Record::decode(&bytes, record::seed(&self.superblock.uuid, slot))
    }

    pub fn bytes(&self, slot: u32) -> Vec<u8> {
        self.file.read(self.layout.record(slot), record::LEN)
    }

    /// All records of a state, with their slots.
    pub fn records(&self, state: State) -> Vec<(u32, Record)> {
        let all = self.layout.records as usize * record::LEN;
        let table = self.file.read(self.layout.record(0), all);
        let (slots, _) = table.as_chunks::<{ record::LEN }>();
        let uuid = &self.superblock.uuid;
        let of = |(slot, bytes)| match Record::decode(bytes, record::seed(uuid, slot)) {
            Slot::Used(record) if record.state == state => Some((slot, record)),
            _ => None,
        };
        (0..).zip(slots).filter_map(of).collect()
    }

    /// The live record of a key.
    pub fn live(&self, key: &Key) -> Option<(u32, Record)> {
        let mut live = self.records(State::Live);
        live.retain(|(_, record)| record.identity.key == *key);
        assert!(live.len() <= 1, "two live records of one key");
        live.pop()
    }

    /// Writes a record into a slot, valid there.
    pub fn write(&self, slot: u32, record: &Record) {
        let bytes = record.encode(record::seed(&self.superblock.uuid, slot));
        self.file.write(self.layout.record(slot), &bytes);
    }

    /// Offset of granule `index` of the data area.
    pub fn granule(&self, index: u64) -> u64 {
        self.layout.data + index * 4096
    }

    /// A record of a block whose payload is written too, and verifies.
    pub fn forge(
        &self,
        namespace: NamespaceId,
        key: Key,
        state: State,
        sequence: u64,
        granules: &[(u64, u64)],
        payload: &[u8],
    ) -> Record {
        let extents: Vec<(u64, u64)> = granules
            .iter()
            .map(|(index, count)| (self.granule(*index), count * 4096))
            .collect();
        let mut rest = payload;
        for (offset, len) in &extents {
            let (now, later) = rest.split_at(rest.len().min(*len as usize));
            self.file.write(*offset, now);
            rest = later;
        }
        let id = PartId {
            namespace: namespace.0,
            key: key.0,
            part: 0,
            parts: 1,
        };
        Record {
            state,
            parts: 1,
            created: 1,
            sequence,
            identity: Identity { namespace, key },
            extents: Packed::new(&extents).unwrap(),
            len: payload.len() as u64,
            checksum: checksum::of(&id, payload),
        }
    }
}
