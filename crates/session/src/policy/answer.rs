//! What the engine is told.

/// Response of the policy to an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "a save that is not carried out keeps its bytes of the budget"]
pub enum Answer {
    /// No checkpoint is due.
    Nothing,
    /// A checkpoint is due. Save it, and report [`saved`](super::Policy::saved) or
    /// [`failed`](super::Policy::failed).
    Save(Save),
    /// A checkpoint was due and is not granted.
    Declined(Declined),
}

impl Answer {
    /// Returns the save if there is one.
    #[must_use]
    pub fn save(self) -> Option<Save> {
        match self {
            Answer::Save(save) => Some(save),
            Answer::Nothing | Answer::Declined(_) => None,
        }
    }
}

/// Checkpoint to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Save {
    /// Number of this grant, unique in its policy. It is not the ID of a session.
    pub id: u64,
    /// Number of leading tokens to save. It is less than all live tokens only if the engine [can
    /// save prefixes](super::Settings::saves_prefixes).
    pub tokens: u64,
    /// Number of leading tokens that are already on disk.
    pub base: u64,
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Bytes that the save may write. The budgets reserve them until the end of the save is
    /// reported.
    pub bytes: u64,
}

/// Cause of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// Prefix of a prompt that other conversations may share.
    Cold,
    /// The conversation has crossed another interval.
    Continued,
    /// Another conversation is about to replace this one.
    Evict,
    /// The engine is shutting down.
    Shutdown,
}

impl Reason {
    /// All reasons, in order.
    pub const ALL: [Reason; 4] = [
        Reason::Cold,
        Reason::Continued,
        Reason::Evict,
        Reason::Shutdown,
    ];

    /// Returns the name that ds4 uses, for example `"cold"`.
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

/// Reason why a checkpoint that was due is not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Declined {
    /// The conversation has fewer tokens than the minimum. Computing them again is cheap.
    TooShort,
    /// All tokens are on disk, or in a save in progress.
    NothingNew,
    /// The whole state would be written again for fewer new tokens than the minimum.
    LittleNew,
    /// The checkpoint alone exceeds the disk space.
    TooLarge,
    /// The remaining budget of the hour or the day is too small.
    WriteBudget,
    /// The checkpoint may write more than a whole budget, and is always declined. Its
    /// [`Save::bytes`] would exceed a limit of the settings.
    OverBudget,
}

impl Declined {
    /// All reasons, in order.
    pub const ALL: [Declined; 6] = [
        Declined::TooShort,
        Declined::NothingNew,
        Declined::LittleNew,
        Declined::TooLarge,
        Declined::WriteBudget,
        Declined::OverBudget,
    ];

    /// Returns a description in words, for example `"write budget"`.
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
