//! What is done to what is shared, and what may come of it.

use std::collections::BTreeSet;
use std::fs;
use std::thread::sleep;
use std::time::Duration;

use kvdepot_testkit::bytes::content;
use kvdepot_testkit::s3::Trouble;
use kvdepot_testkit::sim::twin::Id;

use super::fleet::Fleet;
use super::steps::{Deed, KEYS, Meanwhile, SHARERS, Step};
use crate::history::NAMESPACES;
use crate::processes::players::hash;
use crate::tiers::posix;
use crate::world::{Law, law};

impl Fleet {
    pub fn perform(&mut self, deed: &Deed) -> Law {
        match deed {
            Deed::Do {
                by,
                step,
                meanwhile,
            } => self.act(usize::from(*by), step, meanwhile),
            Deed::Rot { ns, key, at } => {
                self.rot((*ns, *key), u64::from(*at));
                Ok(())
            }
            Deed::Trouble { kind, count } => {
                self.begin_trouble(*kind, usize::from(*count));
                Ok(())
            }
            Deed::Calm => {
                self.calm();
                Ok(())
            }
            Deed::Reopen { by, kind, number } => {
                let by = usize::from(*by);
                self.close(by)?;
                self.open(by, *kind, *number)
            }
        }
    }

    fn act(&mut self, by: usize, step: &Step, meanwhile: &Meanwhile) -> Law {
        let before: Vec<Id> = step.ids();
        self.begin(by, step);
        match meanwhile {
            Meanwhile::Nothing => {
                let said = self.hear(by)?;
                self.judge(by, step, &said, &BTreeSet::new())
            }
            Meanwhile::Killed(after) => {
                self.tally.fault("sharer killed");
                self.killed = true;
                sleep(Duration::from_micros(u64::from(*after)));
                if let Some(mut worker) = self.sharers[by].take() {
                    worker.kill();
                }
                for id in before {
                    self.unknown(id, step);
                }
                self.open(by, 0, 0)
            }
            Meanwhile::Other(other) => {
                self.tally.door("two at once");
                let next = (by + 1) % SHARERS;
                self.begin(next, other);
                let met: BTreeSet<Id> = before.into_iter().collect();
                let met: BTreeSet<Id> = other
                    .ids()
                    .into_iter()
                    .filter(|id| met.contains(id))
                    .collect();
                let mine = self.hear(by)?;
                let theirs = self.hear(next)?;
                self.judge(by, step, &mine, &met)?;
                self.judge(next, other, &theirs, &met)
            }
        }
    }

    /// Nothing was heard of it.
    fn unknown(&mut self, id: Id, step: &Step) {
        let rots = self.rots();
        let known = self.known(id);
        known.murky |= step.writes();
        known.absent &= !step.writes();
        known.there &= !step.removes() && !rots;
    }

    fn begin(&mut self, by: usize, step: &Step) {
        let (door, command) = step.command(|id| (self.content(id), self.len(id)));
        self.tally.door(door);
        if step.writes() {
            for id in step.ids() {
                let known = self.known(id);
                (known.begun, known.absent) = (true, false);
            }
        }
        self.tell(by, &command);
    }

    /// What somebody has said, where these blocks `met` what another one did.
    fn judge(&mut self, by: usize, step: &Step, said: &str, met: &BTreeSet<Id>) -> Law {
        match step {
            Step::Put { .. } => self.judge_put(by, step, said, met),
            Step::Get { .. } => self.judge_get(by, step, said, met),
            Step::Prefetch { .. } => {
                for id in step.ids() {
                    let rots = self.rots();
                    self.known(id).there &= !rots;
                }
                Ok(())
            }
            Step::Remove { .. } | Step::Clear { .. } => {
                let done = said.starts_with("removed");
                law!(done || !self.is_calm(by), "{step:?}: {said}");
                for id in step.ids() {
                    let known = self.known(id);
                    known.there = false;
                    known.absent = done && !known.murky && !met.contains(&id);
                }
                Ok(())
            }
        }
    }

    fn judge_put(&mut self, by: usize, step: &Step, said: &str, met: &BTreeSet<Id>) -> Law {
        let all: Vec<&str> = said.split(' ').collect();
        let ids = step.ids();
        law!(
            all.len() == ids.len() || !self.is_calm(by),
            "{step:?}: {said}"
        );
        for (place, id) in ids.into_iter().enumerate() {
            let stored = all.get(place) == Some(&"Done");
            let roomy = self.shape.roomy;
            let calm = self.is_calm(by);
            let known = self.known(id);
            // What rotted and was not read is there, for all that anybody knows.
            known.there |= stored && roomy && !known.rotted && !met.contains(&id);
            known.murky |= !stored && !calm;
        }
        Ok(())
    }

    fn judge_get(&mut self, by: usize, step: &Step, said: &str, met: &BTreeSet<Id>) -> Law {
        let all: Vec<&str> = said.split(' ').collect();
        let ids = step.ids();
        law!(
            all.len() == ids.len() || !self.is_calm(by),
            "{step:?}: {said}"
        );
        for (said, id) in all.into_iter().zip(ids) {
            self.is_right(id, said)?;
            let known = self.known(id).clone();
            let done = said.starts_with("Done=");
            if done {
                law!(known.begun, "{id:?} was read, and nobody wrote it");
                let hidden = self.shape.cached || met.contains(&id);
                law!(
                    !known.absent || hidden,
                    "{id:?} was read, which is removed: {known:?}"
                );
            } else if known.there && !met.contains(&id) && self.is_calm(by) {
                // Another one has stored it, or it was left alone for a while.
                self.soon(|fleet| fleet.comes(by, id))?;
            }
            if (known.rotted || self.rots()) && !done {
                // Read, it is gone.
                self.known(id).there = false;
            }
        }
        Ok(())
    }

    /// Whatever else: no wrong bytes.
    fn is_right(&self, id: Id, said: &str) -> Law {
        if let Some(found) = said.strip_prefix("Done=") {
            let right = hash(&content(self.content(id), self.len(id) as usize)).to_string();
            law!(found == right, "WRONG BYTES: {id:?} is nobody's");
        }
        Ok(())
    }

    /// One gets a block.
    fn comes(&mut self, by: usize, id: Id) -> Law {
        let command = format!("get {} all {}:{}", id.0, id.1, self.len(id));
        let said = self.ask(by, &command)?;
        self.is_right(id, &said)?;
        let known = self.known(id).clone();
        law!(
            said.starts_with("Done="),
            "LOST: {id:?}, acknowledged, does not come to {by}: {said}, {known:?}"
        );
        Ok(())
    }

    pub fn read_all(&mut self, by: usize) -> Law {
        for ns in 0..NAMESPACES as u8 {
            let keys: Vec<u16> = (0..KEYS as u16).collect();
            self.act(by, &Step::Get { ns, keys }, &Meanwhile::Nothing)?;
        }
        Ok(())
    }

    /// What is missing can be written, whatever has happened to it: a first put may find what
    /// rotted, and a get is what notices.
    pub fn write_all(&mut self, by: usize) -> Law {
        self.tally.door("final puts");
        // Within what is there in any case.
        for id in (0..4).map(|key| (0, key)) {
            self.known(id).begun = true;
            let put = format!(
                "put {} {}:{}:{}",
                id.0,
                id.1,
                self.content(id),
                self.len(id)
            );
            self.soon(|fleet| {
                let said = fleet.ask(by, &put)?;
                let len = fleet.len(id);
                law!(
                    said == "Done",
                    "{id:?}, {len} bytes, is not stored at last: {said}"
                );
                fleet.comes(by, id)
            })?;
        }
        Ok(())
    }

    fn rot(&mut self, id: Id, at: u64) {
        let identity = Fleet::identity(id);
        let Some(file) = posix::file_of(&self.root(), &identity) else {
            return;
        };
        // What is being written anew could be torn by us, not by a medium.
        if self.known(id).murky || !posix::rot(&self.root(), &identity, at) {
            return;
        }
        self.tally
            .fault(if self.shape.keyed { "forgery" } else { "rot" });
        if let Some(server) = self.server.as_ref().filter(|_| at.is_multiple_of(2)) {
            // As somebody leaves it who copies objects by other means: the header is all it has.
            for beside in server.beside(&file) {
                let _or_none = fs::remove_file(beside);
            }
        }
        let known = self.known(id);
        (known.there, known.rotted) = (false, true);
    }

    fn begin_trouble(&mut self, kind: u8, count: usize) {
        let Some(server) = &self.server else {
            return;
        };
        let all = [
            ("busy", Trouble::Answer(503, "SlowDown")),
            ("refused", Trouble::Answer(403, "AccessDenied")),
            ("gone", Trouble::Answer(404, "NoSuchKey")),
            ("changed", Trouble::Answer(412, "PreconditionFailed")),
            ("silence", Trouble::Silence),
            ("connection closed", Trouble::Closed),
            ("slow", Trouble::Slow(Duration::from_millis(300))),
            ("half a body", Trouble::Half),
            ("longer body", Trouble::Longer),
            ("other version", Trouble::OtherVersion),
            ("body rotted", Trouble::Rot),
            ("unanswered", Trouble::Unanswered),
            ("answer lost", Trouble::Lost),
            ("no conditions", Trouble::NoConditions),
        ];
        let (name, trouble) = all[usize::from(kind) % all.len()].clone();
        self.tally.fault(name);
        self.trouble = true;
        if name == "body rotted" {
            self.changing += count;
        }
        // Of the fleet's own objects too: what it counts, and who collects.
        let within = if kind >= 128 { "/blocks/" } else { "/kv/" };
        server.trouble(None, within, count, trouble);
    }
}
