//! A batch costs the submitting thread a fixed number of small allocations, however large it is.

use kvdepot_media::{Buffer, Copier, CopierConfig, PartId};

/// The join, its signal and the boxed completion.
const FIXED: u64 = 3;

#[test]
fn a_warm_copier_allocates_nothing_for_parts() {
    let mut config = CopierConfig::default();
    config.lanes = 2;
    let copier = Copier::new(config).unwrap();
    let (src, dst) = (
        Buffer::from_vec(vec![1; 4 << 20]),
        Buffer::from_vec(vec![0; 4 << 20]),
    );
    let pieces = |buffer: &Buffer| -> Vec<[Buffer; 1]> {
        (0..1024)
            .map(|i| [buffer.slice(i * 4096, 4096).unwrap()])
            .collect()
    };
    let (from, to) = (pieces(&src), pieces(&dst));
    let round = |parts: usize| {
        let mut batch = copier.batch();
        for (from, to) in from.iter().zip(&to).take(parts) {
            let id = PartId::whole([0; 16], [0; 32]);
            batch.part(&id, from, to, None, 0).unwrap();
        }
        assert!(
            copier
                .submit(batch, |done| assert!(done.is_clean()))
                .wait(None)
        );
    };
    // The lanes' queues grow to what they need in the first rounds, whichever thread pushes.
    (0..50).for_each(|_| round(1024));
    for parts in [1, 100, 1024] {
        let counted = allocation_counter::measure(|| round(parts));
        assert!(
            counted.count_total <= FIXED,
            "{} for {parts} parts",
            counted.count_total
        );
        assert!(counted.bytes_total <= 1024, "{} bytes", counted.bytes_total);
    }
}
