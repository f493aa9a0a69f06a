//! Groups that a client has declared.

use std::sync::Weak;
use std::sync::atomic::Ordering;

use kvdepot_arena::{Class, Error, Key, NamespaceId};
use kvdepot_store::Together;
use kvdepot_store::placement::Holder;
use parking_lot::Mutex;

use crate::client::Client;
use crate::frame::Out;
use crate::frame::verbs::{Dissolve, Group};

/// One of them, by its number. Its owner keeps it while this process lives, whatever becomes of
/// the connection; another owner hears of it with the next change.
pub(super) struct Declared {
    client: Weak<Client>,
    id: NamespaceId,
    number: u64,
    said: Mutex<Said>,
}

/// What was said of it.
struct Said {
    /// As whom; `None` where nobody was asked.
    holder: Option<Holder>,
    /// Whether that owner has answered all that was said.
    heard: bool,
    /// What was answered.
    keys: Vec<Key>,
    class: Class,
}

impl Declared {
    pub(super) fn new(
        client: &Client,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Declared, Error> {
        let declared = Declared {
            client: client.me.clone(),
            id,
            number: client.next_group.fetch_add(1, Ordering::Relaxed),
            said: Mutex::new(Said {
                holder: None,
                heard: false,
                keys: Vec::new(),
                class,
            }),
        };
        declared.say(keys, None)?;
        Ok(declared)
    }

    fn say(&self, more: &[Key], class: Option<Class>) -> Result<(), Error> {
        let client = self.client.upgrade().ok_or(Error::Closed(""))?;
        let _pass = client.gate.enter()?;
        if !client.about.groups {
            return Err(client.fails("its release does not support groups"));
        }
        let gone = || client.nobody();
        let link = client.dial.link().ok_or_else(gone)?;
        let mut said = self.said.lock();
        let class = class.unwrap_or(said.class);
        let same = said.holder.replace(link.mover.holder) == Some(link.mover.holder);
        let known = std::mem::take(&mut said.heard) && same;
        let all: Vec<Key>;
        let keys = match known {
            true => more,
            false => {
                all = [&said.keys, more].concat();
                &all
            }
        };
        let call = Group {
            number: self.number,
            namespace: self.id,
            class,
            keys: keys.into(),
        };
        let answer = link.call(&call, Ok);
        answer.map_err(|error| match error {
            Error::Closed(_) => gone(),
            other => other,
        })?;
        said.heard = true;
        said.class = class;
        said.keys.extend_from_slice(more);
        Ok(())
    }
}

impl Together for Declared {
    fn add(&self, keys: &[Key]) -> Result<(), Error> {
        self.say(keys, None)
    }

    fn set_class(&self, class: Class) -> Result<(), Error> {
        self.say(&[], Some(class))
    }
}

impl Drop for Declared {
    fn drop(&mut self) {
        let holder = self.said.get_mut().holder;
        let client = self.client.upgrade().filter(|client| !client.gate.forked());
        if let (Some(holder), Some(client)) = (holder, client) {
            let number = self.number;
            client.dial.tell(holder, Out::new(&Dissolve { number }));
        }
    }
}
