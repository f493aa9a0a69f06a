//! What opens a door, and what it is told of a pin.

use std::net::SocketAddr;
use std::time::Duration;

use kvdepot_store::{DoorKey, Outside};
use serde::{Deserialize, Serialize};

use super::messages::Id;
use super::options::NAME;
use crate::tls::Tls;

/// What the depot hands to its workers, and tells them of pins.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Pass {
    /// Its engine, as homes know it.
    pub(super) holder: [u8; 16],
    pub(super) token: Vec<u8>,
    pub(super) tls: Option<Tls>,
    /// How long a host is waited for that is asked, and that moves bytes.
    pub(super) lookup: Duration,
    pub(super) timeout: Duration,
}

impl Pass {
    pub(super) fn key(&self) -> DoorKey {
        DoorKey {
            name: NAME,
            bytes: postcard::to_allocvec(self).unwrap_or_default().into(),
        }
    }

    /// Where a pin is, for the door: the home's address, and by whom and as what it is pinned.
    pub(super) fn outside(&self, home: SocketAddr, id: Id) -> Outside {
        let holder = u128::from_le_bytes(self.holder);
        Outside {
            name: format!("{home}/{holder:032x}"),
            number: id,
            offset: 0,
        }
    }
}

/// The home of a pin, and its holder.
pub(super) fn home_of(at: &Outside) -> Option<(SocketAddr, [u8; 16])> {
    let (home, holder) = at.name.split_once('/')?;
    let holder = u128::from_str_radix(holder, 16).ok()?;
    Some((home.parse().ok()?, holder.to_le_bytes()))
}
