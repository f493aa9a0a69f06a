//! What the processes are asked, and what they may answer.

use std::io::Write;
use std::net::Shutdown;

use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::twin::Id;

use super::crowd::{Crowd, Hold};
use super::players::{hash, truncate};
use super::steps::{Deed, KEYS, Meanwhile, Step};
use crate::disk;
use crate::history::NAMESPACES;
use crate::peer::{Peer, frame};
use crate::world::{Law, key, law, spec};

/// What happens meanwhile, and when.
type Fate = (Meanwhile, u16);

const CALM: Fate = (Meanwhile::Nothing, 0);

impl Crowd {
    /// Lets one thing happen.
    pub fn perform(&mut self, deed: &Deed) -> Law {
        let client = usize::from(deed.client) % self.clients.len();
        let fate = match deed.meanwhile {
            // Nobody can map such a medium: it is the next owner's that is whole again.
            other if self.truncated && other != Meanwhile::OwnerKilled => CALM,
            other => (other, deed.after),
        };
        match &deed.step {
            Step::Put { ns, keys } => self.put(client, *ns, keys, fate),
            Step::Get { ns, keys, prefix } => self.get(client, *ns, keys, *prefix, fate),
            Step::Prefetch { ns, keys } => {
                self.tally.door("prefetch");
                let command = words("prefetch", *ns, keys.iter().map(u16::to_string));
                self.ask(client, &command, fate).map(drop)
            }
            Step::Remove { ns, keys } => self.remove(client, *ns, keys, fate),
            Step::Reserve { ns, keys } => self.reserve(client, *ns, keys, fate),
            Step::Commit { held } => {
                if self.held.is_empty() {
                    let first = u16::from(*held);
                    let keys = (first..first + 3).map(|key| key % KEYS as u16);
                    self.reserve(client, 0, &keys.collect::<Vec<_>>(), CALM)?;
                }
                self.commit(*held, fate)
            }
            Step::Abort { held } => match self.take_held(*held) {
                Some(hold) if !hold.dead => self.end("abort", &hold, "", fate),
                _ => Ok(()),
            },
            Step::Pin { ns, keys } => self.pin(client, *ns, keys, fate),
            Step::Load { pin } => {
                if self.pins.is_empty() {
                    let there = self.known.iter().filter(|(_, known)| known.there);
                    let there = there.map(|(id, _)| *id).filter(|id| id.0 == 0);
                    let skipped = usize::from(*pin % 4);
                    let keys: Vec<u16> = there.map(|id| id.1).skip(skipped).take(3).collect();
                    match keys.is_empty() {
                        true => return Ok(()),
                        false => self.pin(client, 0, &keys, CALM)?,
                    }
                }
                self.load(*pin, fate)
            }
            Step::Unpin { pin, served } => {
                if self.pins.is_empty() {
                    return Ok(());
                }
                let hold = self.pins.remove(usize::from(*pin) % self.pins.len());
                let how = if *served { " served" } else { " not" };
                match hold.dead {
                    true => Ok(()),
                    false => self.end("unpin", &hold, how, fate),
                }
            }
            Step::Truncate { part } => {
                if self.has_far() {
                    self.tally.fault("truncation");
                    for client in 0..self.clients.len() {
                        self.client(client)?;
                        self.is_back(client)?;
                    }
                    self.expect_losses()?;
                    (self.truncated, self.cut) = (true, true);
                    truncate(&self.arena(), u64::from(*part));
                }
                Ok(())
            }
            Step::Grow { kib } => self.grow(client, u64::from(*kib)),
            Step::Disk { kib } => {
                let full = kib.filter(|kib| disk::leave(Some(u64::from(*kib) << 10)));
                match full {
                    Some(_) => self.tally.fault("full disk"),
                    None => drop(disk::leave(None)),
                }
                Ok(())
            }
            Step::HalfAFrame { key } => self.half_a_frame(*key),
            Step::Reopen => {
                self.tally.fault("reopen");
                self.close_owner()
            }
        }
    }

    /// Whether nothing has happened that may cost hits or calls.
    fn is_calm(&self, fate: Fate) -> bool {
        fate.0 == Meanwhile::Nothing && self.shape.timeout >= 1000 && !self.truncated
    }

    fn generation(&self, id: Id) -> u64 {
        self.known.get(&id).map_or(0, |known| known.generation)
    }

    /// It has to be a hit.
    fn is_sure(&self, id: Id) -> bool {
        let known = self.known.get(&id);
        self.is_roomy() && known.is_some_and(|known| known.there && !known.murky)
    }

    fn len(&self, id: Id) -> u64 {
        self.parts(id, self.generation(id)).iter().sum()
    }

    fn put(&mut self, client: usize, ns: u8, keys: &[u16], fate: Fate) -> Law {
        // None may wait for a reservation.
        let free = |id: &Id| !self.held.iter().any(|hold| hold.id == *id && !hold.dead);
        let single = |id: &Id| self.parts(*id, 0).len() == 1;
        let ids = keys.iter().map(|key| (ns, *key));
        let ids: Vec<Id> = ids.filter(|id| free(id) && single(id)).collect();
        if ids.is_empty() {
            return Ok(());
        }
        self.tally.door("put");
        let block = |id: &Id| {
            let content = self.content(*id, self.generation(*id));
            format!("{}:{content}:{}", id.1, self.len(*id))
        };
        let command = words("put", ns, ids.iter().map(block));
        for id in &ids {
            self.known.entry(*id).or_default().begun = true;
        }
        let Some(said) = self.ask(client, &command, fate)? else {
            return Ok(());
        };
        let outcomes: Vec<&str> = said.split(' ').collect();
        let calm = self.is_calm(fate);
        law!(outcomes.len() == ids.len() || !calm, "put: {said}");
        for (id, outcome) in ids.iter().zip(outcomes) {
            let known = self.known.get_mut(id).unwrap();
            if outcome == "Done" {
                (known.there, known.lasting) = (true, self.shape.pipeline != "Cache");
            }
            let may = !calm || outcome == "Done" || !self.is_roomy();
            law!(
                may || outcome == "Dropped" && self.shape.drop,
                "a put of {id:?} ended as {outcome}"
            );
        }
        Ok(())
    }

    fn get(&mut self, client: usize, ns: u8, keys: &[u16], prefix: bool, fate: Fate) -> Law {
        self.tally.door(if prefix { "get prefix" } else { "get" });
        let ids: Vec<Id> = keys.iter().map(|key| (ns, *key)).collect();
        let how = if prefix { "prefix" } else { "all" };
        let block = |id: &Id| format!("{}:{}", id.1, self.len(*id));
        let blocks = std::iter::once(how.to_owned()).chain(ids.iter().map(block));
        let command = words("get", ns, blocks);
        let Some(said) = self.ask(client, &command, fate)? else {
            return Ok(());
        };
        let outcomes: Vec<&str> = said.split(' ').collect();
        law!(
            outcomes.len() == ids.len() || !self.is_calm(fate),
            "get: {said}"
        );
        let mut gap = false;
        for (id, outcome) in ids.iter().zip(outcomes) {
            if let Some(found) = outcome.strip_prefix("Done=") {
                self.is_right(*id, self.generation(*id), found)?;
                let begun = self.known.get(id).is_some_and(|one| one.begun || one.murky);
                law!(begun, "a get of {id:?} found what nobody put");
                continue;
            }
            let sure = self.is_sure(*id) && !gap && self.is_calm(fate);
            gap |= prefix;
            law!(!sure, "a get of {id:?}, which is there, ended as {outcome}");
            let sound = matches!(outcome, "Miss") || self.truncated;
            law!(
                sound || !self.is_calm(fate),
                "a get of {id:?} ended as {outcome}"
            );
        }
        Ok(())
    }

    fn bytes(&self, id: Id, generation: u64) -> Vec<u8> {
        let len: u64 = self.parts(id, generation).iter().sum();
        content(self.content(id, generation), len as usize)
    }

    fn is_right(&self, id: Id, generation: u64, found: &str) -> Law {
        let right = hash(&self.bytes(id, generation)).to_string();
        law!(
            found == right,
            "WRONG BYTES: a get of {id:?} delivered nobody's"
        );
        Ok(())
    }

    fn remove(&mut self, client: usize, ns: u8, keys: &[u16], fate: Fate) -> Law {
        self.tally.door("remove");
        let command = words("remove", ns, keys.iter().map(u16::to_string));
        let said = self.ask(client, &command, fate)?;
        let done = said.is_some_and(|said| said.starts_with("removed"));
        law!(done || !self.is_calm(fate), "a removal failed");
        for id in keys.iter().map(|key| (ns, *key)) {
            let held = self.held.iter().any(|hold| hold.id == id);
            let known = self.known.entry(id).or_default();
            known.there = false;
            match done && fate.0 == Meanwhile::Nothing {
                true if held => {}
                true => {
                    known.generation += 1;
                    known.begun = false;
                }
                // Who knows when it is heard.
                false => known.murky = true,
            }
        }
        Ok(())
    }

    fn reserve(&mut self, client: usize, ns: u8, keys: &[u16], fate: Fate) -> Law {
        let free = |id: &Id| !self.held.iter().any(|hold| hold.id == *id);
        let ids = keys.iter().map(|key| (ns, *key));
        let ids: Vec<Id> = ids.filter(free).collect();
        let most = if self.is_roomy() { 12 } else { 2 };
        if ids.is_empty() || self.held.len() >= most {
            return Ok(());
        }
        self.tally.door("reserve");
        let block = |id: &Id| {
            let parts = self.parts(*id, self.generation(*id));
            let parts: Vec<String> = parts.iter().map(u64::to_string).collect();
            format!("{}:{}", id.1, parts.join(","))
        };
        let command = words("reserve", ns, ids.iter().map(block));
        let Some(said) = self.ask(client, &command, fate)? else {
            return Ok(());
        };
        let said = said.strip_prefix("reserved ").unwrap_or_default();
        for (id, said) in ids.iter().zip(said.split(' ')) {
            let Some((name, placement)) = said.split_once(':') else {
                let there = self.known.get(id).is_none_or(|one| one.begun || one.murky);
                let may = there || !self.is_calm(fate) || !self.is_roomy();
                law!(may, "{id:?} was not reserved: {said}");
                continue;
            };
            self.known.entry(*id).or_default().begun = true;
            self.held
                .push(self.hold(client, *id, (name, placement), fate));
        }
        Ok(())
    }

    fn hold(&self, client: usize, id: Id, said: (&str, &str), fate: Fate) -> Hold {
        Hold {
            client,
            id,
            generation: self.generation(id),
            name: said.0.parse().unwrap(),
            placement: said.1.to_owned(),
            sound: self.is_calm(fate),
            dead: false,
        }
    }

    fn take_held(&mut self, held: u8) -> Option<Hold> {
        let count = self.held.len();
        (count > 0).then(|| self.held.remove(usize::from(held) % count))
    }

    /// What a client holds ends, whatever has become of its connection.
    fn end(&mut self, how: &'static str, hold: &Hold, more: &str, fate: Fate) -> Law {
        self.tally.door(how);
        let command = format!("{how} {} {}{more}", hold.id.0, hold.name);
        self.tell(hold.client, &command, fate).map(drop)
    }

    fn commit(&mut self, held: u8, fate: Fate) -> Law {
        let Some(hold) = self.take_held(held) else {
            return Ok(());
        };
        // Which of the two it happens to.
        let at_mover = fate.0 == Meanwhile::Killed && fate.1.is_multiple_of(2);
        let parts = self.parts(hold.id, hold.generation);
        let content = self.content(hold.id, hold.generation);
        let (mut sums, mut begin) = (Vec::new(), 0);
        for (part, len) in parts.iter().enumerate() {
            self.tally.door("store part");
            let end = begin + len;
            let command = format!("store {} {part} {content} {begin} {end}", hold.placement);
            begin = end;
            if at_mover {
                self.kill_mover(&command, fate.1)?;
                return match hold.dead {
                    true => Ok(()),
                    false => self.end("abort", &hold, "", CALM),
                };
            }
            sums.push(self.ask_mover(&command)?);
        }
        if hold.dead {
            // Whatever the mover made of it, nobody else's block has changed.
            return Ok(());
        }
        let moved = !sums
            .iter()
            .any(|sum| sum == "-" || sum.starts_with("failed"));
        let sound = hold.sound && !self.truncated;
        law!(moved || !sound, "a part was not stored: {sums:?}");
        if !moved {
            return self.end("abort", &hold, "", fate);
        }
        self.tally.door("commit");
        let command = format!("commit {} {} {}", hold.id.0, hold.name, sums.join(","));
        // Its reservation may be there or not from now on.
        let said = self.ask(hold.client, &command, fate)?;
        let stored = said.as_deref() == Some("committed true");
        law!(
            stored || !sound || !self.is_calm(fate),
            "a reservation of {:?} was not committed: {said:?}",
            hold.id
        );
        if stored {
            let lasting = self.shape.pipeline == "Dax";
            let known = self.known.get_mut(&hold.id).unwrap();
            (known.there, known.lasting) = (true, known.lasting && known.there || lasting);
        }
        Ok(())
    }

    fn kill_mover(&mut self, command: &str, after: u16) -> Law {
        self.tally.fault("mover killed");
        let mut mover = self.mover.take().unwrap();
        mover.tell(command);
        std::thread::sleep(std::time::Duration::from_micros(u64::from(after)));
        mover.kill();
        self.start_mover()
    }

    fn pin(&mut self, client: usize, ns: u8, keys: &[u16], fate: Fate) -> Law {
        if self.pins.len() >= if self.is_roomy() { 12 } else { 2 } {
            return Ok(());
        }
        self.tally.door("pin");
        let command = words("pin", ns, keys.iter().map(u16::to_string));
        let Some(said) = self.ask(client, &command, fate)? else {
            return Ok(());
        };
        let said = said.strip_prefix("pinned ").unwrap_or_default();
        for (id, said) in keys.iter().map(|key| (ns, *key)).zip(said.split(' ')) {
            let words: Vec<&str> = said.split(':').collect();
            let [name, bytes, placement] = words[..] else {
                let sure = self.is_sure(id) && self.is_calm(fate);
                law!(!sure, "{id:?} is there and was not pinned: {said}");
                continue;
            };
            law!(
                bytes == self.len(id).to_string(),
                "a pin of {id:?} has {bytes} bytes"
            );
            self.pins
                .push(self.hold(client, id, (name, placement), fate));
        }
        Ok(())
    }

    fn load(&mut self, pin: u8, fate: Fate) -> Law {
        if self.pins.is_empty() {
            return Ok(());
        }
        let hold = self.pins[usize::from(pin) % self.pins.len()].clone();
        let parts = self.parts(hold.id, hold.generation);
        let bytes = self.bytes(hold.id, hold.generation);
        let mut begin = 0;
        for (part, len) in parts.iter().enumerate() {
            self.tally.door("load part");
            let command = format!("load {} {part} {len}", hold.placement);
            if fate.0 == Meanwhile::Killed && !hold.dead {
                return match fate.1 % 2 {
                    0 => self.kill_mover(&command, fate.1),
                    _ => {
                        self.kill_client(hold.client);
                        Ok(())
                    }
                };
            }
            let said = self.ask_mover(&command)?;
            let end = begin + *len as usize;
            let right = hash(&bytes[begin..end]).to_string();
            begin = end;
            let moved = !(said == "-" || said.starts_with("failed"));
            law!(
                moved || !hold.sound || self.truncated,
                "part {part} of {:?}, which is pinned, was not loaded: {said}",
                hold.id
            );
            law!(
                !moved || said == right,
                "WRONG BYTES: part {part} of {:?}, which is pinned, is nobody's",
                hold.id
            );
        }
        Ok(())
    }

    fn grow(&mut self, client: usize, kib: u64) -> Law {
        if !self.has_far() {
            return Ok(());
        }
        self.tally.door("grow device by a client");
        let more = self.kib + kib;
        let command = format!("grow {} {}", self.arena().display(), more << 10);
        let (free, before) = (disk::free(), self.arena().metadata().unwrap().len());
        let said = self.ask(client, &command, CALM)?.unwrap_or_default();
        let len = self.arena().metadata().unwrap().len();
        if self.cut {
            law!(
                said.starts_with("failed") && len == before,
                "an arena that was cut to {before} has {len} bytes after a growth: {said}"
            );
            return Ok(());
        }
        if said.contains("the free space of") {
            self.tally.fault("no room on disk");
            law!(
                kib << 10 > free && len == self.kib << 10,
                "{free} bytes are free, the arena has {len}, and a growth by {kib} KiB: {said}"
            );
            return Ok(());
        }
        law!(
            said == "grown" || !self.is_calm(CALM),
            "a client could not grow a device: {said}"
        );
        // Where nobody was waited for, the file says what became of it.
        self.kib = match said == "grown" {
            true => more,
            false => self.kib,
        };
        Ok(())
    }

    fn half_a_frame(&mut self, number: u16) -> Law {
        self.tally.fault("half a frame");
        let mut peer = Peer::new(&self.socket())?;
        let ns = spec(0).id().unwrap().0;
        let _held = (
            peer.reserve(ns, &key(400).0, &[5000])?,
            peer.pin(ns, &key(number).0)?,
            peer.pin(ns, &key(number).0)?,
        );
        let _sent = peer.calls.write_all(&frame(3, &[9; 40])[..20]);
        let _shut = peer.calls.shutdown(Shutdown::Both);
        peer.goodbye();
        Ok(())
    }

    /// Whoever lives lets go of what it holds.
    pub fn let_go(&mut self) -> Law {
        while let Some(hold) = self.take_held(0) {
            if !hold.dead {
                self.end("abort", &hold, "", CALM)?;
            }
        }
        while let Some(hold) = self.pins.pop() {
            if !hold.dead {
                self.end("unpin", &hold, " served", CALM)?;
            }
        }
        Ok(())
    }

    /// Every block comes back, or is a miss.
    pub fn read_all(&mut self) -> Law {
        for ns in 0..NAMESPACES as u8 {
            let keys: Vec<u16> = Crowd::all_keys().collect();
            self.get(0, ns, &keys, false, CALM)?;
        }
        Ok(())
    }
}

fn words(verb: &str, ns: u8, rest: impl Iterator<Item = String>) -> String {
    let rest: Vec<String> = rest.collect();
    format!("{verb} {ns} {}", rest.join(" "))
}
