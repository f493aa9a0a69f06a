//! Responses to requests.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::Body;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use kvdepot_arena::clock;
use kvdepot_store::{MetricsFormat, Stats};
use parking_lot::Mutex;

use super::source::Source;
use super::tokens::Tokens;

/// Time for which all requests see the same statistics.
const SHARED_FOR: Duration = Duration::from_secs(1);

const PLAIN: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const JSON: &str = "application/json";

/// The pages of a depot.
pub(super) struct Site {
    source: Box<dyn Source>,
    tokens: Option<Tokens>,
    hosts: Vec<String>,
    shared_for: Duration,
    last: Mutex<Option<(Instant, Arc<Stats>)>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Page {
    Metrics,
    Stats,
    Health,
    Readiness,
}

/// A response without a page.
struct Refusal {
    status: StatusCode,
    /// One sentence.
    text: &'static str,
    header: Option<(HeaderName, &'static str)>,
}

impl Page {
    fn at(path: &str) -> Option<Page> {
        match path {
            "/metrics" => Some(Page::Metrics),
            "/stats" => Some(Page::Stats),
            "/healthz" => Some(Page::Health),
            "/readyz" => Some(Page::Readiness),
            _ => None,
        }
    }

    /// Returns true if the page shows numbers of the depot.
    fn has_numbers(self) -> bool {
        matches!(self, Page::Metrics | Page::Stats)
    }
}

impl Refusal {
    fn new(status: StatusCode, text: &'static str) -> Refusal {
        Refusal {
            status,
            text,
            header: None,
        }
    }

    fn with(mut self, name: HeaderName, value: &'static str) -> Refusal {
        self.header = Some((name, value));
        self
    }

    fn response(self) -> Response<String> {
        let mut response = response(self.status, PLAIN, format!("{}\n", self.text));
        if let Some((name, value)) = self.header {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}

impl Site {
    pub(super) fn new(source: Box<dyn Source>, tokens: Option<Tokens>, hosts: Vec<String>) -> Site {
        Site {
            source,
            tokens,
            hosts,
            shared_for: SHARED_FOR,
            last: Mutex::new(None),
        }
    }

    /// Returns the response to `request`.
    pub(super) fn answer<B: Body>(&self, request: &Request<B>) -> Response<String> {
        let mut response = match self.page(request) {
            Ok(page) => self.show(page, request.headers()),
            Err(refusal) => refusal.response(),
        };
        let headers = response.headers_mut();
        let no_store = HeaderValue::from_static("no-store");
        headers.insert(header::CACHE_CONTROL, no_store);
        let no_sniff = HeaderValue::from_static("nosniff");
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, no_sniff);
        response
    }

    /// Returns the page that `request` names and may see.
    fn page<B: Body>(&self, request: &Request<B>) -> Result<Page, Refusal> {
        self.check_site(request)?;
        let Some(page) = Page::at(request.uri().path()) else {
            let text = "This path has no page; there are /metrics, /stats, /healthz and /readyz.";
            return Err(Refusal::new(StatusCode::NOT_FOUND, text));
        };
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            let text = "This method is not allowed; allowed: GET and HEAD.";
            let refusal = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text);
            return Err(refusal.with(header::ALLOW, "GET, HEAD"));
        }
        if !request.body().is_end_stream() {
            let text = "A request must not have a body.";
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        if page.has_numbers()
            && let Some(tokens) = &self.tokens
        {
            let presented = bearer(request.headers());
            let is_admitted = presented.is_some_and(|token| tokens.admit(token));
            if !is_admitted {
                let text = "This page requires the header Authorization: Bearer TOKEN.";
                let refusal = Refusal::new(StatusCode::UNAUTHORIZED, text);
                return Err(refusal.with(header::WWW_AUTHENTICATE, "Bearer realm=\"kvdepot\""));
            }
        }
        Ok(page)
    }

    /// Rejects requests of browsers whose responses a page of another site could read. A browser
    /// keeps the responses to its other requests from such pages.
    fn check_site<B>(&self, request: &Request<B>) -> Result<(), Refusal> {
        let headers = request.headers();
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(Ok(host)), None) = (hosts.next().map(HeaderValue::to_str), hosts.next()) else {
            let text = "A request must have one header Host.";
            return Err(Refusal::new(StatusCode::BAD_REQUEST, text));
        };
        let uri = request.uri().host();
        if !self.is_own(host) || uri.is_some_and(|host| !self.is_own(host)) {
            let text = "This host name is not served here; the option http_hosts adds names.";
            return Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, text));
        }
        let is_own = |origin: &HeaderValue| {
            let origin = origin.to_str().unwrap_or_default();
            let site = origin.split_once("://").map(|(_, site)| site);
            site.is_some_and(|site| site.eq_ignore_ascii_case(host))
        };
        if !headers.get_all(header::ORIGIN).iter().all(is_own) {
            let text = "Pages of other sites may not read this page.";
            return Err(Refusal::new(StatusCode::FORBIDDEN, text));
        }
        Ok(())
    }

    /// Returns true if a header `Host` names this server: by a loopback name or address, or by a
    /// configured name. The name of another site may resolve to this host, and a browser would take
    /// the response for one of that site; but then the header has that name.
    fn is_own(&self, host: &str) -> bool {
        let name = name_of(host);
        let address = name.parse::<IpAddr>();
        name.eq_ignore_ascii_case("localhost")
            || address.is_ok_and(|address| address.is_loopback())
            || self.hosts.iter().any(|own| own.eq_ignore_ascii_case(name))
    }

    fn show(&self, page: Page, headers: &HeaderMap) -> Response<String> {
        match page {
            Page::Metrics => {
                let (format, kind) = match prefers_open_metrics(headers) {
                    true => (MetricsFormat::OpenMetrics, OPEN_METRICS),
                    false => (MetricsFormat::Prometheus, PROMETHEUS),
                };
                response(StatusCode::OK, kind, self.stats().metrics(format))
            }
            Page::Stats => {
                let report = self.source.report(&self.stats());
                response(StatusCode::OK, JSON, format!("{report}\n"))
            }
            Page::Health => response(StatusCode::OK, PLAIN, "ok\n".to_owned()),
            Page::Readiness => match self.source.rejection() {
                None => response(StatusCode::OK, PLAIN, "ready\n".to_owned()),
                Some(cause) => {
                    let text = format!("not ready: {cause}\n");
                    response(StatusCode::SERVICE_UNAVAILABLE, PLAIN, text)
                }
            },
        }
    }

    /// Returns the statistics, which are read at most once per [`SHARED_FOR`].
    fn stats(&self) -> Arc<Stats> {
        let mut last = self.last.lock();
        match &*last {
            Some((read, stats)) if clock::since(*read) < self.shared_for => Arc::clone(stats),
            _ => {
                let stats = Arc::new(self.source.stats());
                *last = Some((clock::now(), Arc::clone(&stats)));
                stats
            }
        }
    }
}

fn response(status: StatusCode, kind: &'static str, text: String) -> Response<String> {
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// The token in the header `Authorization`.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let end = value.iter().position(|byte| *byte == b' ')?;
    let (scheme, token) = value.split_at(end);
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer");
    is_bearer.then(|| token.trim_ascii())
}

/// The name or address in `NAME:PORT`, without the brackets of an IPv6 address.
fn name_of(host: &str) -> &str {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let inner = name.strip_prefix('[');
    let inner = inner.and_then(|name| name.strip_suffix(']'));
    inner.unwrap_or(name)
}

/// Returns true if the headers `Accept` prefer OpenMetrics 1.0.0 to the Prometheus text format.
fn prefers_open_metrics(headers: &HeaderMap) -> bool {
    let (mut open, mut plain) = (0.0_f32, 0.0_f32);
    let values = headers.get_all(header::ACCEPT).iter();
    let values = values.filter_map(|value| value.to_str().ok());
    for range in values.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let (mut weight, mut version) = (1.0_f32, None);
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name.to_ascii_lowercase().as_str() {
                "q" => weight = value.parse().unwrap_or(0.0),
                "version" => version = Some(value.trim_matches('"')),
                _ => {}
            }
        }
        match kind.as_str() {
            "application/openmetrics-text" if version.is_none_or(|version| version == "1.0.0") => {
                open = open.max(weight);
            }
            "text/plain" | "text/*" | "*/*" => plain = plain.max(weight),
            _ => {}
        }
    }
    open > 0.0 && open >= plain
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::super::source::double::Double;
    use super::*;

    /// A site, and the depot that it shows.
    fn site() -> (Site, Arc<Double>) {
        let depot = Arc::new(Double::default());
        let source = Box::new(Arc::clone(&depot));
        (Site::new(source, None, vec!["a.example".into()]), depot)
    }

    fn get(path: &str, headers: &[(&'static str, &str)]) -> Request<String> {
        let mut request = Request::new(String::new());
        *request.uri_mut() = path.parse().unwrap();
        for (name, value) in headers {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            request.headers_mut().append(*name, value);
        }
        request
    }

    const LOCAL: (&str, &str) = ("host", "localhost");

    #[test]
    fn a_closing_depot_is_alive_and_not_ready() {
        let (site, depot) = site();
        let status = |path: &str| site.answer(&get(path, &[LOCAL])).status().as_u16();
        assert_eq!([status("/healthz"), status("/readyz")], [200, 200]);
        depot.is_closing.store(true, Ordering::SeqCst);
        assert_eq!([status("/healthz"), status("/readyz")], [200, 503]);
        let response = site.answer(&get("/readyz", &[LOCAL]));
        assert_eq!(response.body(), "not ready: the depot is closing\n");
    }

    #[test]
    fn requests_share_statistics_for_a_while() {
        let (mut site, depot) = site();
        let read = |site: &Site| {
            for path in ["/metrics", "/stats", "/healthz", "/readyz", "/metrics"] {
                assert_eq!(site.answer(&get(path, &[LOCAL])).status(), StatusCode::OK);
            }
            depot.reads.load(Ordering::SeqCst)
        };
        site.shared_for = Duration::MAX;
        assert_eq!(read(&site), 1);
        site.shared_for = Duration::ZERO;
        assert_eq!(read(&site), 4);
    }

    #[test]
    fn hosts_are_loopback_names_or_configured() {
        let (site, _) = site();
        let status = |host: &str| site.answer(&get("/healthz", &[("host", host)])).status();
        for own in [
            "localhost",
            "LOCALHOST:9410",
            "127.0.0.1:9410",
            "127.1.2.3",
            "[::1]",
            "[::1]:80",
            "a.example",
            "A.example:443",
        ] {
            assert_eq!(status(own), StatusCode::OK, "{own}");
        }
        for foreign in [
            "b.example",
            "localhost.b.example",
            "a.example.b.example:9410",
            "192.0.2.1",
            "[2001:db8::1]:80",
            "0.0.0.0",
            "",
            ":80",
            "[::1",
        ] {
            assert_eq!(
                status(foreign),
                StatusCode::MISDIRECTED_REQUEST,
                "{foreign}"
            );
        }
        let none: &[(&'static str, &str)] = &[];
        for headers in [none, &[LOCAL, LOCAL], &[("host", "ä")]] {
            let response = site.answer(&get("/healthz", headers));
            assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        }
        // A proxy's form of a request names the host twice.
        let both = |uri: &str| site.answer(&get(uri, &[LOCAL])).status();
        assert_eq!(both("http://localhost/healthz"), StatusCode::OK);
        assert_eq!(
            both("http://b.example/healthz"),
            StatusCode::MISDIRECTED_REQUEST
        );
    }

    #[test]
    fn origins_are_those_of_the_same_site() {
        let (site, _) = site();
        let status = |origins: &[&'static str]| {
            let origins = origins.iter().map(|origin| ("origin", *origin));
            let headers: Vec<_> = [("host", "a.example")].into_iter().chain(origins).collect();
            site.answer(&get("/healthz", &headers)).status()
        };
        for own in ["http://a.example", "https://A.example"] {
            assert_eq!(status(&[own]), StatusCode::OK);
        }
        for foreign in [
            "http://b.example",
            "null",
            "",
            "http://localhost",
            "a.example",
        ] {
            assert_eq!(status(&[foreign]), StatusCode::FORBIDDEN, "{foreign}");
            assert_eq!(
                status(&["http://a.example", foreign]),
                StatusCode::FORBIDDEN
            );
        }
    }

    #[test]
    fn the_preferred_format_is_sent() {
        let is_open = |accept: &str| {
            let request = get("/metrics", &[("accept", accept)]);
            prefers_open_metrics(request.headers())
        };
        for accept in [
            "application/openmetrics-text",
            "Application/OpenMetrics-Text; version=1.0.0; charset=utf-8",
            "application/openmetrics-text;version=\"1.0.0\";q=0.5,text/plain;q=0.4,*/*;q=0.1",
            // Prometheus 3.
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,\
             text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,\
             */*;q=0.1",
        ] {
            assert!(is_open(accept), "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "text/plain",
            "text/html,application/xhtml+xml,*/*;q=0.8",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=x",
            "application/openmetrics-text;version=2.0.0",
            "application/openmetrics-text;q=0.1,text/plain;q=0.2",
            "application/openmetrics-text;q=0.5,*/*",
        ] {
            assert!(!is_open(accept), "{accept}");
        }
    }

    #[test]
    fn a_bearer_token_is_what_follows_its_scheme() {
        let token = |value: &str| {
            let request = get("/", &[("authorization", value)]);
            bearer(request.headers()).map(<[u8]>::to_vec)
        };
        for value in ["Bearer abc", "bearer  abc ", "BEARER abc"] {
            assert_eq!(token(value), Some(b"abc".to_vec()), "{value}");
        }
        for value in ["Basic abc", "abc", "Bearer", ""] {
            assert_eq!(token(value), None, "{value}");
        }
    }
}
