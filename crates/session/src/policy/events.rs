//! The policy: events in, answers out.

use std::collections::BTreeMap;
use std::time::Duration;

use super::answer::{Answer, Declined, Reason, Save};
use super::error::Error;
use super::ledger::Ledger;
use super::metrics::Metrics;
use super::settings::Settings;
use super::slot::{Prompt, Slot, SlotId};

/// Checkpoint policy of one engine.
///
/// All slots of an engine share one policy, because they share the disk. A new slot has no live and
/// no saved tokens.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use kvdepot_session::policy::{Answer, Origin, Policy, Prompt, Reason, Settings};
///
/// let now = Duration::from_secs(1_800_000_000); // since the Unix epoch
/// let settings = Settings { write_budget_hour: Some(2 << 30), ..Settings::default() };
/// let mut policy = Policy::new(settings)?;
/// policy.start(0, &Prompt { tokens: 9000, origin: Origin::Restored(8500), anchor: None });
/// assert_eq!(policy.prefill(0, 9000, now), Answer::Nothing);
/// let save = policy.decode(0, 10_241, now).save().expect("an interval was crossed");
/// assert_eq!((save.reason, save.base), (Reason::Continued, 8500));
/// policy.failed(save.id, 0, now)?;
/// # Ok::<_, kvdepot_session::policy::Error>(())
/// ```
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
    /// Creates a policy without slots.
    ///
    /// # Errors
    /// [`Error::Setting`] if a setting is not allowed.
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

    /// Returns the settings of the policy.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the sums since the policy was created.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the bytes that both budgets still allow at the time `now`, without those of saves in
    /// progress.
    pub fn bytes_left(&mut self, now: Duration) -> u64 {
        self.ledger.left(now)
    }

    /// Counts `bytes` that were written at the time `at`, before this policy was created.
    pub fn recall(&mut self, bytes: u64, at: Duration) {
        self.ledger.record(bytes, at);
    }

    /// Records that a prompt starts in a slot, after its prefix was restored.
    ///
    /// Live tokens of the slot that the prompt does not reuse are lost: report
    /// [`switch`](Policy::switch) before.
    pub fn start(&mut self, slot: SlotId, prompt: &Prompt) {
        let slot = self.slots.entry(slot).or_default();
        slot.start(prompt, &self.settings);
    }

    /// Returns the number of live tokens at which prefill should next stop and report, so that a
    /// checkpoint has exactly this length. An engine that does not stop there saves a little later.
    #[must_use]
    pub fn next_stop(&self, slot: SlotId) -> Option<u64> {
        self.slots.get(&slot)?.stop(&self.settings)
    }

    /// Records that prefill has reached `tokens` live tokens.
    ///
    /// If a step crosses both the position of a cold checkpoint and an interval, this call returns
    /// the cold one. The next call, which may have the same count, returns the other.
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

    /// Records that decoding has reached `tokens` live tokens.
    ///
    /// A smaller number than before means that the conversation went back. Report it before the
    /// number grows again.
    pub fn decode(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        let live = self.slots.entry(slot).or_default();
        live.reach(tokens, &self.settings);
        // What is decoded belongs to this conversation alone.
        live.cold = None;
        self.continued(slot, now)
    }

    /// Records that another conversation, which this one is not a prefix of, is about to replace
    /// the slot's `tokens` live tokens.
    pub fn switch(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        self.leave(slot, tokens, Reason::Evict, now)
    }

    /// Records that the engine stops with `tokens` live tokens in the slot.
    pub fn shutdown(&mut self, slot: SlotId, tokens: u64, now: Duration) -> Answer {
        self.leave(slot, tokens, Reason::Shutdown, now)
    }

    /// Records that checkpoints of the slot's conversation were deleted or are corrupt, and that
    /// only its first `tokens` tokens remain on disk.
    pub fn lost(&mut self, slot: SlotId, tokens: u64) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.lose(tokens, &self.settings);
        }
    }

    /// Records that the save `id` succeeded and wrote `bytes` bytes.
    ///
    /// Bytes beyond the grant count too, although the budget may then be exceeded.
    ///
    /// # Errors
    /// [`Error::UnknownSave`] if the save was not granted or has ended already.
    pub fn saved(&mut self, id: u64, bytes: u64, now: Duration) -> Result<(), Error> {
        let save = self.end(id, bytes, true, now)?;
        self.metrics.save(save.reason, bytes, save.new);
        Ok(())
    }

    /// Records that the save `id` failed after it wrote `bytes` bytes.
    ///
    /// After a failed continued save, the policy waits for the next multiple of the interval. A
    /// full disk is therefore not tried at each token.
    ///
    /// # Errors
    /// [`Error::UnknownSave`] if the save was not granted or has ended already.
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
