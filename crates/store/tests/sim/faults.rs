//! What breaks: bytes that turn over, owners that end, and peers that speak badly.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use kvdepot_testkit::rot::Patient;
use kvdepot_testkit::sim::run::take_wrong;
use kvdepot_testkit::sim::twin::Id;

use crate::history::KEYS;
use crate::peer::{Peer, frame};
use crate::world::{Expect, Law, Medium, World, key, law, spec};

impl World {
    /// Turns a byte over of what a far record covers: its parts, or their table.
    pub fn rot(&self, id: Id, at: u32) {
        let Some(far) = self.seen.borrow().far.get(&id).cloned() else {
            return;
        };
        let parts = {
            let twin = self.twin.borrow();
            let Some(live) = twin.live(id) else {
                return;
            };
            live.versions[0].parts.clone()
        };
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
        self.come_back()?;
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
        self.come_back()
    }

    /// The next owner finds exactly what the files held.
    fn come_back(&self) -> Law {
        self.media.borrow_mut().iter_mut().for_each(Medium::read);
        let lasting: Vec<Id> = self.tables()?.into_keys().collect();
        if self.is_scheduled() {
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
            opening.damaged == 0 && opening.outranked == 0,
            "opening found {opening:?}"
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
