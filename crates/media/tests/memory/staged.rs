//! Copies that go through the staging slab: the same bytes and the same checksums as direct ones,
//! whatever the shape, and the same when things go wrong.

use kvdepot_media::checksum::{self, LEAF};
use kvdepot_media::{
    Batch, Buffer, Checksum, Copier, CopierConfig, Error, Failure, Mapping, PartId,
};
use std::sync::mpsc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

fn copier(lanes: usize, inline_max: u64, slab: u64, regions: usize) -> Copier {
    let mut config = CopierConfig::default();
    (config.lanes, config.inline_max) = (lanes, inline_max);
    (config.staging_slab, config.staging_regions) = (Some(slab), Some(regions));
    Copier::new(config).unwrap()
}

fn id(number: usize) -> PartId {
    PartId::whole([3; 16], [number as u8; 32])
}

fn content(number: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (number * 131 + at * 7 + at / 251) as u8)
        .collect()
}

type Parts = Vec<Result<(Checksum, Option<bool>), Failure>>;

fn run(copier: &Copier, batch: Batch) -> Parts {
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let parts = done.parts().map(|(_, part)| part);
        let parts: Parts = parts.map(|p| p.map(|o| (o.checksum, o.matches))).collect();
        sender.send(parts).unwrap();
    });
    assert!(ticket.wait(Some(PATIENCE)), "the batch hangs");
    receiver.recv().unwrap()
}

/// A buffer in pieces of `each` bytes.
fn cut(buffer: &Buffer, each: usize) -> Vec<Buffer> {
    let starts = (0..buffer.len()).step_by(each);
    starts
        .map(|at| buffer.slice(at, each.min(buffer.len() - at)).unwrap())
        .collect()
}

/// Part `number` of `len` bytes: its pieces, cut and shifted in many ways, and the memory around
/// the destination.
fn shaped(number: usize, len: usize) -> (Vec<Buffer>, Vec<Buffer>, Buffer) {
    const CUTS: [usize; 7] = [usize::MAX, 4096, 1000, 64 << 10, 1024, 65_537, 70_001];
    let source = Buffer::from_vec(content(number, len + 64));
    let around = Buffer::from_vec(vec![0xEE; len + 192]);
    let from = source.slice(number % 5, len).unwrap();
    let to = around.slice(64 + number % 64, len).unwrap();
    let each = |at: usize| CUTS[at % CUTS.len()];
    (
        cut(&from, each(number)),
        cut(&to, each(number / 2 + 1)),
        around,
    )
}

#[test]
fn staged_copies_move_and_hash_the_same_bytes_as_direct_ones() {
    let leaf = LEAF as usize;
    let lens = [
        1,
        63,
        240,
        241,
        1024,
        4095,
        4096,
        5000,
        65_536,
        leaf - 1,
        leaf,
        2 * leaf + 77,
    ];
    // By the thread that submits, by lanes, and by more lanes than there are regions.
    for copier in [
        copier(1, u64::MAX, 64 << 10, 1),
        copier(2, 0, 1 << 20, 4),
        copier(4, 0, 128 << 10, 2),
    ] {
        let mut batch = copier.batch();
        batch.stage().unwrap();
        let mut arounds = Vec::new();
        for number in 0..60 {
            let len = lens[number % lens.len()];
            let (from, to, around) = shaped(number, len);
            let sum = checksum::of(&id(number), &content(number, len + 64)[number % 5..][..len]);
            batch.part(&id(number), &from, &to, Some(sum), 0).unwrap();
            batch.hash_only(&id(number), &from, Some(sum), 0).unwrap();
            arounds.push((len, around));
        }
        let parts = run(&copier, batch);
        assert_eq!(parts.len(), 120);
        assert!(parts.iter().all(|part| part.unwrap().1 == Some(true)));
        for (number, (len, around)) in arounds.iter().enumerate() {
            let begin = 64 + number % 64;
            let mut expected = vec![0xEE; len + 192];
            let bytes = &content(number, len + 64)[number % 5..][..*len];
            expected[begin..begin + len].copy_from_slice(bytes);
            assert!(around.to_vec() == expected, "part {number} of {len} bytes");
        }
    }
}

#[test]
fn bytes_that_changed_do_not_verify() {
    let copier = copier(2, 0, 128 << 10, 2);
    let mut bytes = content(1, 3 << 20);
    let sum = checksum::of(&id(1), &bytes);
    bytes[2_000_000] ^= 1;
    let (from, to) = (Buffer::from_vec(bytes), Buffer::from_vec(vec![0; 3 << 20]));
    let mut batch = copier.batch();
    batch.stage().unwrap();
    batch.part(&id(1), &[from], &[to], Some(sum), 0).unwrap();
    assert_eq!(run(&copier, batch)[0].unwrap().1, Some(false));
}

#[test]
fn media_that_fail_under_staged_copies_are_told_apart() {
    const LEN: u64 = 4 << 20;
    const BLOCK: u64 = 64 << 10;
    let directory = tempfile::tempdir().unwrap();
    let mapped = |name: &str| {
        let path = directory.path().join(name);
        let mapping = Mapping::create(&path, LEN).unwrap();
        (
            std::fs::File::options().write(true).open(path).unwrap(),
            mapping,
        )
    };
    let ((source_file, source), (target_file, target)) = (mapped("source"), mapped("target"));
    let block = content(9, BLOCK as usize);
    for at in (0..LEN).step_by(BLOCK as usize) {
        source.write_from(at, &block).unwrap();
    }
    let copier = copier(2, 0, 128 << 10, 2);
    let sum = checksum::of(&id(9), &block);
    source_file.set_len(LEN / 2).unwrap();
    target_file.set_len(LEN / 4).unwrap();
    let mut batch = copier.batch();
    batch.stage().unwrap();
    for at in (0..LEN).step_by(BLOCK as usize) {
        let from = source.buffer(at, BLOCK).unwrap();
        let to = target.buffer(LEN - BLOCK - at, BLOCK).unwrap();
        batch.part(&id(9), &[from], &[to], Some(sum), 0).unwrap();
    }
    for (number, part) in run(&copier, batch).into_iter().enumerate() {
        let at = number as u64 * BLOCK;
        let expected = match (LEN - BLOCK - at < LEN / 4, at < LEN / 2) {
            (false, _) => Err(Failure::MemoryLost),
            (true, there) => Ok(Some(there)),
        };
        assert_eq!(part.map(|(_, matches)| matches), expected, "block {number}");
    }
}

#[test]
fn cancelled_and_closed_copiers_answer_for_staged_batches() {
    let copier = copier(1, 0, 64 << 10, 1);
    let staged = || {
        let mut batch = copier.batch();
        batch.stage().unwrap();
        for number in 0..64 {
            let (from, to, _around) = shaped(number, 1 << 20);
            batch.part(&id(number), &from, &to, None, 0).unwrap();
        }
        batch
    };
    let ticket = copier.submit(staged(), |_| {});
    ticket.cancel();
    assert!(ticket.wait(Some(PATIENCE)), "a cancelled batch hangs");
    copier.close();
    let parts = run(&copier, staged());
    assert!(parts.iter().all(|part| *part == Err(Failure::Closed)));
}

#[test]
fn slabs_that_cannot_be_cut_are_refused() {
    let refused = |slab, regions| {
        let mut config = CopierConfig::default();
        (config.staging_slab, config.staging_regions) = (slab, regions);
        match Copier::new(config) {
            Err(Error::Invalid { field, .. }) => field,
            _ => "nothing",
        }
    };
    assert_eq!(refused(None, Some(0)), "staging_regions");
    assert_eq!(refused(None, Some(4097)), "staging_regions");
    assert_eq!(refused(Some(1 << 20), Some(17)), "staging_slab");
    assert_eq!(refused(Some(1 << 20), Some(16)), "nothing");
}
