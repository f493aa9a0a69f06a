//! Sessions over tiers that answer late, too late or not at all, that refuse, fail and rot: in the
//! schedule of the histories of such tiers, without threads or clocks. Two engines share a depot,
//! each with an index of its own, and one does something while a call of the other waits.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use kvdepot_session::{Error, Sessions, export, import};
use kvdepot_store::{Identity, Key, NamespaceId};
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::shrink::changed;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};

use super::circle::Known;
use super::words::{self, Come, KINDS, Talk};
use crate::tiers::memory::Bytes;
use crate::tiers::shelf::Mood;
use crate::tiers::steps::{Shape, mood, plain_shape};
use crate::tiers::world::World;
use crate::world::{Law, law};

/// Engines.
const ENGINES: usize = 2;

/// Histories of sessions over late tiers.
pub struct LateTalks;

#[derive(Clone, Debug)]
pub enum Step {
    Save {
        by: u8,
        talk: Talk,
        kind: u8,
        created: u8,
    },
    Ask {
        by: u8,
        talk: Talk,
        more: u8,
        anew: bool,
        text: bool,
    },
    Refresh {
        by: u8,
    },
    Remove {
        by: u8,
        which: u8,
    },
    Travel {
        by: u8,
        which: u8,
        to: u8,
    },
    Mood {
        tier: u8,
        mood: Mood,
    },
    Rot {
        tier: u8,
        which: u16,
        at: u32,
    },
    Fail {
        count: u8,
    },
    Pass {
        ms: u32,
    },
    Background {
        count: u8,
    },
    Calm,
    Reopen,
}

fn engine_step(rng: &mut Rng) -> Step {
    let by = rng.below(ENGINES as u64) as u8;
    let talk = Talk::draw(rng);
    match rng.below(16) {
        0..7 => Step::Save {
            by,
            talk,
            kind: rng.below(KINDS) as u8,
            created: rng.below(4) as u8,
        },
        7..12 => Step::Ask {
            by,
            talk,
            more: rng.below(20) as u8,
            anew: !rng.once_in(3),
            text: rng.once_in(4),
        },
        12 => Step::Refresh { by },
        13 | 14 => Step::Remove {
            by,
            which: rng.bits() as u8,
        },
        _ => Step::Travel {
            by,
            which: rng.bits() as u8,
            to: rng.below(ENGINES as u64) as u8,
        },
    }
}

fn step(rng: &mut Rng, rots: bool) -> Step {
    let tier = rng.below(2) as u8;
    match rng.below(26) {
        0 | 1 => Step::Mood {
            tier,
            mood: mood(rng),
        },
        2 if rots => Step::Rot {
            tier,
            which: rng.bits() as u16,
            at: rng.bits() as u32,
        },
        3 => Step::Fail {
            count: rng.between(1, 4) as u8,
        },
        4 => Step::Pass {
            ms: *rng.pick(&[1, 600, 2000, 30_000, 3_900_000]),
        },
        5 => Step::Background {
            count: rng.between(1, 6) as u8,
        },
        6..8 => Step::Calm,
        8 => Step::Reopen,
        _ => engine_step(rng),
    }
}

impl Subject for LateTalks {
    type Shape = Shape;
    type Step = Step;

    fn name(&self) -> &'static str {
        "late-talks"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Step>) {
        let shape = plain_shape(rng);
        let rots = rng.once_in(3);
        let count = rng.between(6, 50);
        (shape, (0..count).map(|_| step(rng, rots)).collect())
    }

    fn run(&self, history: &History<Shape, Step>, tally: &mut Tally) -> Law {
        crate::log::expect_broken_ends(true);
        let late = Rc::new(Late::new(history.seed, &history.shape));
        let weak = Rc::downgrade(&late);
        late.world.enter(move || {
            weak.upgrade().iter().for_each(|late| late.meanwhile());
        });
        let ran = late.run(&history.steps);
        let ran = late.broken.take().map_or(ran, Err);
        if ran.is_err() {
            late.nested.set(9);
            let all = (late.engines.take(), late.world.depot.take());
            let _broken = catch_unwind(AssertUnwindSafe(|| drop(all)));
        }
        late.world.leave();
        crate::log::expect_broken_ends(false);
        *tally = std::mem::take(tally).plus(&late.world.tally.borrow());
        ran
    }

    fn simpler(&self, _: &Step) -> Vec<Step> {
        Vec::new()
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        changed(
            shape,
            &[
                |shape| shape.bytes = Bytes::Memory,
                |shape| shape.limits = None,
                |shape| shape.pipeline = "Far",
                |shape| shape.mood = Mood::default(),
                |shape| shape.mood.broken = 0,
                |shape| shape.mood.refuses = 0,
                |shape| shape.mood.silent = 0,
                |shape| shape.mood.late = 0,
            ],
        )
    }
}

struct Late {
    world: World,
    engines: RefCell<Vec<Rc<Sessions>>>,
    known: RefCell<BTreeMap<Vec<u32>, Known>>,
    gone: RefCell<BTreeSet<String>>,
    rotted: Cell<bool>,
    /// Calls inside of one another now, and inner ones so far.
    nested: Cell<u32>,
    inner: Cell<u64>,
    broken: RefCell<Option<String>>,
}

impl Late {
    fn new(seed: u64, shape: &Shape) -> Late {
        Late {
            world: World::new(seed, shape),
            engines: RefCell::default(),
            known: RefCell::default(),
            gone: RefCell::default(),
            rotted: Cell::new(false),
            nested: Cell::new(0),
            inner: Cell::new(0),
            broken: RefCell::default(),
        }
    }

    fn run(&self, steps: &[(u64, Step)]) -> Law {
        self.world.reseed(0);
        self.world.open()?;
        self.start()?;
        for shelf in &self.world.shelves {
            shelf.set_mood(self.world.shape.mood);
            shelf.may_remove_all();
        }
        self.world.storm();
        for (number, step) in steps {
            watch::at(*number);
            self.world.reseed(*number);
            let said = |broken| format!("step {number}, {step:?}: {broken}");
            crate::log::step(step, false);
            self.perform(step).map_err(said)?;
            if self.broken.borrow().is_some() {
                return Ok(());
            }
        }
        watch::at(0);
        self.world.reseed(0);
        self.finish()
            .map_err(|broken| format!("at the end: {broken}"))
    }

    /// Engines over the depot that is open: all that is stored is read, where tiers answer.
    fn start(&self) -> Law {
        let open = |_| Sessions::open(self.world.owner(), &words::spec()).map(Rc::new);
        let opened: Result<Vec<_>, Error> = self.alone(|| (0..ENGINES).map(open).collect());
        let opened = match opened {
            Err(_) if !self.world.calm.get() => {
                // Whoever begins needs a listing.
                self.calm()?;
                self.alone(|| (0..ENGINES).map(open).collect())
            }
            opened => opened,
        };
        *self.engines.borrow_mut() = opened.map_err(|error| format!("open sessions: {error}"))?;
        Ok(())
    }

    /// Something else happens while a call waits.
    fn meanwhile(&self) {
        if self.nested.get() > 1 || self.broken.borrow().is_some() {
            return;
        }
        let step = {
            let Ok(mut rng) = self.world.rng.try_borrow_mut() else {
                return;
            };
            if !rng.once_in(12) {
                return;
            }
            match rng.below(3) {
                0 => Step::Background { count: 1 },
                _ => engine_step(&mut rng),
            }
        };
        self.nested.set(self.nested.get() + 1);
        self.inner.set(self.inner.get() + 1);
        crate::log::step(&step, true);
        let done = self.perform(&step);
        self.nested.set(self.nested.get() - 1);
        if let Err(broken) = done {
            let broken = format!("{step:?}, while a call waited: {broken}");
            self.broken.borrow_mut().get_or_insert(broken);
        }
    }

    fn alone<T>(&self, call: impl FnOnce() -> T) -> T {
        self.nested.set(self.nested.get() + 9);
        let answer = call();
        self.nested.set(self.nested.get() - 9);
        answer
    }

    fn engine(&self, by: u8) -> Rc<Sessions> {
        Rc::clone(&self.engines.borrow()[usize::from(by) % ENGINES])
    }

    fn is_calm(&self) -> bool {
        self.world.calm.get() && !self.rotted.get()
    }

    fn know(&self, tokens: &[u32], change: impl FnOnce(&mut Known)) {
        change(self.known.borrow_mut().entry(tokens.to_vec()).or_default());
    }

    fn is_there(&self, tokens: &[u32]) -> bool {
        let known = self.known.borrow();
        known.get(tokens).is_some_and(|known| known.there)
    }

    fn perform(&self, step: &Step) -> Law {
        let inner = self.inner.get();
        // Whether nothing else has happened since it began.
        let was_alone = || self.inner.get() == inner && self.nested.get() == 0;
        match step {
            Step::Save {
                by,
                talk,
                kind,
                created,
            } => {
                let how = (u64::from(*kind), u64::from(*created));
                self.save(*by, &talk.tokens(), how, &was_alone)
            }
            Step::Ask {
                by,
                talk,
                more,
                anew,
                text,
            } => {
                let mut prompt = talk.tokens();
                prompt.extend(0..u32::from(*more));
                self.ask(*by, &prompt, (*anew, *text), &was_alone)
            }
            Step::Refresh { by } => {
                self.world.door("refresh");
                self.ended("refresh", self.engine(*by).refresh()).map(drop)
            }
            Step::Remove { by, which } => self.remove(*by, *which, &was_alone),
            Step::Travel { by, which, to } => self.travel(*by, *which, *to, &was_alone),
            Step::Mood { tier, mood } => {
                self.world.storm();
                self.world.fault("mood");
                let shelves = &self.world.shelves;
                shelves[usize::from(*tier) % shelves.len()].set_mood(*mood);
                Ok(())
            }
            Step::Rot { tier, which, at } => {
                self.rot(*tier, *which, *at);
                Ok(())
            }
            Step::Fail { count } => {
                self.world.storm();
                self.world.fault("lane");
                let fail = &self.world.turns.fail;
                fail.store(u64::from(*count), std::sync::atomic::Ordering::Relaxed);
                Ok(())
            }
            Step::Pass { ms } => {
                let span = Duration::from_millis((*ms).into());
                self.world.schedule.pass(span);
                Ok(())
            }
            Step::Background { count } => {
                (0..*count).for_each(|_| {
                    let owner = self.world.owner();
                    let _did = owner.step_evictor() || owner.step_background();
                });
                Ok(())
            }
            Step::Calm => self.calm(),
            Step::Reopen => self.reopen(),
        }
    }

    fn calm(&self) -> Law {
        self.alone(|| self.world.calm_down())
    }

    fn reopen(&self) -> Law {
        if self.nested.get() > 0 {
            return Ok(());
        }
        let was_calm = self.world.calm.get();
        self.world.storm();
        drop(self.engines.take());
        self.alone(|| self.world.close())?;
        self.world.open()?;
        if was_calm {
            self.calm()?;
        }
        self.start()
    }

    /// What a call has answered, where it has not failed because a tier did.
    fn ended<T>(&self, what: &str, answer: Result<T, Error>) -> Law<Option<T>> {
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(error) if words::is_not_stored(&error) || words::is_gone(&error) => Ok(None),
            Err(error) => {
                law!(!self.is_calm(), "{what}: {error}");
                Ok(None)
            }
        }
    }

    fn save(&self, by: u8, tokens: &[u32], how: (u64, u64), was_alone: &dyn Fn() -> bool) -> Law {
        self.world.door("save");
        let was_calm = self.is_calm();
        self.know(tokens, |known| _ = known.begun.insert(how.0));
        let saved = words::save(&self.engine(by), tokens, how, || self.meanwhile());
        let alone = was_alone();
        match self.ended("save", saved)? {
            Some(saved) => {
                self.gone.borrow_mut().remove(&saved.id.to_string());
                // What another does in that moment may undo it.
                self.know(tokens, |known| known.there = alone);
            }
            None => {
                law!(!(was_calm && self.is_calm() && alone), "nothing was saved");
                // It may be there.
                self.gone.borrow_mut().clear();
            }
        }
        Ok(())
    }

    fn ask(
        &self,
        by: u8,
        prompt: &[u32],
        (anew, text): (bool, bool),
        was_alone: &dyn Fn() -> bool,
    ) -> Law {
        self.world.door("restore");
        let was_calm = self.is_calm();
        let engine = self.engine(by);
        if anew && self.ended("refresh", engine.refresh())?.is_none() {
            return Ok(());
        }
        let asked = words::ask(&engine, prompt, text)?;
        let Some(found) = self.ended("ask", asked)? else {
            return Ok(());
        };
        for come in &found {
            let tokens = &prompt[..come.tokens];
            let begun = self.known.borrow().get(tokens).cloned().unwrap_or_default();
            law!(
                begun.begun.contains(&come.kind),
                "{come:?} was found, and nobody has saved it"
            );
            law!(
                !self.gone.borrow().contains(&come.id),
                "{come:?} was found, which is removed"
            );
        }
        match was_calm && self.is_calm() && was_alone() && anew && !text {
            true => self.is_best(prompt, &found),
            false => Ok(()),
        }
    }

    /// The longest that was acknowledged is found, and whole.
    fn is_best(&self, prompt: &[u32], found: &[Come]) -> Law {
        let mut lens = (1..=prompt.len()).rev();
        let longest = lens.find(|len| self.is_there(&prompt[..*len]));
        let best = found.iter().find(|come| come.whole);
        let come = best.map_or(0, |come| come.tokens);
        law!(
            longest.is_none_or(|longest| come >= longest),
            "LOST: {longest:?} tokens were acknowledged, and {found:?} was found"
        );
        Ok(())
    }

    fn remove(&self, by: u8, which: u8, was_alone: &dyn Fn() -> bool) -> Law {
        let engine = self.engine(by);
        let Some(id) = any(&engine, which) else {
            return Ok(());
        };
        self.world.door("remove session");
        let Some(manifest) = self.ended("manifest", engine.manifest(id))? else {
            return Ok(());
        };
        let tokens = manifest.tokens;
        self.know(&tokens, |known| known.there = false);
        let removed = engine.remove(id);
        self.know(&tokens, |known| known.there = false);
        let calm = self.is_calm();
        if self.ended("remove", removed)?.is_some() && calm && was_alone() {
            self.gone.borrow_mut().insert(id.to_string());
        }
        Ok(())
    }

    fn travel(&self, by: u8, which: u8, to: u8, was_alone: &dyn Fn() -> bool) -> Law {
        let (from, to) = (self.engine(by), self.engine(to));
        let Some(id) = any(&from, which) else {
            return Ok(());
        };
        self.world.door("export");
        let file = self
            .world
            .dir
            .path()
            .join(format!("{}.kvs", self.inner.get()));
        let Some(manifest) = self.ended("manifest", from.manifest(id))? else {
            return Ok(());
        };
        let exported = export(&from, id, &file);
        if self.ended("export", exported)?.is_none() {
            return Ok(());
        }
        self.world.door("import");
        let imported = import(&to, &file);
        let alone = was_alone();
        match self.ended("import", imported)? {
            Some(imported) => {
                self.gone.borrow_mut().remove(&imported.id.to_string());
                self.know(&manifest.tokens, |known| known.there = alone);
            }
            None => self.gone.borrow_mut().clear(),
        }
        Ok(())
    }

    fn rot(&self, tier: u8, which: u16, at: u32) {
        let all = self.alone(|| self.blocks());
        if all.is_empty() {
            return;
        }
        let (namespace, key) = all[usize::from(which) % all.len()];
        let shelves = &self.world.shelves;
        let shelf = &shelves[usize::from(tier) % shelves.len()];
        if shelf.rot(&Identity { namespace, key }, u64::from(at)) {
            self.world.fault("rot of a session");
            self.rotted.set(true);
        }
    }

    /// All blocks of sessions that are known of.
    fn blocks(&self) -> Vec<(NamespaceId, Key)> {
        let owner = self.world.owner();
        let spaces = owner.namespaces().unwrap_or_default();
        let mut all = Vec::new();
        for space in spaces {
            let blocks = owner.namespace_by_id(space.id).blocks();
            let blocks = blocks.unwrap_or_default().into_iter();
            all.extend(blocks.map(|(key, _)| (space.id, key)));
        }
        all.sort();
        all
    }

    /// Once all tiers answer, what was acknowledged comes back, also after the next opening.
    fn finish(&self) -> Law {
        self.calm()?;
        self.all_come()?;
        self.reopen()?;
        self.all_come()?;
        self.alone(|| {
            drop(self.engines.take());
            let held = self.world.owner().stats();
            let held = held.tiers.iter();
            let held: u64 = held
                .map(|tier| tier.pinned_blocks + tier.reserved_blocks)
                .sum();
            law!(held == 0, "{held} blocks stay pinned or reserved");
            self.world.close()
        })
    }

    fn all_come(&self) -> Law {
        self.alone(|| {
            let all: Vec<Vec<u32>> = self.known.borrow().keys().cloned().collect();
            for tokens in all {
                let alone = || true;
                self.ask(0, &tokens, (true, false), &alone)?;
            }
            Ok(())
        })
    }
}

fn any(engine: &Sessions, which: u8) -> Option<kvdepot_session::Id> {
    let all = engine.list();
    (!all.is_empty()).then(|| all[usize::from(which) % all.len()].id)
}
