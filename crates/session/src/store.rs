//! The sessions of a depot.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_host::EachMinute;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Key, Namespace, NamespaceSpec, Task};
use parking_lot::{Mutex, RwLock};

use crate::counted::Counted;
use crate::error::{Error, room};
use crate::index::{Id, Index};
use crate::manifest::{Manifest, Space};

/// Value of `group` in the description of a namespace of manifests.
pub const GROUP: &str = "session manifests";

/// Groups of the others.
pub(crate) const PIECES: &str = "session pieces";
const OBJECTS: &str = "session objects";
const USES: &str = "session uses";

/// Largest number of tokens per piece. A piece that is not full is written again when it grows.
pub const PIECE_TOKENS_MAX: u32 = 1 << 20;

/// Bytes a second that a slow medium moves: a large call may take longer.
const SLOW: u64 = 16 << 20;

/// Manifests that are read at a time, and their bytes.
const BATCH: usize = 64;
const BATCH_BYTES: u64 = 64 << 20;

/// Longest manifest: some 60 million tokens.
pub(crate) const MANIFEST_MAX: u64 = 256 << 20;

/// Settings that all sessions of a [`Sessions`] have in common.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Spec {
    /// Model, weights, element types, layout and tokenizer, which must be equal for a state to be
    /// used again. `block_tokens` is the number of tokens per piece, 1 to [`PIECE_TOKENS_MAX`].
    /// `group` is ignored.
    pub namespace: NamespaceSpec,
    /// Time-out of one depot call. A call gets one second more for each 16 MiB that it moves.
    pub timeout: Duration,
}

impl Spec {
    /// Creates settings with a time-out of one minute.
    #[must_use]
    pub fn new(namespace: NamespaceSpec) -> Spec {
        Spec {
            namespace,
            timeout: Duration::from_secs(60),
        }
    }
}

/// Handle to the sessions of a depot in one namespace.
///
/// Clones share one index in memory. A lookup reads the manifests of matching sessions only.
///
/// # Examples
/// ```
/// use kvdepot_session::{Sessions, Spec};
/// use kvdepot_store::{Config, Depot, NamespaceSpec};
///
/// # let dir = tempfile::tempdir()?;
/// let posix = serde_json::json!({"path": dir.path(), "capacity": "64MiB"});
/// let config = Config::new("Posix", &serde_json::json!({"socket": "off", "posix": posix}))?;
/// let spec = Spec::new(NamespaceSpec {
///     model: "m".into(),
///     dtype: "f16".into(),
///     block_tokens: 256,
///     ..NamespaceSpec::default()
/// });
/// let sessions = Sessions::open(Depot::open(&config)?, &spec)?;
/// assert!(sessions.list().is_empty());
/// assert!(sessions.lookup(&[1, 2, 3], 1)?.is_empty());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// The [crate documentation](crate) has an example with a save and a restore.
#[derive(Clone)]
pub struct Sessions {
    pub(crate) depot: Depot,
    pub(crate) pieces: Namespace,
    pub(crate) objects: Namespace,
    pub(crate) manifests: Namespace,
    pub(crate) uses: Namespace,
    pub(crate) space: Space,
    pub(crate) piece_tokens: u32,
    pub(crate) timeout: Duration,
    pub(crate) index: Arc<RwLock<Index>>,
    pub(crate) counted: Arc<Mutex<Counted>>,
    /// Read while a session gets its name, and written while what none names is removed: between
    /// the look at who names what and the removal nobody here is told that all of it is there.
    pub(crate) naming: Arc<RwLock<()>>,
    passed_over: Arc<EachMinute>,
}

impl Sessions {
    /// Opens the sessions of `depot` in the namespace of `spec`, and reads the stored manifests
    /// into an index.
    ///
    /// # Errors
    /// [`Error::Input`] if the number of tokens per piece is not allowed, and [`Error::Depot`] if
    /// the depot fails.
    pub fn open(depot: Depot, spec: &Spec) -> Result<Sessions, Error> {
        let piece_tokens = u32::try_from(spec.namespace.block_tokens).ok();
        let piece_tokens = piece_tokens.filter(|tokens| (1..=PIECE_TOKENS_MAX).contains(tokens));
        let piece_tokens = piece_tokens.ok_or_else(|| {
            let allowed = format!("1 to {PIECE_TOKENS_MAX} tokens per piece");
            Error::input("block_tokens", spec.namespace.block_tokens, allowed)
        })?;
        let namespace = |group: &str| {
            depot.namespace(&NamespaceSpec {
                group: Some(group.to_owned()),
                ..spec.namespace.clone()
            })
        };
        let sessions = Sessions {
            pieces: namespace(PIECES)?,
            objects: namespace(OBJECTS)?,
            manifests: namespace(GROUP)?,
            uses: namespace(USES)?,
            depot,
            space: Space::of(&spec.namespace),
            piece_tokens,
            timeout: spec.timeout,
            index: Arc::new(RwLock::new(Index::new(piece_tokens))),
            counted: Arc::new(Mutex::new(Counted::default())),
            naming: Arc::default(),
            passed_over: Arc::default(),
        };
        sessions.refresh()?;
        Ok(sessions)
    }

    /// Opens all sessions of `depot`, one [`Sessions`] per namespace.
    ///
    /// Sessions with a salt are included only if `salt` is their salt.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn all(depot: &Depot, salt: Option<&str>) -> Result<Vec<Sessions>, Error> {
        let mut all: Vec<Sessions> = Vec::new();
        let group = format!("group={GROUP}");
        for namespace in depot.namespaces()? {
            let description = namespace.description.unwrap_or_default();
            if !description.contains(&group) {
                continue;
            }
            let manifests = depot.namespace_by_id(namespace.id);
            let timeout = Spec::new(NamespaceSpec::default()).timeout;
            let mut some = manifests.blocks()?;
            some.retain(|(_, len)| *len <= MANIFEST_MAX);
            some.truncate(BATCH);
            // What one says of itself need not be so.
            let mut tried: Vec<(Space, u32)> = Vec::new();
            'found: for some in batches(&some) {
                let read = read_all(&manifests, some, timeout)?.into_iter().flatten();
                for known in read.filter_map(|bytes| Manifest::decode(&bytes).ok()) {
                    let of = (known.space, known.piece_tokens);
                    if tried.contains(&of) {
                        continue;
                    }
                    let salt = salt.filter(|_| of.0.is_salted).map(str::to_owned);
                    let spec = Spec::new(of.0.spec(of.1, salt));
                    tried.push(of);
                    let sessions = Sessions::open(depot.clone(), &spec)?;
                    if sessions.manifests.id() == namespace.id {
                        all.push(sessions);
                        break 'found;
                    }
                }
            }
        }
        Ok(all)
    }

    /// Returns the conditions under which these sessions can be used.
    #[must_use]
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Returns the depot.
    #[must_use]
    pub fn depot(&self) -> &Depot {
        &self.depot
    }

    /// Returns the number of tokens per piece.
    #[must_use]
    pub fn piece_tokens(&self) -> u32 {
        self.piece_tokens
    }

    /// Updates the index with sessions that other processes have saved or removed.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn refresh(&self) -> Result<(), Error> {
        // Those that are saved from now on need not be in the listing.
        let begun = self.index.read().epoch();
        let listed = self.manifests.blocks()?;
        let there: HashSet<Id> = listed.iter().map(|(key, _)| Id::of(key)).collect();
        let new: Vec<(Key, u64)> = {
            let index = self.index.read();
            let is_new = |(key, len): &(Key, u64)| {
                *len <= MANIFEST_MAX && index.entry(Id::of(key)).is_none()
            };
            listed.into_iter().filter(is_new).collect()
        };
        {
            let mut index = self.index.write();
            index.doubt();
            index.retain(&there, begun);
        }
        for some in batches(&new) {
            let read = read_all(&self.manifests, some, self.timeout)?;
            let mut index = self.index.write();
            for ((key, len), bytes) in some.iter().zip(read) {
                match bytes.as_deref().map(Manifest::decode) {
                    Some(Ok(manifest)) if manifest.piece_tokens == self.piece_tokens => {
                        index.add(*key, *len, &manifest);
                    }
                    // Each refresh reads it again.
                    Some(Err(error)) => {
                        if let Some(unsaid) = self.passed_over.may_say() {
                            tracing::warn!(%error, %key, unsaid,
                                "session is damaged or has an unknown format; lookups ignore the \
                                 session");
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Bytes that one session may have: tiers begin to evict before they are full, and a session
    /// that needs more would evict its own parts.
    pub(crate) fn size_max(&self) -> u64 {
        let stats = self.depot.stats();
        let lasting = stats.tiers.iter().skip(self.depot.acknowledging());
        let each = lasting.map(|tier| match tier.capacity_bytes {
            // It does not say, or is not there now.
            0 => u64::MAX,
            bytes => bytes / 10 * 9,
        });
        each.max().unwrap_or(u64::MAX)
    }

    /// The block that is a session's manifest, and its bytes.
    pub(crate) fn block_of(&self, id: Id) -> Option<(Key, u64)> {
        let index = self.index.read();
        index.entry(id).map(|entry| (entry.key, entry.len))
    }

    /// Reads the manifest of the session `id`.
    ///
    /// # Errors
    /// * [`Error::Unknown`] if the manifest is missing or fails checksum verification.
    /// * [`Error::Malformed`] if it cannot be decoded.
    /// * [`Error::Depot`] if the depot fails.
    pub fn manifest(&self, id: Id) -> Result<Manifest, Error> {
        let unknown = || Error::Unknown(id.to_string());
        let (key, len) = self.block_of(id).ok_or_else(unknown)?;
        let read = read_all(&self.manifests, &[(key, len)], self.timeout)?;
        let bytes = read.into_iter().next().flatten();
        let Some(bytes) = bytes else {
            self.index.write().gone(id);
            return Err(unknown());
        };
        Manifest::decode(&bytes)
    }

    /// Returns the ID of the session whose ID begins with these hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is none, and [`Error::Input`] if there are several.
    pub fn find(&self, digits: &str) -> Result<Id, Error> {
        match self.index.read().named(digits) {
            Err(Error::Unknown(unknown)) => {
                // One that this release does not read can be removed.
                let listed = self.manifests.blocks()?.into_iter();
                let ids = listed.map(|(key, _)| Id::of(&key));
                let found = ids.filter(|id| id.to_string().starts_with(&unknown));
                match found.collect::<Vec<_>>()[..] {
                    [one] => Ok(one),
                    _ => Err(Error::Unknown(unknown)),
                }
            }
            found => found,
        }
    }
}

/// Refuses a session with parts of these lengths that no tier can keep whole.
pub(crate) fn check_size(most: u64, lens: impl Iterator<Item = u64>) -> Result<(), Error> {
    // As a tier has them, at least.
    let room = |len: u64| len.checked_next_multiple_of(4096).unwrap_or(u64::MAX);
    let bytes = lens.fold(0, |all: u64, len| all.saturating_add(room(len)));
    if bytes <= most {
        return Ok(());
    }
    let allowed = format!("at most {most} bytes, 90 % of the tier that acknowledges sessions");
    Err(Error::input("session", format!("{bytes} bytes"), allowed))
}

/// Blocks in batches that are read together, each of so many bytes at most, or of one block: a
/// tier's listing says what others claim.
fn batches(blocks: &[(Key, u64)]) -> impl Iterator<Item = &[(Key, u64)]> {
    let mut rest = blocks;
    std::iter::from_fn(move || {
        let mut bytes = 0_u64;
        let fits = |(_, len): &&(Key, u64)| {
            bytes = bytes.saturating_add(*len);
            bytes <= BATCH_BYTES
        };
        let count = rest.iter().take(BATCH).take_while(fits).count().max(1);
        let (some, behind) = rest.split_at_checked(count)?;
        rest = behind;
        Some(some)
    })
}

/// Blocks, whole, each of which may be missing.
pub(crate) fn read_all(
    from: &Namespace,
    blocks: &[(Key, u64)],
    timeout: Duration,
) -> Result<Vec<Option<Vec<u8>>>, Error> {
    if blocks.is_empty() {
        return Ok(Vec::new());
    }
    let buffer = |(_, len): &(Key, u64)| {
        let mut bytes = room(*len, Path::new("a part of a session"))?;
        bytes.resize(*len as usize, 0);
        Ok::<_, Error>(Buffer::from_vec(bytes))
    };
    let buffers: Vec<Buffer> = blocks.iter().map(buffer).collect::<Result<_, _>>()?;
    let keys = blocks.iter().map(|(key, _)| *key).collect();
    let bytes = blocks.iter().map(|(_, len)| len).sum();
    let task = from.get(keys, BlockBuffers::whole(buffers.clone()))?;
    let there = wait(&task, timeout, bytes)?;
    let each = there.into_iter().zip(buffers);
    Ok(each
        .map(|(there, buffer)| there.then(|| buffer.to_vec()))
        .collect())
}

/// Waits for a task of so many bytes; which keys are done.
pub(crate) fn wait(task: &Task, timeout: Duration, bytes: u64) -> Result<Vec<bool>, Error> {
    let moving = Duration::from_secs(bytes / SLOW);
    Ok(task.wait(Some(timeout.saturating_add(moving)))?)
}
