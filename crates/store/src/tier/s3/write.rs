//! How a block becomes an object: memory is reserved for it, lanes write it, and one request, or
//! several for a large one, stores it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{FutureExt, join_all, try_join_all};
use kvdepot_arena::clock::unix_seconds;
use kvdepot_arena::format::file_header::{FileHeader, LEN, SUMS_MAX};
use kvdepot_arena::format::file_note::FileNote;
use kvdepot_arena::{Cause, Full, Identity, NamespaceId, Refused, Reserved, Wanted, parts};
use kvdepot_media::Checksum;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
};
use tokio::time::{Instant, timeout_at};

use super::bucket::{Fault, Way};
use super::held::{Pinned, Written};
use super::object::{Found, NOTE, Seen, look, write_note};
use super::usage::Promise;
use super::{Common, NAME};

/// Objects of more bytes go in pieces of so many, several at a time.
const WHOLE_MAX: usize = 16 << 20;
const PIECE: usize = 8 << 20;

/// How long a put waits for room that a collection makes, or for memory.
const FOR_ROOM: Duration = Duration::from_secs(1);

impl Common {
    /// Makes room for blocks. Of memory a call waits for its first block alone: with more in its
    /// hands it would wait for itself. What is not made in time is declined.
    pub(super) async fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: Vec<Wanted>,
    ) -> Vec<Result<Reserved, Refused>> {
        let name = |wanted: &Wanted| Identity {
            namespace,
            key: wanted.key,
        };
        let names: Vec<Identity> = blocks.iter().map(name).collect();
        let deadline = self.bucket.deadline();
        let seen = join_all(names.iter().map(|name| self.find(name, Way::Write))).await;
        let until = deadline.min(Instant::now() + FOR_ROOM);
        let mut made: Vec<Result<Reserved, Refused>> = Vec::with_capacity(blocks.len());
        let object = |wanted: &Wanted| LEN as u64 + wanted.len;
        let mut beyond: u64 = blocks.iter().map(object).sum();
        for ((wanted, name), seen) in blocks.iter().zip(names).zip(seen) {
            beyond -= object(wanted);
            let waits = !made.iter().any(Result::is_ok);
            let one = match seen {
                Ok(Seen::Block(_)) => Err(Refused::Present(self.held.nowhere())),
                Ok(Seen::Strange { newer: true, .. }) | Err(_) => Err(Refused::Declined),
                Ok(Seen::Nothing | Seen::Strange { .. }) => {
                    let make = self.make((wanted, beyond), name, waits.then_some(until));
                    let made = timeout_at(deadline, make).await;
                    made.unwrap_or(Err(Refused::Declined))
                }
            };
            made.push(one);
        }
        made
    }

    async fn make(
        &self,
        (wanted, beyond): (&Wanted, u64),
        name: Identity,
        until: Option<Instant>,
    ) -> Result<Reserved, Refused> {
        let has_room = !self.held.has_keys() || usize::from(wanted.parts) <= SUMS_MAX;
        if !has_room || !self.held.proves(name.namespace) {
            // There would be no MACs, or no room for them.
            return Err(Refused::Declined);
        }
        let Some(making) = self.held.begin(name) else {
            return Err(Refused::Reserved(self.held.nowhere()));
        };
        let bytes = LEN as u64 + wanted.len;
        if wanted.len > self.block_max {
            return Err(self.full(wanted.len, (0, self.block_max)));
        }
        let Some(memory) = self.staging.take(bytes as usize, until).await else {
            let staging = &self.staging;
            return Err(self.full(wanted.len, (staging.free(), staging.capacity())));
        };
        if wanted.parts > 1 {
            // Between parts are bytes that nobody writes.
            let page = [0; LEN];
            for at in (0..bytes).step_by(LEN) {
                let some = (bytes - at).min(LEN as u64) as usize;
                memory
                    .write(at, &page[..some])
                    .map_err(|_| Refused::Declined)?;
            }
        }
        let promise = self.promise(bytes, beyond).await?;
        let about = (wanted.len, wanted.parts, wanted.copy);
        making
            .reserve((memory, promise), about)
            .ok_or(Refused::Declined)
    }

    /// Room in the bucket, which a collection may make.
    async fn promise(&self, bytes: u64, beyond: u64) -> Result<Promise, Refused> {
        let Some((usage, collector)) = &self.fleet else {
            return Ok(Promise::nothing());
        };
        let until = Instant::now() + FOR_ROOM;
        loop {
            match usage.take(bytes, beyond).await {
                Ok(Some(promise)) => {
                    if usage.seen() >= usage.part(super::usage::BEGIN) {
                        collector.wake();
                    }
                    return Ok(promise);
                }
                Ok(None) => {}
                Err(_) => return Err(Refused::Declined),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let capacity = usage.capacity();
                let free = capacity.saturating_sub(usage.seen());
                return Err(self.full(bytes - LEN as u64, (free, capacity)));
            }
            collector.make_room(bytes, left).await;
        }
    }

    fn full(&self, requested: u64, (free, capacity): (u64, u64)) -> Refused {
        self.full.fetch_add(1, Ordering::Relaxed);
        Refused::Full(Full {
            tier: NAME,
            requested,
            cause: Cause::Space { free, capacity },
        })
    }

    /// Stores what is written; its pin, where it is stored and that was asked for.
    pub(super) async fn publish(
        &self,
        reserved: Reserved,
        checksum: Checksum,
        pinned: bool,
    ) -> Option<Option<Pinned>> {
        let Written {
            place,
            memory,
            promise,
            leaves,
            macs,
        } = self.held.take(reserved)?;
        let name = place.identity;
        let header = FileHeader {
            identity: name,
            len: place.len,
            parts: place.parts,
            checksum,
            created: unix_seconds().into(),
        };
        let note = FileNote {
            len: place.len,
            parts: place.parts,
            checksum,
            mac: macs.first().copied().filter(|_| place.parts == 1),
        };
        let proven = !self.held.has_keys() || macs.len() == usize::from(place.parts);
        let path = self.path_of(&name);
        let sent = match memory.write(0, &header.encode(&macs, &leaves)) {
            Ok(()) if proven && !self.held.is_removed(&place) => {
                let bytes = memory.into_bytes();
                let sent = self.send(&path, &name, &note, bytes.clone()).await;
                sent.map(|e_tag| (e_tag, bytes))
            }
            _ => {
                let _ended = self.held.published(&place, None);
                return None;
            }
        };
        let object = match &sent {
            Ok((Some(e_tag), bytes)) => {
                let found = Found {
                    note,
                    e_tag: e_tag.as_str().into(),
                    macs: macs.into(),
                };
                self.filter.note(name, Some(found.clone()));
                let table = match usize::from(place.parts) {
                    1 => Vec::new(),
                    count => {
                        let begin = bytes.len() - count * parts::ENTRY as usize;
                        bytes[begin..].to_vec()
                    }
                };
                pinned.then(|| self.object(name, (path.clone(), found), table))
            }
            _ => None,
        };
        let stored = match &sent {
            Ok((Some(_), _)) => {
                promise.settle();
                true
            }
            Ok((None, _)) => {
                promise.keep();
                false
            }
            Err(fault) => {
                tracing::warn!(?fault, key = %name.key, "a block is not stored");
                match fault.is_doubtful() {
                    true => promise.keep(),
                    false => drop(promise),
                }
                false
            }
        };
        let Ok(pin) = self.held.published(&place, object) else {
            self.filter.note(name, None);
            let _gone = self.bucket.remove(&path).await;
            return None;
        };
        if stored {
            self.stored[0].fetch_add(1, Ordering::Relaxed);
            self.stored[1].fetch_add(place.len, Ordering::Relaxed);
        }
        stored.then_some(pin)
    }

    /// Stores an object; its ETag, if the store has the bytes that were sent.
    async fn send(
        &self,
        path: &Path,
        name: &Identity,
        note: &FileNote,
        bytes: Bytes,
    ) -> Result<Option<String>, Fault> {
        let attributes =
            Attributes::from_iter([(Attribute::Metadata(NOTE.into()), write_note(note, name))]);
        if bytes.len() > WHOLE_MAX {
            return self.send_in_pieces(path, attributes, bytes).await;
        }
        let put = || {
            let options = PutOptions::from(attributes.clone());
            let payload = PutPayload::from_bytes(bytes.clone());
            self.bucket.store().put_opts(path, payload, options).boxed()
        };
        let stored = self.bucket.ask(Way::Write, put).await?;
        match stored.e_tag {
            Some(e_tag) => Ok(Some(e_tag)),
            None => self.e_tag_of(path, name).await,
        }
    }

    /// A store that tells no ETag with its answer is asked for it.
    async fn e_tag_of(&self, path: &Path, name: &Identity) -> Result<Option<String>, Fault> {
        let seen = look(&self.bucket, Way::Write, path, (name, false)).await?;
        Ok(match seen {
            Seen::Block(found) => Some(found.e_tag.to_string()),
            Seen::Nothing | Seen::Strange { .. } => None,
        })
    }

    async fn send_in_pieces(
        &self,
        path: &Path,
        attributes: Attributes,
        bytes: Bytes,
    ) -> Result<Option<String>, Fault> {
        let (bucket, store) = (&self.bucket, self.bucket.store());
        let begin = || {
            let options = PutMultipartOptions::from(attributes.clone());
            store.create_multipart_opts(path, options).boxed()
        };
        let id = bucket.ask(Way::Write, begin).await?;
        let pieces = (0..bytes.len()).step_by(PIECE).enumerate();
        let pieces = pieces.map(|(number, at)| {
            let piece = bytes.slice(at..(at + PIECE).min(bytes.len()));
            let id = &id;
            async move {
                let put = || {
                    let payload = PutPayload::from_bytes(piece.clone());
                    store.put_part(path, id, number, payload).boxed()
                };
                bucket.ask(Way::Write, put).await
            }
            .boxed()
        });
        let sent = try_join_all(pieces.collect::<Vec<_>>()).await;
        let sent = match sent {
            Ok(parts) => {
                let end = || store.complete_multipart(path, &id, parts.clone()).boxed();
                bucket.ask(Way::Write, end).await
            }
            Err(fault) => Err(fault),
        };
        if sent.is_err() {
            // What is not ended stays, and is paid for.
            let abort = store.abort_multipart(path, &id);
            let _best_effort = tokio::time::timeout(FOR_ROOM, abort).await;
        }
        Ok(sent?.e_tag)
    }
}
