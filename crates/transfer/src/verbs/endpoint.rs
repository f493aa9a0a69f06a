//! What each side of a queue pair has to know of the other, as it goes over the wire.

use super::error::{Error, Result};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an [`Endpoint`].
pub(crate) const ENDPOINT_LEN: usize = size_of::<Endpoint>();

const VERSION: u16 = 1;
const INFINIBAND: u8 = 1;
const ETHERNET: u8 = 2;

/// Numbers of queue pairs and of packets have 24 bits.
const NUMBER_MAX: u32 = 0xFF_FFFF;

/// One end of a queue pair. Little-endian:
///
/// ```text
///  0  version: 1           2 bytes
///  2  MTU: 1 for 256 bytes, to 5 for 4096
///  3  link: 1 InfiniBand, 2 Ethernet
///  4  number of the queue pair, 24 bits
///  8  number of its first packet, 24 bits
/// 12  LID, zero on Ethernet  2 bytes
/// 14  READs that it serves at once
/// 15  zero
/// 16  GID                 16 bytes
/// 32  zeros               32 bytes
/// ```
#[repr(C)]
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
pub(crate) struct Endpoint {
    version: U16,
    mtu: u8,
    link: u8,
    qpn: U32,
    psn: U32,
    lid: U16,
    reads: u8,
    zero: u8,
    gid: [u8; 16],
    zeros: [u8; 32],
}

const _: () = assert!(ENDPOINT_LEN == 64);

/// The numbers of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    pub(super) mtu: u8,
    pub(super) is_ethernet: bool,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) lid: u16,
    pub(super) reads: u8,
    pub(super) gid: [u8; 16],
}

impl Endpoint {
    pub(super) fn new(numbers: &Numbers) -> Self {
        let link = match numbers.is_ethernet {
            true => ETHERNET,
            false => INFINIBAND,
        };
        Self {
            version: VERSION.into(),
            mtu: numbers.mtu,
            link,
            qpn: numbers.qpn.into(),
            psn: numbers.psn.into(),
            lid: numbers.lid.into(),
            reads: numbers.reads,
            gid: numbers.gid,
            ..Self::new_zeroed()
        }
    }

    /// As it goes over the wire.
    pub(crate) fn to_bytes(self) -> [u8; ENDPOINT_LEN] {
        zerocopy::transmute!(self)
    }

    /// What a peer has sent.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], with the field that makes no sense.
    pub(crate) fn from_bytes(bytes: [u8; ENDPOINT_LEN]) -> Result<Self> {
        let row: Self = zerocopy::transmute!(bytes);
        let check = |field, value: u64, is_right, allowed: &str| match is_right {
            true => Ok(()),
            false => Err(Error::invalid(field, value, allowed)),
        };
        let version = row.version.get();
        check("peer's version", version.into(), version == VERSION, "1")?;
        let mtu = row.mtu;
        check("peer's MTU", mtu.into(), (1..=5).contains(&mtu), "1 to 5")?;
        let link = matches!(row.link, INFINIBAND | ETHERNET);
        check("peer's link", row.link.into(), link, "1 or 2")?;
        for (field, number) in [("queue pair", row.qpn), ("packet", row.psn)] {
            let number = number.get();
            check(
                field,
                number.into(),
                number <= NUMBER_MAX,
                "a 24-bit number",
            )?;
        }
        let zeros = row.zeros.iter().chain([&row.zero]).filter(|at| **at != 0);
        let others = zeros.count();
        check("peer's bytes behind", others as u64, others == 0, "zeros")?;
        Ok(row)
    }

    pub(super) fn numbers(&self) -> Numbers {
        Numbers {
            mtu: self.mtu,
            is_ethernet: self.link == ETHERNET,
            qpn: self.qpn.get(),
            psn: self.psn.get(),
            lid: self.lid.get(),
            reads: self.reads,
            gid: self.gid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> Numbers {
        Numbers {
            mtu: 3,
            is_ethernet: true,
            qpn: 0x01_0203,
            psn: 0x0A_0B0C,
            lid: 0x1234,
            reads: 16,
            gid: std::array::from_fn(|at| at as u8),
        }
    }

    #[test]
    fn a_row_is_what_the_drawing_says_and_comes_back() {
        let row = Endpoint::new(&numbers());
        let bytes = row.to_bytes();
        let mut drawn = vec![
            1, 0, 3, 2, 3, 2, 1, 0, 0x0C, 0x0B, 0x0A, 0, 0x34, 0x12, 16, 0,
        ];
        drawn.extend(0..16);
        drawn.resize(64, 0);
        assert_eq!(bytes.to_vec(), drawn);
        assert_eq!(Endpoint::from_bytes(bytes).unwrap(), row);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_field() {
        let good = Endpoint::new(&numbers()).to_bytes();
        for (at, byte, says) in [
            (0, 2, "version: 2"),
            (2, 0, "MTU: 0"),
            (2, 6, "MTU: 6"),
            (3, 0, "link: 0"),
            (7, 1, "queue pair: 16843267"),
            (11, 1, "packet: "),
            (15, 9, "bytes behind"),
            (63, 9, "bytes behind"),
        ] {
            let mut bytes = good;
            bytes[at] = byte;
            let error = Endpoint::from_bytes(bytes).unwrap_err().to_string();
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
    }
}
