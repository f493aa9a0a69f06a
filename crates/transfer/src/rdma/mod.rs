//! The way by RDMA: memory that both ends' devices know, read and written without the target's
//! processor. What the target is told goes over its connections.

mod joined;
mod link;

pub(crate) use joined::{Exposed, Joined};
pub(crate) use link::{Asks, Exposes, Link, Ranges};

use std::collections::HashMap;
use std::sync::Arc;

use kvdepot_media::Buffer;
use parking_lot::Mutex;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::grant::Rights;
use crate::memory::Region;
use crate::verbs::{self, Choice, Device, Port, Shape};

/// Most devices that are used side by side.
pub(crate) const DEVICES_MAX: usize = 8;

/// A range of a grant, as a device of the target knows it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Known {
    pub(crate) addr: U64,
    pub(crate) len: U64,
    pub(crate) rkey: U32,
    /// Which of the devices that were joined.
    pub(crate) device: U32,
}

/// The devices of this process, and its memory as they know it.
#[derive(Debug)]
pub(crate) struct Fabric {
    devices: Vec<(Arc<Device>, Port)>,
    /// By device, and by where it begins.
    regions: Mutex<HashMap<(usize, u64), Arc<verbs::Region>>>,
}

impl Fabric {
    /// Opens those that are named, or all that have a port in use. `None` where there is none.
    ///
    /// # Errors
    /// What is wrong with one that is named.
    pub(crate) fn open(names: Option<&[String]>) -> Result<Option<Fabric>, verbs::Error> {
        let all = match names {
            Some(names) => names.to_vec(),
            // No library, or no device: as most machines are.
            None => verbs::devices().unwrap_or_default(),
        };
        let mut devices = Vec::new();
        for name in all.iter().take(DEVICES_MAX) {
            let opened = Device::open(name)
                .and_then(|device| Ok((Arc::clone(&device), device.port(Choice::default())?)));
            match opened {
                Ok(opened) => devices.push(opened),
                Err(error) if names.is_some() => return Err(error),
                Err(error) => tracing::debug!(%error, "skipping an RDMA device"),
            }
        }
        let fabric = Fabric {
            devices,
            regions: Mutex::default(),
        };
        Ok(Some(fabric).filter(|fabric| !fabric.devices.is_empty()))
    }

    /// With a device that is open.
    #[cfg(test)]
    pub(crate) fn of(device: Arc<Device>) -> Result<Fabric, verbs::Error> {
        let port = device.port(Choice::default())?;
        Ok(Fabric {
            devices: vec![(device, port)],
            regions: Mutex::default(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.devices.len()
    }

    /// A queue pair on one of the devices, which is not connected.
    fn queue(&self, device: usize) -> Result<verbs::QueuePair, verbs::Error> {
        let (device, port) = &self.devices[device];
        verbs::QueuePair::make(device, port.clone(), Shape::default())
    }

    /// Memory of peers' grants, as one of the devices knows it until it is dropped.
    fn lend(
        &self,
        device: usize,
        buffer: &Buffer,
        rights: Rights,
    ) -> Result<Arc<verbs::Region>, verbs::Error> {
        let rights = verbs::Rights {
            remote_read: rights.read,
            remote_write: rights.write,
        };
        verbs::Region::register(&self.devices[device].0, buffer.clone(), rights)
    }

    /// Memory that batches use, as one of the devices knows it until it is forgotten.
    fn know(&self, device: usize, region: &Region) -> Result<Arc<verbs::Region>, verbs::Error> {
        let buffer = region.buffer();
        let name = (device, buffer.addr() as u64);
        if let Some(known) = self.regions.lock().get(&name) {
            return Ok(Arc::clone(known));
        }
        let rights = verbs::Rights::default();
        let known = verbs::Region::register(&self.devices[device].0, buffer, rights)?;
        self.regions.lock().insert(name, Arc::clone(&known));
        Ok(known)
    }

    /// Memory is not registered any more.
    pub(crate) fn forget(&self, regions: &[u64]) {
        let mut known = self.regions.lock();
        for at in regions {
            for device in 0..self.devices.len() {
                known.remove(&(device, *at));
            }
        }
    }
}
