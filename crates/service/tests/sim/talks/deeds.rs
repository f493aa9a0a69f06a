//! What engines with sessions are asked, and what they may answer.

use std::thread::sleep;
use std::time::Duration;

use super::circle::Circle;
use super::steps::{Deed, Meanwhile, Step, TALKERS};
use super::words::{Come, Talk};
use crate::world::{Law, law};

/// Under what a call was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    /// Nothing else has happened.
    Nothing,
    /// Another engine has done something.
    Other,
    /// Its owner was killed.
    Fault,
}

impl Circle {
    pub fn perform(&mut self, deed: &Deed) -> Law {
        match deed {
            Deed::Do {
                by,
                step,
                meanwhile,
            } => self.act(usize::from(*by), step, meanwhile),
            Deed::Rot { which, at } => {
                if self.rot(usize::from(*which), usize::from(*at)) {
                    self.tally.fault("rot of a session");
                    self.rotted = true;
                }
                Ok(())
            }
            Deed::Evict { which } => {
                if self.evict(usize::from(*which)) {
                    self.tally.fault("eviction of a part");
                    // What is acknowledged from now on is there all the same.
                    self.forget();
                }
                Ok(())
            }
            Deed::Disk { kib } => {
                let full = kib.filter(|kib| crate::disk::leave(Some(u64::from(*kib) << 10)));
                match full {
                    Some(_) => {
                        self.tally.fault("full disk");
                        (self.full, self.was_full) = (true, true);
                    }
                    None => {
                        crate::disk::leave(None);
                        self.full = false;
                    }
                }
                Ok(())
            }
            Deed::Reopen { by } => {
                let by = usize::from(*by);
                if by < TALKERS {
                    self.close(by)?;
                    return self.open(by);
                }
                if self.is_served() && !self.full {
                    self.close_owner()?;
                    self.open_owner()?;
                    self.is_found()?;
                }
                Ok(())
            }
        }
    }

    /// Says what a step is in words, and what of it counts from its beginning on.
    fn begin(&mut self, by: usize, step: &Step) {
        let command = match step {
            Step::Save {
                talk,
                kind,
                created,
            } => {
                self.tally.door("save");
                self.known(talk.tokens()).begun.insert(u64::from(*kind));
                format!("save {} {kind} {created}", talk.word())
            }
            Step::Ask {
                talk,
                more,
                anew,
                text,
            } => {
                self.tally.door("restore");
                let how = if *anew { "anew" } else { "known" };
                let by = if *text { "text" } else { "tokens" };
                format!("ask {} {more} {how} {by}", talk.word())
            }
            Step::Refresh => {
                self.tally.door("refresh");
                "refresh".into()
            }
            Step::Remove { which } => {
                self.tally.door("remove session");
                format!("remove {which}")
            }
            Step::Verify => {
                self.tally.door("verify");
                "verify".into()
            }
            Step::Travel { which, .. } => {
                self.tally.door("export");
                format!("export {which} {}", self.file("one.kvs").display())
            }
        };
        self.tell(by, &command);
    }

    fn act(&mut self, by: usize, step: &Step, meanwhile: &Meanwhile) -> Law {
        if self.talkers[by].is_none() {
            self.open(by)?;
        }
        self.begin(by, step);
        match meanwhile {
            Meanwhile::Nothing => {
                let said = self.hear(by)?;
                self.judge(by, step, &said, Met::Nothing)
            }
            Meanwhile::Killed(after) => {
                self.tally.fault("talker killed");
                sleep(Duration::from_micros(u64::from(*after)));
                if let Some(mut worker) = self.talkers[by].take() {
                    worker.kill();
                }
                // Nobody has said what it came to.
                self.gone.clear();
                if matches!(step, Step::Remove { .. }) {
                    self.forget();
                }
                if !self.full {
                    self.open(by)?;
                }
                Ok(())
            }
            Meanwhile::OwnerKilled(after) => {
                sleep(Duration::from_micros(u64::from(*after)));
                if !self.is_served() || self.full {
                    let said = self.hear(by)?;
                    return self.judge(by, step, &said, Met::Nothing);
                }
                self.tally.fault("owner killed");
                if let Some(mut owner) = self.owner.take() {
                    owner.kill();
                }
                self.ended();
                self.open_owner()?;
                let said = self.hear(by)?;
                self.judge(by, step, &said, Met::Fault)?;
                if !self.lasts() {
                    self.forget();
                }
                self.is_found()
            }
            Meanwhile::Other(other) => {
                self.tally.door("two at once");
                let next = (by + 1) % TALKERS;
                if self.talkers[next].is_none() {
                    self.open(next)?;
                }
                self.begin(next, other);
                let (mine, theirs) = (self.hear(by)?, self.hear(next)?);
                self.judge(by, step, &mine, Met::Other)?;
                self.judge(next, other, &theirs, Met::Other)?;
                let removes = |step: &Step| matches!(step, Step::Remove { .. });
                if removes(step) || removes(other) {
                    // What was acknowledged in that moment may have lost a part.
                    for step in [step, other] {
                        if let Step::Save { talk, .. } = step {
                            self.known(talk.tokens()).there = false;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    fn judge(&mut self, by: usize, step: &Step, said: &str, met: Met) -> Law {
        let calm = met == Met::Nothing && !self.full;
        law!(
            !said.starts_with("failed") || met == Met::Fault || self.full,
            "{step:?}: {said}"
        );
        match step {
            Step::Save { talk, kind, .. } => self.judge_save(by, (*talk, *kind), said, met),
            Step::Ask {
                talk, more, anew, ..
            } => {
                let mut prompt = talk.tokens();
                prompt.extend(0..u32::from(*more));
                let all = self.judge_found(&prompt, said)?;
                match calm && *anew {
                    true => self.judge_best(&prompt, step, &all),
                    false => Ok(()),
                }
            }
            Step::Refresh | Step::Verify => Ok(()),
            Step::Remove { .. } => {
                self.judge_remove(said, met);
                Ok(())
            }
            Step::Travel { to, .. } => {
                let words: Vec<&str> = said.split(' ').collect();
                if words[0] != "exported" || met != Met::Nothing {
                    return Ok(());
                }
                let (kind, tokens) = (words[1].parse().unwrap(), tokens_of(words[2]));
                law!(
                    self.known(tokens.clone()).begun.contains(&kind),
                    "{tokens:?} of kind {kind} was exported, and nobody has saved it"
                );
                self.arrive(usize::from(*to), tokens)
            }
        }
    }

    /// A file is saved by somebody.
    fn arrive(&mut self, to: usize, tokens: Vec<u32>) -> Law {
        if self.talkers[to].is_none() {
            self.open(to)?;
        }
        self.tally.door("import");
        let command = format!("import {}", self.file("one.kvs").display());
        let said = self.ask(to, &command)?;
        let keeps = self.keeps_all();
        law!(said.starts_with("saved ") || !keeps, "import: {said}");
        match said.strip_prefix("saved ") {
            Some(id) => {
                self.gone.remove(id);
                self.known(tokens).there = true;
            }
            None => self.gone.clear(),
        }
        Ok(())
    }

    fn judge_save(&mut self, by: usize, (talk, kind): (Talk, u8), said: &str, met: Met) -> Law {
        if let Some(id) = said.strip_prefix("saved ") {
            self.gone.remove(id);
            self.known(talk.tokens()).there = true;
            return Ok(());
        }
        if met != Met::Nothing || !self.keeps_all() {
            // It may be there.
            self.gone.clear();
            return Ok(());
        }
        // What another has removed lately one with a depot of its own may have taken for there: it
        // knows now.
        law!(!self.is_served(), "a save ended with {said}");
        let again = self.ask(by, &format!("save {} {kind} 9", talk.word()))?;
        law!(
            again.starts_with("saved "),
            "a save ended with {said}, and again with {again}"
        );
        self.judge_save(by, (talk, kind), &again, met)
    }

    fn judge_remove(&mut self, said: &str, met: Met) {
        let Some(removed) = said.strip_prefix("removed ") else {
            if met == Met::Fault || self.full {
                self.forget();
            }
            return;
        };
        let (id, tokens) = removed.split_once(' ').unwrap();
        self.known(tokens_of(tokens)).there = false;
        // One that is saved at that time may be the same.
        if met == Met::Nothing && (self.is_served() || !self.shape.cached) {
            self.gone.insert(id.to_owned());
        }
    }

    /// What was found, and that somebody has saved it so.
    pub fn judge_found(&mut self, prompt: &[u32], said: &str) -> Law<Vec<Come>> {
        let Some(all) = said.strip_prefix("asked") else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for word in all.split_whitespace() {
            let each: Vec<&str> = word.split(':').collect();
            let come = Come {
                id: each[0].to_owned(),
                tokens: each[1].parse().unwrap(),
                kind: each[2].parse().unwrap(),
                whole: each[3] == "whole",
            };
            let known = self.known(prompt[..come.tokens].to_vec());
            law!(
                known.begun.contains(&come.kind),
                "{come:?} was found, and nobody has saved it"
            );
            law!(
                !self.gone.contains(&come.id),
                "{come:?} was found, which is removed"
            );
            found.push(come);
        }
        Ok(found)
    }

    /// The longest that was acknowledged is found, and whole.
    fn judge_best(&self, prompt: &[u32], step: &Step, found: &[Come]) -> Law {
        let by_text = matches!(step, Step::Ask { text: true, .. });
        if !self.keeps_all() || by_text {
            return Ok(());
        }
        let lost = found.iter().find(|come| !come.whole);
        // Who has just removed a part of it, or is about to, has not said so.
        let there = |circle: &Circle, tokens: usize| {
            let known = circle.known.get(&prompt[..tokens]);
            known.is_some_and(|known| known.there)
        };
        if let Some(lost) = lost {
            law!(
                !there(self, lost.tokens),
                "LOST: {lost:?}, acknowledged, has lost a part"
            );
        }
        let longest = (1..=prompt.len()).rev().find(|len| there(self, *len));
        let best = found.iter().find(|come| come.whole);
        let come = best.map_or(0, |come| come.tokens);
        law!(
            longest.is_none_or(|longest| come >= longest),
            "LOST: {longest:?} tokens were acknowledged, and {found:?} was found"
        );
        Ok(())
    }
}

fn tokens_of(word: &str) -> Vec<u32> {
    word.split(',').map(|one| one.parse().unwrap()).collect()
}
