//! How a history may end: all of an arena is written once more, or a part of it is gone.

use std::fs::File;

use kvdepot_store::{BlockBuffers, Buffer, Outcome, Task};
use kvdepot_testkit::sim::twin::Id;

use crate::history::{KEYS, NAMESPACES, Step};
use crate::world::{Law, PATIENCE, World, key, law};

/// Keys of a final fill.
const FILL: u16 = KEYS as u16 + 600;

impl World {
    /// Holds all the room there is, as far as it can be had.
    pub fn fill_up(&self, door: u8, ns: u8, first: u16) -> Law {
        let stats = self.owner().stats();
        // Where calls are waited for, none may wait for room.
        if !self.is_scheduled() && !self.is_single() {
            return Ok(());
        }
        self.fault("full device");
        let (count, each) = match self.shape.uniform {
            true => (KEYS as u16, 8192),
            false => (9, (stats.tiers[0].capacity_bytes / 8).max(4096) as u32),
        };
        let keys = (0..count).map(|index| (first + index) % KEYS as u16);
        let blocks = keys.map(|key| (key, vec![each])).collect();
        self.perform(&Step::Reserve {
            door,
            ns,
            blocks,
            strict: false,
        })
    }

    /// Everything goes, and all of the arena can be had at once: nothing has leaked.
    pub fn final_fill(&self) -> Law {
        for ns in 0..NAMESPACES as u8 {
            self.cause.replace(crate::world::Cause::default());
            self.perform(&Step::Clear { door: 0, ns })?;
            self.look_softly()?;
        }
        self.perform(&Step::Settle)?;
        self.look_softly()?;
        self.at_rest()?;
        let stats = self.owner().stats();
        let serving = |one: &kvdepot_store::DeviceStats| one.state.name() == "serving";
        let devices = self.owner().devices().unwrap_or_default();
        let tier = &stats.tiers[0];
        if !self.is_single() || devices.len() > 1 || !devices.iter().all(serving) {
            return Ok(());
        }
        self.door("final fill");
        let free = (tier.blocks, tier.free_bytes + tier.lost_bytes);
        law!(
            free == (0, tier.capacity_bytes),
            "all is cleared, and there is {tier:?}"
        );
        let count = tier.blocks_max.min(8);
        let each = tier.capacity_bytes / count / 4096 * 4096;
        if tier.lost_bytes > 0 || each == 0 {
            return Ok(());
        }
        let blocks = (0..count as u16).map(|index| (key(FILL + index), vec![each]));
        let namespace = self.namespace(0, 0)?;
        let whole = namespace.reserve_strict(&blocks.collect::<Vec<_>>());
        let whole = whole.map_err(|error| format!("{count} times {each} bytes: {error}"))?;
        let had = whole.iter().flatten().count();
        namespace.abort(&whole.into_iter().flatten().collect::<Vec<_>>());
        law!(
            had as u64 == count,
            "all is free, and {had} of {count} times {each} bytes were reserved"
        );
        Ok(())
    }

    /// A part of each file is gone under the mapping. What was lost is a miss, what comes is right,
    /// and the process goes on.
    pub fn lose_a_part(&self) -> Law {
        self.fault("truncation");
        crate::log::expect_losses(true);
        // Nothing else happens meanwhile, and no count is known any more.
        self.nested.set(9);
        let part = self.rng.borrow_mut().between(40, 99);
        for medium in self.media.borrow().iter().filter(|medium| medium.present) {
            let file = File::options().write(true).open(&medium.path).unwrap();
            let len = file.metadata().unwrap().len();
            let kept = (len * part / 100).max(len - (medium.kib << 10));
            file.set_len(kept).unwrap();
        }
        let ids: Vec<Id> = self.twin.borrow().all_live().map(|(id, _)| id).collect();
        let doors = self.doors();
        for (index, id) in ids.iter().enumerate() {
            self.read_what_is_left(index % doors, *id)?;
        }
        // Room that was lost is no room, and what is written elsewhere is right.
        for index in 0..8 {
            let namespace = self.namespace(usize::from(index) % doors, 0)?;
            let bytes = kvdepot_testkit::bytes::content(u64::from(index), 9000);
            let block = || vec![key(FILL + index)];
            let buffers = BlockBuffers::whole([Buffer::from_vec(bytes.clone())]);
            let put = namespace.put(block(), buffers);
            self.ended(&put.map_err(|error| format!("put: {error}"))?)?;
            let buffer = Buffer::from_vec(vec![0xEE; bytes.len()]);
            let buffers = BlockBuffers::whole([buffer.clone()]);
            let got = namespace.get(block(), buffers);
            let outcome = self.ended(&got.map_err(|error| format!("get: {error}"))?)?;
            law!(
                outcome != Outcome::Done || buffer.to_vec() == bytes,
                "WRONG BYTES: of block {index}, which was put on a medium that was cut"
            );
        }
        Ok(())
    }

    fn read_what_is_left(&self, door: usize, id: Id) -> Law {
        let versions = {
            let twin = self.twin.borrow();
            twin.live(id)
                .map_or(Vec::new(), |live| live.versions.clone())
        };
        let Some(version) = versions.first() else {
            return Ok(());
        };
        let buffer = Buffer::from_vec(vec![0xEE; version.len() as usize]);
        let buffers = BlockBuffers::whole([buffer.clone()]);
        let got = self.namespace(door, id.0)?.get(vec![key(id.1)], buffers);
        let outcome = self.ended(&got.map_err(|error| format!("get: {error}"))?)?;
        let bytes = buffer.to_vec();
        let right = versions.iter().any(|version| version.bytes() == bytes);
        law!(
            outcome != Outcome::Done || right,
            "WRONG BYTES: of {id:?}, on a medium that was cut"
        );
        Ok(())
    }

    /// The outcome of a task of one key.
    fn ended(&self, task: &Task) -> Law<Outcome> {
        match self.is_scheduled() {
            true => self.settle(),
            false => {
                let waited = task.wait(Some(PATIENCE));
                law!(waited.is_ok(), "a call does not end: {:?}", task.outcomes());
            }
        }
        let outcome = task.outcomes()[0];
        law!(outcome != Outcome::Pending, "a call does not end");
        Ok(outcome)
    }
}
