//! Tools beside a running owner: what is evicted, replaced or just being written while they look
//! is never reported as rotten.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::raw::Raw;
use crate::common::{Place, copier, key, keys, namespace};
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Buffer};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::{Rng, rounds};

#[test]
fn verify_beside_a_churning_owner_reports_nothing_but_rot() {
    let mut rng =
        Rng::for_test("live_verify::verify_beside_a_churning_owner_reports_nothing_but_rot");
    let place = Place::new("Dax", "", "2MiB").with("dax", "records", 64);
    let depot = place.open();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (ns, stop, mut rng) = (namespace(&depot), &stop, rng.fork());
            scope.spawn(move || {
                for round in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let number = (thread << 40) + round;
                    let len = rng.between(1, 120_000) as usize;
                    let bytes = BlockBuffers::whole([Buffer::from_vec(content(number, len))]);
                    ns.put(keys([number]), bytes).unwrap().wait(None).unwrap();
                    if rng.once_in(4) {
                        ns.remove(&[key(number)]).unwrap();
                    }
                }
            });
        }
        let (mut sound, mut changed) = (0, 0);
        let copier = copier();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3 * rounds(1)) {
            let inspection = Inspection::open(&place.arena()).unwrap();
            let found = inspection.verify(&copier, |_, _| true).unwrap();
            assert_eq!(found.bad, []);
            assert_eq!(found.damaged_records, [] as [u32; 0]);
            sound += found.sound;
            changed += found.changed;
        }
        stop.store(true, Ordering::Relaxed);
        assert!(sound > 0 && changed > 0, "{sound} sound, {changed} changed");
    });
    // Real rot is reported, also beside the owner.
    let ns = namespace(&depot);
    let bytes = BlockBuffers::whole([Buffer::from_vec(content(7, 5000))]);
    assert_eq!(
        ns.put(keys([7]), bytes).unwrap().wait(None).unwrap(),
        [true]
    );
    let raw = Raw::open(&place.arena());
    let (_, record) = raw.live(&key(7)).unwrap();
    let (offset, _) = record.extents.iter().next().unwrap();
    raw.file.write(offset, &[content(7, 1)[0] ^ 1]);
    let found = common::verify(&place.arena());
    assert_eq!(found.bad.len(), 1);
    assert_eq!(found.bad[0].record, record);
}
