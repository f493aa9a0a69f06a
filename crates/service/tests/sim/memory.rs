//! Memory of those who call: this process's, or that of a CUDA device, by a double of its driver.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvdepot_media::conformance;
use kvdepot_store::{Buffer, Device, Fence};

use crate::world::World;

fn library() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| kvdepot_testkit::double::build("cuda"))
}

fn double(function: &str, argument: i64) -> i64 {
    conformance::double(library(), function, argument)
}

/// A device, whose copies take some microseconds, or where steps are scheduled none.
pub fn device(scheduled: bool) -> Arc<Device> {
    double("double_delay", if scheduled { -1 } else { 20 });
    double("double_jitter", if scheduled { 0 } else { 300 });
    Device::open_with(library(), 0).unwrap()
}

/// Where the memory of a call is.
pub enum Home {
    Process,
    Device(Arc<Device>, Option<Arc<Fence>>),
}

impl Home {
    /// Memory in so many pieces, with these bytes; and the same where they can be seen.
    pub fn memory(&self, bytes: &[u8], pieces: u8) -> (Vec<Buffer>, Vec<Buffer>) {
        let each = bytes.len().div_ceil(usize::from(pieces)).max(1);
        let pieces = bytes.chunks(each);
        let seen: Vec<Buffer> = pieces
            .map(|piece| Buffer::from_vec(piece.to_vec()))
            .collect();
        let moved = seen.iter().map(|host| match self {
            Home::Process => host.clone(),
            Home::Device(device, None) => conformance::on_double(device, host),
            Home::Device(device, Some(fence)) => conformance::on_double(device, host).behind(fence),
        });
        (moved.collect(), seen)
    }
}

impl World {
    /// Where the memory of the next call is.
    pub fn home(&self) -> Home {
        let device = self.device.as_ref();
        let Some(device) = device.filter(|_| !self.rng.borrow_mut().once_in(3)) else {
            return Home::Process;
        };
        self.door("memory of a device");
        Home::Device(Arc::clone(device), self.fence(device))
    }

    /// What a call waits for: nothing, what is done, or what takes a few milliseconds still.
    fn fence(&self, device: &Arc<Device>) -> Option<Arc<Fence>> {
        let mut rng = self.rng.borrow_mut();
        // Where steps are scheduled nothing happens meanwhile.
        let stream = match rng.below(4) {
            0 => return None,
            1 | 2 if !self.is_scheduled() => {
                self.fault("stream that computes");
                double("double_busy_stream", 0)
            }
            _ => 0,
        };
        let fence = conformance::fence_of_double(device, stream);
        if stream != 0 {
            let span = Duration::from_micros(rng.below(4000));
            std::thread::spawn(move || {
                std::thread::sleep(span);
                double("double_release", stream);
            });
        }
        Some(fence)
    }
}
