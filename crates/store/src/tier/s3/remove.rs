//! How blocks' objects are removed.

use kvdepot_arena::{Identity, NamespaceId};

use super::bucket::{Fault, Way};
use super::object::{Found, Seen, look};
use super::{Common, FOLDERS, LISTED};

impl Common {
    /// Removes a block's object: the one of that version, or whichever has its name. Whether there
    /// was one.
    pub(super) async fn remove(&self, name: &Identity, e_tag: Option<&str>) -> Result<bool, Fault> {
        let path = self.path_of(name);
        let seen = look(&self.bucket, Way::Write, &path, (name, false)).await?;
        let (len, is_one) = match &seen {
            Seen::Nothing => (0, false),
            Seen::Block(Found {
                e_tag: other, note, ..
            }) => (note.len, e_tag.is_none_or(|e_tag| e_tag == &**other)),
            Seen::Strange { e_tag: other, .. } => (0, e_tag.is_none_or(|e_tag| e_tag == &**other)),
        };
        if is_one {
            self.bucket.remove(&path).await?;
            self.departures.note(name, len);
        }
        if is_one || e_tag.is_none() {
            self.filter.note(*name, None);
        }
        Ok(is_one)
    }

    pub(super) async fn clear(&self, namespace: NamespaceId) -> Result<usize, Fault> {
        let (mut count, mut all) = (0, true);
        for begin in (0..FOLDERS).step_by(LISTED as usize) {
            let some = begin..begin + LISTED;
            let names = self.names(some, namespace).await?;
            let paths = names
                .into_iter()
                .map(|(name, path, len)| (path, (name, len)));
            let paths: Vec<_> = paths.collect();
            let asked = paths.len();
            let gone = self.bucket.remove_all(paths).await;
            all &= gone.len() == asked;
            for (name, len) in &gone {
                self.departures.note(name, *len);
            }
            count += gone.len();
        }
        self.filter.clear(namespace);
        // Why is counted.
        all.then_some(count).ok_or(Fault::Lost)
    }
}
