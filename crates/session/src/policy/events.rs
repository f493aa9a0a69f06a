//! The policy: events in, answers out.

use std::collections::BTreeMap;
use std::time::Duration;

use super::answer::{Answer, Declined, Reason, Save};
use super::error::Error;
use super::ledger::Ledger;
use super::metrics::Metrics;
use super::settings::Settings;
use super::slot::{Prompt, Slot, SlotId};

/// When to save: one for all slots of an engine, as they share the disk.
///
/// A slot that was not heard of before has nothing live and nothing saved.
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    slots: BTreeMap<SlotId, Slot>,
    /// Saves that were granted and have not ended, by their ids.
    under_way: BTreeMap<u64, UnderWay>,
    ledger: Ledger,
    metrics: Metrics,
    next_id: u64,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    slot: SlotId,
    reason: Reason,
    /// Bytes of the budgets.
    held: u64,
    /// Bytes of the tokens that are neither on disk nor on their way by an earlier save.
    new: u64,
}

impl Policy {
    /// A policy that has seen nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] for a setting that is not allowed.
    pub fn new(settings: Settings) -> Result<Policy, Error> {
        settings.check()?;
        Ok(Policy {
            slots: BTreeMap::new(),
            under_way: BTreeMap::new(),
            ledger: Ledger::new(settings.write_budget_hour, settings.write_budget_day),
            metrics: Metrics::default(),
            next_id: 1,
            settings,
        })
    }

    /// The settings that it was made with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sums since it was made.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Bytes that may be written now, by both budgets and beside the saves under way.
    pub fn bytes_left(&mut self, now: Duration) -> u64 {
        self.ledger.left(now)
    }

    /// Counts bytes that were written at `at`, before this policy was made.
    pub fn recall(&mut self, bytes: u64, at: Duration) {
        self.ledger.record(bytes, at);
    }

    /// A prompt starts in a slot, after what it begins with was restored. What was live there and
    /// does not stay is gone: [`switch`](Policy::switch) comes first.
    pub fn start(&mut self, slot: SlotId, prompt: &Prompt) {
        let slot = self.slots.entry(slot).or_default();
        slot.start(prompt, &self.settings);
    }

    /// The count of live tokens at which prefill should next stop and tell, so that a checkpoint
    /// is of just as many. An engine that does not stop there saves a little later.
    #[must_use]
    pub fn next_stop(&self, slot: SlotId) -> Option<u64> {
        self.slots.get(&slot)?.stop(&self.settings)
    }

    /// Prefill has come to so many live tokens. A step that crosses both the place of a cold
    /// checkpoint and an interval gets the cold one, and the other at the next call, which may be
    /// of the same count.
    pub fn prefill(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        let live = self.slots.entry(slot).or_default();
        live.reach(tokens, &self.settings);
        let Some(target) = live.cold.take_if(|target| *target <= tokens) else {
            return self.continued(slot, now);
        };
        let at = match self.settings.saves_prefixes {
            true => target,
            false => tokens,
        };
        // The engine may have gone far beyond.
        if at > self.settings.cold_max_tokens {
            return self.continued(slot, now);
        }
        match self.ask(slot, at, Reason::Cold, now) {
            Answer::Declined(why) => match self.continued(slot, now) {
                Answer::Nothing => Answer::Declined(why),
                continued => continued,
            },
            cold => cold,
        }
    }

    /// Decoding has come to so many live tokens. Fewer than before say that the conversation went
    /// back; to have that seen, tell it before it grows again.
    pub fn decode(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        let live = self.slots.entry(slot).or_default();
        live.reach(tokens, &self.settings);
        // What is decoded belongs to this conversation alone.
        live.cold = None;
        self.continued(slot, now)
    }

    /// Another conversation, which the slot's is not the beginning of, is about to replace its
    /// `tokens` live ones.
    pub fn switch(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        self.leave(slot, tokens, Reason::Evict, now)
    }

    /// The engine stops, with `tokens` live ones in the slot.
    pub fn shutdown(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        self.leave(slot, tokens, Reason::Shutdown, now)
    }

    /// Checkpoints of the slot's conversation were removed from disk, or do not verify: only its
    /// first `tokens` are left there.
    pub fn lost(&mut self, slot: SlotId, tokens: u64) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.lose(tokens, &self.settings);
        }
    }

    /// A save succeeded and wrote so many bytes. Those beyond what it was granted count too, but
    /// too late for the budgets to hold.
    ///
    /// # Errors
    /// [`Error::UnknownSave`] where it has ended already or was never granted.
    pub fn saved(&mut self, id: u64, bytes: u64, now: Duration) -> Result<(), Error> {
        let save = self.end(id, bytes, true, now)?;
        self.metrics.save(save.reason, bytes, save.new);
        Ok(())
    }

    /// A save failed, and wrote so many bytes before. Where it was a continued one the next
    /// multiple of the interval is waited for, so that a full disk is not hit at each token.
    ///
    /// # Errors
    /// [`Error::UnknownSave`] where it has ended already or was never granted.
    pub fn failed(&mut self, id: u64, bytes: u64, now: Duration) -> Result<(), Error> {
        let save = self.end(id, bytes, false, now)?;
        self.metrics.fail(save.reason, bytes);
        Ok(())
    }

    fn end(&mut self, id: u64, bytes: u64, ok: bool, now: Duration) -> Result<UnderWay, Error> {
        let save = self.under_way.remove(&id);
        let save = save.ok_or(Error::UnknownSave { id })?;
        self.ledger.settle(save.held, bytes, now);
        if let Some(slot) = self.slots.get_mut(&save.slot) {
            slot.end(id, ok);
        }
        Ok(save)
    }

    fn leave(&mut self, slot: SlotId, tokens: u64, reason: Reason, now: Duration) -> Answer {
        let live = self.slots.entry(slot).or_default();
        live.reach(tokens, &self.settings);
        self.ask(slot, tokens, reason, now)
    }

    fn continued(&mut self, slot: SlotId, now: Duration) -> Answer {
        let due = self
            .slots
            .get(&slot)
            .and_then(|live| live.due(&self.settings));
        let Some(due) = due else {
            return Answer::Nothing;
        };
        let (live, declined) = match self.grant(slot, due.tokens, Reason::Continued, now) {
            Ok(save) => return Answer::Save(save),
            Err(declined) => (self.slots.entry(slot).or_default(), declined),
        };
        // It is asked for again at each step, and told once.
        match live.tells(due.multiple) {
            true => self.declines(declined),
            false => Answer::Nothing,
        }
    }

    fn ask(&mut self, slot: SlotId, tokens: u64, reason: Reason, now: Duration) -> Answer {
        match self.grant(slot, tokens, reason, now) {
            Ok(save) => Answer::Save(save),
            Err(declined) => self.declines(declined),
        }
    }

    fn declines(&mut self, declined: Declined) -> Answer {
        self.metrics.decline(declined);
        Answer::Declined(declined)
    }

    fn grant(
        &mut self,
        slot: SlotId,
        tokens: u64,
        reason: Reason,
        now: Duration,
    ) -> Result<Save, Declined> {
        let live = self.slots.entry(slot).or_default();
        let settings = &self.settings;
        let (base, saved) = (live.marks().base(), live.marks().saved());
        if tokens < settings.min_tokens.max(1) {
            return Err(Declined::TooShort);
        }
        if tokens <= saved {
            return Err(Declined::NothingNew);
        }
        if saved > 0 && tokens - saved < settings.new_tokens_min() {
            return Err(Declined::LittleNew);
        }
        if settings.size(tokens) > settings.disk_space {
            return Err(Declined::TooLarge);
        }
        let bytes = settings.written(tokens, base);
        if bytes > self.ledger.most() {
            return Err(Declined::OverBudget);
        }
        if !self.ledger.hold(bytes, now) {
            return Err(Declined::WriteBudget);
        }
        let id = self.next_id;
        self.next_id += 1;
        live.begin(tokens, id);
        let under_way = UnderWay {
            slot,
            reason,
            held: bytes,
            new: settings.token_bytes.saturating_mul(tokens - saved),
        };
        self.under_way.insert(id, under_way);
        Ok(Save {
            id,
            tokens,
            base,
            reason,
            bytes,
        })
    }
}
