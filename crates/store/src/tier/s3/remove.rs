//! How blocks' objects are removed.

use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Identity, NamespaceId};
use kvdepot_media::checksum::PartSum;

use super::bucket::{Fault, Way};
use super::object::{Found, Object, Seen, look, read};
use super::{Common, FOLDERS, LISTED};

impl Common {
    /// Removes the object of a block that a reader found to be corrupt, unless a second read finds
    /// the right bytes: those of the first were changed in transit.
    pub(super) async fn discard(&self, object: &Object) -> Result<bool, Fault> {
        if self.is_sound(object).await? {
            return Ok(false);
        }
        self.remove(&object.name, Some(&object.found.e_tag)).await
    }

    /// Removes the object of that version at a block's name, unless a second look finds the block,
    /// or one of a later release: then the header of the first was changed in transit.
    pub(super) async fn remove_strange(&self, name: &Identity, e_tag: &str) -> Result<bool, Fault> {
        match self.look(name, Way::Write).await? {
            Seen::Strange { newer: false, .. } => self.remove(name, Some(e_tag)).await,
            Seen::Strange { .. } | Seen::Block(_) | Seen::Nothing => Ok(false),
        }
    }

    /// Whether the bytes of an object have its checksum. Of one with MACs that says nothing: who
    /// has forged it has computed its checksum too.
    async fn is_sound(&self, object: &Object) -> Result<bool, Fault> {
        let Found { note, e_tag, macs } = &object.found;
        if !macs.is_empty() {
            return Ok(false);
        }
        let (bucket, name) = (&self.bucket, &object.name);
        let whole = (&object.path, &**e_tag);
        let table_len = object.table.len() as u64;
        let begin = note.len.saturating_sub(table_len);
        let parts = if note.parts == 1 {
            vec![Part {
                offset: 0,
                len: note.len,
                checksum: note.checksum,
            }]
        } else {
            let mut table = Vec::with_capacity(object.table.len());
            read(
                bucket,
                Way::Read,
                whole,
                LEN as u64 + begin,
                table_len,
                |_, bytes| {
                    table.extend_from_slice(bytes);
                    true
                },
            )
            .await?;
            match parts::of_table(name, &table, begin, note.checksum) {
                Some(parts) => parts,
                None => return Ok(false),
            }
        };
        for (number, part) in (0..).zip(parts) {
            let mut sum = PartSum::new(part.len);
            let at = LEN as u64 + part.offset;
            read(bucket, Way::Read, whole, at, part.len, |_, bytes| {
                sum.add(bytes);
                true
            })
            .await?;
            if sum.finish(&parts::part_id(name, number, note.parts)) != part.checksum {
                return Ok(false);
            }
        }
        Ok(true)
    }

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
