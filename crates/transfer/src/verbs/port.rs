//! Ports of a device, and the addresses on them.

use super::abi::{Gid, LINK_ETHERNET, PORT_ACTIVE, PortAttr};
use super::device::Device;
use super::error::{Error, Result};
use std::ffi::c_int;
use std::path::{Path, PathBuf};

/// Which port and address are to be used; where nothing is said, the first port that is active, and
/// the address on it that goes farthest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Choice {
    /// The port's number, from 1 on.
    pub(crate) port: Option<u8>,
    /// The position in its table of addresses.
    pub(crate) gid_index: Option<u8>,
}

/// A port that is active, and the address to use there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// Its number.
    pub(crate) number: u8,
    /// The position of the address in the port's table.
    pub(crate) gid_index: u8,
    /// The address.
    pub(crate) gid: [u8; 16],
    /// What InfiniBand calls the port within its subnet; zero on Ethernet.
    pub(crate) lid: u16,
    /// Bytes of a packet, as the number that stands for them: 1 for 256, to 5 for 4096.
    pub(crate) mtu: u8,
    /// Whether it is Ethernet (RoCE), and not InfiniBand.
    pub(crate) is_ethernet: bool,
    /// Most bytes of a slice.
    pub(crate) message_max: u32,
}

impl Device {
    /// Finds a port and an address.
    ///
    /// # Errors
    ///
    /// [`Error::Unusable`] where none is active, or has the address; [`Error::Invalid`] for a port
    /// that the device does not have; [`Error::Os`], [`Error::Forked`].
    pub(crate) fn port(&self, choice: Choice) -> Result<Port> {
        self.check_here()?;
        let last = self.limits().ports;
        if let Some(number) = choice.port
            && !(1..=last).contains(&number)
        {
            return Err(Error::invalid(
                "port",
                number.into(),
                format!("1 to {last}"),
            ));
        }
        let mut states = Vec::new();
        for number in choice.port.map_or(1..=last, |number| number..=number) {
            let attributes = self.port_attributes(number)?;
            if attributes.state == PORT_ACTIVE {
                return self.port_of(number, &attributes, choice.gid_index);
            }
            states.push(format!("port {number} is {}", state(attributes.state)));
        }
        Err(self.unusable(format!("active port: {}", states.join(", "))))
    }

    fn port_attributes(&self, number: u8) -> Result<PortAttr> {
        let mut attributes = PortAttr::default();
        // SAFETY: the context is open, and the attributes are writable; they are as long as the
        // function needs them, or longer.
        let answer = unsafe {
            (self.functions().ibv_query_port)(self.context(), number, &raw mut attributes)
        };
        Error::check("query a port of", self.name(), answer)?;
        Ok(attributes)
    }

    fn port_of(&self, number: u8, attributes: &PortAttr, index: Option<u8>) -> Result<Port> {
        let is_ethernet = attributes.link_layer == LINK_ETHERNET;
        let types = types_of(Path::new("/sys"), self.name(), number);
        let (gid_index, gid) = match index {
            Some(index) => (index, self.gid(number, index)?),
            None => {
                let all = 0..=u8::try_from(attributes.gid_tbl_len - 1).unwrap_or(u8::MAX);
                // An entry that cannot be read is none: tables have holes.
                let ranked = all.filter_map(|index| {
                    let gid = self.gid(number, index).ok()?;
                    let kind = std::fs::read_to_string(types.join(index.to_string()));
                    Some((rank(is_ethernet, kind.ok().as_deref(), gid)?, index, gid))
                });
                let best = ranked.min_by_key(|(rank, index, _)| (*rank, *index));
                let (_, index, gid) = best.ok_or_else(|| {
                    self.unusable(format!(
                        "address on port {number}; configure an address on its network interface"
                    ))
                })?;
                (index, gid)
            }
        };
        if gid == [0; 16] {
            return Err(self.unusable(format!("address at {gid_index} on port {number}")));
        }
        let mtu = u8::try_from(attributes.active_mtu).unwrap_or(0);
        if !(1..=5).contains(&mtu) {
            return Err(self.unusable(format!("MTU on port {number}")));
        }
        Ok(Port {
            number,
            gid_index,
            gid,
            lid: attributes.lid,
            mtu,
            is_ethernet,
            message_max: attributes.max_msg_sz,
        })
    }

    fn gid(&self, port: u8, index: u8) -> Result<[u8; 16]> {
        let mut gid = Gid::default();
        // SAFETY: the context is open, and the address is writable.
        let answer = unsafe {
            (self.functions().ibv_query_gid)(self.context(), port, c_int::from(index), &raw mut gid)
        };
        Error::check("query an address of", self.name(), answer)?;
        Ok(gid.0)
    }

    fn unusable(&self, what: String) -> Error {
        Error::Unusable {
            device: self.name().to_owned(),
            what,
        }
    }
}

/// `enum ibv_port_state` in words.
fn state(state: c_int) -> String {
    match state {
        1 => "down".to_owned(),
        2 => "initialising".to_owned(),
        3 => "armed".to_owned(),
        other => format!("in state {other}"),
    }
}

/// The folder where the kernel says of what type each address of a port is.
fn types_of(sysfs: &Path, device: &str, port: u8) -> PathBuf {
    let ports = sysfs.join("class/infiniband").join(device).join("ports");
    ports.join(port.to_string()).join("gid_attrs/types")
}

/// How well an address serves, the smallest best; nothing for one that does not. On Ethernet RoCE
/// v2 goes through routers and v1 does not, and IPv4 is what networks are usually set up for; one
/// of the link alone goes nowhere else. InfiniBand's own are as good as each other.
fn rank(is_ethernet: bool, kind: Option<&str>, gid: [u8; 16]) -> Option<u8> {
    if gid == [0; 16] {
        return None;
    }
    if !is_ethernet {
        return Some(0);
    }
    let is_v2 = kind.is_some_and(|kind| kind.trim_ascii() == "RoCE v2");
    let is_ipv4 = gid[..10] == [0; 10] && gid[10..12] == [0xFF; 2];
    let is_of_link = gid[0] == 0xFE && gid[1] & 0xC0 == 0x80;
    Some(match (is_v2, is_ipv4, is_of_link) {
        (true, true, _) => 0,
        (true, false, false) => 1,
        (true, false, true) => 2,
        (false, true, _) => 3,
        (false, false, false) => 4,
        (false, false, true) => 5,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_go_far_are_preferred() {
        let mut ipv4 = [0; 16];
        ipv4[10..].copy_from_slice(&[0xFF, 0xFF, 10, 9, 0, 1]);
        let (mut global, mut link) = ([0; 16], [0; 16]);
        (global[0], global[1], link[0], link[1]) = (0x20, 1, 0xFE, 0x80);
        let (v1, v2) = (Some("IB/RoCE v1\n"), Some("RoCE v2\n"));
        let order = [
            (v2, ipv4),
            (v2, global),
            (v2, link),
            (v1, ipv4),
            (None, global),
            (v1, link),
        ];
        let ranks = order.map(|(kind, gid)| rank(true, kind, gid).unwrap());
        assert!(ranks.is_sorted_by(|a, b| a < b), "{ranks:?}");
        assert_eq!(rank(true, v2, [0; 16]), None);
        assert_eq!(rank(false, None, link), Some(0));
    }
}
