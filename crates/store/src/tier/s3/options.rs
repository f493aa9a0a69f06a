//! The section `s3`.

use std::path::PathBuf;

use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::{Error, size};
use object_store::path::Path;

use crate::option::{Kind, OptionSpec, Section};

pub(super) const OPTIONS: &[OptionSpec] = &[
    OptionSpec::new(
        "s3",
        "url",
        Kind::Text,
        "none (required)",
        "Bucket and prefix, in the form `s3://BUCKET/PREFIX`. Any number of processes and hosts \
         can share the prefix. All objects below the prefix belong to the tier.",
    ),
    OptionSpec::new(
        "s3",
        "endpoint",
        Kind::Text,
        "`AWS_ENDPOINT`, or AWS's endpoint of the region",
        "Address of the object store, in the form `https://HOST:PORT`.",
    ),
    OptionSpec::new(
        "s3",
        "region",
        Kind::Text,
        "`AWS_REGION`, or us-east-1",
        "Region of the bucket.",
    ),
    OptionSpec::new(
        "s3",
        "credentials",
        Kind::Text,
        "the environment: `AWS_*` variables, a web identity, or the role of the container or \
         instance",
        "File with `aws_access_key_id`, `aws_secret_access_key` and optionally \
         `aws_session_token`. kvdepot reads the file again after each change.",
    ),
    OptionSpec::new(
        "s3",
        "capacity",
        Kind::Size,
        "none (required with `lifecycle: fleet`)",
        "Maximum total size of the objects of all processes that share the prefix, at least 1MiB. \
         kvdepot starts to evict the least recently used objects at 94 % of this size. With \
         `lifecycle: bucket`, `capacity` must not be set.",
    ),
    OptionSpec::new(
        "s3",
        "lifecycle",
        Kind::Choice(&["fleet", "bucket"]),
        "fleet",
        "Method of removing old blocks. `fleet`: kvdepot's processes remove blocks to keep the \
         total size below `capacity`. `bucket`: the lifecycle rules of the bucket remove blocks, \
         and kvdepot does not count blocks.",
    ),
    OptionSpec::new(
        "s3",
        "requests",
        Kind::Count,
        "64",
        "Maximum number of concurrent requests, 2 to 1024. Half of the requests are for reads and \
         lookups, and half are for writes.",
    ),
    OptionSpec::new(
        "s3",
        "staging",
        Kind::Size,
        "256MiB",
        "Memory for blocks that are being uploaded, at least 1MiB. A block larger than `staging` \
         is not stored. If `S3` is the only tier, `staging` also limits the total size of one put.",
    ),
    OptionSpec::new(
        "s3",
        "allow_http",
        Kind::Flag,
        "false",
        "Permission to use an `http://` endpoint. With such an endpoint, anybody on the network \
         path can read and change blocks.",
    ),
];

/// Fewest bytes of a bucket: some blocks, and the grants of a few processes.
const CAPACITY_MIN: u64 = 1 << 20;

const STAGING: u64 = 256 << 20;
const STAGING_MIN: u64 = 1 << 20;

const REQUESTS: u64 = 64;
const REQUESTS_MAX: u64 = 1024;

#[derive(Debug)]
pub(super) struct Options {
    pub(super) bucket: String,
    pub(super) prefix: Path,
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    pub(super) credentials: Option<PathBuf>,
    /// `None` where the bucket has rules.
    pub(super) capacity: Option<u64>,
    pub(super) requests: usize,
    pub(super) staging: u64,
    pub(super) allow_http: bool,
}

impl Options {
    pub(super) fn read(section: &Section) -> Result<Options, Error> {
        let missing = |field: &str, allowed: &str| Error::config(field, "missing", allowed);
        let url = section.text("url");
        let url = url.ok_or_else(|| missing("s3.url", "s3://BUCKET/PREFIX"))?;
        let (bucket, prefix) = place_of(url).ok_or_else(|| {
            Error::config(
                "s3.url",
                shown(url),
                "s3://BUCKET/PREFIX, with a bucket name of 3 to 63 characters (lowercase letters, \
                 digits, - . _)",
            )
        })?;
        let capacity = match (section.text("lifecycle"), section.number("capacity")) {
            (Some("bucket"), None) => None,
            (Some("bucket"), Some(capacity)) => {
                let allowed = "no capacity with lifecycle: bucket (the bucket's own rules limit \
                               its size); remove one of the two";
                let capacity = size::show(capacity);
                return Err(Error::config("s3.capacity", capacity, allowed));
            }
            (_, None) => {
                let allowed = "a size such as 1TiB, or lifecycle: bucket";
                return Err(missing("s3.capacity", allowed));
            }
            (_, Some(capacity)) => Some(at_least("capacity", capacity, CAPACITY_MIN)?),
        };
        let requests = section.number("requests").unwrap_or(REQUESTS);
        if !(2..=REQUESTS_MAX).contains(&requests) {
            let allowed = format!("2 to {REQUESTS_MAX}");
            return Err(Error::config("s3.requests", requests, allowed));
        }
        let staging = section.number("staging").unwrap_or(STAGING);
        Ok(Options {
            bucket,
            prefix,
            endpoint: section.text("endpoint").map(str::to_owned),
            region: section.text("region").map(str::to_owned),
            credentials: section.path("credentials"),
            capacity,
            requests: requests as usize,
            staging: at_least("staging", staging, STAGING_MIN)?,
            allow_http: section.flag("allow_http").unwrap_or(false),
        })
    }

    /// Bytes of the largest block: so many that some are written at a time, and stay a while.
    pub(super) fn block_max(&self) -> u64 {
        let staged = self.staging - LEN as u64;
        self.capacity
            .map_or(staged, |capacity| staged.min(capacity / 8))
    }
}

fn at_least(name: &str, bytes: u64, least: u64) -> Result<u64, Error> {
    if bytes < least {
        let allowed = format!("at least {}", size::show(least));
        let field = format!("s3.{name}");
        return Err(Error::config(field, size::show(bytes), allowed));
    }
    Ok(bytes)
}

/// An address for messages. One with a user or a query may have a secret in it.
fn shown(address: &str) -> &str {
    match address.contains(['@', '?']) {
        true => "(not shown)",
        false => address,
    }
}

/// A bucket and a prefix in it.
fn place_of(url: &str) -> Option<(String, Path)> {
    let (bucket, prefix) = url.strip_prefix("s3://")?.split_once('/')?;
    let is_plain = |letter: char| {
        letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-._".contains(letter)
    };
    let is_bucket = (3..=63).contains(&bucket.len()) && bucket.chars().all(is_plain);
    let prefix = Path::parse(prefix.trim_end_matches('/')).ok()?;
    (is_bucket && !prefix.as_ref().is_empty()).then(|| (bucket.to_owned(), prefix))
}

pub(super) fn check_endpoint(endpoint: &str, allow_http: bool) -> Result<(), Error> {
    let refuse = |allowed: &str| Err(Error::config("s3.endpoint", shown(endpoint), allowed));
    let host = match endpoint.split_once("://") {
        Some(("https", host)) => host,
        Some(("http", host)) if allow_http => host,
        Some(("http", _)) => return refuse("https://HOST, or set allow_http: true for http://"),
        _ => return refuse("https://HOST or https://HOST:PORT"),
    };
    match host.is_empty() || host.contains(['@', '?', '#']) || host.starts_with('/') {
        true => refuse("https://HOST or https://HOST:PORT, without user name, query or fragment"),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_bucket_and_a_prefix() {
        let found = place_of("s3://my-bucket/kv/llama/").unwrap();
        assert_eq!(
            found,
            ("my-bucket".into(), Path::parse("kv/llama").unwrap())
        );
        for wrong in [
            "s3://my-bucket",
            "s3://my-bucket/",
            "s3:///kv",
            "https://host/kv",
            "s3://My/kv",
            "s3://my-bucket/a//b",
            "s3://ab/kv",
        ] {
            assert_eq!(place_of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_endpoint_is_encrypted_unless_somebody_says_otherwise() {
        assert!(check_endpoint("https://host:9000", false).is_ok());
        assert!(check_endpoint("http://host:9000", true).is_ok());
        for wrong in ["http://host", "host:9000", "https://", "https://me@host"] {
            assert!(check_endpoint(wrong, false).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_with_a_secret_is_not_shown() {
        for endpoint in [
            "http://me:hunter2@host",
            "https://me:hunter2@host",
            "https://host?token=hunter2",
            "me:hunter2@host",
        ] {
            let error = check_endpoint(endpoint, false).unwrap_err().to_string();
            assert!(error.starts_with("s3.endpoint: (not shown)"), "{error}");
        }
        let error = check_endpoint("ftp://host", false).unwrap_err().to_string();
        assert!(error.starts_with("s3.endpoint: ftp://host "), "{error}");
    }
}
