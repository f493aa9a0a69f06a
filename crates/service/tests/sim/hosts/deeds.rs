//! What is done between hosts, and what may come of it.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::Duration;

use kvdepot_testkit::bytes::content;
use kvdepot_testkit::etcd::Etcd;
use kvdepot_testkit::proxy::{Act, Chunk, Way};
use kvdepot_testkit::sim::twin::Id;

use super::ring::Ring;
use super::steps::{Deed, Meanwhile};
use crate::processes::players::hash;
use crate::shared::steps::Step;
use crate::world::{Law, law};

/// Bytes that come together where payloads do.
const PAYLOAD: usize = 2000;

/// What becomes of bytes on their way.
type Rule = Box<dyn FnMut(Chunk, &[u8]) -> Act + Send>;

/// Bytes by which a payload is found in a share.
const BEGIN: usize = 64;

impl Ring {
    pub fn perform(&mut self, deed: &Deed) -> Law {
        let count = self.count();
        let host = |who: u8| usize::from(who) % count;
        match deed {
            Deed::Do {
                by,
                step,
                loads,
                meanwhile,
            } => match (0..count)
                .map(|more| (host(*by) + more) % count)
                .find(|host| self.hosts[*host].is_some())
            {
                Some(by) => self.act(by, step, *loads, meanwhile),
                None => self.open(host(*by), false),
            },
            Deed::Trouble {
                from,
                to,
                kind,
                number,
            } => {
                self.begin_trouble(host(*from), host(*to), *kind, u64::from(*number));
                Ok(())
            }
            Deed::Calm => {
                self.calm();
                Ok(())
            }
            Deed::Cut => {
                self.tally.fault("all connections cut");
                self.quiet = false;
                self.ways.values().for_each(|way| way.cut_all());
                Ok(())
            }
            Deed::NoEtcd => {
                if let Some(etcd) = &self.etcd {
                    self.tally.fault("etcd stopped");
                    etcd.stop();
                    (self.trouble, self.quiet) = (true, false);
                }
                Ok(())
            }
            Deed::Leave { who, killed } => match self.hosts[host(*who)].is_some() {
                true => self.leave(host(*who), *killed),
                false => Ok(()),
            },
            Deed::Back { who, older } => match self.hosts[host(*who)].is_none() {
                true => self.open(host(*who), *older),
                false => Ok(()),
            },
            Deed::Rot { who, ns, key, at } => {
                self.rot(host(*who), (*ns, u16::from(*key)), u64::from(*at));
                Ok(())
            }
            Deed::Rest(time) => {
                sleep(Duration::from_millis(u64::from(*time)));
                Ok(())
            }
        }
    }

    fn act(&mut self, by: usize, step: &Step, loads: bool, meanwhile: &Meanwhile) -> Law {
        self.begin(by, step, loads);
        match meanwhile {
            Meanwhile::Nothing => {
                let said = self.hear(by)?;
                self.judge(by, step, &said, &BTreeSet::new())
            }
            Meanwhile::Killed(who, after) => {
                let who = usize::from(*who) % self.count();
                sleep(Duration::from_micros(u64::from(*after)));
                if who == by {
                    for id in step.ids() {
                        let known = self.known(id);
                        known.murky |= step.writes();
                        known.absent &= !step.writes();
                        if step.removes() {
                            known.copies = 0;
                        }
                    }
                    return self.leave(by, true);
                }
                let was_quiet = self.quiet;
                self.quiet = false;
                if let Some(worker) = &mut self.hosts[who] {
                    worker.kill();
                }
                let said = self.hear(by)?;
                // Whether it had as many homes as if nothing had happened: one of them is lost.
                self.quiet = was_quiet;
                let met = match self.shape.lasts || self.shape.replicas > 1 {
                    true => BTreeSet::new(),
                    false => step.ids().into_iter().collect(),
                };
                let judged = match step.writes() {
                    true => self.judge_put(step, &said, &met),
                    false => {
                        self.quiet = false;
                        self.judge(by, step, &said, &step.ids().into_iter().collect())
                    }
                };
                self.quiet = false;
                judged?;
                match self.hosts[who].is_some() {
                    true => self.leave(who, true),
                    false => Ok(()),
                }
            }
            Meanwhile::Other(other) => {
                let count = self.count();
                let next = (1..count).map(|more| (by + more) % count);
                let Some(next) = next.into_iter().find(|host| self.hosts[*host].is_some()) else {
                    let said = self.hear(by)?;
                    return self.judge(by, step, &said, &BTreeSet::new());
                };
                self.tally.door("two at once");
                self.begin(next, other, !loads);
                let met: BTreeSet<Id> = step.ids().into_iter().collect();
                let met = other.ids().into_iter().filter(|id| met.contains(id));
                let met: BTreeSet<Id> = met.collect();
                let mine = self.hear(by)?;
                let theirs = self.hear(next)?;
                self.judge(by, step, &mine, &met)?;
                self.judge(next, other, &theirs, &met)
            }
        }
    }

    fn begin(&mut self, by: usize, step: &Step, loads: bool) {
        let (mut door, mut command) = self.command(step);
        if loads && let Step::Get { .. } = step {
            (door, command) = ("load", command.replacen("get", "load", 1));
        }
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
            Step::Put { .. } => self.judge_put(step, said, met),
            Step::Get { .. } => self.judge_get(by, step, said, met),
            Step::Prefetch { .. } => Ok(()),
            Step::Remove { .. } | Step::Clear { .. } => {
                let mut done = said.starts_with("removed");
                if !done && self.quiet && met.is_empty() {
                    // A busy machine may take its time.
                    let command = self.command(step).1;
                    self.soon(|ring| {
                        let said = ring.ask(by, &command)?;
                        law!(said.starts_with("removed"), "{step:?}: {said}");
                        Ok(())
                    })?;
                    done = true;
                }
                for id in step.ids() {
                    let known = self.known(id);
                    known.copies = 0;
                    known.absent = done && !known.murky && !met.contains(&id);
                }
                // Whoever is away has what it had.
                if self.away() > 0 {
                    let all = self.known.values_mut();
                    all.for_each(|known| known.absent = false);
                }
                Ok(())
            }
        }
    }

    fn judge_put(&mut self, step: &Step, said: &str, met: &BTreeSet<Id>) -> Law {
        let all: Vec<&str> = said.split(' ').collect();
        let ids = step.ids();
        law!(all.len() == ids.len() || !self.quiet, "{step:?}: {said}");
        // Where hosts do not answer, or are not known yet, one home is enough.
        let all_known = self.quiet && self.etcd.is_none();
        let homes = match (self.shape.backed, all_known) {
            (true, _) => usize::MAX,
            (false, true) => usize::from(self.shape.replicas).min(self.count()),
            (false, false) => 1,
        };
        for (place, id) in ids.into_iter().enumerate() {
            let stored = all.get(place) == Some(&"Done");
            let roomy = self.shape.roomy;
            let known = self.known(id);
            // What rotted and was not read is there, for all that anybody knows.
            if stored && roomy && !known.rotted && !met.contains(&id) {
                known.copies = known.copies.max(homes);
            }
            known.murky |= !stored;
        }
        Ok(())
    }

    /// Gets blocks, and judges what comes.
    pub fn get(&mut self, by: usize, step: &Step) -> Law {
        self.begin(by, step, false);
        let said = self.hear(by)?;
        self.judge_get(by, step, &said, &BTreeSet::new())
    }

    fn judge_get(&mut self, by: usize, step: &Step, said: &str, met: &BTreeSet<Id>) -> Law {
        let all: Vec<&str> = said.split(' ').collect();
        let ids = step.ids();
        law!(all.len() == ids.len(), "{step:?}: {said}");
        for (said, id) in all.into_iter().zip(ids) {
            self.is_right(id, said)?;
            let known = self.known(id).clone();
            let done = said.starts_with("Done=");
            // What a host had in memory was lost when it left.
            let away = if self.shape.lasts { self.away() } else { 0 };
            let reached = known.copies > away;
            if done {
                law!(known.begun, "{id:?} was read, and nobody wrote it");
                let hidden = self.shape.cached || self.shape.backed || met.contains(&id);
                law!(
                    !known.absent || hidden,
                    "{id:?} was read, which is removed: {known:?}"
                );
            } else if reached && !met.contains(&id) && !self.trouble && !known.rotted {
                // It goes from one host to another, or one was left alone for a while.
                self.soon(|ring| ring.comes(by, id))?;
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
    pub fn comes(&mut self, by: usize, id: Id) -> Law {
        let command = format!("get {} all {}:{}", id.0, id.1, self.len(id));
        let said = self.ask(by, &command)?;
        self.is_right(id, &said)?;
        let known = self.known(id).clone();
        law!(
            said.starts_with("Done="),
            "LOST: {id:?}, acknowledged, does not come to host {by}: {said}, {known:?}"
        );
        Ok(())
    }

    /// Changes a bit of a block in a host's share, where that has it first.
    fn rot(&mut self, host: usize, id: Id, at: u64) {
        let bytes = content(self.content(id), self.len(id) as usize);
        if !self.shape.lasts || bytes.len() < BEGIN || self.known(id).murky {
            return;
        }
        let Ok(share) = std::fs::read(self.share(host)) else {
            return;
        };
        let mut places = share.windows(BEGIN);
        let found = places.position(|some| some[0] == bytes[0] && *some == bytes[..BEGIN]);
        let Some(begin) = found.filter(|begin| share[*begin..].starts_with(&bytes)) else {
            return;
        };
        self.tally.fault("rot in a share");
        let place = at % bytes.len() as u64;
        let file = File::options().write(true).open(self.share(host)).unwrap();
        let other = [bytes[place as usize] ^ 1];
        file.write_all_at(&other, begin as u64 + place).unwrap();
        let known = self.known(id);
        (known.copies, known.rotted) = (0, true);
    }

    pub fn calm(&mut self) {
        self.trouble = false;
        self.etcd.iter().for_each(Etcd::go_on);
        for way in self.ways.values() {
            way.rule(|_, _| Act::Pass);
        }
    }

    fn begin_trouble(&mut self, from: usize, to: usize, kind: u8, number: u64) {
        let way = self
            .ways
            .get(&(from, to))
            .or_else(|| self.ways.get(&(to, to)));
        let Some(way) = way else {
            return;
        };
        (self.trouble, self.quiet) = (true, false);
        let ms = Duration::from_millis;
        let mut seen = 0;
        let mut turn = move || {
            seen += 1;
            seen % (number + 1) == 0
        };
        let (name, mut act): (_, Rule) = match kind % 8 {
            0 => (
                "connection cut",
                Box::new(move |_, some| Act::Cut(some.len() / 2)),
            ),
            1 => ("slow way", Box::new(move |_, _| Act::Delay(ms(number * 5)))),
            2 => (
                "bit changed",
                Box::new(move |_, some| Act::Flip(some.len() as u64 * 8 / (number + 1))),
            ),
            3 => (
                "bytes that come twice",
                Box::new(move |chunk, _| match chunk.way {
                    Way::There if chunk.before > 200 => Act::Late(ms(number * 20)),
                    _ => Act::Pass,
                }),
            ),
            4 => ("silence", Box::new(move |_, _| Act::Delay(ms(2500)))),
            5 => (
                "cut at the end",
                Box::new(move |_, some| Act::Cut(some.len().saturating_sub(1))),
            ),
            // Of several connections some are later than others.
            6 => (
                "other order",
                Box::new(move |chunk, _| Act::Delay(ms((chunk.connection % 4) * number * 4))),
            ),
            _ => (
                "nothing comes back",
                Box::new(move |chunk, _| match chunk.way {
                    Way::Back if chunk.before > 200 => Act::Cut(0),
                    _ => Act::Pass,
                }),
            ),
        };
        self.tally.fault(name);
        // Where a greeting changes there is no connection whose payloads could.
        let least = if name == "bit changed" { PAYLOAD } else { 0 };
        way.rule(move |chunk, some| match some.len() >= least && turn() {
            true => act(chunk, some),
            false => Act::Pass,
        });
    }
}
