//! Requests to whichever endpoint answers, and streams of answers that another thread can cut.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use thiserror::Error;
use ureq::{Agent, Body, BodyReader};

use super::backoff::drawn;

/// Most bytes of an answer: 64 Ki hosts with long names and addresses.
const ANSWER_MAX: u64 = 64 << 20;
/// Codes of gRPC: what is asked for is not there; what one member cannot, another may.
const NOT_FOUND: i64 = 5;
const UNAVAILABLE: i64 = 14;

/// Why there is no answer.
#[derive(Debug, Error)]
pub(super) enum Failure {
    /// No endpoint answered as etcd does; the last one's reason.
    #[error("{0}")]
    Unreachable(String),
    /// Etcd does not have it, as with a lease that has run out.
    #[error("etcd: {0}")]
    NotFound(String),
    /// Etcd says no.
    #[error("etcd: {0}")]
    Refused(String),
    /// This membership ends.
    #[error("the connection to etcd is closed")]
    Closed,
}

/// The endpoints, one of which is asked until it does not answer.
pub(super) struct Gateway {
    endpoints: Vec<String>,
    current: AtomicUsize,
    patience: Duration,
    agent: Agent,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    /// The stream that is under way and may be cut, with its endpoint. There is one at a time.
    stream: Option<(usize, Agent)>,
}

impl Gateway {
    pub(super) fn new(endpoints: &[String], patience: Duration) -> Gateway {
        let plain = |endpoint: &String| endpoint.trim_end_matches('/').to_owned();
        Gateway {
            endpoints: endpoints.iter().map(plain).collect(),
            // Hosts share the members between them.
            current: AtomicUsize::new(drawn() as usize % endpoints.len().max(1)),
            patience,
            agent: agent(patience, None),
            state: Mutex::default(),
        }
    }

    /// Asks the endpoints in turn, beginning with the one that answered last.
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        let mut last = Failure::Closed;
        for _ in 0..self.endpoints.len() {
            if self.is_closed() {
                return Err(Failure::Closed);
            }
            let at = self.current.load(Ordering::Relaxed);
            match self.post_to(&self.agent, at, path, body) {
                Err(Failure::Unreachable(reason)) => {
                    self.leave(at);
                    last = Failure::Unreachable(reason);
                }
                answer => return answer,
            }
        }
        Err(last)
    }

    /// Says one thing more after closing, to the endpoint that answered last, and waits no longer
    /// than one request may take.
    pub(super) fn post_last(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        let agent = agent(self.patience, None);
        self.post_to(&agent, self.current.load(Ordering::Relaxed), path, body)
    }

    fn post_to(
        &self,
        agent: &Agent,
        at: usize,
        path: &str,
        body: &Value,
    ) -> Result<Value, Failure> {
        let url = format!("{}{path}", self.endpoints[at]);
        let unreachable = |reason: &dyn fmt::Display| {
            Failure::Unreachable(format!("{}: {reason}", self.endpoints[at]))
        };
        let sent = agent.post(&url).content_type("application/json");
        let mut response = sent
            .send(body.to_string())
            .map_err(|error| unreachable(&error))?;
        let text = response.body_mut().with_config().limit(ANSWER_MAX);
        let text = text.read_to_vec().map_err(|error| unreachable(&error))?;
        let answer: Value = serde_json::from_slice(&text).map_err(|_| {
            let status = response.status();
            unreachable(&format_args!(
                "HTTP status {status}, but not a response of etcd's JSON gateway"
            ))
        })?;
        match refusal(&answer) {
            None => Ok(answer),
            Some((UNAVAILABLE, message)) => Err(unreachable(&message)),
            Some((NOT_FOUND, message)) => Err(Failure::NotFound(message)),
            Some((_, message)) => Err(Failure::Refused(message)),
        }
    }

    /// Begins a stream at the endpoint that answered last. It ends by itself when its life is over.
    pub(super) fn stream(
        &self,
        path: &str,
        body: &Value,
        life: Duration,
    ) -> Result<Stream<'_>, Failure> {
        let at = self.current.load(Ordering::Relaxed);
        let agent = agent(self.patience, Some(life));
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Failure::Closed);
        }
        state.stream = Some((at, agent.clone()));
        drop(state);
        // From here on it ends when it is dropped.
        let mut stream = Stream {
            gateway: self,
            agent,
            at,
            lines: None,
        };
        let url = format!("{}{path}", self.endpoints[at]);
        let sent = stream.agent.post(&url).content_type("application/json");
        match sent.send(body.to_string()) {
            Ok(response) => {
                stream.lines = Some(lines(response.into_body()));
                Ok(stream)
            }
            Err(_) if self.is_closed() => Err(Failure::Closed),
            Err(error) => {
                self.leave(at);
                let reason = format!("{}: {error}", self.endpoints[at]);
                Err(Failure::Unreachable(reason))
            }
        }
    }

    /// Goes on to the next endpoint, if nobody has yet, and cuts what is under way to this one.
    pub(super) fn leave(&self, at: usize) {
        let next = (at + 1) % self.endpoints.len();
        let order = Ordering::Relaxed;
        let _was_left = self.current.compare_exchange(at, next, order, order);
        if let Some((endpoint, agent)) = &self.state.lock().stream
            && *endpoint == at
        {
            agent.clone().shutdown();
        }
    }

    /// Cuts everything, and lets nothing begin any more.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        if let Some((_, agent)) = state.stream.take() {
            agent.shutdown();
        }
        self.agent.clone().shutdown();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gateway = f.debug_struct("Gateway");
        gateway.field("endpoints", &self.endpoints);
        gateway.field("current", &self.current);
        gateway.finish_non_exhaustive()
    }
}

/// Answers that come one by one.
pub(super) struct Stream<'a> {
    gateway: &'a Gateway,
    agent: Agent,
    at: usize,
    lines: Option<BufReader<std::io::Take<BodyReader<'static>>>>,
}

impl Stream<'_> {
    /// The next answer; none when the stream has come to its end, was cut, or its life is over.
    pub(super) fn next(&mut self) -> Result<Option<Value>, Failure> {
        let Some(lines) = &mut self.lines else {
            return Ok(None);
        };
        lines.get_mut().set_limit(ANSWER_MAX);
        let mut line = Vec::new();
        match lines.read_until(b'\n', &mut line) {
            Ok(_) if line.ends_with(b"\n") => {}
            // Its life is over, its connection broke, its endpoint ended: a new one tells which.
            _ => return Ok(None),
        }
        let answer: Value = serde_json::from_slice(&line)
            .map_err(|error| Failure::Refused(format!("response is not JSON: {error}")))?;
        match refusal(&answer) {
            Some((UNAVAILABLE, message)) => Err(Failure::Unreachable(message)),
            Some((_, message)) => Err(Failure::Refused(message)),
            None => Ok(Some(answer)),
        }
    }

    /// The endpoint is not what is wanted: the next one shall be asked.
    pub(super) fn leave(&self) {
        self.gateway.leave(self.at);
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.gateway.state.lock().stream = None;
        self.agent.clone().shutdown();
    }
}

fn lines(body: Body) -> BufReader<std::io::Take<BodyReader<'static>>> {
    BufReader::new(body.into_reader().take(ANSWER_MAX))
}

/// No proxy of the environment, no redirect: etcd is spoken to as it is addressed.
fn agent(patience: Duration, life: Option<Duration>) -> Agent {
    let config = Agent::config_builder()
        .proxy(None)
        .max_redirects(0)
        .http_status_as_error(false)
        .user_agent("kvdepot")
        .timeout_resolve(Some(patience))
        .timeout_connect(Some(patience))
        .timeout_send_request(Some(patience))
        .timeout_send_body(Some(patience))
        .timeout_recv_response(Some(patience));
    let config = match life {
        Some(life) => config.timeout_recv_body(Some(life)),
        None => config.timeout_global(Some(patience)),
    };
    config.build().new_agent()
}

/// What etcd says when it does not do it: at the top of an answer, or in a stream's.
fn refusal(answer: &Value) -> Option<(i64, String)> {
    let error = answer.get("error")?;
    let code = |of: &Value| {
        of.get("code")
            .or_else(|| of.get("grpc_code"))
            .and_then(Value::as_i64)
    };
    let message = error.get("message").unwrap_or(error);
    let text = message
        .as_str()
        .map_or_else(|| message.to_string(), str::to_owned);
    Some((code(answer).or_else(|| code(error)).unwrap_or(0), text))
}
