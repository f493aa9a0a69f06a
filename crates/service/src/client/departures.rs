//! What left, as a client hears of it: an owner says it once.

use kvdepot_store::Gone;
use kvdepot_store::placement::Holder;

use crate::frame::verbs::Left;

/// Who hears what left.
#[derive(Default)]
pub(crate) struct Listening {
    /// As whom the owner was last asked.
    holder: Option<Holder>,
    /// It was asked, and what it said was not heard.
    missed: bool,
}

impl Listening {
    /// What an owner says to this holder.
    pub(crate) fn hear(&mut self, holder: Holder, left: &Left<'_>) -> Gone {
        // Nobody knows what left while this process had no owner.
        let before = self.holder.replace(holder);
        let another = before.is_some_and(|before| before != holder);
        let missed = std::mem::take(&mut self.missed);
        Gone {
            blocks: left.blocks.iter().map(Into::into).collect(),
            overflowed: left.overflowed || another || missed,
        }
    }

    /// It was asked, and nothing was heard.
    pub(crate) fn miss(&mut self) {
        self.missed = true;
    }
}
