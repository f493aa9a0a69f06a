//! Tasks: puts, gets, lookups and prefetches in progress.

use kvdepot_store::{Outcome, Task};

use crate::given::{Out, span};
use crate::guard::Failure;
use crate::handle::Ref;

/// Outcome of one key, `kvd_outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Became {
    /// Success.
    Done = 0,
    /// Not known yet.
    Pending = 1,
    /// No tier has the block.
    Miss = 2,
    /// The block failed checksum verification.
    Corrupt = 3,
    /// The memory and the block differ in length.
    Length = 4,
    /// No space could be freed.
    Full = 5,
    /// A queue is full, or a tier could not store the block.
    Dropped = 6,
    /// Rejected by the admission policy or another rule of a tier.
    Declined = 7,
    /// The depot closed before the block was stored or promoted.
    Closed = 8,
    /// An outcome without a number in this version.
    Other = 9,
}

impl Became {
    pub(crate) fn of(outcome: Outcome) -> Became {
        match outcome {
            Outcome::Done => Became::Done,
            Outcome::Pending => Became::Pending,
            Outcome::Miss => Became::Miss,
            Outcome::Corrupt => Became::Corrupt,
            Outcome::Length => Became::Length,
            Outcome::Full => Became::Full,
            Outcome::Dropped => Became::Dropped,
            Outcome::Declined => Became::Declined,
            Outcome::Closed => Became::Closed,
            _ => Became::Other,
        }
    }
}

fn outcomes(task: &Task) -> Vec<u8> {
    let each = task.outcomes().into_iter();
    each.map(|outcome| Became::of(outcome) as u8).collect()
}

exported! {
    /// Implements `kvd_task_wait`.
    fn kvd_task_wait(
        task: Ref<Task>, timeout_ms: u64, became: Out<u8>, became_len: usize,
    ) {
        let task = task.get("task")?;
        let keys = task.outcomes().len();
        if became_len < keys {
            return Err(Failure::input("outcomes_len", became_len, format!("at least {keys}")));
        }
        if keys > 0 {
            became.place("outcomes")?;
        }
        let waited = task.wait(span(timeout_ms)).map(drop);
        // After a time-out, the outcomes that are known are returned too.
        became.fill("outcomes", became_len, &outcomes(task))?;
        Ok(waited?)
    }

    /// Implements `kvd_task_wait_released`.
    fn kvd_task_wait_released(task: Ref<Task>, timeout_ms: u64) {
        Ok(task.get("task")?.wait_released(span(timeout_ms))?)
    }

    /// Implements `kvd_task_free`. The memory is released when it returns.
    fn kvd_task_free(task: Ref<Task>) {
        match task.end() {
            Some(task) => Ok(task.wait_released(None)?),
            None => Ok(()),
        }
    }
}
