//! Requests to a bucket: so many at a time, each within its time, again where that may help, and
//! counted.
//!
//! *Again.* What a server refuses for its load, or a connection loses, is asked for again after a
//! random pause that doubles, within the time. Where more than one in ten fails, nothing is: a
//! server in trouble gets no more than it is asked.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{self, StreamExt};
use kvdepot_arena::Error;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{ClientConfigKey, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout_at};

use super::credentials::FromFile;
use super::options::{Options, check_endpoint};
use super::voice::Voice;
use crate::tier::late::Progress;

/// The first pause, and the longest.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MOST: Duration = Duration::from_secs(2);

/// What one request is worth of one more, and how many are kept for bad times: in hundredths.
const WORTH: u64 = 10;
const SAVED: u64 = 1000;
const ONCE_MORE: u64 = 100;

/// Objects that one request removes, or a page has.
pub(super) const MANY: usize = 1000;

/// How often a page of a long listing begins anew, beyond what each of its requests is repeated.
const PAGE_TRIES: usize = 3;

/// How long a connection is tried.
const CONNECT: Duration = Duration::from_secs(5);

/// Why a request came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fault {
    /// There is no such object, or no such bucket.
    Gone,
    /// The object is not the one that was meant.
    Changed,
    /// Somebody else was first.
    Taken,
    /// Credentials: none, wrong ones or expired.
    Refused,
    /// The server has too much to do, or is in trouble.
    Busy,
    /// It did not answer in time.
    Late,
    /// A body was shorter or longer than what was asked for.
    Short,
    /// An object is not the block that its name says.
    Strange,
    /// The server does not know what was asked for.
    Unknown,
    /// Anything else: a connection that was closed or refused.
    Lost,
}

impl Fault {
    const ALL: [(Fault, &'static str); 10] = [
        (Fault::Gone, "not_found"),
        (Fault::Changed, "precondition_failed"),
        (Fault::Taken, "already_exists"),
        (Fault::Refused, "access_denied"),
        (Fault::Busy, "throttled"),
        (Fault::Late, "timeout"),
        (Fault::Short, "length_mismatch"),
        (Fault::Strange, "invalid_object"),
        (Fault::Unknown, "unsupported"),
        (Fault::Lost, "connection_error"),
    ];

    /// Whether it may go well the next time.
    fn passes(self) -> bool {
        matches!(self, Fault::Busy | Fault::Short | Fault::Lost)
    }

    /// Whether the server may have done what it was asked for.
    pub(super) fn is_doubtful(self) -> bool {
        self.passes() || self == Fault::Late
    }

    fn of(error: &object_store::Error) -> Fault {
        use object_store::Error::{
            AlreadyExists, Generic, NotFound, NotImplemented, NotModified, NotSupported,
            PermissionDenied, Precondition, Unauthenticated,
        };
        match error {
            NotFound { .. } => Fault::Gone,
            Precondition { .. } | NotModified { .. } => Fault::Changed,
            AlreadyExists { .. } => Fault::Taken,
            PermissionDenied { .. } | Unauthenticated { .. } => Fault::Refused,
            NotSupported { .. } | NotImplemented { .. } => Fault::Unknown,
            Generic { source, .. } => Fault::of_status(&source.to_string()),
            _ => Fault::Lost,
        }
    }

    /// The crate tells the status of other answers in words alone.
    fn of_status(words: &str) -> Fault {
        let status = words.split_once("status code: ").map(|(_, rest)| rest);
        match status.and_then(|rest| rest.get(..3)?.parse::<u16>().ok()) {
            Some(400) if words.contains("Token") || words.contains("Credential") => Fault::Refused,
            Some(408 | 429 | 500 | 502..) => Fault::Busy,
            Some(_) => Fault::Unknown,
            None if words.contains("<Error>") => Fault::Busy,
            None => Fault::Lost,
        }
    }
}

/// Whether a request looks and reads, or writes: neither waits for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Read,
    Write,
}

/// A bucket.
pub(super) struct Bucket {
    store: AmazonS3,
    prefix: Path,
    timeout: Duration,
    ways: [Semaphore; 2],
    /// Questions of one call that are asked at a time: others have their turn between them.
    at_once: usize,
    requests: AtomicU64,
    retries: AtomicU64,
    faults: [AtomicU64; Fault::ALL.len()],
    /// Whether it knows conditions for what is written, as far as is known.
    conditions: AtomicBool,
    voice: Voice,
    saved: Mutex<u64>,
    dice: AtomicU64,
}

/// One request, and those that follow it where it comes to nothing.
pub(super) struct Turn<'a> {
    bucket: &'a Bucket,
    deadline: Instant,
    pause: Duration,
    /// `None` when all has ended.
    _permit: Option<SemaphorePermit<'a>>,
}

tokio::task_local! {
    /// The question that the requests of a task are made for.
    static QUESTION: Progress;
}

/// Runs `work`, whose requests are made for a question: each answer of the store is progress.
pub(super) fn serving<F: Future>(question: Progress, work: F) -> impl Future<Output = F::Output> {
    QUESTION.scope(question, work)
}

/// The store has answered a request. A request that timed out, or is to be made again, is no
/// progress.
fn answered() {
    // Work in the background serves no question.
    let _noted = QUESTION.try_with(Progress::made);
}

/// Returns true unless the question of this task is over.
pub(super) fn is_wanted() -> bool {
    QUESTION.try_with(Progress::is_wanted).unwrap_or(true)
}

impl Turn<'_> {
    /// What comes of a request, within the time; `None` where it is to be made again.
    pub(super) async fn once<T>(
        &mut self,
        request: impl Future<Output = Result<T, Fault>> + Send,
    ) -> Option<Result<T, Fault>> {
        self.bucket.earn();
        let answer = timeout_at(self.deadline, request).await;
        let fault = match answer {
            Ok(Ok(answer)) => {
                self.bucket.voice.answered();
                answered();
                return Some(Ok(answer));
            }
            Ok(Err(fault)) if fault.passes() => fault,
            Ok(Err(fault)) => {
                answered();
                fault
            }
            Err(_late) => Fault::Late,
        };
        let left = self.deadline.saturating_duration_since(Instant::now());
        if !fault.passes() || left < self.pause || !self.bucket.spend() {
            self.bucket.count(fault);
            return Some(Err(fault));
        }
        self.bucket.retries.fetch_add(1, Ordering::Relaxed);
        sleep(self.pause.mul_f64(self.bucket.chance())).await;
        self.pause = (self.pause * 2).min(PAUSE_MOST);
        None
    }
}

impl Bucket {
    pub(super) fn open(options: &Options, timeout: Duration) -> Result<Bucket, Error> {
        install_tls();
        let millis = |time: Duration| format!("{}ms", time.as_millis().max(1));
        let http = |key: ClientConfigKey| AmazonS3ConfigKey::Client(key);
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&options.bucket)
            // Every request has a time of its own, which is known to be over by that.
            .with_config(http(ClientConfigKey::Timeout), millis(2 * timeout))
            .with_config(
                http(ClientConfigKey::ConnectTimeout),
                millis(timeout.min(CONNECT)),
            )
            .with_config(
                http(ClientConfigKey::AllowHttp),
                options.allow_http.to_string(),
            )
            .with_retry(RetryConfig {
                max_retries: 0,
                retry_timeout: timeout,
                ..RetryConfig::default()
            });
        if let Some(endpoint) = &options.endpoint {
            // By the name that goes before all that the environment has.
            let endpoint = endpoint.trim_end_matches('/');
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if let Some(region) = &options.region {
            builder = builder.with_region(region);
        }
        if let Some(path) = &options.credentials {
            let file: AwsCredentialProvider = Arc::new(FromFile::open(path)?);
            builder = builder.with_credentials(file);
        }
        // The environment's, too.
        let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
        let mut endpoint = endpoint.iter();
        if let Some(endpoint) = endpoint.find_map(|key| builder.get_config_value(key)) {
            check_endpoint(&endpoint, options.allow_http)?;
        }
        let store = builder.build().map_err(|error| {
            let allowed =
                "settings that the S3 client accepts, in this section and in the AWS_* environment \
                 variables";
            Error::config("s3", format!("this section ({error})"), allowed)
        })?;
        let writes = options.requests / 2;
        Ok(Bucket {
            store,
            prefix: options.prefix.clone(),
            timeout,
            ways: [options.requests - writes, writes].map(Semaphore::new),
            at_once: options.requests,
            requests: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            faults: Default::default(),
            conditions: AtomicBool::new(true),
            voice: Voice::default(),
            saved: Mutex::new(SAVED),
            dice: AtomicU64::new(u64::from(std::process::id())),
        })
    }

    pub(super) fn store(&self) -> &AmazonS3 {
        &self.store
    }

    pub(super) fn has_conditions(&self) -> bool {
        self.conditions.load(Ordering::Relaxed)
    }

    /// It does not know them.
    pub(super) fn forget_conditions(&self) {
        if self.conditions.swap(false, Ordering::Relaxed) {
            tracing::info!(
                "object store has no conditional writes; checking existence before \
                            each upload"
            );
        }
    }

    /// A path below the prefix.
    pub(super) fn path(&self, name: &str) -> Path {
        name.split('/')
            .fold(self.prefix.clone(), |path, part| path.join(part))
    }

    pub(super) fn at_once(&self) -> usize {
        self.at_once
    }

    /// How long an answer is waited for.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// When what begins now has to have ended.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// A turn among the requests of its way, which is waited for until then.
    pub(super) async fn turn(&self, way: Way, deadline: Instant) -> Result<Turn<'_>, Fault> {
        let taken = timeout_at(deadline, self.ways[way as usize].acquire()).await;
        let taken = taken.map_err(|_| Fault::Late).map(Result::ok);
        let permit = taken.inspect_err(|fault| self.count(*fault))?;
        Ok(Turn {
            bucket: self,
            deadline,
            pause: PAUSE,
            _permit: permit,
        })
    }

    /// Has a request made until it succeeds, within the time.
    pub(super) async fn ask<'a, T: Send>(
        &'a self,
        way: Way,
        once: impl Fn() -> BoxFuture<'a, Result<T, object_store::Error>> + Send + Sync,
    ) -> Result<T, Fault> {
        let mut turn = self.turn(way, self.deadline()).await?;
        loop {
            let request = once();
            let noted = async { request.await.map_err(|error| self.note(&error)) };
            if let Some(answer) = turn.once(noted).await {
                return answer;
            }
        }
    }

    /// The same for what need not be there.
    pub(super) async fn ask_for<'a, T: Send + 'a>(
        &'a self,
        way: Way,
        once: impl Fn() -> BoxFuture<'a, Result<T, object_store::Error>> + Send + Sync,
    ) -> Result<Option<T>, Fault> {
        let found = || {
            let request = once();
            let found = async {
                match request.await {
                    Err(object_store::Error::NotFound { .. }) => Ok(None),
                    answer => answer.map(Some),
                }
            };
            found.boxed()
        };
        self.ask(way, found).await
    }

    /// What an error is, which is said where people look for it.
    pub(super) fn note(&self, error: &object_store::Error) -> Fault {
        let fault = Fault::of(error);
        match fault {
            Fault::Gone | Fault::Changed | Fault::Taken => {}
            Fault::Refused => self.voice.refused(error),
            _ => tracing::debug!(%error, "request to the object store failed"),
        }
        fault
    }

    /// A page of at most `most` of the objects below a folder of the prefix, and what to ask for
    /// the next one with. One that fails is asked for again: what came before it is not lost.
    pub(super) async fn page(
        &self,
        folder: &str,
        token: Option<&str>,
        most: usize,
    ) -> Result<(Vec<ObjectMeta>, Option<String>), Fault> {
        let prefix = format!("{}/", self.path(folder));
        let options = PaginatedListOptions {
            max_keys: Some(most),
            page_token: token.map(str::to_owned),
            ..PaginatedListOptions::default()
        };
        let list = || self.store.list_paginated(Some(&prefix), options.clone());
        let mut tries = PAGE_TRIES;
        loop {
            match self.ask(Way::Write, list).await {
                Ok(page) => return Ok((page.result.objects, page.page_token)),
                Err(fault) if fault.is_doubtful() && tries > 1 && self.spend() => tries -= 1,
                Err(fault) => return Err(fault),
            }
            self.retries.fetch_add(1, Ordering::Relaxed);
            sleep(PAUSE_MOST.mul_f64(self.chance())).await;
        }
    }

    /// All of a folder, page by page.
    pub(super) async fn list_all(&self, folder: &str) -> Result<Vec<ObjectMeta>, Fault> {
        let (mut all, mut token) = (Vec::new(), None);
        loop {
            let (page, next) = self.page(folder, token.as_deref(), MANY).await?;
            all.extend(page);
            match next {
                Some(next) => token = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Removes an object, or finds none.
    pub(super) async fn remove(&self, path: &Path) -> Result<(), Fault> {
        let delete = || self.store.delete(path).boxed();
        self.ask_for(Way::Write, delete).await.map(drop)
    }

    /// Removes many objects; what those that went were worth.
    pub(super) async fn remove_all<T: Copy>(&self, paths: Vec<(Path, T)>) -> Vec<T> {
        let mut gone = Vec::new();
        for some in paths.chunks(MANY) {
            let names: Vec<_> = some.iter().map(|(path, _)| Ok(path.clone())).collect();
            self.earn();
            let mut answers = self.store.delete_stream(stream::iter(names).boxed());
            let worth: HashMap<&Path, T> = some.iter().map(|(path, of)| (path, *of)).collect();
            while let Some(answer) = answers.next().await {
                match answer {
                    Ok(path) => {
                        answered();
                        gone.extend(worth.get(&path));
                    }
                    Err(error) => {
                        let fault = self.note(&error);
                        self.count(fault);
                    }
                }
            }
        }
        gone
    }

    /// As [`Voice::may_say`].
    pub(super) fn may_say(&self, kind: &'static str, fault: Fault) -> Option<u64> {
        self.voice.may_say(kind, fault)
    }

    pub(super) fn count(&self, fault: Fault) {
        if let Some(count) = self.counter(fault) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How often there was this one.
    pub(super) fn counted(&self, fault: Fault) -> u64 {
        let count = self.counter(fault);
        count.map_or(0, |count| count.load(Ordering::Relaxed))
    }

    fn counter(&self, fault: Fault) -> Option<&AtomicU64> {
        let at = Fault::ALL.iter().position(|(known, _)| *known == fault);
        at.and_then(|at| self.faults.get(at))
    }

    /// Requests, those that were made again, and what came of the others, by cause.
    pub(super) fn counts(&self) -> (u64, u64, BTreeMap<String, u64>) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let causes = Fault::ALL.iter().zip(&self.faults);
        let causes = causes.map(|((_, name), count)| ((*name).to_owned(), read(count)));
        let causes = causes.filter(|(_, count)| *count > 0).collect();
        (read(&self.requests), read(&self.retries), causes)
    }

    fn earn(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut saved = self.saved.lock();
        *saved = (*saved + WORTH).min(SAVED);
    }

    fn spend(&self) -> bool {
        let mut saved = self.saved.lock();
        let left = saved.checked_sub(ONCE_MORE);
        *saved = left.unwrap_or(*saved);
        left.is_some()
    }

    /// From a half to one: processes that were refused together do not come again together.
    pub(super) fn chance(&self) -> f64 {
        let number = self.dice.fetch_add(1, Ordering::Relaxed);
        let now = kvdepot_arena::clock::now();
        let mixed = xxhash_rust::xxh3::xxh3_64(format!("{number} {now:?}").as_bytes());
        0.5 + (mixed >> 11) as f64 / (1_u64 << 53) as f64 / 2.0
    }
}

/// What connections are encrypted by, unless the program has chosen already.
fn install_tls() {
    let _others = rustls::crypto::ring::default_provider().install_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_in_words_is_understood() {
        let said = |status: &str| format!("Server returned non-2xx status code: {status}: ");
        for (words, fault) in [
            (said("503 Service Unavailable"), Fault::Busy),
            (said("429 Too Many Requests"), Fault::Busy),
            (
                said("400 Bad Request") + "<Code>ExpiredToken</Code>",
                Fault::Refused,
            ),
            (said("400 Bad Request"), Fault::Unknown),
            ("connection closed".to_owned(), Fault::Lost),
            (
                "Server returned error response: <Error>".to_owned(),
                Fault::Busy,
            ),
        ] {
            assert_eq!(Fault::of_status(&words), fault, "{words}");
        }
    }
}
