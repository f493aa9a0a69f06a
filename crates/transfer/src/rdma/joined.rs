//! The target's side: queue pairs with an initiator, and memory of grants that its devices know.

use std::sync::Arc;

use zerocopy::IntoBytes;

use super::{DEVICES_MAX, Fabric, Known};
use crate::grant::{Grant, Use};
use crate::verbs::{self, ENDPOINT_LEN, Endpoint, QueuePair};

/// Queue pairs with one initiator. Dropping it ends them: nothing that the initiator has asked for
/// and that has not arrived arrives any more.
#[derive(Debug)]
pub(crate) struct Joined {
    queues: Vec<QueuePair>,
}

impl Joined {
    /// Connects to these ends, device by device, and what the initiator has to know.
    pub(crate) fn new(fabric: &Fabric, ends: &[u8]) -> Result<(Joined, Vec<u8>), verbs::Error> {
        let (mut queues, mut said) = (Vec::new(), Vec::new());
        let (ends, _) = ends.as_chunks::<ENDPOINT_LEN>();
        for (device, end) in ends.iter().take(fabric.len().min(DEVICES_MAX)).enumerate() {
            let mut queue = fabric.queue(device)?;
            said.extend_from_slice(&queue.local().to_bytes());
            queue.connect(&Endpoint::from_bytes(*end)?)?;
            queues.push(queue);
        }
        Ok((Joined { queues }, said))
    }

    pub(crate) fn devices(&self) -> usize {
        self.queues.len()
    }
}

/// Memory of a grant that devices know. Dropping it is the end of that, at once, whatever an
/// initiator is at.
pub(crate) struct Exposed {
    /// Before the use: what is in them is the grant's.
    _regions: Vec<Arc<verbs::Region>>,
    used: Use,
}

impl Exposed {
    /// Makes so many devices know a grant; and what the initiator has to know.
    pub(crate) fn new(
        fabric: &Fabric,
        devices: usize,
        grant: &Arc<Grant>,
    ) -> Option<(Exposed, Vec<u8>)> {
        let used = Use::begin(grant)?;
        let (mut regions, mut said) = (Vec::new(), Vec::new());
        for device in 0..devices {
            for buffer in grant.buffers().iter() {
                let region = fabric.lend(device, buffer, grant.rights);
                let region = region.inspect_err(|error| {
                    tracing::debug!(%error, "using TCP to reach this memory");
                });
                let region = region.ok()?;
                let known = Known {
                    addr: region.addr().into(),
                    len: (buffer.len() as u64).into(),
                    rkey: region.rkey().into(),
                    device: (device as u32).into(),
                };
                said.extend_from_slice(known.as_bytes());
                regions.push(region);
            }
        }
        let exposed = Exposed {
            _regions: regions,
            used,
        };
        Some((exposed, said))
    }

    pub(crate) fn is_of(&self, grant: &Arc<Grant>) -> bool {
        self.used.is_of(grant)
    }
}
