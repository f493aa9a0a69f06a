//! Tasks: puts, gets and lookups under way.

use kvdepot_store::{Outcome, Task};

use crate::given::{Out, span};
use crate::guard::Failure;
use crate::handle::Ref;

/// `kvd_outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Became {
    /// It worked.
    Done = 0,
    /// Not known yet.
    Pending = 1,
    /// There is no such block.
    Miss = 2,
    /// It did not verify.
    Corrupt = 3,
    /// The memory has another length than the block.
    Length = 4,
    /// No room could be freed.
    Full = 5,
    /// A queue is full, or a tier could not take it.
    Dropped = 6,
    /// It is not worth what would have to go.
    Declined = 7,
    /// The depot was closed before.
    Closed = 8,
    /// An outcome that this version has no number for.
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
    /// `kvd_task_wait`.
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
        // What is known is told, too, where the time is over.
        became.fill("outcomes", became_len, &outcomes(task))?;
        Ok(waited?)
    }

    /// `kvd_task_wait_released`.
    fn kvd_task_wait_released(task: Ref<Task>, timeout_ms: u64) {
        Ok(task.get("task")?.wait_released(span(timeout_ms))?)
    }

    /// `kvd_task_free`. The memory is the caller's again when it returns.
    fn kvd_task_free(task: Ref<Task>) {
        match task.end() {
            Some(task) => Ok(task.wait_released(None)?),
            None => Ok(()),
        }
    }
}
