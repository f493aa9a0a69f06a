//! What the engine is told.

/// What to do after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "a save that is not carried out keeps its bytes of the budget"]
pub enum Answer {
    /// Go on.
    Nothing,
    /// Save now, and tell [`saved`](super::Policy::saved) or [`failed`](super::Policy::failed).
    Save(Save),
    /// A checkpoint was due and is not taken.
    Declined(Declined),
}

impl Answer {
    /// The save, if it is one.
    #[must_use]
    pub fn save(self) -> Option<Save> {
        match self {
            Answer::Save(save) => Some(save),
            Answer::Nothing | Answer::Declined(_) => None,
        }
    }
}

/// A checkpoint to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Save {
    /// Names it to the policy that granted it, once: not the checkpoint's name on disk.
    pub id: u64,
    /// Tokens to save, from the first one on: all that are live, or fewer where the engine
    /// [can](super::Settings::saves_prefixes).
    pub tokens: u64,
    /// The first so many of them are on disk.
    pub base: u64,
    /// Why.
    pub reason: Reason,
    /// Bytes that it may write. They are taken from the budgets until its end is told.
    pub bytes: u64,
}

/// Why a checkpoint is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// The part of a prompt that other conversations may begin with, too.
    Cold,
    /// Another interval of a conversation that goes on.
    Continued,
    /// Another conversation is about to replace it.
    Evict,
    /// The engine stops.
    Shutdown,
}

impl Reason {
    /// All of them, in order.
    pub const ALL: [Reason; 4] = [
        Reason::Cold,
        Reason::Continued,
        Reason::Evict,
        Reason::Shutdown,
    ];

    /// Its name, as ds4 has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reason::Cold => "cold",
            Reason::Continued => "continued",
            Reason::Evict => "evict",
            Reason::Shutdown => "shutdown",
        }
    }
}

/// Why a checkpoint that was due is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Declined {
    /// Fewer tokens than the minimum: prefilling them again is cheap.
    TooShort,
    /// All its tokens are on disk, or on their way to it.
    NothingNew,
    /// The whole state would be written again, for fewer new tokens than the minimum.
    LittleNew,
    /// It alone would take more than all disk space.
    TooLarge,
    /// The hour or the day has no such number of bytes left.
    WriteBudget,
    /// It alone may write more than a whole budget has: it is never granted, whenever it is asked
    /// for. What [`Save::bytes`] would be is more than the settings allow.
    OverBudget,
}

impl Declined {
    /// All of them, in order.
    pub const ALL: [Declined; 6] = [
        Declined::TooShort,
        Declined::NothingNew,
        Declined::LittleNew,
        Declined::TooLarge,
        Declined::WriteBudget,
        Declined::OverBudget,
    ];

    /// It in words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Declined::TooShort => "too short",
            Declined::NothingNew => "nothing new since the last save",
            Declined::LittleNew => "too little new since the last save",
            Declined::TooLarge => "larger than the disk space",
            Declined::WriteBudget => "write budget",
            Declined::OverBudget => "larger than a whole write budget",
        }
    }
}
