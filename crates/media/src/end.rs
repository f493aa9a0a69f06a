//! Where bytes lie: memory of this process, or what a carrier reaches.

use crate::carrier::Carrier;
use crate::cuda::{Device, Fence};
use std::sync::Arc;

/// Where the bytes of a buffer lie.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// Memory of this process, which lanes touch.
    Memory,
    /// Memory of a CUDA device, behind a fence or not.
    Device(Arc<Device>, Option<Arc<Fence>>),
    /// A file, a peer, or whatever else has a carrier.
    Carried(Arc<dyn Carrier>),
}

impl End {
    /// Who carries bytes from and to it; nobody needs to where it is memory of this process.
    pub(crate) fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        match self {
            Self::Memory => None,
            Self::Device(device, fence) => Some(device.carrier(fence.as_ref())),
            Self::Carried(carrier) => Some(Arc::clone(carrier)),
        }
    }

    /// Whether both are memory of this process, or reached by the same carrier.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Memory, Self::Memory) => true,
            (Self::Device(one, behind), Self::Device(other, too)) => {
                let same = |(one, other)| Arc::ptr_eq(one, other);
                let both = behind.as_ref().zip(too.as_ref());
                Arc::ptr_eq(one, other)
                    && behind.is_some() == too.is_some()
                    && both.is_none_or(same)
            }
            (Self::Carried(one), Self::Carried(other)) => {
                std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
            }
            _ => false,
        }
    }
}
