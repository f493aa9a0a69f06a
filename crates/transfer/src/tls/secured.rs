//! What all protected connections of an engine share.

use std::fmt::Display;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use kvdepot_host::Condvar;
use kvdepot_host::fork::Unshared;
use parking_lot::Mutex;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, ConfigBuilder, ConfigSide, RootCertStore, ServerConfig,
    ServerConnection, WantsVerifier, WantsVersions,
};

use super::ended::Ended;
use super::pump::Pump;
use super::settings::Tls;
use super::talk::Talk;
use crate::error::Error;

/// What the files say, and the threads there are.
pub(crate) struct Secured {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: Option<ServerName<'static>>,
    running: Mutex<usize>,
    ended: Condvar,
}

impl Secured {
    /// Reads the files.
    ///
    /// # Errors
    /// [`Error::Input`] names the setting whose file cannot be used.
    pub(crate) fn read(tls: &Tls) -> Result<Secured, Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(authorities(&tls.ca)?);
        let client = client(tls, &provider, Arc::clone(&roots))?;
        let server = server(tls, &provider, roots)?;
        let name = tls.name.clone().map(ServerName::try_from).transpose();
        let name = name.map_err(|error| {
            let (name, allowed) = (tls.name.as_deref(), "a DNS name or an IP address");
            refused("tls_name", name.unwrap_or_default(), error, allowed)
        })?;
        Ok(Secured {
            client: Arc::new(client),
            server: Arc::new(server),
            name,
            running: Mutex::new(0),
            ended: Condvar::new(),
        })
    }

    /// Protects a connection to a target.
    pub(crate) fn to(
        &self,
        stream: Unshared<TcpStream>,
        target: SocketAddr,
    ) -> std::io::Result<Talk> {
        let name = self.name.clone();
        let name = name.unwrap_or_else(|| target.ip().to_canonical().into());
        let tls = ClientConnection::new(Arc::clone(&self.client), name);
        let tls = tls.map_err(std::io::Error::other)?;
        Ok(Talk::new(tls.into(), stream))
    }

    /// Protects a connection that an initiator has made.
    pub(crate) fn from(&self, stream: Unshared<TcpStream>) -> std::io::Result<Talk> {
        let tls = ServerConnection::new(Arc::clone(&self.server));
        let tls = tls.map_err(std::io::Error::other)?;
        Ok(Talk::new(tls.into(), stream))
    }

    /// The inner end, and why it has ended once it has. What both sides prove to each other, and
    /// have not yet, is proved while this one is used: nothing that is sent there leaves before.
    pub(crate) fn cover(
        self: &Arc<Self>,
        talk: Talk,
    ) -> std::io::Result<(Unshared<OwnedFd>, Arc<Ended>)> {
        let (inner, theirs) = Unshared::pair()?;
        let ended = Arc::new(Ended::default());
        let pump = Pump::new(talk, theirs, Arc::clone(&ended));
        // Counted before it runs, so that whoever waits finds it.
        *self.running.lock() += 1;
        let its = Runs(Arc::clone(self));
        kvdepot_host::cpu::spawn("kvdepot-tls", move || {
            let _its = its;
            pump.run();
        })?;
        Ok((inner.map(OwnedFd::from), ended))
    }

    /// Waits until no thread is left, once the inner ends are shut.
    pub(crate) fn wait(&self) {
        let mut running = self.running.lock();
        while *running > 0 {
            self.ended.wait(&mut running);
        }
    }
}

impl std::fmt::Debug for Secured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Neither keys nor whom it believes.
        f.debug_struct("Secured").finish_non_exhaustive()
    }
}

/// A thread that runs, or was to be started.
struct Runs(Arc<Secured>);

impl Drop for Runs {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.ended.notify_all();
    }
}

fn client(
    tls: &Tls,
    provider: &Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
) -> Result<ClientConfig, Error> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(provider));
    let verifier = verifier
        .build()
        .map_err(|error| no_authority(&tls.ca, error))?;
    let builder = ClientConfig::builder_with_provider(Arc::clone(provider));
    let builder = latest(builder)?;
    let builder = builder.with_webpki_verifier(verifier);
    let config = builder.with_client_auth_cert(chain(tls)?, key(tls)?);
    let mut config = config.map_err(|error| no_key(tls, error))?;
    // Certificates are looked at each time: one that is over is not good for another connection.
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn server(
    tls: &Tls,
    provider: &Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
) -> Result<ServerConfig, Error> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider));
    let verifier = verifier
        .build()
        .map_err(|error| no_authority(&tls.ca, error))?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(provider));
    let builder = latest(builder)?;
    let builder = builder.with_client_cert_verifier(verifier);
    let config = builder.with_single_cert(chain(tls)?, key(tls)?);
    let mut config = config.map_err(|error| no_key(tls, error))?;
    // As for clients.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Speaks the latest version alone.
fn latest<S: ConfigSide>(
    builder: ConfigBuilder<S, WantsVersions>,
) -> Result<ConfigBuilder<S, WantsVerifier>, Error> {
    let builder = builder.with_protocol_versions(&[&TLS13]);
    builder.map_err(|error| Error::io("start TLS")(std::io::Error::other(error)))
}

fn authorities(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for one in certificates("tls_ca", path)? {
        let added = roots.add(one);
        added.map_err(|error| no_authority(path, error))?;
    }
    Ok(roots)
}

fn chain(tls: &Tls) -> Result<Vec<CertificateDer<'static>>, Error> {
    certificates("tls_certificate", &tls.certificate)
}

fn key(tls: &Tls) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| no_key(tls, error))
}

/// At least one.
fn certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    use rustls::pki_types::pem::Error as Pem;
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let all = all.and_then(|all| match all.is_empty() {
        true => Err(Pem::NoItemsFound),
        false => Ok(all),
    });
    all.map_err(|error| refused(field, path.display(), error, "a PEM file with certificates"))
}

fn no_authority(path: &Path, error: impl Display) -> Error {
    let allowed = "a PEM file with CA certificates";
    refused("tls_ca", path.display(), error, allowed)
}

fn no_key(tls: &Tls, error: impl Display) -> Error {
    let allowed = "a PEM file with the key of tls_certificate";
    refused("tls_key", tls.key.display(), error, allowed)
}

fn refused(
    field: &'static str,
    value: impl Display,
    error: impl Display,
    allowed: &'static str,
) -> Error {
    Error::input(field, format!("{value} ({error})"), allowed)
}
