//! Certificates, made when they are needed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvdepot_transfer::Tls;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

/// Where targets of these tests are.
pub(crate) const HERE: &str = "127.0.0.1";

/// Who signs certificates.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) ca: PathBuf,
    signed: AtomicU32,
    dir: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let dir = tempfile::tempdir().unwrap();
        // No other has that name.
        let name = dir.path().display().to_string();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let ca = dir.path().join("ca.pem");
        write(&ca, "CERTIFICATE", certificate.der());
        Authority {
            issuer: Issuer::new(params, key),
            ca,
            signed: AtomicU32::new(0),
            dir,
        }
    }

    /// A certificate for this name or address, and what else is to be said of it.
    pub(crate) fn sign(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Tls {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        change(&mut params);
        let pair = KeyPair::generate().unwrap();
        let signed = params.signed_by(&pair, &self.issuer).unwrap();
        let number = self.signed.fetch_add(1, Ordering::Relaxed);
        let file = |kind| self.dir.path().join(format!("{number}-{kind}.pem"));
        let (certificate, key) = (file("certificate"), file("key"));
        write(&certificate, "CERTIFICATE", signed.der());
        write(&key, "PRIVATE KEY", pair.serialized_der());
        Tls {
            certificate,
            key,
            ca: self.ca.clone(),
            name: None,
        }
    }

    /// One that nothing is wrong with.
    pub(crate) fn tls(&self) -> Tls {
        self.sign(HERE, |_| ())
    }

    /// One that was good once.
    pub(crate) fn expired(&self) -> Tls {
        self.sign(HERE, |params| params.not_after = date_time_ymd(2020, 1, 1))
    }

    /// Another file of this authority's.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

fn write(path: &Path, kind: &str, bytes: &[u8]) {
    let text = STANDARD.encode(bytes);
    let pem = format!("-----BEGIN {kind}-----\n{text}\n-----END {kind}-----\n");
    std::fs::write(path, pem).unwrap();
}
