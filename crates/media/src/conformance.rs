//! The contract of every end and every carrier, as tests that a crate runs for its own.
//!
//! A [`Medium`] gives room to move bytes from and to. [`every_pair`] moves parts of many lengths,
//! alignments and shapes between any two of them, with one lane and one region too, has carries
//! fail one by one in every manner, keeps receipts until the batch is cancelled, and closes copiers
//! under way. Whatever happens, every part is answered, only what had a failed carry fails, what is
//! said to be there is there, nothing around it is touched, and buffers and regions are held as
//! long as anybody may touch them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod doubles;
mod faults;
mod media;

pub use doubles::{double, fence_of_double, on_double};
pub use faults::{Fault, Faulty, Keeping};
pub use media::{InMemory, Late, Store};

use crate::checksum::{self, LEAF};
use crate::{
    Batch, Buffer, Carrier, Checksum, Copier, CopierConfig, Failure, Mac, MacKey, Op, Outcome,
    PartId,
};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// No batch here takes as long.
const PATIENCE: Duration = Duration::from_secs(60);

/// What room holds before anything is moved there.
const FRESH: u8 = 0xEE;

/// Somewhere to move bytes from and to.
pub trait Medium {
    /// For messages.
    fn name(&self) -> String;

    /// What offsets and lengths of destinations are multiples of; a power of two.
    fn alignment(&self) -> usize {
        1
    }

    /// `len` bytes that nobody else uses, at an offset that fits the alignment.
    fn room(&self, len: usize) -> Room;
}

/// Bytes of a medium.
#[expect(clippy::exhaustive_structs, reason = "media make them")]
pub struct Room {
    /// The bytes as a buffer for batches.
    pub buffer: Buffer,
    /// Returns the present bytes.
    pub look: Box<dyn Fn() -> Vec<u8>>,
    /// Sets all of them, past every carrier.
    pub fill: Fill,
}

/// Sets bytes.
pub type Fill = Box<dyn Fn(&[u8])>;

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.buffer.fmt(f)
    }
}

/// Runs the whole contract for every pair of these, each with itself too.
///
/// # Panics
///
/// When it is not kept.
pub fn every_pair(media: &[&dyn Medium]) {
    for from in media {
        for to in media {
            moves(*from, *to);
            answers_for_failed_carries(*from, *to);
        }
        holds_what_a_carrier_has(*from);
    }
    shares_one_lane_and_one_region(media);
    closes_under_way(media);
}

fn copier(lanes: usize, inline_max: u64, slab: u64, regions: usize) -> Copier {
    let config = CopierConfig {
        lanes,
        inline_max,
        staging_slab: Some(slab),
        staging_regions: Some(regions),
        ..CopierConfig::default()
    };
    Copier::new(config).unwrap()
}

fn id(number: usize) -> PartId {
    PartId::whole([9; 16], [number as u8; 32])
}

fn content(number: usize, len: usize) -> Vec<u8> {
    let byte = |at: usize| (number * 131 + at * 7 + at / 251) as u8;
    (0..len).map(byte).collect()
}

fn secret() -> MacKey {
    MacKey::derive(&[3; 32], &[1; 16])
}

type Parts = Vec<Result<Outcome, Failure>>;

fn run(copier: &Copier, batch: Batch) -> Parts {
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let parts = done.parts().map(|(_, part)| part).collect();
        sender.send(parts).unwrap();
    });
    assert!(ticket.wait(Some(PATIENCE)), "the batch hangs");
    receiver.recv().unwrap()
}

/// A buffer in pieces of `each` bytes, none of them empty.
fn cut(buffer: &Buffer, each: usize) -> Vec<Buffer> {
    let piece = |at| buffer.slice(at, each.min(buffer.len() - at)).unwrap();
    (0..buffer.len()).step_by(each).map(piece).collect()
}

/// A part of `len` bytes between two media, cut and shifted in a way that its number gives.
struct Shaped {
    from: Vec<Buffer>,
    to: Vec<Buffer>,
    sum: Checksum,
    mac: Mac,
    look: Box<dyn Fn() -> Vec<u8>>,
    expected: Vec<u8>,
}

impl Shaped {
    fn new(from: &dyn Medium, to: &dyn Medium, number: usize, len: usize) -> Self {
        const CUTS: [usize; 6] = [usize::MAX >> 1, 4096, 1000, 1 << 16, 65_537, 70_001];
        let source = from.room(len + 64);
        let bytes = content(number, len + 64);
        (source.fill)(&bytes);
        let shift = number % 5;
        let grain = to.alignment();
        let begin = grain * (1 + number % 3);
        let target = to.room(begin + len.next_multiple_of(grain) + grain);
        let all = target.buffer.len();
        (target.fill)(&vec![FRESH; all]);
        let mut expected = vec![FRESH; all];
        expected[begin..begin + len].copy_from_slice(&bytes[shift..shift + len]);
        expected[begin + len..begin + len.next_multiple_of(grain)].fill(0);
        let place = target.buffer.slice(begin, len).unwrap().padded();
        // Pieces that are too many tell nothing more, and take long.
        let least = len / 200 + 1;
        let each = |number: usize| CUTS[number % CUTS.len()].max(least);
        Self {
            from: cut(&source.buffer.slice(shift, len).unwrap(), each(number)),
            to: cut(&place, each(number / 2 + 1).next_multiple_of(grain)),
            sum: checksum::of(&id(number), &bytes[shift..shift + len]),
            mac: secret().of(&id(number), &bytes[shift..shift + len]),
            look: target.look,
            expected,
        }
    }

    fn add(&self, batch: &mut Batch, number: usize, sum: Checksum) -> usize {
        let (from, to) = (&self.from, &self.to);
        batch.part(&id(number), from, to, Some(sum), 0).unwrap()
    }

    /// Whether bytes of it were in a carry.
    fn had(&self, (op, at, len): faults::Struck) -> bool {
        let side = if op == Op::Read { &self.from } else { &self.to };
        let end = |one: &Buffer| (one.addr() + one.len()) as u64;
        let overlaps = |one: &Buffer| (one.addr() as u64) < at + len as u64 && at < end(one);
        side.iter().any(overlaps)
    }

    fn has_arrived(&self) -> bool {
        (self.look)() == self.expected
    }
}

const LEAF_LEN: usize = LEAF as usize;

const LENS: [usize; 12] = [
    1,
    63,
    240,
    241,
    4095,
    4096,
    5000,
    65_536,
    70_001,
    LEAF_LEN - 1,
    LEAF_LEN + 4096,
    2 * LEAF_LEN + 77,
];

/// The same bytes and checksums, whatever the shape, and nothing beside them; one that is expected
/// to be another is told.
fn moves(from: &dyn Medium, to: &dyn Medium) {
    let pair = format!("{} to {}", from.name(), to.name());
    let copiers = [
        copier(1, 0, 64 << 10, 1),
        copier(2, 0, 2 << 20, 4),
        copier(2, u64::MAX, 256 << 10, 2),
    ];
    let secret = Arc::new(secret());
    for (turn, copier) in copiers.iter().enumerate() {
        let number = |at: usize| 7 * turn + at;
        let shape = |(at, len): (usize, &usize)| Shaped::new(from, to, number(at), *len);
        let parts: Vec<Shaped> = LENS.iter().enumerate().map(shape).collect();
        let mut batch = copier.batch();
        for (at, part) in parts.iter().enumerate() {
            let moved = part.add(&mut batch, number(at), part.sum);
            let (from, sum) = (&part.from, Some(part.sum));
            let hashed = batch.hash_only(&id(number(at)), from, sum, 0).unwrap();
            // Some have a MAC beside the checksum, which is compared or new.
            let compared = (at % 3 == 0).then_some(part.mac);
            if (at + turn) % 4 > 0 {
                batch.authenticate(moved, &secret, compared);
                batch.authenticate(hashed, &secret, Some(part.mac));
            }
        }
        let forged = Shaped::new(from, to, 98, LEAF_LEN + 5000);
        let at = forged.add(&mut batch, 98, forged.sum);
        batch.authenticate(at, &secret, Some(Mac([1; 16])));
        let odd = Shaped::new(from, to, 99, 5000);
        let at = odd.add(&mut batch, 99, Checksum([1; 16]));
        batch.authenticate(at, &secret, Some(odd.mac));
        let mut outcomes = run(copier, batch);
        let last = outcomes.pop().unwrap().unwrap();
        assert_eq!(
            (last.checksum, last.matches),
            (odd.sum, Some(false)),
            "{pair}"
        );
        let last = outcomes.pop().unwrap().unwrap();
        assert_eq!(
            (last.checksum, last.mac, last.matches),
            (forged.sum, Some(forged.mac), Some(false)),
            "{pair}"
        );
        for (at, outcome) in outcomes.iter().enumerate() {
            let (len, part) = (LENS[at / 2], &parts[at / 2]);
            let mac = outcome.map(|outcome| outcome.mac.unwrap_or(part.mac));
            assert_eq!(mac, Ok(part.mac), "{pair}, {len} bytes, turn {turn}");
            let matches = outcome.map(|outcome| outcome.matches);
            assert_eq!(matches, Ok(Some(true)), "{pair}, {len} bytes, turn {turn}");
        }
        for (part, len) in parts.iter().zip(LENS).chain([(&odd, 5000)]) {
            assert!(part.has_arrived(), "{pair}, {len} bytes, turn {turn}");
        }
        assert_eq!(copier.free_regions(), copier.config().regions(), "{pair}");
    }
}

/// The buffers of a side by another carrier, unless they are memory.
fn by(side: &[Buffer], wrap: &mut dyn FnMut(Arc<dyn Carrier>) -> Arc<dyn Carrier>) -> Vec<Buffer> {
    let Some(carrier) = side.first().and_then(|first| first.end().carrier()) else {
        return side.to_vec();
    };
    let carrier = wrap(carrier);
    let other = |buffer: &Buffer| buffer.clone().by(Arc::clone(&carrier));
    side.iter().map(other).collect()
}

/// One carry after the other fails, in every manner: its parts fail, all others arrive.
fn answers_for_failed_carries(from: &dyn Medium, to: &dyn Medium) {
    const LENS: [usize; 5] = [4096, 5000, LEAF_LEN + 4096, 100_000, 8192];
    let pair = format!("{} to {}", from.name(), to.name());
    let copier = copier(2, 0, 256 << 10, 2);
    for fault in [Fault::Refused, Fault::Short, Fault::Dropped, Fault::Panics] {
        for nth in [0, 1, 2, 5, 9] {
            let shape = |(at, len): (usize, &usize)| Shaped::new(from, to, at, *len);
            let mut parts: Vec<Shaped> = LENS.iter().enumerate().map(shape).collect();
            let injected = faults::Count::new(nth, fault);
            // One for each side, so that parts share slices as they do without.
            let (mut from_by, mut to_by) = (None, None);
            let faulty = |inner| Faulty::new(inner, &injected) as Arc<dyn Carrier>;
            for part in &mut parts {
                part.from = by(&part.from, &mut |inner| {
                    Arc::clone(from_by.get_or_insert_with(|| faulty(inner)))
                });
                part.to = by(&part.to, &mut |inner| {
                    Arc::clone(to_by.get_or_insert_with(|| faulty(inner)))
                });
            }
            let mut batch = copier.batch();
            for (at, part) in parts.iter().enumerate() {
                part.add(&mut batch, at, part.sum);
            }
            let outcomes = run(&copier, batch);
            let struck = injected.struck();
            for (part, outcome) in parts.iter().zip(outcomes) {
                let about = format!("{pair}, {fault:?} {nth}: {outcome:?}");
                let had = struck.is_some_and(|struck| part.had(struck));
                match outcome {
                    Ok(outcome) => {
                        assert!(!had && outcome.matches == Some(true), "{about}");
                        assert!(part.has_arrived(), "{about}");
                    }
                    Err(failure) => {
                        assert!(fault.explains(failure), "{about}");
                        // Whatever else the carrier had goes with it when it panics.
                        let is_its = had || (struck.is_some() && fault == Fault::Panics);
                        assert!(is_its, "{about}");
                    }
                }
            }
            assert_eq!(copier.free_regions(), 2, "{pair}, {fault:?} {nth}");
        }
    }
}

/// A carrier that answers nothing until the batch is cancelled: buffers are held until it does.
fn holds_what_a_carrier_has(medium: &dyn Medium) {
    let copier = copier(1, 0, 64 << 10, 1);
    for writes in [false, true] {
        let (memory, there) = (Buffer::from_vec(content(1, 5000)), medium.room(8192));
        let (mut batch, keeping) = (copier.batch(), Keeping::new(medium.alignment()));
        let mut wrap = |_| Arc::clone(&keeping) as Arc<dyn Carrier>;
        let place = there.buffer.slice(0, 5000).unwrap().padded();
        let there = by(&[place], &mut wrap);
        if there[0].end().carrier().is_none() {
            return;
        }
        let held = Arc::new(());
        let watch = Arc::downgrade(&held);
        // SAFETY: the other owner, which the buffer behind `kept` is of, outlives the batch.
        let kept = unsafe { Buffer::from_raw(memory.addr(), memory.len(), true, held) };
        match writes {
            true => batch.part(&id(1), &[kept], &there, None, 0).unwrap(),
            false => batch.part(&id(1), &there, &[kept], None, 0).unwrap(),
        };
        let (sender, receiver) = mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            sender.send(done.part(0).unwrap().1).unwrap();
        });
        assert!(keeping.waits_for_one(PATIENCE), "{}", medium.name());
        assert!(!ticket.wait(Some(Duration::from_millis(20))));
        assert_eq!(keeping.give_up_cancelled(), 0, "nobody has cancelled");
        ticket.cancel();
        assert!(!ticket.is_done() && watch.strong_count() > 0, "still held");
        assert_eq!(keeping.give_up_cancelled(), 1);
        assert!(ticket.wait(Some(PATIENCE)), "{} hangs", medium.name());
        assert_eq!(watch.strong_count(), 0, "let go");
        assert!(receiver.recv().unwrap().is_err());
        assert_eq!(copier.free_regions(), 1);
    }
}

/// Many batches in all directions, staged copies among them, with one lane and one region.
fn shares_one_lane_and_one_region(media: &[&dyn Medium]) {
    let copier = copier(1, 0, 64 << 10, 1);
    let (sender, receiver) = mpsc::channel();
    let (mut parts, mut tickets) = (Vec::new(), Vec::new());
    let pairs = media
        .iter()
        .flat_map(|from| media.iter().map(move |to| (*from, *to)));
    for (number, (from, to)) in pairs.enumerate() {
        let mut batch = copier.batch();
        batch.stage().unwrap();
        for len in [300_000, 5000] {
            let part = Shaped::new(from, to, number, len);
            part.add(&mut batch, number, part.sum);
            parts.push(part);
        }
        let sender = sender.clone();
        tickets.push(copier.submit(batch, move |done| sender.send(done.is_clean()).unwrap()));
    }
    for ticket in &tickets {
        assert!(ticket.wait(Some(PATIENCE)), "one lane and one region hang");
        assert!(receiver.recv().unwrap());
    }
    assert!(parts.iter().all(Shaped::has_arrived));
    assert_eq!(copier.free_regions(), 1);
}

/// A copier that is closed waits for what carriers have, and answers for all of it.
fn closes_under_way(media: &[&dyn Medium]) {
    let memory = InMemory;
    for medium in media {
        let copier = copier(2, 0, 128 << 10, 2);
        let (sender, receiver) = mpsc::channel();
        let shape = |number| Shaped::new(*medium, &memory, number, 100_000);
        let parts: Vec<Shaped> = (0..8).map(shape).collect();
        let mut batch = copier.batch();
        for (number, part) in parts.iter().enumerate() {
            part.add(&mut batch, number, part.sum);
        }
        let here = std::thread::current().id();
        let ticket = copier.submit(batch, move |done| {
            let thread = std::thread::current();
            let is_lane = thread
                .name()
                .is_some_and(|name| name.starts_with("kvdepot-lane"));
            let answer = (done.is_clean(), is_lane || thread.id() == here);
            sender.send(answer).unwrap();
        });
        drop(ticket);
        copier.close();
        let (is_clean, is_by_lane) = receiver.try_recv().unwrap();
        assert!(is_clean, "{}", medium.name());
        assert!(
            is_by_lane,
            "{}: a carrier's thread did a lane's work",
            medium.name()
        );
        let mut late = copier.batch();
        parts[0].add(&mut late, 0, parts[0].sum);
        assert_eq!(run(&copier, late)[0], Err(Failure::Closed));
    }
}

#[cfg(test)]
mod tests;
