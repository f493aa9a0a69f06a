//! One place for a conversation in the engine: what is live there, and what of it is on disk.

use super::marks::Marks;
use super::settings::Settings;

/// Number of a slot, chosen by the caller. A slot is a place for one conversation in the engine's
/// memory; ds4 has one.
pub type SlotId = u32;

/// Source of the state that a prompt reuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The prompt reuses no state.
    Empty,
    /// This number of tokens was loaded from disk, and remains there.
    Restored(u64),
    /// This number of the slot's live tokens is reused, saved or not.
    Live(u64),
}

/// Prompt that is about to be prefilled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Number of tokens, including reused ones.
    pub tokens: u64,
    /// Source of the reused tokens.
    pub origin: Origin,
    /// Number of tokens before the last user marker that precedes the first assistant turn; `None`
    /// if unknown. Other conversations of the same agent share these tokens.
    pub anchor: Option<u64>,
}

/// The live conversation of a slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    /// Tokens whose state is live.
    pub(super) live: u64,
    prompt: u64,
    /// Where its cold checkpoint is to be taken.
    pub(super) cold: Option<u64>,
    marks: Marks,
    /// Most tokens that a save was tried with: after a failure the next multiple is waited for.
    tried: u64,
    /// The multiple of the interval whose refusal was told.
    told: u64,
}

/// A continued checkpoint that may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) tokens: u64,
    /// The multiple of the interval that was crossed.
    pub(super) multiple: u64,
}

impl Slot {
    /// Another prompt, of the same conversation where live tokens stay.
    pub(super) fn start(&mut self, prompt: &Prompt, settings: &Settings) {
        let reused = match prompt.origin {
            Origin::Empty => 0,
            Origin::Restored(tokens) | Origin::Live(tokens) => tokens,
        };
        if let Origin::Live(tokens) = prompt.origin {
            self.reach(tokens, settings);
        } else {
            *self = Slot::default();
        }
        self.live = reused;
        self.prompt = prompt.tokens;
        if let Origin::Restored(tokens @ 1..) = prompt.origin {
            self.marks.restore(tokens);
        }
        self.cold = settings.cold_target(prompt.tokens, reused, prompt.anchor);
    }

    /// So many tokens are live now. Fewer than before: the conversation went back, and what comes
    /// next is not what was saved, even where it gets as long.
    pub(super) fn reach(&mut self, tokens: u64, settings: &Settings) {
        if tokens < self.live {
            self.marks.cut(tokens, settings.saves_prefixes);
            self.retry(tokens);
        }
        self.live = tokens;
    }

    /// Of what was saved only the first `tokens` are left on disk.
    pub(super) fn lose(&mut self, tokens: u64, settings: &Settings) {
        self.marks.lose(tokens, settings.saves_prefixes);
        self.retry(tokens);
    }

    /// What was tried or told with more tokens is of others, or gone.
    fn retry(&mut self, tokens: u64) {
        for count in [&mut self.tried, &mut self.told] {
            *count = if *count > tokens { 0 } else { *count };
        }
    }

    /// What is on disk of it, and on its way there.
    pub(super) fn marks(&self) -> &Marks {
        &self.marks
    }

    /// The continued checkpoint that may be taken: a multiple of the interval was crossed since the
    /// last one, and enough is new.
    pub(super) fn due(&self, settings: &Settings) -> Option<Due> {
        let step = settings.continued_step()?;
        let multiple = self.live - self.live % step;
        let saved = self.marks.saved();
        if multiple <= saved.max(self.tried) {
            return None;
        }
        let least = settings
            .min_tokens
            .max(saved.saturating_add(settings.new_tokens_min()));
        let tokens = match settings.saves_prefixes {
            true => multiple.max(least),
            false => self.live,
        };
        let is_enough = tokens >= least && tokens <= self.live;
        is_enough.then_some(Due { tokens, multiple })
    }

    /// Whether a refusal at this multiple is told for the first time.
    pub(super) fn tells(&mut self, multiple: u64) -> bool {
        let is_first = multiple > self.told;
        self.told = self.told.max(multiple);
        is_first
    }

    /// The count of live tokens at which prefill should stop for a checkpoint.
    pub(super) fn stop(&self, settings: &Settings) -> Option<u64> {
        let cold = self.cold.filter(|at| *at > self.live);
        let done = self.live.max(self.marks.saved()).max(self.tried);
        let next = |step: u64| (done - done % step).saturating_add(step);
        let continued = settings.continued_step().map(next);
        let stop = cold.into_iter().chain(continued).min();
        stop.filter(|at| *at <= self.prompt)
    }

    /// A save of so many tokens, more than any before, is under way.
    pub(super) fn begin(&mut self, tokens: u64, save: u64) {
        self.marks.begin(tokens, save);
        self.tried = self.tried.max(tokens);
    }

    /// A save has ended, of what is live or of what was.
    pub(super) fn end(&mut self, save: u64, is_saved: bool) {
        self.marks.end(save, is_saved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(origin: Origin, live: u64, settings: &Settings) -> Slot {
        let mut slot = Slot::default();
        let prompt = Prompt {
            tokens: 100_000,
            origin,
            anchor: None,
        };
        slot.start(&prompt, settings);
        slot.reach(live, settings);
        slot
    }

    fn prefixes() -> Settings {
        Settings {
            saves_prefixes: true,
            ..Settings::default()
        }
    }

    #[test]
    fn an_interval_is_due_once_it_was_crossed() {
        let settings = Settings::default();
        let due = |origin, live| {
            slot(origin, live, &settings)
                .due(&settings)
                .map(|due| due.tokens)
        };
        assert_eq!(due(Origin::Restored(9000), 10_239), None);
        assert_eq!(due(Origin::Restored(9000), 10_241), Some(10_241));
        assert_eq!(due(Origin::Restored(10_241), 20_479), None);
        let slot = slot(Origin::Restored(9000), 35_000, &prefixes());
        let due = slot.due(&prefixes()).map(|due| due.tokens);
        assert_eq!(due, Some(30_720), "of several multiples the last one");
    }

    #[test]
    fn prefill_is_told_where_to_stop() {
        let settings = Settings::default();
        let stop = |origin, live| slot(origin, live, &settings).stop(&settings);
        assert_eq!(stop(Origin::Restored(9000), 9500), Some(10_240));
        assert_eq!(stop(Origin::Restored(9000), 10_240), Some(20_480));
        assert_eq!(
            stop(Origin::Restored(9000), 99_000),
            None,
            "beyond the prompt"
        );
        let mut slot = slot(Origin::Empty, 0, &settings);
        slot.cold = Some(7001);
        assert_eq!(slot.stop(&settings), Some(7001));
    }

    #[test]
    fn after_going_back_an_interval_is_due_again() {
        let settings = Settings::default();
        let mut slot = slot(Origin::Empty, 15_000, &settings);
        slot.begin(15_000, 1);
        slot.end(1, true);
        slot.reach(12_000, &settings);
        assert_eq!(slot.due(&settings).map(|due| due.tokens), Some(12_000));
    }

    #[test]
    fn what_was_lost_is_due_again() {
        let settings = Settings::default();
        let mut slot = slot(Origin::Restored(20_000), 20_100, &settings);
        assert_eq!(slot.due(&settings), None);
        slot.lose(9000, &settings);
        assert_eq!(slot.due(&settings).map(|due| due.tokens), Some(20_100));
    }
}
