//! Who is refused, how soon, and what it hears.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_transfer::{Config, Engine, Error, Tls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::certificates::{Authority, HERE};
use super::common::raw::hello;
use super::common::{Home, bytes, config, engine_of, ms, until};
use super::under;

/// What an initiator hears from a target, within the time of a greeting. The target has counted it.
fn refusal(mine: Config, theirs: Config) -> String {
    let (one, other) = (engine_of(mine), engine_of(theirs));
    let _home = Home::of(&other, b"home", bytes(4096, 1));
    let begun = Instant::now();
    let refused = one.open(other.address().unwrap(), b"home").unwrap_err();
    let took = begun.elapsed();
    assert!(took < Config::default().timeout, "{took:?}");
    until("it is counted", || other.stats().refused_greetings > 0);
    until("it has ended", || other.stats().connections == 0);
    refused.to_string()
}

fn assert_says(text: &str, wanted: &str) {
    assert!(text.contains(wanted), "{wanted:?} is not in {text:?}");
}

#[test]
fn a_target_of_another_authority_is_not_believed() {
    let (mine, theirs) = (Authority::new(), Authority::new());
    let told = refusal(under(&mine.tls()), under(&theirs.tls()));
    assert_says(&told, "certificate");
    assert_says(&told, "UnknownIssuer");
}

#[test]
fn an_initiator_of_another_authority_is_not_believed() {
    let (mine, theirs) = (Authority::new(), Authority::new());
    let tls = Tls {
        // It believes the target.
        ca: theirs.ca.clone(),
        ..mine.tls()
    };
    let told = refusal(under(&tls), under(&theirs.tls()));
    assert_says(&told, "UnknownCA");
}

#[test]
fn certificates_that_are_over_are_refused() {
    let authority = Authority::new();
    let (good, over) = (authority.tls(), authority.expired());
    assert_says(&refusal(under(&good), under(&over)), "expired");
    assert_says(&refusal(under(&over), under(&good)), "CertificateExpired");
}

#[test]
fn a_certificate_is_for_the_address_or_for_the_name_that_is_given() {
    let authority = Authority::new();
    let mine = authority.tls();
    let elsewhere = under(&authority.sign("127.0.0.2", |_| ()));
    assert_says(
        &refusal(under(&mine), elsewhere.clone()),
        "not valid for name",
    );
    let named = |name: &str| Tls {
        name: Some(name.to_owned()),
        ..mine.clone()
    };
    let theirs = under(&authority.sign("depot.example", |_| ()));
    assert_says(&refusal(under(&mine), theirs.clone()), "not valid for name");
    let other_name = under(&named("other.example"));
    assert_says(&refusal(other_name, theirs.clone()), "not valid for name");
    for (name, theirs) in [("depot.example", theirs), ("127.0.0.2", elsewhere)] {
        let (one, other) = (engine_of(under(&named(name))), engine_of(theirs));
        one.ping(other.address().unwrap()).unwrap();
    }
}

#[test]
fn the_token_is_proved_as_well_where_there_is_one() {
    let authority = Authority::new();
    let tls = authority.tls();
    let with = |token: &[u8]| Config {
        token: token.to_vec(),
        ..under(&tls)
    };
    assert_says(
        &refusal(with(b"one"), with(b"another")),
        "a different token",
    );
    assert_says(&refusal(with(b""), with(b"another")), "a different token");
    assert_says(&refusal(with(b"one"), with(b"")), "a different token");
}

#[test]
fn who_speaks_no_tls_is_told() {
    let authority = Authority::new();
    let tls = authority.tls();
    assert_says(&refusal(config(), under(&tls)), "it uses TLS");
    assert_says(&refusal(under(&tls), config()), "may not use TLS");
}

#[test]
fn who_has_no_certificate_gets_nothing() {
    let authority = Authority::new();
    let other = engine_of(under(&authority.tls()));
    let _home = Home::of(&other, b"home", bytes(4096, 1));
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(&authority.ca).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(HERE).unwrap();
    let tls = ClientConnection::new(Arc::new(client), name).unwrap();
    let tcp = TcpStream::connect(other.address().unwrap()).unwrap();
    let mut stream = StreamOwned::new(tls, tcp);
    let _may_be_late = stream.write_all(&hello(0, [7; 16]));
    let told = stream.read(&mut [0; 64]).unwrap_err();
    assert_says(&told.to_string(), "CertificateRequired");
    until("it is counted", || other.stats().refused_greetings == 1);
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    let authority = Authority::new();
    let tls = authority.tls();
    let timeout = ms(400);
    let soon = Config {
        timeout,
        retries: 0,
        ..under(&tls)
    };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = engine_of(soon.clone());
    let begun = Instant::now();
    assert!(one.ping(silent.local_addr().unwrap()).is_err());
    one.close();
    assert!(begun.elapsed() < 40 * timeout, "{:?}", begun.elapsed());

    let other = engine_of(soon);
    let mut stream = TcpStream::connect(other.address().unwrap()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    // The beginning of a handshake whose end never comes.
    stream.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
    let begun = Instant::now();
    while stream.read(&mut [0; 64]).is_ok_and(|got| got > 0) {}
    assert!(begun.elapsed() < 40 * timeout, "{:?}", begun.elapsed());
    until("it is counted", || other.stats().refused_greetings == 1);
    until("it has ended", || other.stats().connections == 0);
}

#[test]
fn one_connection_too_many_hears_that() {
    let authority = Authority::new();
    let tls = authority.tls();
    let one = engine_of(Config {
        streams: 1,
        ..under(&tls)
    });
    let other = engine_of(Config {
        connections_max: 1,
        ..under(&tls)
    });
    let address = other.address().unwrap();
    one.ping(address).unwrap();
    let another = engine_of(under(&tls));
    let told = another.ping(address).unwrap_err().to_string();
    assert_says(&told, "connections");
    one.ping(address).unwrap();
}

#[test]
fn certificates_do_for_listening_everywhere() {
    let authority = Authority::new();
    let tls = authority.tls();
    let listen: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let everywhere = |config: Config| Config {
        listen: Some(listen),
        ..config
    };
    let refused = Engine::start(everywhere(config())).unwrap_err();
    assert_says(&refused.to_string(), "TLS");
    let other = engine_of(everywhere(under(&tls)));
    let port = other.address().unwrap().port();
    engine_of(under(&tls))
        .ping(([127, 0, 0, 1], port).into())
        .unwrap();
}

#[test]
fn settings_that_cannot_be_are_named() {
    let authority = Authority::new();
    let good = authority.tls();
    let none = authority.file("none.pem", "nothing");
    let gone = none.with_file_name("gone.pem");
    let others = Authority::new();
    let wrong = [
        (
            "tls_certificate",
            Tls {
                certificate: none.clone(),
                ..good.clone()
            },
        ),
        (
            "tls_certificate",
            Tls {
                certificate: gone.clone(),
                ..good.clone()
            },
        ),
        (
            "tls_key",
            Tls {
                key: none.clone(),
                ..good.clone()
            },
        ),
        (
            "tls_key",
            Tls {
                key: others.tls().key,
                ..good.clone()
            },
        ),
        (
            "tls_ca",
            Tls {
                ca: none,
                ..good.clone()
            },
        ),
        (
            "tls_ca",
            Tls {
                ca: gone,
                ..good.clone()
            },
        ),
        (
            "tls_name",
            Tls {
                name: Some("a b".to_owned()),
                ..good.clone()
            },
        ),
    ];
    for (wanted, tls) in wrong {
        match Engine::start(under(&tls)).unwrap_err() {
            Error::Input { field, .. } => assert_eq!(field, wanted),
            other => panic!("{wanted}: {other}"),
        }
    }
    let some = || Some(good.key.clone());
    let parts = [
        (None, some(), some(), "tls_certificate"),
        (some(), None, some(), "tls_key"),
        (some(), some(), None, "tls_ca"),
        (some(), None, None, "tls_key"),
        (None, None, None, "tls_name"),
    ];
    for (certificate, key, ca, missing) in parts {
        let refused = Tls::of(certificate, key, ca, Some("x".to_owned())).unwrap_err();
        assert_says(&refused.to_string(), missing);
    }
    assert_eq!(Tls::of(None, None, None, None).unwrap(), None);
}
