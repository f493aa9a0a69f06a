//! The settings, and what follows from them alone.

use super::error::Error;

/// ds4's: a few conversations of a large model.
const DISK_SPACE: u64 = 4096 << 20;

/// ds4's: as many are prefilled in about the time that a checkpoint takes to load.
const MIN_TOKENS: u64 = 512;

/// ds4's: system prompts and tools of agents are shorter; what is longer is a conversation's own.
const COLD_MAX_TOKENS: u64 = 30_000;

/// ds4's: a crash costs half a minute of prefill, and a checkpoint is written every few minutes.
const CONTINUED_INTERVAL_TOKENS: u64 = 10_000;

/// ds4's: the last tokens of a prompt may be merged otherwise once text follows them.
const BOUNDARY_TRIM_TOKENS: u64 = 32;

/// ds4's prefill chunk: a cold prompt is computed in the same steps, so that rows are equal.
const BOUNDARY_ALIGN_TOKENS: u64 = 2048;

/// Of ds4's payload: logits and the raw window, whatever the length.
const FIXED_BYTES: u64 = 23 << 20;

/// Of ds4's payload, measured: 13.8 KB a token.
const TOKEN_BYTES: u64 = 13_800;

/// ds4's files and every engine's positions count tokens in 32 bits.
const TOKENS_MAX: u64 = u32::MAX as u64;

/// Amount of data that a save writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Writes {
    /// Only tokens that are not on disk.
    #[default]
    Delta,
    /// The whole checkpoint each time, as one file.
    Whole,
}

/// Settings of a policy. The defaults are those of ds4, with [`Writes::Delta`] and without write
/// budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Limit for all data on disk, in bytes. Default: 4 GiB; at least 1.
    pub disk_space: u64,
    /// Shortest checkpoint, in tokens. Default: 512.
    pub min_tokens: u64,
    /// Longest cold checkpoint, in tokens. Default: 30,000; 0 for no cold checkpoints.
    pub cold_max_tokens: u64,
    /// Tokens between continued checkpoints, rounded up to the alignment. Default: 10,000; 0 for no
    /// continued checkpoints.
    pub continued_interval_tokens: u64,
    /// Tokens at the end of a prompt that a cold checkpoint omits. Default: 32.
    pub boundary_trim_tokens: u64,
    /// Alignment of cold checkpoints and of the interval, in tokens. Default: 2048; 0 for no
    /// alignment.
    pub boundary_align_tokens: u64,
    /// Bytes that may be written in any hour. Default: `None`, no limit.
    pub write_budget_hour: Option<u64>,
    /// Bytes that may be written in any day. Default: `None`, no limit.
    pub write_budget_day: Option<u64>,
    /// Amount of data that a save writes.
    pub writes: Writes,
    /// True if the engine can save the first tokens of the live ones, and restore the first tokens
    /// of the saved ones. For example, llama.cpp's plain attention can; ds4 cannot. Default: false.
    pub saves_prefixes: bool,
    /// Most bytes that each checkpoint has regardless of its length: data that does not grow, and
    /// the last block, which may not be full. Default: 23 MiB.
    pub fixed_bytes: u64,
    /// Most bytes per token. Default: 13,800.
    pub token_bytes: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            disk_space: DISK_SPACE,
            min_tokens: MIN_TOKENS,
            cold_max_tokens: COLD_MAX_TOKENS,
            continued_interval_tokens: CONTINUED_INTERVAL_TOKENS,
            boundary_trim_tokens: BOUNDARY_TRIM_TOKENS,
            boundary_align_tokens: BOUNDARY_ALIGN_TOKENS,
            write_budget_hour: None,
            write_budget_day: None,
            writes: Writes::Delta,
            saves_prefixes: false,
            fixed_bytes: FIXED_BYTES,
            token_bytes: TOKEN_BYTES,
        }
    }
}

impl Settings {
    /// Checks that a policy can be created from these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first value that is not allowed.
    pub fn check(&self) -> Result<(), Error> {
        let refused = |field, value, allowed| {
            Err(Error::Setting {
                field,
                value,
                allowed,
            })
        };
        if self.disk_space == 0 {
            return refused("disk_space", 0, "at least 1 byte");
        }
        let counts = [
            ("min_tokens", self.min_tokens),
            ("cold_max_tokens", self.cold_max_tokens),
            ("continued_interval_tokens", self.continued_interval_tokens),
            ("boundary_trim_tokens", self.boundary_trim_tokens),
            ("boundary_align_tokens", self.boundary_align_tokens),
        ];
        match counts.iter().find(|(_, count)| *count > TOKENS_MAX) {
            Some((field, value)) => refused(field, *value, "at most 4294967295 tokens"),
            None => Ok(()),
        }
    }

    /// Returns the effective number of tokens between continued checkpoints, a multiple of the
    /// alignment, or `None` if there are no continued checkpoints.
    #[must_use]
    pub fn continued_step(&self) -> Option<u64> {
        let align = self.boundary_align_tokens.max(1);
        let step = self.continued_interval_tokens.next_multiple_of(align);
        (step > 0).then_some(step)
    }

    /// Where the cold checkpoint of a prompt is taken that has so many tokens, the first `reused`
    /// of which are not computed: at the anchor, or else, where nothing is reused, without the
    /// last few and aligned, or else at the end.
    pub(super) fn cold_target(&self, tokens: u64, reused: u64, anchor: Option<u64>) -> Option<u64> {
        let at_anchor = anchor.filter(|at| *at >= self.min_tokens && *at <= tokens);
        let target = at_anchor.or_else(|| (reused == 0).then(|| self.stable(tokens)));
        target.filter(|at| {
            *at > reused && *at >= self.min_tokens.max(1) && *at <= self.cold_max_tokens
        })
    }

    /// The tokens of a prompt that stay the same whatever follows it.
    fn stable(&self, tokens: u64) -> u64 {
        let trimmed = tokens.saturating_sub(self.boundary_trim_tokens);
        let aligned = trimmed - trimmed % self.boundary_align_tokens.max(1);
        match aligned >= self.min_tokens.max(1) {
            true => aligned,
            false => tokens,
        }
    }

    /// Fewest tokens that are worth a save beyond those on disk.
    pub(super) fn new_tokens_min(&self) -> u64 {
        match self.writes {
            Writes::Delta => 1,
            Writes::Whole => self.min_tokens.max(1),
        }
    }

    /// Most bytes that a checkpoint takes.
    pub(super) fn size(&self, tokens: u64) -> u64 {
        let rows = self.token_bytes.saturating_mul(tokens);
        rows.saturating_add(self.fixed_bytes)
    }

    /// Most bytes that a save writes whose first `base` tokens are on disk.
    pub(super) fn written(&self, tokens: u64, base: u64) -> u64 {
        match self.writes {
            Writes::Delta => self.size(tokens - base),
            Writes::Whole => self.size(tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_rounded_up_to_the_alignment() {
        let mut settings = Settings::default();
        assert_eq!(settings.continued_step(), Some(10_240));
        settings.boundary_align_tokens = 0;
        assert_eq!(settings.continued_step(), Some(10_000));
        settings.continued_interval_tokens = 0;
        assert_eq!(settings.continued_step(), None);
    }

    #[test]
    fn a_cold_checkpoint_is_at_the_anchor_or_trimmed_and_aligned() {
        let settings = Settings::default();
        let target = |tokens, reused, anchor| settings.cold_target(tokens, reused, anchor);
        assert_eq!(target(20_000, 0, Some(7001)), Some(7001));
        assert_eq!(target(20_000, 0, None), Some(18_432));
        assert_eq!(
            target(18_432 + 31, 0, None),
            Some(16_384),
            "31 of 32 trimmed"
        );
        assert_eq!(
            target(20_000, 0, Some(100)),
            Some(18_432),
            "the anchor is too short"
        );
        assert_eq!(
            target(20_000, 0, Some(20_001)),
            Some(18_432),
            "no place in the prompt"
        );
        assert_eq!(
            target(1500, 0, None),
            Some(1500),
            "no aligned place is long enough"
        );
        assert_eq!(target(400, 0, None), None);
    }

    #[test]
    fn a_cold_checkpoint_is_within_its_maximum_however_long_the_prompt() {
        let settings = Settings::default();
        assert_eq!(settings.cold_target(90_000, 0, None), None);
        assert_eq!(settings.cold_target(90_000, 0, Some(12_000)), Some(12_000));
        let none = Settings {
            cold_max_tokens: 0,
            ..settings
        };
        assert_eq!(none.cold_target(20_000, 0, None), None);
    }

    #[test]
    fn a_longer_common_beginning_is_saved_after_a_shorter_one_was_reused() {
        let settings = Settings::default();
        assert_eq!(settings.cold_target(20_000, 4000, Some(7001)), Some(7001));
        assert_eq!(settings.cold_target(20_000, 7001, Some(7001)), None);
        assert_eq!(settings.cold_target(20_000, 4000, None), None);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let settings = Settings {
            disk_space: 0,
            ..Settings::default()
        };
        let error = settings.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "disk_space: 0 is not allowed; allowed: at least 1 byte"
        );
        let settings = Settings {
            boundary_align_tokens: 1 << 32,
            ..Settings::default()
        };
        let error = settings.check().unwrap_err().to_string();
        assert!(
            error.starts_with("boundary_align_tokens: 4294967296"),
            "{error}"
        );
        assert_eq!(Settings::default().check(), Ok(()));
    }
}
