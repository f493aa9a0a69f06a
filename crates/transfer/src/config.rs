//! What an engine is told.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::peer::Summed;
use crate::task::Priority;
use crate::tls::Tls;

/// What a longer time of a batch is cut to.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// Options of an engine. Its `Debug` output does not contain the token.
#[derive(Clone)]
#[expect(clippy::exhaustive_structs, reason = "made from its default")]
pub struct Config {
    /// Address for connections from peers; port 0 is any free port. With `None` peers cannot
    /// connect. Default: `127.0.0.1:0`.
    pub listen: Option<SocketAddr>,
    /// Secret that both sides must have; empty for none. Without a token and without `tls`, an
    /// engine listens on loopback addresses only. Default: empty.
    pub token: Vec<u8>,
    /// Certificates that protect connections and authenticate both sides. With `None` connections
    /// are not encrypted. Default: `None`.
    pub tls: Option<Tls>,
    /// True to listen on any address without a token and without TLS. Every process that can
    /// connect is then trusted. Default: false.
    pub allow_unauthenticated: bool,
    /// Number of connections to a peer, 1 to 64, and of threads for copies on one host. Default: 2.
    pub streams: usize,
    /// Largest slice, in bytes, 4 KiB to 32 MiB. Larger slices need fewer calls. Smaller ones let
    /// urgent transfers overtake sooner, and keep hashed bytes in the CPU caches. Default: 512 KiB.
    pub slice_size: u64,
    /// Largest remainder, in bytes, that joins the slice before it, 0 to `slice_size`. Default: 64
    /// KiB.
    pub tail_merge: u64,
    /// Number of slices that are ready before the first is sent, while the rest is still planned.
    /// At least 1; default: 4.
    pub watermark: usize,
    /// Number of slices per connection without a response, 1 to 1024. Urgent transfers wait for
    /// them. Default: 8.
    pub window: usize,
    /// True to use shared memory with processes of the same host and user. Default: true.
    pub local: bool,
    /// Names of the RDMA devices to use, for example `mlx5_0`. With `None` the engine uses all
    /// devices that it finds, or with TLS none. Default: `None`.
    pub rdma: Option<Vec<String>>,
    /// True to protect each slice on a connection with a checksum. Default: false.
    pub checksum: bool,
    /// True if the caller verifies the data that it reads. Then `checksum` applies to writes only.
    /// Default: false.
    pub verifies_reads: bool,
    /// Number of retries after a transfer error. Default: 4.
    pub retries: u32,
    /// Time-out for connecting, for the handshake, for opening a name and for calls, 1 ms to 1 h.
    /// Default: 5 s.
    pub timeout: Duration,
    /// Largest number of connections from peers, 1 to 1,048,576. Default: 1024.
    pub connections_max: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
            token: Vec::new(),
            tls: None,
            allow_unauthenticated: false,
            streams: 2,
            slice_size: 512 << 10,
            tail_merge: 64 << 10,
            watermark: 4,
            window: 8,
            local: true,
            rdma: None,
            checksum: false,
            verifies_reads: false,
            retries: 4,
            timeout: Duration::from_secs(5),
            connections_max: 1024,
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config {
            listen,
            token: _,
            tls,
            allow_unauthenticated,
            streams,
            slice_size,
            tail_merge,
            watermark,
            window,
            local,
            rdma,
            checksum,
            verifies_reads,
            retries,
            timeout,
            connections_max,
        } = self;
        f.debug_struct("Config")
            .field("listen", listen)
            .field("token", &"…")
            .field("tls", tls)
            .field("allow_unauthenticated", allow_unauthenticated)
            .field("streams", streams)
            .field("slice_size", slice_size)
            .field("tail_merge", tail_merge)
            .field("watermark", watermark)
            .field("window", window)
            .field("local", local)
            .field("rdma", rdma)
            .field("checksum", checksum)
            .field("verifies_reads", verifies_reads)
            .field("retries", retries)
            .field("timeout", timeout)
            .field("connections_max", connections_max)
            .finish()
    }
}

impl Config {
    /// What is under a checksum on the way.
    pub(crate) fn summed(&self) -> Summed {
        Summed {
            writes: self.checksum,
            reads: self.checksum && !self.verifies_reads,
        }
    }

    /// Whether nothing is to be proved by who connects.
    fn trusts_anybody(&self) -> bool {
        self.token.is_empty() && self.tls.is_none()
    }

    /// Devices that are used: with TLS those that are named, as bytes go by them in the clear.
    pub(crate) fn devices(&self) -> Option<&[String]> {
        match (&self.rdma, &self.tls) {
            (None, Some(_)) => Some(&[]),
            (named, _) => named.as_deref(),
        }
    }

    /// Whether processes of this host reach memory without a connection. They prove the token, and
    /// no certificate: without one that would let in who has none.
    pub(crate) fn is_neighbourly(&self) -> bool {
        self.local && !(self.tls.is_some() && self.token.is_empty())
    }

    /// Refuses what cannot be.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let within = |field, value: u64, least: u64, most: u64, allowed| match (least..=most)
            .contains(&value)
        {
            true => Ok(()),
            false => Err(Error::input(field, value, allowed)),
        };
        within("streams", self.streams as u64, 1, 64, "1 to 64")?;
        within(
            "slice_size",
            self.slice_size,
            4 << 10,
            32 << 20,
            "4KiB to 32MiB",
        )?;
        within(
            "tail_merge",
            self.tail_merge,
            0,
            self.slice_size,
            "0 to slice_size",
        )?;
        within("watermark", self.watermark as u64, 1, u64::MAX, "1 or more")?;
        within("window", self.window as u64, 1, 1024, "1 to 1024")?;
        within(
            "connections_max",
            self.connections_max as u64,
            1,
            1 << 20,
            "1 to 1048576",
        )?;
        within(
            "timeout",
            self.timeout.as_millis() as u64,
            1,
            3_600_000,
            "1 ms to 1 hour",
        )?;
        let open = self.listen.filter(|address| !address.ip().is_loopback());
        match open {
            Some(address) if self.trusts_anybody() && !self.allow_unauthenticated => {
                let allowed =
                    "a loopback address, or any address with a token, TLS or allow_unauthenticated";
                Err(Error::input("listen", address, allowed))
            }
            _ => Ok(()),
        }
    }
}

/// Options of one batch.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its default")]
pub struct Options {
    /// Time-out of the batch, at most an hour. Requests that are not done by then fail. Default: 30
    /// s.
    pub timeout: Duration,
    /// Priority over other batches. Default: [`Priority::Normal`].
    pub priority: Priority,
}

impl Options {
    /// When a batch that begins now is over.
    pub(crate) fn deadline(&self, now: Instant) -> Instant {
        now + self.timeout.min(TIMEOUT_MAX)
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(30),
            priority: Priority::Normal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_shows_all_options_but_the_token() {
        let config = Config {
            token: b"secret".to_vec(),
            ..Config::default()
        };
        let shown = format!("{config:?}");
        let expected = "Config { listen: Some(127.0.0.1:0), token: \"…\", tls: None, \
            allow_unauthenticated: false, streams: 2, slice_size: 524288, tail_merge: 65536, \
            watermark: 4, window: 8, local: true, rdma: None, checksum: false, \
            verifies_reads: false, retries: 4, timeout: 5s, connections_max: 1024 }";
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_time_beyond_an_hour_is_an_hour() {
        let now = Instant::now();
        let lasts = |timeout| {
            let options = Options {
                timeout,
                ..Options::default()
            };
            options.deadline(now) - now
        };
        assert_eq!(lasts(Duration::from_secs(30)), Duration::from_secs(30));
        assert_eq!(lasts(Duration::from_secs(7200)), TIMEOUT_MAX);
        assert_eq!(lasts(Duration::MAX), TIMEOUT_MAX);
    }
}
