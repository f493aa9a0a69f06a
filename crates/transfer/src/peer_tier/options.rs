//! The section `peer`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_arena::{Error, size};
use kvdepot_store::option::{Kind, OptionSpec, Section, read_tokens};

use crate::homes::{Host, REPLICAS_MAX, View};
use crate::membership::Settings;
use crate::tls::Tls;

/// The tier's name.
pub(super) const NAME: &str = "Peer";

pub(super) const OPTIONS: &[OptionSpec] = &[
    OptionSpec::new(
        "peer",
        "name",
        Kind::Text,
        "none (required)",
        "Unique name of this host. Keep the name when the address changes, because the name \
         determines which blocks the host stores.",
    ),
    OptionSpec::new(
        "peer",
        "capacity",
        Kind::Size,
        "none (required)",
        "Bytes that this host contributes: in memory, or on the medium at `path`. The number of \
         blocks on the host is proportional to these bytes.",
    ),
    OptionSpec::new(
        "peer",
        "hosts",
        Kind::Text,
        "none (set `hosts` or `etcd`)",
        "Fixed list of all hosts, including this host; the same list on every host. Each entry has \
         the form `NAME IP:PORT [CAPACITY]`; separate entries by commas. An entry without CAPACITY \
         has the `capacity` of this host.",
    ),
    OptionSpec::new(
        "peer",
        "etcd",
        Kind::Text,
        "none (set `hosts` or `etcd`)",
        "Endpoints of an etcd cluster that holds the list of hosts, such as \
         `http://10.0.0.1:2379`, separated by commas. With `etcd`, hosts can join and leave.",
    ),
    OptionSpec::new(
        "peer",
        "etcd_prefix",
        Kind::Text,
        "/kvdepot",
        "Prefix of the keys in etcd under which the hosts register. The option is allowed only \
         with `etcd`.",
    ),
    OptionSpec::new(
        "peer",
        "etcd_ttl",
        Kind::Duration,
        "10s",
        "Time without a heartbeat after which a host is removed from the list in etcd: 2s to \
         3600s, in whole seconds. The option is allowed only with `etcd`.",
    ),
    OptionSpec::new(
        "peer",
        "listen",
        Kind::Text,
        "this host's address in `hosts`; with `etcd`, `127.0.0.1:0`",
        "Address to which other hosts connect, in the form `IP:PORT`. An address other than \
         loopback requires a token or TLS.",
    ),
    OptionSpec::new(
        "peer",
        "advertise",
        Kind::Text,
        "the value of `listen`",
        "Address that this host registers in etcd, in the form `IP:PORT`, if other hosts cannot \
         connect to the value of `listen`. The option is allowed only with `etcd`.",
    ),
    OptionSpec::new(
        "peer",
        "token",
        Kind::Text,
        "none",
        "Secret that all hosts share. A host admits every host that presents the same token. Set \
         either `token` or `token_file`.",
    ),
    OptionSpec::new(
        "peer",
        "token_file",
        Kind::Text,
        "none",
        "File that contains the shared token of all hosts; file mode 0600, at most 4096 bytes. \
         Each line contains a token: the host presents the first, and admits every host that \
         presents any of them. kvdepot reads the file again on SIGHUP.",
    ),
    OptionSpec::new(
        "peer",
        "tls_certificate",
        Kind::Text,
        "none (connections are not encrypted)",
        "PEM file with this host's certificate and intermediate certificates. Set \
         `tls_certificate`, `tls_key` and `tls_ca` together: hosts then authenticate each other, \
         and kvdepot encrypts all traffic between hosts.",
    ),
    OptionSpec::new(
        "peer",
        "tls_key",
        Kind::Text,
        "none",
        "PEM file with the private key of the certificate in `tls_certificate`.",
    ),
    OptionSpec::new(
        "peer",
        "tls_ca",
        Kind::Text,
        "none",
        "PEM file with the certificate authorities that sign the certificates of all hosts.",
    ),
    OptionSpec::new(
        "peer",
        "tls_name",
        Kind::Text,
        "the address of the connection",
        "Name in the certificates of other hosts. Set the name if the certificates are not issued \
         for the addresses of hosts.",
    ),
    OptionSpec::new(
        "peer",
        "path",
        Kind::Text,
        "none (the contributed bytes are in memory, and are lost with the process)",
        "DAX device, or path of a file that can be memory-mapped, for the bytes that this host \
         contributes.",
    ),
    OptionSpec::new(
        "peer",
        "replicas",
        Kind::Count,
        "1",
        "Number of hosts that store each block, 1 to 8. A put succeeds when this number of hosts \
         has the block; if fewer hosts are reachable, all reachable hosts must have the block.",
    ),
];

/// What a section says.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) name: String,
    pub(super) capacity: u64,
    pub(super) listen: SocketAddr,
    pub(super) advertise: Option<SocketAddr>,
    pub(super) secrets: Secrets,
    pub(super) path: Option<PathBuf>,
    pub(super) replicas: usize,
    pub(super) source: Source,
}

/// Tokens and TLS files of this host, and the file of the tokens.
#[derive(Clone)]
pub(super) struct Secrets {
    /// The first is presented, and all are admitted.
    pub(super) tokens: Vec<Vec<u8>>,
    token_file: Option<PathBuf>,
    pub(super) tls: Option<Tls>,
}

impl Secrets {
    /// The same after a look at the file of the tokens. Those of TLS are read by the engine.
    pub(super) fn read_again(&self) -> Result<Secrets, Error> {
        let tokens = match &self.token_file {
            Some(path) => tokens_of(path)?,
            None => self.tokens.clone(),
        };
        Ok(Secrets {
            tokens,
            ..self.clone()
        })
    }

    /// The token that this host presents; empty without one.
    pub(super) fn token(&self) -> Vec<u8> {
        self.tokens.first().cloned().unwrap_or_default()
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secrets")
            .field("token_file", &self.token_file)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// Where hosts come from.
#[derive(Debug)]
pub(super) enum Source {
    Fixed(Vec<Host>),
    Etcd(Settings),
}

impl Options {
    /// With the token that a file has, if `files` are read.
    pub(super) fn read(section: &Section, files: bool) -> Result<Options, Error> {
        let missing = |field: &str, allowed: &str| Error::config(field, "missing", allowed);
        let name = section.text("name");
        let name = name.ok_or_else(|| missing("peer.name", "a unique name for this host"))?;
        let capacity = section.number("capacity");
        let capacity = capacity.ok_or_else(|| missing("peer.capacity", size::SIZE_HELP))?;
        let source = source(section, capacity)?;
        let own = match &source {
            Source::Fixed(hosts) => Some(own_of(hosts, name, capacity)?),
            Source::Etcd(_) => None,
        };
        let listen = match (section.text("listen"), own) {
            (Some(listen), _) => address("peer.listen", listen)?,
            (None, Some(own)) => own,
            (None, None) => (Ipv4Addr::LOCALHOST, 0).into(),
        };
        let advertise = section.text("advertise");
        let advertise = advertise
            .map(|text| address("peer.advertise", text))
            .transpose()?;
        if advertise.is_some() && own.is_some() {
            let allowed =
                "this option only with peer.etcd (peer.hosts contains the address of this host)";
            let value = section.text("advertise").unwrap_or_default();
            return Err(Error::config("peer.advertise", value, allowed));
        }
        if own.is_none() && advertise.is_none() && listen.ip().is_unspecified() {
            let allowed =
                "an address that other hosts can connect to, because peer.listen is not one";
            return Err(Error::config("peer.advertise", "missing", allowed));
        }
        let (tokens, tls) = (tokens(section, files)?, tls(section)?);
        if tokens.is_none() && tls.is_none() && !listen.ip().is_loopback() {
            let allowed = "a loopback address, or any address with peer.token, peer.token_file or \
                           peer.tls_ca";
            return Err(Error::config("peer.listen", listen, allowed));
        }
        let replicas = section.number("replicas").unwrap_or(1);
        if replicas > REPLICAS_MAX as u64 {
            let allowed = format!("1 to {REPLICAS_MAX}");
            return Err(Error::config("peer.replicas", replicas, allowed));
        }
        Ok(Options {
            name: name.to_owned(),
            capacity,
            listen,
            advertise,
            secrets: Secrets {
                tokens: tokens.unwrap_or_default(),
                token_file: section.path("token_file"),
                tls,
            },
            path: section.path("path"),
            replicas: replicas as usize,
            source,
        })
    }
}

fn source(section: &Section, capacity: u64) -> Result<Source, Error> {
    match (section.text("hosts"), section.text("etcd")) {
        (Some(hosts), None) => {
            for field in ["etcd_prefix", "etcd_ttl"] {
                let given = section.text(field).map(str::to_owned);
                let given = given.or_else(|| section.duration(field).map(|it| format!("{it:?}")));
                if let Some(given) = given {
                    let (field, allowed) =
                        (format!("peer.{field}"), "this option only with peer.etcd");
                    return Err(Error::config(field, given, allowed));
                }
            }
            Ok(Source::Fixed(fixed(hosts, capacity)?))
        }
        (None, Some(endpoints)) => {
            let endpoints = endpoints.split(',').map(|one| one.trim().to_owned());
            let mut settings = Settings::new(endpoints.collect());
            if let Some(prefix) = section.text("etcd_prefix") {
                prefix.clone_into(&mut settings.prefix);
            }
            if let Some(ttl) = section.duration("etcd_ttl") {
                let whole = ttl.subsec_nanos() == 0;
                if !whole || !(2..=3600).contains(&ttl.as_secs()) {
                    let value = format!("{ttl:?}");
                    let allowed = "whole seconds, 2s to 3600s";
                    return Err(Error::config("peer.etcd_ttl", value, allowed));
                }
                settings.ttl = ttl;
            }
            Ok(Source::Etcd(settings))
        }
        (Some(_), Some(etcd)) => {
            let allowed = "either peer.hosts or peer.etcd, not both";
            Err(Error::config("peer.etcd", etcd, allowed))
        }
        (None, None) => {
            let allowed = "NAME IP:PORT [CAPACITY] of each host (or set peer.etcd)";
            Err(Error::config("peer.hosts", "missing", allowed))
        }
    }
}

fn fixed(text: &str, capacity: u64) -> Result<Vec<Host>, Error> {
    let host = |one: &str| {
        let allowed = "NAME IP:PORT [CAPACITY] of each host, separated by commas";
        let refuse = || Error::config("peer.hosts", one.trim(), allowed);
        let words: Vec<&str> = one.split_whitespace().collect();
        let (name, at, bytes) = match words.as_slice() {
            [name, at] => (name, at, capacity),
            [name, at, bytes] => (name, at, size::size(bytes).ok_or_else(refuse)?),
            _ => return Err(refuse()),
        };
        at.parse::<SocketAddr>().map_err(|_| refuse())?;
        Ok(Host {
            name: (*name).to_owned(),
            address: (*at).to_owned(),
            capacity: bytes,
            incarnation: 0,
        })
    };
    let hosts = text.split(',').map(host).collect::<Result<Vec<_>, _>>()?;
    let view = View::new(1, hosts.clone());
    view.map_err(|error| {
        let allowed = format!("a valid list of hosts ({error})");
        Error::config("peer.hosts", text, allowed)
    })?;
    Ok(hosts)
}

fn own_of(hosts: &[Host], name: &str, capacity: u64) -> Result<SocketAddr, Error> {
    let own = hosts.iter().find(|host| host.name == name);
    let own =
        own.ok_or_else(|| Error::config("peer.name", name, "one of the names in peer.hosts"))?;
    if own.capacity != capacity {
        let allowed = format!(
            "{}, the capacity of this host in peer.hosts",
            size::show(own.capacity)
        );
        return Err(Error::config(
            "peer.capacity",
            size::show(capacity),
            allowed,
        ));
    }
    address("peer.hosts", &own.address)
}

fn address(field: &str, text: &str) -> Result<SocketAddr, Error> {
    text.parse()
        .map_err(|_| Error::config(field, text, "IP:PORT"))
}

/// What hosts prove themselves by; nothing of a file that is not read.
fn tokens(section: &Section, files: bool) -> Result<Option<Vec<Vec<u8>>>, Error> {
    match (section.text("token"), section.path("token_file")) {
        (Some(_), Some(path)) => {
            let allowed = "either peer.token or peer.token_file, not both";
            Err(Error::config("peer.token_file", path.display(), allowed))
        }
        (Some(token), None) => Ok(Some(vec![token.as_bytes().to_vec()])),
        (None, Some(path)) if files => tokens_of(&path).map(Some),
        (None, Some(_)) => Ok(Some(Vec::new())),
        (None, None) => Ok(None),
    }
}

fn tokens_of(path: &Path) -> Result<Vec<Vec<u8>>, Error> {
    read_tokens("peer.token_file", path)
}

fn tls(section: &Section) -> Result<Option<Tls>, Error> {
    let name = section.text("tls_name").map(str::to_owned);
    let path = |field| section.path(field);
    Tls::of(
        path("tls_certificate"),
        path("tls_key"),
        path("tls_ca"),
        name,
    )
    .map_err(refused)
}

/// As the section's options name it.
pub(super) fn refused(error: crate::error::Error) -> Error {
    match error {
        crate::error::Error::Input {
            field,
            value,
            allowed,
        } => Error::config(format!("peer.{field}"), value, allowed),
        crate::error::Error::Io { what, source } => Error::Io {
            path: format!("peer: cannot {what}").into(),
            source,
        },
        other => {
            let allowed = format!("settings with which the transfer engine starts ({other})");
            Error::config("peer", "this section", allowed)
        }
    }
}

/// Half of a limit, with a little room for what is behind: two hosts may be asked, one after the
/// other.
pub(super) fn half(limit: Duration) -> Duration {
    (limit * 9 / 20).max(Duration::from_millis(1))
}
