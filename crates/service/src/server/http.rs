//! The HTTP server of the depot, if its options select one and the build has one.

use std::path::Path;
use std::sync::Arc;

use kvdepot_arena::Error;
use kvdepot_store::config::{Config, Socket};
use kvdepot_store::{About, Core};

#[cfg(feature = "http")]
pub(super) use crate::http::{Http, sweep};
#[cfg(not(feature = "http"))]
pub(super) use absent::{Http, sweep};

/// Rejects options that cannot be used.
pub(super) fn check(config: &Config) -> Result<(), Error> {
    let http = &config.http;
    if let Some(address) = &http.address {
        if config.socket == Socket::Off {
            let allowed = "an address only for a depot with a socket; the option socket is off";
            return Err(Error::config("http", address, allowed));
        }
        return Http::check(address, http);
    }
    let only = "this option only together with the option http";
    match &http.token_file {
        Some(path) => Err(Error::config("http_token_file", path.display(), only)),
        None if !http.hosts.is_empty() => {
            Err(Error::config("http_hosts", http.hosts.join(","), only))
        }
        None => Ok(()),
    }
}

/// Starts the server that the options select, for the depot that has `socket`.
#[cfg(feature = "http")]
pub(super) fn start(
    config: &Config,
    core: &Arc<Core>,
    about: &About,
    socket: &Path,
) -> Result<Option<Http>, Error> {
    Http::forget(socket);
    let Some(address) = &config.http.address else {
        return Ok(None);
    };
    let source = Box::new(present::Shown {
        core: Arc::clone(core),
        about: about.clone(),
        socket: socket.to_owned(),
    });
    Http::start(address, config, socket, source).map(Some)
}

/// Starts no server.
#[cfg(not(feature = "http"))]
pub(super) fn start(
    config: &Config,
    _: &Arc<Core>,
    _: &About,
    _: &Path,
) -> Result<Option<Http>, Error> {
    check(config).map(|()| None)
}

#[cfg(feature = "http")]
mod present {
    use std::path::PathBuf;
    use std::sync::Arc;

    use kvdepot_store::{About, Core, Stats};
    use serde_json::Value;

    use crate::http::Source;

    /// The depot, as the HTTP server shows it.
    pub(super) struct Shown {
        pub(super) core: Arc<Core>,
        pub(super) about: About,
        pub(super) socket: PathBuf,
    }

    impl Source for Shown {
        fn stats(&self) -> Stats {
            self.core.stats()
        }

        fn report(&self, stats: &Stats) -> Value {
            let path = self.about.path.as_deref();
            stats.report(&self.socket, &self.about.description, path)
        }

        fn rejection(&self) -> Option<&'static str> {
            let is_closing = self.core.gate.enter().is_err();
            is_closing.then_some("the depot is closing")
        }
    }
}

#[cfg(not(feature = "http"))]
mod absent {
    use std::path::Path;

    use kvdepot_arena::Error;
    use kvdepot_store::config::{HttpAddress, HttpConfig};

    /// No server.
    pub(crate) enum Http {}

    impl Http {
        pub(crate) fn check(address: &HttpAddress, _: &HttpConfig) -> Result<(), Error> {
            let allowed = "off, because this build has no HTTP server (feature http)";
            Err(Error::config("http", address, allowed))
        }

        pub(crate) fn address(&self) -> &str {
            match *self {}
        }

        pub(crate) fn stop(&self) {
            match *self {}
        }
    }

    pub(crate) fn sweep(_: &Path) {}
}
