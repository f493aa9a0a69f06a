//! The digests of a batch's leaves.

use std::sync::mpsc;
use std::time::Duration;

use kvdepot_media::checksum::{LEAF, PartId};
use kvdepot_media::{Buffer, Copier, CopierConfig};
use xxhash_rust::xxh3::xxh3_128;

#[test]
fn leaves_are_kept_for_whoever_asks() {
    let copier = Copier::new(CopierConfig::default()).unwrap();
    let leaf = LEAF as usize;
    let lens = [1, 1000, leaf, leaf + 1, 3 * leaf];
    // The memory of a batch is the next one's.
    for keeps in [true, false, true] {
        let mut batch = copier.batch();
        let mut expected = Vec::new();
        for (number, len) in lens.into_iter().enumerate() {
            let bytes: Vec<u8> = (0..len)
                .map(|at| (at * 7 + at / 256 + number) as u8)
                .collect();
            expected.push(match keeps {
                true => bytes.chunks(leaf).map(xxh3_128).collect(),
                false => Vec::new(),
            });
            let (src, dst) = (Buffer::from_vec(bytes), Buffer::from_vec(vec![0; len]));
            let id = PartId::whole([1; 16], [2; 32]);
            batch.part(&id, &[src], &[dst], None, 0).unwrap();
        }
        if keeps {
            batch.keep_leaves();
        }
        let (sender, receiver) = mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            let leaves = |index| done.leaves(index).collect::<Vec<u128>>();
            sender.send((0..=lens.len()).map(leaves).collect()).unwrap();
        });
        assert!(ticket.wait(Some(Duration::from_secs(60))));
        let found: Vec<Vec<u128>> = receiver.recv().unwrap();
        // There is no part beyond the last one.
        expected.push(Vec::new());
        assert_eq!(found, expected, "{keeps}");
    }
}
