//! What an engine is told.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::peer::Summed;
use crate::task::Priority;
use crate::tls::Tls;

/// What a longer time of a batch is cut to.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// How an engine works.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its default")]
pub struct Config {
    /// Where peers connect to; port 0 is any that is free. `None`: nobody can.
    pub listen: Option<SocketAddr>,
    /// What both sides have to know. Without it, and without `tls`, only loopback addresses are
    /// listened at.
    pub token: Vec<u8>,
    /// What protects connections and proves both sides to each other; `None`: they go in the clear.
    pub tls: Option<Tls>,
    /// Listens at any address without a token and TLS all the same: whoever reaches it is trusted.
    pub allow_unauthenticated: bool,
    /// Connections to a peer that slices go over, 1 to 64.
    pub streams: usize,
    /// Most bytes of a slice, 4 KiB to 32 MiB. Larger ones cost fewer calls, smaller ones let what
    /// is urgent overtake sooner, and keep hashed bytes in the caches.
    pub slice_size: u64,
    /// A rest of at most so many bytes joins the slice before it, 0 to `slice_size`.
    pub tail_merge: u64,
    /// Slices that are ready before they are handed on, while the rest is still being planned.
    pub watermark: usize,
    /// Slices of a connection that may be unanswered, 1 to 1024. What is urgent waits behind them.
    pub window: usize,
    /// Whether memory of this host, of processes of the same user, is reached without a connection.
    pub local: bool,
    /// RDMA devices that are used, by their names, such as `mlx5_0`; `None`: all that are found.
    pub rdma: Option<Vec<String>>,
    /// Whether each slice that goes over a connection is under a checksum.
    pub checksum: bool,
    /// Whether whoever reads verifies what has come by itself: with `checksum` only what is written
    /// is under one then.
    pub verifies_reads: bool,
    /// How often what failed on the way is tried again.
    pub retries: u32,
    /// How long connecting, greeting, opening and calling may take.
    pub timeout: Duration,
    /// Connections that others may have to this engine.
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
            "1 ms to an hour",
        )?;
        let open = self.listen.filter(|address| !address.ip().is_loopback());
        match open {
            Some(address) if self.trusts_anybody() && !self.allow_unauthenticated => {
                let allowed = "a loopback address, or a token or TLS, or allow_unauthenticated";
                Err(Error::input("listen", address, allowed))
            }
            _ => Ok(()),
        }
    }
}

/// How one batch is moved.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its default")]
pub struct Options {
    /// When it is over at the latest, and no more than an hour. What is not done then has failed.
    pub timeout: Duration,
    /// What goes first where there is more than goes at once.
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
