//! What the namespaces of a bucket are, and what they have there.

use std::collections::HashMap;
use std::ops::Range;

use futures_util::future::{FutureExt, try_join_all};
use futures_util::stream::{self, StreamExt};
use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::{Identity, NamespaceId};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, PutMode, PutOptions, PutPayload,
};
use parking_lot::Mutex;

use super::bucket::{Fault, MANY, Way, is_wanted};
use super::{Common, FOLDERS, LISTED};
use crate::tier::description::{FOLDER, LEN_MAX, MOST, decode};
use crate::tier::posix::name::{BLOCKS, identity_of, namespace_of};
use crate::tier::{NamespacePage, NamespaceUsage};

/// A block's object: its name, its path, and the bytes of its payload.
pub(super) type Named = (Identity, Path, u64);

/// The version of a description, and its text.
type Described = (String, String);

/// Descriptions of namespaces that were read before.
pub(super) type Descriptions = Mutex<HashMap<NamespaceId, Described>>;

/// Some stores list no ETag.
fn version_of(meta: &ObjectMeta) -> String {
    format!("{:?} {} {}", meta.e_tag, meta.last_modified, meta.size)
}

impl Common {
    /// Writes what a namespace is where nobody has. It is for people: what fails is not said.
    pub(super) async fn describe(&self, id: NamespaceId, text: &str) {
        let path = self.bucket.path(&format!("{FOLDER}/{id}"));
        let put = || {
            let payload = PutPayload::from(text.to_owned());
            let options = PutOptions::from(PutMode::Create);
            self.bucket
                .store()
                .put_opts(&path, payload, options)
                .boxed()
        };
        match self.bucket.ask(Way::Write, put).await {
            Ok(_) | Err(Fault::Taken) => {}
            Err(fault) => tracing::debug!(?fault, "cannot write the description of a namespace"),
        }
    }

    /// Reads the first [`MOST`] descriptions: anybody with write access may write more. Objects
    /// that have not changed since the last call are not read again.
    async fn descriptions(&self) -> Result<Vec<(NamespaceId, String)>, Fault> {
        let (mut found, mut looked, mut token) = (HashMap::new(), 0, None);
        loop {
            let most = MANY.min(MOST - looked);
            let (page, next) = self.bucket.page(FOLDER, token.as_deref(), most).await?;
            looked += page.len().max(1);
            let small = page.into_iter().take(most);
            let small = small.filter(|meta| meta.size <= LEN_MAX as u64);
            let small = small.take_while(|_| is_wanted());
            let each = stream::iter(small).map(async |meta| match self.described_before(&meta) {
                Some(before) => Some(before),
                None => self.description(&meta).await,
            });
            let some: Vec<_> = each.buffer_unordered(self.bucket.at_once()).collect().await;
            found.extend(some.into_iter().flatten());
            match next {
                Some(next) if looked < MOST && is_wanted() => token = Some(next),
                _ => break,
            }
        }
        if !is_wanted() {
            // What was read before stays known.
            return Err(Fault::Late);
        }
        let told = found.iter().map(|(id, (_, text))| (*id, text.clone()));
        let told = told.collect();
        *self.descriptions.lock() = found;
        Ok(told)
    }

    /// Returns the description that an earlier call has read of the same version.
    fn described_before(&self, meta: &ObjectMeta) -> Option<(NamespaceId, Described)> {
        let id = namespace_of(meta.location.filename()?)?;
        let known = self.descriptions.lock();
        let known = known
            .get(&id)
            .filter(|(version, _)| *version == version_of(meta))?;
        Some((id, known.clone()))
    }

    async fn description(&self, meta: &ObjectMeta) -> Option<(NamespaceId, Described)> {
        let id = namespace_of(meta.location.filename()?)?;
        // What has grown since it was listed is none.
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(0..LEN_MAX as u64 + 1)));
        let get = || {
            let get = self
                .bucket
                .store()
                .get_opts(&meta.location, options.clone());
            get.then(|found| async { found?.bytes().await }).boxed()
        };
        let bytes = self.bucket.ask(Way::Read, get).await.ok()?;
        if bytes.len() > LEN_MAX {
            return None;
        }
        let text = decode(std::str::from_utf8(&bytes).ok()?)?;
        Some((id, (version_of(meta), text)))
    }

    /// What namespaces have in some folders, from one on, and where the next ones begin.
    pub(super) async fn shares(&self, first: u32) -> Result<NamespacePage, Fault> {
        let mut found = HashMap::<NamespaceId, NamespaceUsage>::new();
        if first == 0 {
            for (id, text) in self.descriptions().await? {
                found.insert(id, NamespaceUsage::described(id, Some(text)));
            }
        }
        let next = FOLDERS.min(first.saturating_add(LISTED));
        for (name, _, len) in self.named(first..next).await? {
            let id = name.namespace;
            let usage = found.entry(id);
            let usage = usage.or_insert_with(|| NamespaceUsage::described(id, None));
            usage.blocks += 1;
            usage.bytes += len;
        }
        let more = (next < FOLDERS).then_some(next.into());
        Ok((found.into_values().collect(), more))
    }

    /// The blocks in some folders.
    async fn named(&self, folders: Range<u32>) -> Result<Vec<Named>, Fault> {
        let listed = folders.map(|folder| async move {
            let path = format!("{BLOCKS}/{folder:03x}");
            self.bucket.list_all(&path).await
        });
        let all = try_join_all(listed).await?.into_iter().flatten();
        let named = all.filter_map(|meta| {
            let name = meta.location.filename().and_then(identity_of)?;
            let len = meta.size.saturating_sub(LEN as u64);
            Some((name, meta.location, len))
        });
        Ok(named.collect())
    }

    /// Those of a namespace.
    pub(super) async fn names(
        &self,
        folders: Range<u32>,
        namespace: NamespaceId,
    ) -> Result<Vec<Named>, Fault> {
        let mut named = self.named(folders).await?;
        named.retain(|(name, ..)| name.namespace == namespace);
        Ok(named)
    }
}
