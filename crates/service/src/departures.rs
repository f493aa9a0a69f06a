//! What left, as a client hears of it: an owner says it once.

use kvdepot_arena::{Error, Identity};
use kvdepot_store::Gone;
use kvdepot_store::placement::Holder;

use crate::client::Client;
use crate::frame::{Out, Verb};

/// Who hears what left.
#[derive(Default)]
pub(crate) struct Listening {
    /// As whom the owner was last asked.
    holder: Option<Holder>,
    /// It was asked, and what it said was not heard.
    missed: bool,
}

impl Client {
    pub(crate) fn gone(&self, limit: usize) -> Result<Gone, Error> {
        let mut out = Out::new(Verb::Gone, 0);
        out.long(limit as u64);
        let heard = self.ask(
            || None,
            out,
            |body, link| {
                let overflowed = body.flag()?;
                let mut blocks = Vec::new();
                for _ in 0..body.count(56)? {
                    let namespace = body.namespace()?;
                    let key = body.key()?;
                    blocks.push((Identity { namespace, key }, body.long()?));
                }
                let mut listening = self.listening.lock();
                // Nobody knows what left while this process had no owner.
                let before = listening.holder.replace(link.mover.holder);
                let another = before.is_some_and(|before| before != link.mover.holder);
                let missed = std::mem::take(&mut listening.missed);
                Ok(Some(Gone {
                    blocks,
                    overflowed: overflowed || another || missed,
                }))
            },
        );
        if !matches!(heard, Ok(Some(_))) {
            self.listening.lock().missed = true;
        }
        heard.map(Option::unwrap_or_default)
    }
}
