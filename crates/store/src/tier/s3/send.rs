//! How a block's bytes reach the store: by one request, on the condition that nothing has its name,
//! or by several where they are many.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::FutureExt;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use kvdepot_arena::Identity;
use kvdepot_arena::format::file_note::FileNote;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult,
};
use tokio::time::{Instant, sleep};

use super::Common;
use super::bucket::{Fault, PAUSE, Way};
use super::object::{Found, NOTE, Seen, look, write_note};

/// Objects of more bytes go in pieces of so many, several at a time.
pub(super) const WHOLE_MAX: usize = 16 << 20;
const PIECE: usize = 8 << 20;

/// How long the end of an upload that has failed is waited for.
const TO_ABORT: Duration = Duration::from_secs(1);

/// What came of sending a block.
#[derive(Debug)]
pub(super) enum Sent {
    /// It is there, as the version of that ETag.
    Stored(String),
    /// A block of that name was there, or came before: by another process, or by a request whose
    /// answer was lost, which is `doubtful`.
    There { found: Found, doubtful: bool },
    /// Something else is there, and stays.
    Kept,
}

impl Common {
    /// Whether what is to be written is looked for before: a condition would do it as it is sent,
    /// but pieces have none, and some stores neither.
    pub(super) fn looks_first(&self, len: usize) -> bool {
        len > WHOLE_MAX || !self.bucket.has_conditions()
    }

    /// Stores an object.
    pub(super) async fn send(
        &self,
        path: &Path,
        name: &Identity,
        note: &FileNote,
        bytes: Bytes,
    ) -> Result<Sent, Fault> {
        let text = write_note(note, name);
        let attributes = Attributes::from_iter([(Attribute::Metadata(NOTE.into()), text)]);
        let stored = if bytes.len() > WHOLE_MAX {
            match self.send_in_pieces(path, attributes, bytes).await {
                Err(Fault::Gone) => return self.sent_before(path, name, note).await,
                sent => sent?,
            }
        } else {
            let deadline = self.bucket.deadline();
            let mut is_known = true;
            let mut mode = match self.bucket.has_conditions() {
                true => PutMode::Create,
                false => PutMode::Overwrite,
            };
            loop {
                let options = PutOptions {
                    attributes: attributes.clone(),
                    ..PutOptions::from(mode.clone())
                };
                let (stored, again) = self.put(path, options, &bytes, deadline).await;
                match stored {
                    Ok(stored) => {
                        if !is_known {
                            self.bucket.forget_conditions();
                        }
                        break stored.e_tag;
                    }
                    Err(Fault::Taken) if mode == PutMode::Create => {}
                    Err(Fault::Unknown) if mode == PutMode::Create => {
                        // What it does not know is the condition, or else it says so again.
                        (mode, is_known) = (PutMode::Overwrite, false);
                    }
                    Err(fault) => return Err(fault),
                }
                let proven = self.held.has_keys();
                match look(&self.bucket, Way::Write, path, (name, proven)).await? {
                    Seen::Block(found) => {
                        let doubtful = again && found.note == *note;
                        return Ok(Sent::There { found, doubtful });
                    }
                    Seen::Strange { newer: true, .. } => return Ok(Sent::Kept),
                    Seen::Strange { .. } => {
                        self.bucket.count(Fault::Strange);
                        mode = PutMode::Overwrite;
                    }
                    // It went, or is on its way to be there.
                    Seen::Nothing if mode == PutMode::Create => {
                        if Instant::now() + PAUSE > deadline {
                            return Err(Fault::Taken);
                        }
                        sleep(PAUSE).await;
                    }
                    Seen::Nothing => {}
                }
            }
        };
        if let Some(e_tag) = stored {
            return Ok(Sent::Stored(e_tag));
        }
        // A store that tells no ETag with its answer is asked for it.
        match look(&self.bucket, Way::Write, path, (name, false)).await? {
            Seen::Block(found) => Ok(Sent::Stored(found.e_tag.to_string())),
            Seen::Nothing | Seen::Strange { .. } => Ok(Sent::Kept),
        }
    }

    /// An upload is not there any more: somebody has ended it, or a request to end it whose answer
    /// was lost.
    async fn sent_before(
        &self,
        path: &Path,
        name: &Identity,
        note: &FileNote,
    ) -> Result<Sent, Fault> {
        let proven = self.held.has_keys();
        match look(&self.bucket, Way::Write, path, (name, proven)).await? {
            Seen::Block(found) if found.note == *note => Ok(Sent::There {
                found,
                doubtful: true,
            }),
            _ => Err(Fault::Gone),
        }
    }

    /// One request to store an object, until it succeeds; whether there was more than one.
    async fn put(
        &self,
        path: &Path,
        options: PutOptions,
        bytes: &Bytes,
        deadline: Instant,
    ) -> (Result<PutResult, Fault>, bool) {
        let mut turn = match self.bucket.turn(Way::Write, deadline).await {
            Ok(turn) => turn,
            Err(fault) => return (Err(fault), false),
        };
        let mut again = false;
        loop {
            let payload = PutPayload::from_bytes(bytes.clone());
            let put = self.bucket.store().put_opts(path, payload, options.clone());
            let noted = async { put.await.map_err(|error| self.bucket.note(&error)) };
            if let Some(answer) = turn.once(noted).await {
                return (answer, again);
            }
            again = true;
        }
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
        // As many as may be sent at a time: the others would wait within their time-out.
        let sent = stream::iter(pieces).buffered(bucket.at_once());
        let sent: Result<Vec<_>, Fault> = sent.try_collect().await;
        let sent = match sent {
            Ok(parts) => {
                let mut turn = bucket.turn(Way::Write, bucket.deadline()).await?;
                let mut again = false;
                loop {
                    let end = store.complete_multipart(path, &id, parts.clone());
                    let noted = async { end.await.map_err(|error| bucket.note(&error)) };
                    match turn.once(noted).await {
                        // It may have been ended by the request whose answer was lost.
                        Some(Err(fault)) if again && !fault.is_doubtful() => {
                            break Err(Fault::Gone);
                        }
                        Some(answer) => break answer,
                        None => again = true,
                    }
                }
            }
            Err(fault) => Err(fault),
        };
        if sent.is_err() {
            // What is not ended stays, and is paid for.
            let abort = store.abort_multipart(path, &id);
            let _best_effort = tokio::time::timeout(TO_ABORT, abort).await;
        }
        Ok(sent?.e_tag)
    }
}
