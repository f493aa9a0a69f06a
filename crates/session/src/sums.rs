//! What names objects: the BLAKE3 of their bytes, computed while other things are written.

use std::thread::JoinHandle;

use kvdepot_store::Buffer;

use crate::error::Error;

/// Objects of fewer bytes are hashed by whoever saves: that takes less than a thread.
const APART: usize = 1 << 20;

/// Sums of objects that a thread computes; none before that was begun.
#[derive(Default)]
pub(crate) struct Sums(Option<JoinHandle<Result<Vec<[u8; 32]>, Error>>>);

impl Sums {
    /// Begins to hash these, which nobody changes until they are asked for, or this is dropped.
    pub(crate) fn begin(objects: &[(String, Buffer)]) -> Sums {
        if objects.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() < APART {
            return Sums::default();
        }
        let buffers: Vec<Buffer> = objects.iter().map(|(_, bytes)| bytes.clone()).collect();
        let thread = std::thread::Builder::new().name("kvdepot-sums".into());
        // Without one they are hashed when they are asked for.
        Sums(
            thread
                .spawn(move || {
                    buffers
                        .iter()
                        .map(|one| sum_of(std::slice::from_ref(one)))
                        .collect()
                })
                .ok(),
        )
    }

    /// The sums of these, which are those that were begun with, if any were.
    pub(crate) fn take(&mut self, objects: &[(String, Buffer)]) -> Result<Vec<[u8; 32]>, Error> {
        let begun = self.0.take().and_then(|thread| thread.join().ok());
        match begun {
            Some(sums) => sums,
            None => objects
                .iter()
                .map(|(_, bytes)| sum_of(std::slice::from_ref(bytes)))
                .collect(),
        }
    }
}

impl Drop for Sums {
    /// The engine's memory is its own again.
    fn drop(&mut self) {
        let _ended = self.0.take().map(JoinHandle::join);
    }
}

/// The BLAKE3 of some memory, of which little is copied at a time.
pub(crate) fn sum_of(pieces: &[Buffer]) -> Result<[u8; 32], Error> {
    const STEP: usize = 256 << 10;
    let mut hasher = blake3::Hasher::new();
    // Of other memory there is no copy to be had here.
    if pieces.iter().any(|piece| !piece.is_memory()) {
        return Err(Error::input(
            "checkpoint",
            "device memory",
            "objects and exact rows in host memory",
        ));
    }
    for bytes in pieces {
        for at in (0..bytes.len()).step_by(STEP) {
            let some = bytes.slice(at, STEP.min(bytes.len() - at));
            hasher.update(&some.map_err(kvdepot_store::Error::from)?.to_vec());
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_same_whoever_computes_them() {
        let object = |len: usize| {
            let bytes = (0..len).map(|at| (at * 7) as u8).collect();
            ("an object".to_owned(), Buffer::from_vec(bytes))
        };
        for lens in [vec![], vec![1, 5000], vec![3 << 20, 1, (1 << 20) + 1]] {
            let objects: Vec<_> = lens.into_iter().map(object).collect();
            let wanted: Vec<[u8; 32]> = objects
                .iter()
                .map(|(_, bytes)| *blake3::hash(&bytes.to_vec()).as_bytes())
                .collect();
            assert_eq!(Sums::default().take(&objects).unwrap(), wanted);
            let mut begun = Sums::begin(&objects);
            assert_eq!(begun.take(&objects).unwrap(), wanted);
            assert_eq!(begun.take(&objects).unwrap(), wanted, "again");
            // Who drops them unasked has the memory alone.
            drop(Sums::begin(&objects));
            assert!(
                objects
                    .into_iter()
                    .all(|(_, bytes)| bytes.into_vec().is_ok())
            );
        }
    }
}
