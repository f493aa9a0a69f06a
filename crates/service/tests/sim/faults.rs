//! What breaks: bytes that turn over, owners that end, and peers that speak badly.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use kvdepot_store::{DeviceStats, Error};
use kvdepot_testkit::rot::Patient;
use kvdepot_testkit::sim::run::take_wrong;
use kvdepot_testkit::sim::twin::Id;

use crate::disk;
use crate::history::KEYS;
use crate::laws::live_in;
use crate::peer::{Peer, frame};
use crate::world::{Expect, Law, Medium, World, eventually, key, law, spec};

/// The files of a history with their lengths, and the devices with their capacities.
type Files = (BTreeMap<PathBuf, u64>, Vec<(PathBuf, u64, u64)>);

impl World {
    /// Turns a byte over of what a far record covers, its parts or their table, and answers whose:
    /// that of a block in parts as often as there is one, as few blocks are.
    pub fn rot(&self, id: Id, at: u32) -> Option<Id> {
        let id = match at & 1 {
            0 => self.one_in_parts(id).unwrap_or(id),
            _ => id,
        };
        let at = at >> 1;
        let far = self.seen.borrow().far.get(&id).cloned()?;
        let parts = self.parts_of(id)?;
        // Which bytes of the payload mean something: pages are filled up between the parts.
        let mut ranges = Vec::new();
        let mut offset = 0;
        for len in &parts {
            ranges.push((offset, *len));
            offset += len.next_multiple_of(4096);
        }
        if parts.len() > 1 {
            ranges.push((offset, 32 * parts.len() as u64));
        }
        let (begin, len) = ranges[at as usize % ranges.len()];
        let byte = begin + u64::from(at / 7) % len;
        let mut rest = byte;
        let place = far.extents.iter().find_map(|(begin, len)| {
            let here = rest < *len;
            if !here {
                rest -= len;
            }
            here.then(|| begin + rest)
        });
        let place = place.unwrap();
        self.fault("rot");
        let file = Patient::open(&self.media.borrow()[far.medium].path);
        let now = file.read(place, 1)[0];
        file.write(place, &[!now]);
        let mut rotten = self.rotten.borrow_mut();
        let bytes = rotten.entry(far.sequence).or_default();
        if !bytes.remove(&byte) {
            bytes.insert(byte);
        }
        // Whoever is reading it may have read it before.
        for flying in self.flying.borrow_mut().iter_mut() {
            if flying.ids.contains(&id) {
                flying
                    .expect
                    .iter_mut()
                    .for_each(|expect| *expect = Expect::Any);
            }
        }
        Some(id)
    }

    fn parts_of(&self, id: Id) -> Option<Vec<u64>> {
        let twin = self.twin.borrow();
        Some(twin.live(id)?.versions[0].parts.clone())
    }

    /// A far block in parts, by another's key.
    fn one_in_parts(&self, (_, number): Id) -> Option<Id> {
        let seen = self.seen.borrow();
        let in_parts = |id: &&Id| self.parts_of(**id).is_some_and(|parts| parts.len() > 1);
        let all: Vec<&Id> = seen.far.keys().filter(in_parts).collect();
        let one = *all.get(usize::from(number).checked_rem(all.len())?)?;
        Some(*one)
    }

    /// The file system is left with so many KiB, or with room for everything.
    pub fn fill_disk(&self, kib: Option<u64>) {
        let room = kib.map(|kib| kib << 10);
        if disk::leave(room) {
            self.room.set(room);
            kib.iter().for_each(|_| self.fault("full disk"));
        }
    }

    /// Asks for so many bytes of the file system. They are given if and only if it has them, which
    /// is answered; otherwise the error says what was missing, and nothing has changed.
    pub fn with_room(&self, bytes: u64, ask: impl FnOnce() -> Result<(), Error>) -> Law<bool> {
        if !disk::is_own() {
            return ask().map(|()| true).map_err(|error| error.to_string());
        }
        let (free, before) = (disk::free(), self.files()?);
        // It may be more: files of the last history have their end some time.
        let Err(error) = ask() else {
            let left = disk::free();
            law!(
                left + bytes >= free,
                "{bytes} bytes were asked of {free}, {left} are left"
            );
            return Ok(true);
        };
        let text = error.to_string();
        let says = text.contains("capacity: ") && text.contains("the free space of");
        law!(says && bytes > free, "{free} bytes are free, and {text}");
        self.fault("no room on disk");
        let (left, after) = (disk::free(), self.files()?);
        law!(
            left >= free && after == before,
            "{bytes} bytes were refused: {free} free and {before:?} are {left} and {after:?}"
        );
        Ok(false)
    }

    pub fn files(&self) -> Law<Files> {
        let files = std::fs::read_dir(self.dir.path()).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            let len = path.symlink_metadata().unwrap().len();
            (path, len)
        });
        let depot = self.depot.borrow().clone();
        let devices = depot.map(|depot| depot.devices()).transpose();
        let devices = devices.map_err(|error| error.to_string())?;
        let sizes = |one: DeviceStats| (one.path, one.capacity_bytes, one.data_bytes);
        let devices = devices.into_iter().flatten().map(sizes);
        Ok((files.collect(), devices.collect()))
    }

    /// Where the file system has no room for its arenas, an owner refuses to open, and leaves none
    /// half made.
    pub fn open_without_room(&self) -> Law {
        let media = self.media.borrow().clone();
        let Some(last) = media.iter().rposition(|medium| medium.present) else {
            return Ok(());
        };
        // Files of the last history may have their end only now; those of one that was left as it
        // was stay.
        let empty = || disk::is_empty().then_some(()).ok_or_else(String::new);
        if !disk::is_own() || eventually(empty).is_err() {
            return Ok(());
        }
        let wanted: u64 = media[..=last].iter().map(|medium| medium.kib).sum();
        self.fill_disk(Some(self.rng.borrow_mut().below(wanted / 4) * 4));
        let opened = kvdepot_service::open(&self.config());
        let text = opened.err().map(|error| error.to_string());
        let says =
            |text: &String| text.contains("capacity: ") && text.contains("the free space of");
        law!(
            text.as_ref().is_some_and(says),
            "opened on a full disk: {text:?}"
        );
        self.fault("no room on disk");
        for (path, len) in self.files()?.0 {
            let whole = media.iter().find(|one| one.path == path);
            law!(
                whole.is_some_and(|one| one.kib << 10 == len),
                "{} of {len} bytes is left of a depot that was not opened",
                path.display()
            );
        }
        self.fill_disk(None);
        Ok(())
    }

    /// Closes and opens again: what lasts is there.
    pub fn reopen(&self) -> Law {
        if self.nested.get() > 0 {
            return Ok(());
        }
        self.fault("reopen");
        self.may_evict();
        if self.is_scheduled() {
            self.settle();
            self.look()?;
        }
        let stale: Vec<_> = self
            .held
            .borrow()
            .iter()
            .map(|held| held.reservation.clone())
            .collect();
        self.close()?;
        self.forget_held();
        self.come_back(true)?;
        if let Some(stale) = stale.first() {
            let namespace = self.namespace(0, 0)?;
            let sums = vec![vec![kvdepot_store::Checksum([1; 16]); stale.parts()]];
            let answer = namespace.commit(std::slice::from_ref(stale), &sums);
            law!(
                answer.is_err(),
                "a reservation of the former owner was committed: {answer:?}"
            );
            let before = take_wrong();
            namespace.abort(std::slice::from_ref(stale));
            let said = take_wrong();
            let told = said.len() == 1 && said[0].contains("of another depot");
            law!(told && before.is_empty(), "{before:?}, and then {said:?}");
        }
        Ok(())
    }

    /// Dies at this instruction.
    pub fn killed(&self) -> Law {
        if self.nested.get() > 0 {
            return Ok(());
        }
        self.fault("owner killed");
        self.look()?;
        self.crash();
        self.come_back(true)
    }

    /// The next owner finds exactly what the files hold: as much as before, where nothing was cut.
    pub fn come_back(&self, as_before: bool) -> Law {
        self.media.borrow_mut().iter_mut().for_each(Medium::read);
        let lasting: Vec<Id> = self.tables()?.into_keys().collect();
        let lost: usize = {
            let media = self.media.borrow();
            let tables = media.iter().filter_map(|medium| medium.table.as_ref());
            tables.map(|table| live_in(table).1).sum()
        };
        if self.is_scheduled() && as_before {
            let before: Vec<Id> = self.seen.borrow().far.keys().copied().collect();
            law!(
                before == lasting,
                "{before:?} were far, {lasting:?} are after the end"
            );
        }
        self.open()?;
        let mut twin = self.twin.borrow_mut();
        twin.tick();
        let live: Vec<Id> = twin.all_live().map(|(id, _)| id).collect();
        for id in live {
            if !lasting.contains(&id) {
                twin.left(id);
            }
        }
        twin.forget_uses();
        drop(twin);
        let opening = self.owner().opening();
        law!(
            opening.damaged == lost as u64 && opening.outranked == 0,
            "opening found {opening:?}, and {lost} blocks were cut away"
        );
        self.seen.borrow_mut().near.clear();
        // What was there is there, and nothing else: nothing has happened since.
        self.cause.replace(crate::world::Cause::default());
        self.look()?;
        let found: Vec<Id> = self.twin.borrow().all_live().map(|(id, _)| id).collect();
        let evicts = !self.is_scheduled() && found.iter().all(|id| lasting.contains(id));
        law!(
            found == lasting || evicts,
            "{lasting:?} were there, {found:?} are after the opening"
        );
        Ok(())
    }

    /// A peer of the owner's socket misbehaves and goes. Nothing of it stays.
    pub fn noise(&self, kind: u8, number: u16) -> Law {
        if self.nested.get() > 0 || !self.shape.socket {
            return Ok(());
        }
        let socket = self.socket();
        if kind == 0 {
            self.fault("half a request");
            let mut stream = UnixStream::connect(&socket).map_err(|error| error.to_string())?;
            let _sent = stream.write_all(b"KVDATT");
            return Ok(());
        }
        let ns = spec(0).id().unwrap().0;
        let mut peer = Peer::new(&socket)?;
        self.may_evict();
        // Nobody else's key.
        let own = key(KEYS as u16 + 400).0;
        match kind {
            1 => {
                self.fault("cut commit");
                if let Some(name) = peer.reserve(ns, &own, &[5000, 70])? {
                    let status = peer.cut_commit(&name, 2)?;
                    law!(
                        status != 0,
                        "a commit that ends too early was answered as sound"
                    );
                    let status = peer.cut_commit(&name, 1 << 30)?;
                    law!(
                        status != 0,
                        "a commit of endless checksums was answered as sound"
                    );
                }
            }
            2 => {
                self.fault("repeated frame");
                if let Some(name) = peer.reserve(ns, &own, &[5000])? {
                    peer.abort(&name, 3)?;
                }
                if let Some(name) = peer.pin(ns, &key(number).0)? {
                    peer.unpin(&name, 3)?;
                }
            }
            3 => {
                self.fault("half a frame");
                let _held = (
                    peer.reserve(ns, &own, &[5000])?,
                    peer.pin(ns, &key(number).0)?,
                    peer.pin(ns, &key(number).0)?,
                );
                let _sent = peer.calls.write_all(&frame(3, &[9; 40])[..20]);
                let _shut = peer.calls.shutdown(Shutdown::Both);
            }
            4 => {
                self.fault("noise");
                let _held = peer.reserve(ns, &own, &[5000])?;
                let noise: Vec<u8> = {
                    let mut rng = self.rng.borrow_mut();
                    (0..64).map(|_| rng.bits() as u8).collect()
                };
                let _sent = peer.calls.write_all(&noise);
            }
            _ => {
                self.fault("connection cut");
                let _sent = peer.tasks.write_all(&frame(32, &[9; 40])[..30]);
                // Its process lives, and holds nothing.
                return Ok(());
            }
        }
        peer.goodbye();
        Ok(())
    }
}
