//! Where bytes lie: memory of this process, or what a carrier reaches.

use crate::carrier::Carrier;
use crate::cuda::Device;
use std::sync::Arc;

/// Where the bytes of a buffer lie.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// Memory of this process, which lanes touch.
    Memory,
    /// Memory of a CUDA device.
    Device(Arc<Device>),
    /// A file, a peer, or whatever else has a carrier.
    Carried(Arc<dyn Carrier>),
}

impl End {
    /// Who carries bytes from and to it; nobody needs to where it is memory of this process.
    pub(crate) fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        match self {
            Self::Memory => None,
            Self::Device(device) => Some(device.carrier()),
            Self::Carried(carrier) => Some(Arc::clone(carrier)),
        }
    }

    /// Whether both are memory of this process, or reached by the same carrier.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Memory, Self::Memory) => true,
            (Self::Device(one), Self::Device(other)) => Arc::ptr_eq(one, other),
            (Self::Carried(one), Self::Carried(other)) => {
                std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
            }
            _ => false,
        }
    }
}
