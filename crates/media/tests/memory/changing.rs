//! Sources that change while they are copied. Not for ThreadSanitizer, which would say so.

use kvdepot_media::{Buffer, Checksum, Copier, CopierConfig, PartId, checksum};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

/// Parts of a batch: several are moved in turns.
const PARTS: usize = 5;

/// Bytes at a source's end that change: those that a hash looks at in two ways.
const CHANGING: usize = 150;

fn id(number: usize) -> PartId {
    PartId::whole([3; 16], [number as u8; 32])
}

/// Copies the source into each target; the checksums of what was moved.
fn copy(copier: &Copier, source: &Buffer, targets: &[Buffer], staged: bool) -> Vec<Checksum> {
    let mut batch = copier.batch();
    if staged {
        batch.stage().unwrap();
    }
    let from = slice::from_ref(source);
    for (number, target) in targets.iter().enumerate() {
        let to = slice::from_ref(target);
        batch.part(&id(number), from, to, None, 0).unwrap();
    }
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let sums = done.parts().map(|(_, part)| part.unwrap().checksum);
        sender.send(sums.collect()).unwrap();
    });
    assert!(ticket.wait(None));
    receiver.recv().unwrap()
}

/// Whoever changes a source meanwhile gets a mixture, but one that verifies: each byte is read
/// once, and what is hashed is what is stored.
#[test]
fn what_is_stored_is_what_was_hashed_while_the_source_changes() {
    let mut config = CopierConfig::default();
    config.inline_max = u64::MAX;
    let copier = Copier::new(config).unwrap();
    // Short leaves, whole stripes and parts of one at the end, whole blocks and several.
    for len in [200, 385, 448, 1024, 4096, 5152, 65_553] {
        let source = Buffer::from_vec(vec![0; len]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in (0..=u8::MAX).cycle() {
                    source.write_at(len - CHANGING, &[value; CHANGING]).unwrap();
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let wrong = (0..2000).find(|round| {
                let targets: [Buffer; PARTS] =
                    std::array::from_fn(|_| Buffer::from_vec(vec![0; len]));
                let sums = copy(&copier, &source, &targets, round % 2 == 1);
                let stored = targets.iter().enumerate();
                let stored = stored.map(|(number, to)| checksum::of(&id(number), &to.to_vec()));
                !stored.eq(sums)
            });
            stop.store(true, Ordering::Relaxed);
            assert_eq!(wrong, None, "{len} bytes");
        });
    }
}
