//! Connections of the HTTP server, which one thread serves.
//!
//! A peer that sends nothing costs a descriptor for some seconds. If there are too many
//! connections, the one without progress for the longest time ends.

use std::convert::Infallible;
use std::future::{self, poll_fn};
use std::io::{self, ErrorKind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use kvdepot_host::EachMinute;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{sleep, sleep_until, timeout};

use super::answer::Site;
use super::limits::{Limits, Progress};
use super::socket::{Connection, Listener, Stream};

/// Most bytes of a request's head.
const HEAD_MAX: usize = 8192;

/// Pause before the next attempt to accept a connection, if the system has no descriptor for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `woken` can be read, or has been shut down.
pub(super) async fn run(
    listener: AsyncFd<Listener>,
    woken: AsyncFd<Stream>,
    site: Arc<Site>,
    limits: Limits,
) {
    let (end, ended) = watch::channel(());
    let mut connections = Connections {
        limits,
        site,
        ended,
        tasks: JoinSet::new(),
        open: Vec::new(),
    };
    let failures = EachMinute::default();
    while let Some(accepted) = arrival(&listener, &woken).await {
        match accepted.and_then(Stream::watched) {
            Ok(stream) => connections.begin(stream),
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(error) => {
                // Its descriptor may be the one that is missing.
                connections.end_oldest();
                if let Some(unsaid) = failures.may_say() {
                    tracing::warn!(%error, unsaid,
                        "cannot accept HTTP connections; scrapes wait until a retry succeeds");
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
        // Ended connections close their sockets before the next one is accepted.
        yield_now().await;
    }
    listener.into_inner().end();
    drop(end);
    connections.end().await;
}

/// Accepts the next connection; `None` when the server ends.
async fn arrival(
    listener: &AsyncFd<Listener>,
    woken: &AsyncFd<Stream>,
) -> Option<io::Result<Stream>> {
    poll_fn(|cx| {
        if woken.poll_read_ready(cx).is_ready() {
            return Poll::Ready(None);
        }
        loop {
            let mut ready = match ready!(listener.poll_read_ready(cx)) {
                Ok(ready) => ready,
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            if let Ok(accepted) = ready.try_io(|listener| listener.get_ref().accept()) {
                return Poll::Ready(Some(accepted));
            }
        }
    })
    .await
}

/// The open connections.
struct Connections {
    limits: Limits,
    site: Arc<Site>,
    /// Changes when the server ends.
    ended: watch::Receiver<()>,
    tasks: JoinSet<()>,
    /// Those that may still be open.
    open: Vec<(Arc<Progress>, AbortHandle)>,
}

impl Connections {
    fn begin(&mut self, stream: AsyncFd<Stream>) {
        while self.tasks.try_join_next().is_some() {}
        self.open.retain(|(_, task)| !task.is_finished());
        if self.open.len() >= self.limits.connections {
            self.end_oldest();
        }
        let progress = Arc::new(Progress::new(self.limits));
        let connection = Connection {
            stream,
            progress: Arc::clone(&progress),
        };
        let (site, ended) = (Arc::clone(&self.site), self.ended.clone());
        let task = self.tasks.spawn(converse(connection, site, ended));
        self.open.push((progress, task));
    }

    /// Ends the connection without progress for the longest time.
    fn end_oldest(&mut self) {
        let open = self.open.iter().enumerate();
        let oldest = open.min_by_key(|(_, (progress, _))| progress.since());
        if let Some((at, _)) = oldest {
            let (_, task) = self.open.swap_remove(at);
            task.abort();
        }
    }

    /// Waits for the responses in progress, for a limited time.
    async fn end(mut self) {
        let limit = self.limits.end;
        let all = async { while self.tasks.join_next().await.is_some() {} };
        let _in_time = timeout(limit, all).await;
    }
}

/// Answers the requests of one connection.
async fn converse(connection: Connection, site: Arc<Site>, mut ended: watch::Receiver<()>) {
    let progress = Arc::clone(&connection.progress);
    let asked = Arc::clone(&progress);
    let answer = move |request: Request<Incoming>| {
        let response = site.answer(&request);
        asked.answered();
        future::ready(Ok::<_, Infallible>(response))
    };
    let mut http = http1::Builder::new();
    http.max_buf_size(HEAD_MAX).half_close(true);
    let mut requests = pin!(http.serve_connection(connection, service_fn(answer)));
    let mut end = pin!(ended.changed());
    let mut timer = pin!(sleep_until(progress.deadline()));
    let mut is_ending = false;
    poll_fn(|cx| {
        if !is_ending && end.as_mut().poll(cx).is_ready() {
            is_ending = true;
            requests.as_mut().graceful_shutdown();
        }
        if requests.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let deadline = progress.deadline();
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(cx)
    })
    .await;
}
