//! What the namespaces of a bucket are, and what they have there.

use std::collections::HashMap;
use std::ops::Range;

use futures_util::future::{FutureExt, join_all, try_join_all};
use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::{Identity, NamespaceId};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::bucket::{Fault, Way};
use super::{Common, FOLDERS, LISTED};
use crate::tier::description::{FOLDER, LEN_MAX, MOST, decode, encode};
use crate::tier::posix::name::{BLOCKS, identity_of, namespace_of};
use crate::tier::{NamespacePage, NamespaceUsage};

/// A block's object: its name, its path, and the bytes of its payload.
pub(super) type Named = (Identity, Path, u64);

impl Common {
    /// Writes what a namespace is where nobody has. It is for people: what fails is not said.
    pub(super) async fn describe(&self, id: NamespaceId, description: &str) {
        let path = self.bucket.path(&format!("{FOLDER}/{id}"));
        let text = encode(description);
        let put = || {
            let payload = PutPayload::from(text.clone());
            let options = PutOptions::from(PutMode::Create);
            self.bucket
                .store()
                .put_opts(&path, payload, options)
                .boxed()
        };
        match self.bucket.ask(Way::Write, put).await {
            Ok(_) | Err(Fault::Taken) => {}
            Err(fault) => tracing::debug!(?fault, "a namespace is not described"),
        }
    }

    async fn descriptions(&self) -> Result<Vec<(NamespaceId, String)>, Fault> {
        let all = self.bucket.list_all(FOLDER).await?.into_iter();
        let small = all.filter(|meta| meta.size <= LEN_MAX as u64).take(MOST);
        let each = small.map(|meta: ObjectMeta| async move {
            let id = namespace_of(meta.location.filename()?)?;
            let get = || {
                let get = self.bucket.store().get(&meta.location);
                get.then(|found| async { found?.bytes().await }).boxed()
            };
            let bytes = self.bucket.ask(Way::Read, get).await.ok()?;
            Some((id, decode(std::str::from_utf8(&bytes).ok()?)?))
        });
        Ok(join_all(each).await.into_iter().flatten().collect())
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
