//! When a local engine saves the state of its conversations, and what goes when disk is short.
//!
//! The engine tells [`Policy`] what happens (a prompt starts, tokens are prefilled or decoded, a
//! session is about to be replaced, the engine stops) and gets an [`Answer`]: save so many tokens
//! now, nothing, or why not. It then tells what became of the save. [`Catalogue`] knows what is on
//! disk and picks what to remove. Nothing here reads a clock, a disk or a token: the caller passes
//! counts and `now`, the time since the Unix epoch. The names and the defaults are ds4's.
//!
//! # Guarantees
//! - While saves are granted and succeed, two checkpoints of a conversation are never further apart
//!   than the interval (the minimum, where that is more) and one step of the engine, wherever it
//!   was restored: crossing a multiple of the interval counts, not meeting it.
//! - No hour and no day has more bytes written than its budget, as long as no save writes more than
//!   it was granted. What a save is granted and does not write is given back.
//! - Tokens that are on disk, or on their way to it, are not saved again.
//! - A hit removes nothing. What is pinned is never picked, and nothing is picked where all that
//!   may go would not be enough.
//!
//! # Limits
//! The budget trusts the clock: set forwards, it forgets what was written too early; set back, it
//! never does. A save that may write more than a whole budget is never granted, and
//! [said](Declined::OverBudget) to be. It lives in memory: after a start the caller
//! [recalls](Policy::recall) what the catalogue shows was written lately.

mod answer;
mod catalogue;
mod choose;
mod error;
mod events;
mod ledger;
mod marks;
mod metrics;
mod settings;
mod slot;

pub use answer::{Answer, Declined, Reason, Save};
pub use catalogue::Catalogue;
pub use choose::{Entry, choose, score};
pub use error::Error;
pub use events::Policy;
pub use metrics::{Metrics, Tally};
pub use settings::{Settings, Writes};
pub use slot::{Origin, Prompt, SlotId};
