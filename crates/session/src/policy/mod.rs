//! Checkpoint policy: decisions when to save a conversation, and which checkpoints to delete.
//!
//! The engine reports events to a [`Policy`]: a prompt starts, tokens are prefilled or decoded, a
//! conversation is about to be replaced, the engine stops. Each event returns an [`Answer`]: a save
//! that is due, nothing, or the reason why a save is declined. The engine then reports the result
//! of the save. A [`Catalogue`] knows the checkpoints on disk, and selects those to delete.
//!
//! This module uses no clock, disk or token. The caller passes counts and `now`, the time since the
//! Unix epoch. Names and defaults are those of ds4.
//!
//! # Guarantees
//! * **Bounded distance.** While saves are granted and succeed, two checkpoints of a conversation
//!   are at most one interval and one step of the engine apart. If the minimum length is larger
//!   than the interval, it replaces the interval. The position of a restore does not matter: an
//!   interval counts when a multiple of it is crossed.
//! * **Write budgets.** No hour and no day exceeds its budget, as long as no save writes more than
//!   it was granted. Bytes that a save was granted and did not write are returned to the budget.
//! * **No repetition.** Tokens that are on disk, or in a save in progress, are not saved again.
//! * **Safe deletion.** A hit deletes nothing. Pinned checkpoints are never selected. If all others
//!   together are too small, nothing is selected.
//!
//! # Limits
//! * The budget relies on the clock. If the clock is set forward, recent writes are forgotten too
//!   early; if it is set back, they are not.
//! * A save that may write more than a whole budget is always declined, as
//!   [`Declined::OverBudget`].
//! * The budget is in memory. After a restart the caller reports recent writes with
//!   [`Policy::recall`].
//!
//! # Examples
//! ```
//! use std::time::Duration;
//!
//! use kvdepot_session::policy::{Origin, Policy, Prompt, Reason, Settings};
//!
//! let now = Duration::from_secs(1_800_000_000); // since the Unix epoch
//! let mut policy = Policy::new(Settings::default())?;
//! policy.start(0, &Prompt { tokens: 20_000, origin: Origin::Empty, anchor: None });
//! let save = policy.prefill(0, 18_432, now).save().expect("a cold checkpoint is due");
//! assert_eq!((save.reason, save.tokens), (Reason::Cold, 18_432));
//! policy.saved(save.id, 250_000_000, now)?; // or `failed`
//! # Ok::<_, kvdepot_session::policy::Error>(())
//! ```

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
