//! How a history may end: all of an arena is written once more, or a part of it is gone.

use std::fs::File;

use kvdepot_store::format::layout::CAPACITY_MIN;
use kvdepot_store::{BlockBuffers, Buffer, Outcome, Task};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::twin::Id;

use crate::history::{KEYS, NAMESPACES, Step};
use crate::world::{Law, PATIENCE, World, eventually, key, law};

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

    /// Everything goes: each tier and each device is free in whole, and can be had and filled in
    /// whole. Nothing has leaked.
    pub fn final_fill(&self) -> Law {
        self.door("final fill");
        self.clear_all()?;
        for device in self.owner().devices().unwrap_or_default() {
            // One that was drained is written again.
            let media = self.media.borrow().clone();
            let at = media.iter().position(|medium| medium.path == device.path);
            let device = at.unwrap() as u8;
            self.perform(&Step::Add { device })?;
        }
        // Nothing else happens from now on, and the twin knows nothing of it.
        self.nested.set(9);
        self.let_go()?;
        self.clear_unseen()?;
        let rooms = self.rooms()?;
        self.have_all(&rooms)?;
        self.all_free()?;
        self.write_all(&rooms)?;
        self.clear_unseen()
    }

    fn clear_unseen(&self) -> Law {
        self.settle();
        for ns in 0..NAMESPACES as u8 {
            let cleared = self.namespace(0, ns)?.clear();
            cleared.map_err(|error| format!("clear: {error}"))?;
        }
        self.all_free()
    }

    /// Bytes of the media of the last tier, the largest first: a block goes where most is free.
    fn rooms(&self) -> Law<Vec<u64>> {
        if !self.has_far() {
            return Ok(vec![self.owner().stats().tiers[0].capacity_bytes]);
        }
        let devices = self.owner().devices().map_err(|error| error.to_string())?;
        let mut rooms: Vec<u64> = devices.iter().map(|one| one.data_bytes).collect();
        rooms.sort_by_key(|room| std::cmp::Reverse(*room));
        Ok(rooms)
    }

    fn clear_all(&self) -> Law {
        for ns in 0..NAMESPACES as u8 {
            self.cause.replace(crate::world::Cause::default());
            self.perform(&Step::Clear { door: 0, ns })?;
            self.look_softly()?;
        }
        self.perform(&Step::Settle)?;
        self.look_softly()?;
        self.at_rest()
    }

    fn all_free(&self) -> Law {
        self.settle();
        let free = || {
            for tier in self.owner().stats().tiers {
                let free = (tier.blocks, tier.free_bytes) == (0, tier.capacity_bytes);
                law!(free, "all is cleared, and there is {tier:?}");
            }
            for device in self.owner().devices().unwrap_or_default() {
                let free = (device.blocks, device.used_bytes) == (0, 0);
                law!(free, "all is cleared, and there is {device:?}");
            }
            Ok(())
        };
        // A promotion may still be on its way.
        if self.is_scheduled() {
            free()
        } else {
            eventually(free)
        }
    }

    /// All can be reserved at once: of a near tier what may wait for the far one, and each medium
    /// of the last tier.
    fn have_all(&self, rooms: &[u64]) -> Law {
        let tier = &self.owner().stats().tiers[0];
        let queue = self.queue();
        // By calls.
        let mut wanted = Vec::new();
        if !self.is_single() {
            wanted.push(vec![queue / 4096 * 4096]);
        }
        // Whoever drops what does not fit the queue sends nothing round it but what never would.
        let far = |room: &&u64| self.is_single() || !self.shape.drop || **room > queue;
        wanted.extend(rooms.iter().filter(far).map(|room| vec![*room]));
        if let ([room], true) = (rooms, self.is_single()) {
            // In several pieces, which take several records.
            let count = tier.blocks_max.min(8).min(room / 4096);
            wanted = vec![vec![room / count / 4096 * 4096; count as usize]];
        }
        let namespace = self.namespace(0, 0)?;
        let mut had = Vec::new();
        let mut keys = (FILL..).map(key);
        for lens in &wanted {
            let blocks: Vec<_> = lens
                .iter()
                .zip(&mut keys)
                .map(|(len, key)| (key, vec![*len]))
                .collect();
            // Who has worked for the last owner may have to hear first that it is gone.
            let one = eventually(|| {
                let one = namespace.reserve_strict(&blocks);
                one.map_err(|error| format!("all is free, {wanted:?} are wanted: {error}"))
            });
            had.extend(one?);
        }
        let tiers = self.owner().stats().tiers;
        let left: u64 = tiers.iter().map(|tier| tier.free_bytes).sum();
        let all: u64 = tiers.iter().map(|tier| tier.capacity_bytes).sum();
        let had: Vec<_> = had.into_iter().flatten().collect();
        namespace.abort(&had);
        let (count, bytes) = (
            wanted.iter().flatten().count(),
            wanted.iter().flatten().sum::<u64>(),
        );
        law!(
            had.len() == count && left + bytes == all,
            "all is free, and {} of {wanted:?} bytes were reserved: {tiers:?}",
            had.len()
        );
        Ok(())
    }

    /// Nearly all can be written and read: a little is always made free ahead of need.
    fn write_all(&self, rooms: &[u64]) -> Law {
        let namespace = self.namespace(0, 0)?;
        let content = |(room, seed)| content(seed, (room / 16 * 15) as usize);
        let contents = rooms.iter().zip(0..).map(content);
        let keys = (FILL..).map(key);
        let blocks: Vec<_> = keys.zip(contents).collect();
        for (key, bytes) in &blocks {
            let buffers = BlockBuffers::whole([Buffer::from_vec(bytes.clone())]);
            let put = namespace.put(vec![*key], buffers);
            let outcome = self.ended(&put.map_err(|error| format!("put: {error}"))?)?;
            law!(
                outcome == Outcome::Done,
                "all is free, and a put of {} bytes ended as {outcome:?}",
                bytes.len()
            );
        }
        for (key, bytes) in &blocks {
            let buffer = Buffer::from_vec(vec![0xEE; bytes.len()]);
            let got = namespace.get(vec![*key], BlockBuffers::whole([buffer.clone()]));
            let outcome = self.ended(&got.map_err(|error| format!("get: {error}"))?)?;
            law!(
                outcome == Outcome::Done && buffer.to_vec() == *bytes,
                "a last get of {} bytes ended as {outcome:?}",
                bytes.len()
            );
        }
        Ok(())
    }

    /// A part of each file is gone under the mapping. What was lost is a miss, what comes is right,
    /// and the process goes on. Answers what was missed.
    pub fn lose_a_part(&self, part: u64) -> Law<Vec<Id>> {
        self.fault("truncation");
        crate::log::expect_losses(true);
        // Nothing else happens meanwhile, and no count is known any more.
        self.nested.set(9);
        for medium in self.media.borrow().iter().filter(|medium| medium.present) {
            let file = File::options().write(true).open(&medium.path).unwrap();
            let len = file.metadata().unwrap().len();
            // What stands in front of the blocks stays, and what nobody would take for an arena
            // is not left.
            file.set_len((len * part / 100).max(CAPACITY_MIN)).unwrap();
        }
        let ids: Vec<Id> = self.twin.borrow().all_live().map(|(id, _)| id).collect();
        let doors = self.doors();
        let mut missed = Vec::new();
        for (index, id) in ids.into_iter().enumerate() {
            if !self.read_what_is_left(index % doors, id)? {
                missed.push(id);
            }
        }
        // Room that was lost is no room, and what is written elsewhere is right.
        for index in 0..8 {
            let namespace = self.namespace(usize::from(index) % doors, 0)?;
            let bytes = content(u64::from(index), 9000);
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
        Ok(missed)
    }

    /// The same, and the next owner has what is left, of blocks and of room: from then on all is as
    /// in any other arena.
    pub fn cut(&self, part: u64) -> Law {
        if self.nested.get() > 0 || !self.lasts() {
            return Ok(());
        }
        self.let_go()?;
        self.rest()?;
        if !self.flying.borrow().is_empty() {
            return Ok(());
        }
        let missed = self.lose_a_part(part)?;
        // By calls a file grows again, with zeros where a client alone has met its end.
        for (ns, number) in missed.into_iter().filter(|_| self.shape.disk) {
            let removed = self.namespace(0, ns)?.remove(&[key(number)]);
            removed.map_err(|error| format!("remove: {error}"))?;
        }
        let fill: Vec<_> = (0..8).map(|index| key(FILL + index)).collect();
        let removed = self.namespace(0, 0)?.remove(&fill);
        removed.map_err(|error| format!("remove: {error}"))?;
        self.close()?;
        self.forget_held();
        self.nested.set(0);
        self.come_back(false)
    }

    /// Whether a block is there still.
    fn read_what_is_left(&self, door: usize, id: Id) -> Law<bool> {
        let versions = {
            let twin = self.twin.borrow();
            twin.live(id)
                .map_or(Vec::new(), |live| live.versions.clone())
        };
        let Some(version) = versions.first() else {
            return Ok(true);
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
        Ok(outcome == Outcome::Done)
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
