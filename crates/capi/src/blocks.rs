//! Namespaces and the calls on blocks.

use kvdepot_store::{Depot, GetOptions, Key, Namespace, NamespaceSpec, Task};

use crate::given::{Growing, In, Out, Plain, Text};
use crate::guard::Failure;
use crate::handle::{Made, Ref};
use crate::memory::{Block, Lent, buffers};

/// `KVD_GET_PREFIX`: stop at the first miss.
pub const GET_PREFIX: u32 = 1;
/// `KVD_GET_STAGED`: copy through the staging buffer.
pub const GET_STAGED: u32 = 2;

/// Description of a namespace, `kvd_space`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Space {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Model ID, as the engine names it.
    pub model: Text,
    /// Element type of the KV cache.
    pub dtype: Text,
    /// Tokens per block, or per piece of a session.
    pub block_tokens: u64,
    /// Fingerprint of the weights.
    pub weights: Text,
    /// Layout and geometry of the bytes.
    pub layout: Text,
    /// Group of layers; null for sessions.
    pub group: Text,
    /// Tensor and pipeline parallel sizes of the model.
    pub world: Text,
    /// Hash algorithm and seed of the keys.
    pub hash: Text,
    /// Secret or label that separates tenants.
    pub salt: Text,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Space {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Space {
    const FIRST: usize = 80;
}

impl Space {
    pub(crate) fn spec(&self) -> Result<NamespaceSpec, Failure> {
        let maybe = |text: &Text, field: &str| -> Result<Option<String>, Failure> {
            Ok(text.maybe(field)?.map(str::to_owned))
        };
        Ok(NamespaceSpec {
            model: self.model.read("model")?.to_owned(),
            dtype: self.dtype.read("dtype")?.to_owned(),
            block_tokens: self.block_tokens,
            weights: maybe(&self.weights, "weights")?,
            layout: maybe(&self.layout, "layout")?,
            group: maybe(&self.group, "group")?,
            world: maybe(&self.world, "world")?,
            hash: maybe(&self.hash, "hash")?,
            salt: maybe(&self.salt, "salt")?,
        })
    }
}

pub(crate) fn keys(given: &In<[u8; 32]>, len: usize) -> Result<Vec<Key>, Failure> {
    let given = given.slice("keys", len)?;
    Ok(given.iter().map(|bytes| Key(*bytes)).collect())
}

exported! {
    /// Implements `kvd_namespace_open`.
    fn kvd_namespace_open(
        depot: Ref<Depot>, space: In<Space>, namespace: Made<Namespace>,
    ) {
        let namespace = namespace.making("namespace")?;
        let depot = depot.get("depot")?;
        namespace.put(depot.namespace(&space.read("space")?.spec()?)?);
        Ok(())
    }

    /// Implements `kvd_namespace_close`.
    fn kvd_namespace_close(namespace: Ref<Namespace>) {
        drop(namespace.end());
        Ok(())
    }

    /// Implements `kvd_keys_of_tokens`.
    fn kvd_keys_of_tokens(
        tokens: In<u32>, tokens_len: usize, block_tokens: usize, salt: In<u8>, salt_len: usize,
        made: Out<[u8; 32]>, made_len: usize,
    ) {
        let tokens = tokens.slice("tokens", tokens_len)?;
        let chain = Key::chain(tokens, block_tokens, salt.slice("salt", salt_len)?)?;
        let all: Vec<[u8; 32]> = chain.into_iter().map(|key| key.0).collect();
        made.fill("keys", made_len, &all)
    }

    /// Implements `kvd_put`.
    fn kvd_put(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, blocks: In<Block>,
        task: Made<Task>,
    ) {
        let task = task.making("task")?;
        let namespace = namespace.get("namespace")?;
        let lent = Lent::new();
        let blocks = buffers(&lent, "blocks", blocks.slice("blocks", given_len)?, false)?;
        task.put(namespace.put(keys(&given, given_len)?, blocks)?);
        Ok(())
    }

    /// Implements `kvd_get`.
    fn kvd_get(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, blocks: In<Block>,
        flags: u32, task: Made<Task>,
    ) {
        let task = task.making("task")?;
        let namespace = namespace.get("namespace")?;
        if flags & !(GET_PREFIX | GET_STAGED) != 0 {
            let allowed = "KVD_GET_PREFIX, KVD_GET_STAGED, both, or 0";
            return Err(Failure::input("flags", format!("{flags:#x}"), allowed));
        }
        let mut options = GetOptions::default();
        options.prefix = flags & GET_PREFIX != 0;
        options.staged = flags & GET_STAGED != 0;
        let lent = Lent::new();
        let blocks = buffers(&lent, "blocks", blocks.slice("blocks", given_len)?, true)?;
        task.put(namespace.get_with(keys(&given, given_len)?, blocks, options)?);
        Ok(())
    }

    /// Implements `kvd_lookup`.
    fn kvd_lookup(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, task: Made<Task>,
    ) {
        let task = task.making("task")?;
        let namespace = namespace.get("namespace")?;
        task.put(namespace.lookup(&keys(&given, given_len)?)?);
        Ok(())
    }

    /// Implements `kvd_prefetch`.
    fn kvd_prefetch(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, task: Made<Task>,
    ) {
        let task = task.making("task")?;
        let namespace = namespace.get("namespace")?;
        task.put(namespace.prefetch(&keys(&given, given_len)?)?);
        Ok(())
    }

    /// Implements `kvd_prefix`.
    fn kvd_prefix(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, count: Out<usize>,
    ) {
        let count = count.place("count")?;
        let namespace = namespace.get("namespace")?;
        count.put(namespace.prefix(&keys(&given, given_len)?)?);
        Ok(())
    }

    /// Implements `kvd_contains`.
    fn kvd_contains(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, stored: Out<u8>,
    ) {
        let namespace = namespace.get("namespace")?;
        let is_there = namespace.contains(&keys(&given, given_len)?)?;
        let is_there: Vec<u8> = is_there.into_iter().map(u8::from).collect();
        stored.fill("stored", given_len, &is_there)
    }

    /// Implements `kvd_remove`.
    fn kvd_remove(
        namespace: Ref<Namespace>, given: In<[u8; 32]>, given_len: usize, count: Out<usize>,
    ) {
        let count = count.wanted("count")?;
        let namespace = namespace.get("namespace")?;
        let removed = namespace.remove(&keys(&given, given_len)?)?;
        if let Some(count) = count {
            count.put(removed);
        }
        Ok(())
    }
}
