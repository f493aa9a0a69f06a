//! `object_store` as it is: what is straightforward for blocks in a bucket.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use kvdepot_media::Buffer;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::runtime::{Builder, Runtime};

use super::beside::Contender;
use super::plan::Plan;
use crate::bench::media::Region;
use crate::bench::random::Random;
use crate::error::Error;
use crate::interrupt::Interrupt;

/// Where objects are.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub(super) url: String,
    pub(super) endpoint: Option<String>,
}

impl Bucket {
    pub(super) fn of(plan: &Plan) -> Option<Bucket> {
        Some(Bucket {
            url: plan.url.clone()?,
            endpoint: plan.endpoint.clone(),
        })
    }
}

/// A client with threads of its own.
pub(super) struct Bare {
    pub(super) name: &'static str,
    runtime: Runtime,
    store: Arc<AmazonS3>,
    at: Path,
}

/// Clients that may be the limit.
pub(super) fn clients(bucket: &Bucket, run: &str) -> Result<Vec<Bare>, Error> {
    let ways = [
        ("object_store, 1 thread", 1),
        ("object_store, 4 threads", 4),
    ];
    let client = |(name, threads)| Bare::new(name, threads, bucket, run);
    ways.into_iter().map(client).collect()
}

impl Bare {
    fn new(name: &'static str, threads: usize, bucket: &Bucket, run: &str) -> Result<Bare, Error> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("kvdepot-bare")
            .enable_all()
            .build()?;
        let mut builder = AmazonS3Builder::from_env().with_url(&bucket.url);
        if let Some(endpoint) = &bucket.endpoint {
            builder = builder
                .with_config(AmazonS3ConfigKey::S3Endpoint, endpoint)
                .with_allow_http(endpoint.starts_with("http://"));
        }
        let place = bucket.url.strip_prefix("s3://").unwrap_or_default();
        let prefix = place.split_once('/').unwrap_or_default().1;
        let at = Path::parse(prefix.trim_end_matches('/')).map_err(failed)?;
        Ok(Bare {
            name,
            runtime,
            store: Arc::new(builder.build().map_err(failed)?),
            at: at.join(run),
        })
    }

    fn path(&self, number: usize) -> Path {
        self.at.clone().join("plain").join(number.to_string())
    }

    /// Stores contents as objects with these numbers, `depth` at a time; seconds.
    pub(super) fn put(
        &self,
        numbers: &[usize],
        contents: &[Bytes],
        depth: usize,
    ) -> Result<f64, Error> {
        let each = numbers.iter().zip(contents.iter().cycle());
        let each = each.map(|(number, content)| {
            let (store, path, content) = (self.store.clone(), self.path(*number), content.clone());
            async move { store.put(&path, content.into()).await.map(drop) }
        });
        self.run(each, depth)
    }

    /// Gets objects into slots of the region, `depth` at a time; seconds.
    pub(super) fn get(
        &self,
        numbers: &[usize],
        slots: &[Buffer],
        depth: usize,
    ) -> Result<f64, Error> {
        let each = numbers.iter().zip(slots.iter().cycle());
        let each = each.map(|(number, slot)| {
            let (store, path, slot) = (self.store.clone(), self.path(*number), slot.clone());
            async move {
                let mut body = store.get(&path).await?.into_stream();
                let mut at = 0;
                while let Some(bytes) = body.try_next().await? {
                    let written = slot.write_at(at, &bytes);
                    written.map_err(|error| object_store::Error::Generic {
                        store: "memory",
                        source: Box::new(error),
                    })?;
                    at += bytes.len();
                }
                Ok(())
            }
        });
        self.run(each, depth)
    }

    fn run(
        &self,
        each: impl Iterator<Item = impl Future<Output = object_store::Result<()>> + Send + 'static>,
        depth: usize,
    ) -> Result<f64, Error> {
        let start = Instant::now();
        let all = async {
            let mut ended = stream::iter(each).map(tokio::spawn).buffer_unordered(depth);
            while let Some(one) = ended.next().await {
                one.map_err(|error| Error::Bench(error.to_string()))?
                    .map_err(failed)?;
            }
            Ok(start.elapsed().as_secs_f64())
        };
        self.runtime.block_on(all)
    }

    /// Removes plain objects.
    pub(super) fn remove(&self, numbers: &[usize]) -> Result<(), Error> {
        let paths: Vec<_> = numbers
            .iter()
            .map(|number| Ok(self.path(*number)))
            .collect();
        let gone = self.store.delete_stream(stream::iter(paths).boxed());
        let gone = self.runtime.block_on(gone.try_collect::<Vec<_>>());
        gone.map(drop).map_err(failed)
    }

    /// Removes all that this run has made, kvdepot's too.
    pub(super) fn clear(&self) -> Result<(), Error> {
        let all = self.store.list(Some(&self.at));
        let all = all.map_ok(|meta| meta.location).boxed();
        let gone = self.store.delete_stream(all);
        let gone = self.runtime.block_on(gone.try_collect::<Vec<_>>());
        gone.map(drop).map_err(failed)
    }
}

/// Plain objects of a run, and what is in them.
pub(super) struct Objects {
    /// Those that are loaded, in no order.
    numbers: Vec<usize>,
    /// Those that are stored anew.
    new: Vec<usize>,
    slots: Vec<Buffer>,
    contents: Vec<Bytes>,
}

impl Objects {
    pub(super) fn new(
        count: usize,
        region: &Region,
        block: usize,
        slots: &[usize],
    ) -> Result<Objects, Error> {
        let slot = |slot: &usize| Ok(region.whole().slice(slot * block, block)?);
        let buffers: Result<Vec<Buffer>, Error> = slots.iter().map(slot).collect();
        let buffers = buffers?;
        let content = |slot: &Buffer| Bytes::from(slot.to_vec());
        let mut numbers: Vec<usize> = (0..count).collect();
        Random(17).shuffle(&mut numbers);
        Ok(Objects {
            numbers,
            new: (count..count + slots.len()).collect(),
            contents: buffers.iter().map(content).collect(),
            slots: buffers,
        })
    }

    /// Stores those that are loaded.
    pub(super) fn fill(&self, client: &Bare, interrupt: &Interrupt) -> Result<(), Error> {
        for some in self.numbers.chunks(self.contents.len()) {
            interrupt.check()?;
            client.put(some, &self.contents, 8)?;
        }
        Ok(())
    }
}

/// One that moves such objects.
pub(super) struct Client<'a> {
    bare: Bare,
    objects: &'a Objects,
}

impl<'a> Client<'a> {
    pub(super) fn new(bare: Bare, objects: &'a Objects) -> Client<'a> {
        Client { bare, objects }
    }
}

impl Contender for Client<'_> {
    fn name(&self) -> &'static str {
        self.bare.name
    }

    fn load(&mut self, which: Range<usize>, depth: usize) -> Result<f64, Error> {
        let Objects { numbers, slots, .. } = self.objects;
        self.bare.get(&numbers[which], slots, depth)
    }

    fn dump(&mut self, depth: usize) -> Result<f64, Error> {
        let Objects { new, contents, .. } = self.objects;
        self.bare.put(new, contents, depth)
    }

    fn remove(&mut self) -> Result<(), Error> {
        self.bare.remove(&self.objects.new)
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Bench(format!("object_store: {error}"))
}
