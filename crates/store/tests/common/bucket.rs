//! A real object store in this process, over a directory, and what may happen on the way to it.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, ETAG, IF_NONE_MATCH};
use hyper::{Method, Request, Response};
use kvdepot_store::{Config, Depot, Error};
use kvdepot_testkit::s3::{self, Answer};
use s3s::service::S3Service;
use s3s::{Body, StdError};
use serde_json::{Value, json};

pub(crate) const LEN: usize = 70_001;

/// What happens to requests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Trouble {
    /// Another answer, with this code of an error.
    Answer(u16, &'static str),
    /// None.
    Silence,
    /// The connection is closed.
    Closed,
    /// It comes so much later.
    Slow(Duration),
    /// Half of the body, and then the end of the connection.
    Half,
    /// Half of the body, and then nothing.
    Stalled,
    /// One byte more.
    Longer,
    /// The object is another version.
    OtherVersion,
    /// A byte of the body is another one.
    Rot,
    /// It is done, and the answer does not come.
    Unanswered,
    /// It is done, and the connection is closed.
    Lost,
    /// The server does not know conditions, and says so.
    NoConditions,
}

/// Which requests, and how many of them.
struct Case {
    method: Option<Method>,
    within: &'static str,
    left: usize,
    trouble: Trouble,
}

#[derive(Default)]
struct Shared {
    cases: Mutex<Vec<Case>>,
    requests: AtomicU64,
    seen: Mutex<Vec<String>>,
}

pub(crate) struct Server {
    server: s3::Server,
    shared: Arc<Shared>,
    /// Goes last.
    root: tempfile::TempDir,
}

impl Server {
    pub(crate) fn start() -> Server {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("bucket")).unwrap();
        fs::write(
            root.path().join("credentials"),
            "aws_access_key_id = me\naws_secret_access_key = secret\n",
        )
        .unwrap();
        let shared = Arc::new(Shared::default());
        let asked = Arc::clone(&shared);
        let answer = move |service, request| answer(Arc::clone(&asked), service, request);
        let server = s3::Server::start_with(root.path(), ("me", "secret"), 2, answer);
        Server {
            server,
            shared,
            root,
        }
    }

    /// Of the next `count` requests of a method whose path has this in it.
    pub(crate) fn trouble(
        &self,
        method: Option<Method>,
        within: &'static str,
        count: usize,
        trouble: Trouble,
    ) {
        self.shared.cases.lock().unwrap().push(Case {
            method,
            within,
            left: count,
            trouble,
        });
    }

    pub(crate) fn calm(&self) {
        self.shared.cases.lock().unwrap().clear();
    }

    pub(crate) fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// Methods and paths since the last time.
    pub(crate) fn seen(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn credentials(&self) -> PathBuf {
        self.path().join("credentials")
    }

    pub(crate) fn settings(&self) -> Value {
        json!({
            "url": "s3://bucket/kv/test",
            "endpoint": self.server.endpoint(),
            "allow_http": true,
            "credentials": self.credentials(),
            "capacity": "64MiB",
            "timeout": "3s",
            "lookup_timeout": "3s",
        })
    }

    pub(crate) fn try_open(&self, pipeline: &str, s3: &Value) -> Result<Depot, Error> {
        self.open_of(pipeline, s3, json!({}))
    }

    /// With a file of keys.
    pub(crate) fn open_keyed(&self, pipeline: &str, s3: &Value, keys: &Path) -> Depot {
        let keyed = self.open_of(pipeline, s3, json!({"mac_key_file": keys}));
        keyed.unwrap()
    }

    fn open_of(&self, pipeline: &str, s3: &Value, mut settings: Value) -> Result<Depot, Error> {
        settings["lanes"] = json!(2);
        settings["close_timeout"] = json!("10s");
        settings["socket"] = json!("off");
        for tier in pipeline.split('|') {
            match tier {
                "Cache" => settings["cache"] = json!({"capacity": "1MiB"}),
                "Dax" => {
                    let path = self.path().join("dax");
                    settings["dax"] = json!({"path": path, "capacity": "2MiB"});
                }
                _ => {
                    settings["s3"] = self.settings();
                    for (name, value) in s3.as_object().unwrap() {
                        settings["s3"][name] = value.clone();
                        if value.is_null() {
                            settings["s3"].as_object_mut().unwrap().remove(name);
                        }
                    }
                }
            }
        }
        Depot::open(&Config::new(pipeline, &settings)?)
    }

    pub(crate) fn open_with(&self, pipeline: &str, s3: &Value) -> Depot {
        self.try_open(pipeline, s3).unwrap()
    }

    pub(crate) fn open(&self) -> Depot {
        self.open_with("S3", &json!({}))
    }

    /// The objects of blocks, as files.
    pub(crate) fn objects(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.path().join("bucket/kv/test/blocks"));
        let folders = folders.into_iter().flatten().flatten();
        let files = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten());
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files
    }

    pub(crate) fn is_of(&self, object: &Path, number: u64) -> bool {
        let name = object.file_name().unwrap().to_string_lossy();
        name.starts_with(&super::common::key(number).to_string())
    }

    /// The files beside an object that have its attributes and its ETag.
    fn beside(&self, object: &Path) -> [PathBuf; 2] {
        let key = object.strip_prefix(self.path().join("bucket")).unwrap();
        let (bucket, key) = (base64("bucket"), base64(key.to_str().unwrap()));
        ["metadata", "internal"]
            .map(|kind| format!(".bucket-{bucket}.object-{key}.{kind}.json"))
            .map(|name| self.path().join(name))
    }

    pub(crate) fn attributes(&self, object: &Path) -> Vec<u8> {
        fs::read(&self.beside(object)[0]).unwrap()
    }

    /// Puts something else in the place of an object.
    pub(crate) fn replace(&self, object: &Path, bytes: &[u8], attributes: Option<&[u8]>) {
        for file in self.beside(object) {
            let _or_none = fs::remove_file(file);
        }
        fs::write(object, bytes).unwrap();
        if let Some(attributes) = attributes {
            fs::write(&self.beside(object)[0], attributes).unwrap();
        }
    }

    /// Their bytes.
    pub(crate) fn used(&self) -> u64 {
        let len = |path: &PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
        self.objects().iter().map(len).sum()
    }
}

/// Without padding, as the server names files.
fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digits = |three: &[u8]| {
        let bits = (0..3).fold(0, |bits, at| {
            bits << 8 | three.get(at).map_or(0, |b| *b as usize)
        });
        let digit = move |at: usize| char::from(DIGITS[bits >> (18 - 6 * at) & 63]);
        (0..three.len() + 1).map(digit)
    };
    text.as_bytes().chunks(3).flat_map(digits).collect()
}

impl Shared {
    fn take(&self, request: &Request<Incoming>) -> Option<Trouble> {
        let mut cases = self.cases.lock().unwrap();
        let path = request.uri().path();
        let case = cases.iter_mut().find(|case| {
            let is_one = case
                .method
                .as_ref()
                .is_none_or(|one| one == request.method());
            is_one && case.left > 0 && path.contains(case.within)
        })?;
        case.left -= 1;
        Some(case.trouble.clone())
    }
}

async fn answer(shared: Arc<Shared>, service: S3Service, request: Request<Incoming>) -> Answer {
    shared.requests.fetch_add(1, Ordering::Relaxed);
    let line = format!("{} {}", request.method(), request.uri().path());
    shared.seen.lock().unwrap().push(line);
    let mut trouble = shared.take(&request);
    let conditions = request.headers().contains_key(IF_NONE_MATCH);
    if conditions && trouble == Some(Trouble::NoConditions) {
        trouble = Some(Trouble::Answer(501, "NotImplemented"));
    }
    match &trouble {
        Some(Trouble::Answer(status, code)) => {
            let text = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
            let answer = Response::builder().status(*status);
            return Ok(answer.body(Body::from(text)).unwrap());
        }
        Some(Trouble::Silence) => std::future::pending().await,
        Some(Trouble::Closed) => return Err(io::Error::other("closed")),
        Some(Trouble::Slow(time)) => tokio::time::sleep(*time).await,
        _ => {}
    }
    let mut response = s3::pass(&service, request).await?;
    match trouble {
        Some(Trouble::Unanswered) => {
            std::future::pending::<()>().await;
        }
        Some(Trouble::Lost) => return Err(io::Error::other("closed")),
        Some(Trouble::OtherVersion) => {
            let other = "\"00000000000000000000000000000000\"".parse().unwrap();
            response.headers_mut().insert(ETAG, other);
        }
        Some(trouble @ (Trouble::Half | Trouble::Stalled | Trouble::Longer | Trouble::Rot)) => {
            let (mut head, body) = response.into_parts();
            let bytes = BodyExt::collect(body).await.unwrap().to_bytes();
            let mut frames: Vec<Result<Frame<Bytes>, StdError>> = Vec::new();
            let mut end = stream::empty().boxed();
            match trouble {
                Trouble::Stalled => {
                    frames.push(Ok(Frame::data(bytes.slice(..bytes.len() / 2))));
                    end = stream::pending().boxed();
                }
                Trouble::Half => {
                    frames.push(Ok(Frame::data(bytes.slice(..bytes.len() / 2))));
                    frames.push(Err("closed".into()));
                }
                Trouble::Longer => {
                    head.headers.remove(CONTENT_LENGTH);
                    frames.push(Ok(Frame::data(bytes)));
                    frames.push(Ok(Frame::data(Bytes::from_static(b"x"))));
                }
                _ => {
                    let mut bytes = bytes.to_vec();
                    let middle = bytes.len() / 2;
                    bytes[middle] ^= 1;
                    frames.push(Ok(Frame::data(bytes.into())));
                }
            }
            let body = StreamBody::new(stream::iter(frames).chain(end));
            return Ok(Response::from_parts(head, Body::http_body_unsync(body)));
        }
        _ => {}
    }
    Ok(response)
}
