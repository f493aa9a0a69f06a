//! The object store, and what may happen on the way to it.

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
use s3s::service::S3Service;
use s3s::{Body, StdError};

use super::{Answer, Server, pass};

/// What happens to requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a plain value of a test")]
pub enum Trouble {
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
#[derive(Debug)]
struct Case {
    method: Option<Method>,
    within: &'static str,
    left: usize,
    trouble: Trouble,
}

#[derive(Debug, Default)]
struct Shared {
    cases: Mutex<Vec<Case>>,
    requests: AtomicU64,
    seen: Mutex<Vec<String>>,
    /// Paths and queries of all requests.
    asked: Mutex<Vec<String>>,
}

/// A server whose id is `me`, its secret `secret`, and its bucket `bucket`, with a directory of its
/// own.
#[derive(Debug)]
pub struct Troubled {
    server: Server,
    shared: Arc<Shared>,
    /// Goes last.
    root: tempfile::TempDir,
}

impl Troubled {
    /// Starts it with its directory in another one.
    ///
    /// # Panics
    /// Where it cannot be started.
    #[must_use]
    pub fn start(within: &Path) -> Troubled {
        let root = tempfile::tempdir_in(within).unwrap();
        fs::create_dir(root.path().join("bucket")).unwrap();
        fs::write(
            root.path().join("credentials"),
            "aws_access_key_id = me\naws_secret_access_key = secret\n",
        )
        .unwrap();
        let shared = Arc::new(Shared::default());
        let asked = Arc::clone(&shared);
        let answer = move |service, request| answer(Arc::clone(&asked), service, request);
        let server = Server::start_with(root.path(), ("me", "secret"), 2, answer);
        Troubled {
            server,
            shared,
            root,
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.server.endpoint()
    }

    /// Of the next `count` requests of a method whose path, or query as it is sent, has this in it.
    ///
    /// # Panics
    /// Where one of its threads has.
    pub fn trouble(
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

    /// There is no more trouble.
    ///
    /// # Panics
    /// Where one of its threads has.
    pub fn calm(&self) {
        self.shared.cases.lock().unwrap().clear();
    }

    /// How many it was asked.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// Methods and paths since the last time.
    ///
    /// # Panics
    /// Where one of its threads has.
    pub fn seen(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }

    /// How many requests so far have had this in their path or query, as it is sent.
    ///
    /// # Panics
    /// Where one of its threads has.
    #[must_use]
    pub fn asked(&self, within: &str) -> usize {
        let asked = self.shared.asked.lock().unwrap();
        asked.iter().filter(|one| one.contains(within)).count()
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The file of its id and secret.
    #[must_use]
    pub fn credentials(&self) -> PathBuf {
        self.path().join("credentials")
    }

    /// The objects two folders below a prefix, as files.
    ///
    /// # Panics
    /// Where a folder cannot be read.
    #[must_use]
    pub fn objects(&self, prefix: &str) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.path().join("bucket").join(prefix));
        let folders = folders.into_iter().flatten().flatten();
        let files = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten());
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files
    }

    /// The files beside an object that have its attributes and its ETag.
    ///
    /// # Panics
    /// Where it is none of the bucket's.
    #[must_use]
    pub fn beside(&self, object: &Path) -> [PathBuf; 2] {
        let key = object.strip_prefix(self.path().join("bucket")).unwrap();
        let (bucket, key) = (base64("bucket"), base64(key.to_str().unwrap()));
        ["metadata", "internal"]
            .map(|kind| format!(".bucket-{bucket}.object-{key}.{kind}.json"))
            .map(|name| self.path().join(name))
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
        let path = request.uri().path_and_query();
        let path = path.map_or("/", |path| path.as_str());
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
    let asked = request.uri().to_string();
    shared.asked.lock().unwrap().push(asked);
    let mut trouble = shared.take(&request);
    let conditions = request.headers().contains_key(IF_NONE_MATCH);
    if conditions && trouble == Some(Trouble::NoConditions) {
        trouble = Some(Trouble::Answer(501, "NotImplemented"));
    }
    match &trouble {
        Some(Trouble::Answer(status, code)) => {
            // An answer before the end of the request's body lets the client send its next request
            // on this connection, and hyper 1.12 reads that one at times and never answers it.
            let _all_or_lost = request.into_body().collect().await;
            let text = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
            let answer = Response::builder().status(*status);
            return Ok(answer.body(Body::from(text)).unwrap());
        }
        Some(Trouble::Silence) => std::future::pending().await,
        Some(Trouble::Closed) => return Err(io::Error::other("closed")),
        Some(Trouble::Slow(time)) => tokio::time::sleep(*time).await,
        _ => {}
    }
    let mut response = pass(&service, request).await?;
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
                    if let Some(byte) = bytes.get_mut(middle) {
                        *byte ^= 1;
                    }
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
