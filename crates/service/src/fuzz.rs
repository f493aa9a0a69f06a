//! Any bytes, as if a peer had said them: they are read or refused, and what was read is read again
//! as what it is written as.

use kvdepot_arena::{Identity, Key, NamespaceId};
use kvdepot_store::placement;

use crate::frame::hello::read_request;
use crate::frame::verbs::{Grant, Move, again};
use crate::frame::{Frame, Out};
use crate::line::incoming::Incoming;

/// Returns the number of frames that were read from any bytes.
pub fn frames(bytes: &[u8]) -> usize {
    let _request = read_request(bytes);
    let _placement = placement::decode(bytes);
    let mut read = 0;
    for frame in cut(bytes) {
        places(&frame);
        for out in again(&frame) {
            read += 1;
            let written = out.number(frame.number).finish();
            let same = cut(&written);
            assert_eq!(same.len(), 1, "one frame");
            let twice = again(&same[0]).into_iter().map(Out::finish);
            let twice: Vec<Vec<u8>> = twice.collect();
            assert!(twice.iter().any(|twice| body(twice) == body(&written)));
        }
    }
    read
}

/// The frames that come whole.
fn cut(mut bytes: &[u8]) -> Vec<Frame> {
    let mut incoming = Incoming::default();
    std::iter::from_fn(|| incoming.next(&mut bytes).ok().flatten()).collect()
}

fn body(frame: &[u8]) -> &[u8] {
    &frame[crate::frame::HEAD..]
}

/// Places that a peer names are looked at before they are used.
fn places(frame: &Frame) {
    let identity = Identity {
        namespace: NamespaceId([0; 16]),
        key: Key([0; 32]),
    };
    if let Ok(grant) = frame.read::<Grant<'_>>() {
        for (row, file) in grant.places.iter().zip(grant.files.each()) {
            let _place = row.of(identity, file.as_ref());
        }
    }
    if let Ok(asked) = frame.read::<Move<'_>>() {
        for (row, file) in asked.blocks.iter().zip(asked.files.each()) {
            let _place = row.place.of(identity, file.as_ref());
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_store::Outside;

    use super::*;
    use crate::frame::rows::{Files, Rows};
    use crate::frame::verbs::{Lookup, Verb};

    /// As many rounds of bytes as are quickly done: the fuzz target has the time.
    #[test]
    fn any_bytes_are_frames_or_none() {
        let key = [Key([7; 32])];
        let lookup = Lookup {
            namespace: NamespaceId([1; 16]),
            keys: key.as_slice().into(),
        };
        let file = Outside {
            name: "ab/cd".into(),
            number: 7,
            offset: 4096,
        };
        let asked = Move {
            task: 7,
            blocks: Rows::from(&[][..]),
            files: Files::of([None, Some(file)]),
        };
        let mut sound = Out::new(&lookup).number(3).finish();
        sound.extend(Out::new(&asked).number(4).finish());
        assert_eq!(frames(&sound), 2);
        let mut seed = 1_u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let (at, bit) = ((seed >> 33) as usize % sound.len(), (seed >> 60) & 7);
            let mut bytes = sound.clone();
            bytes[at] ^= 1 << bit;
            bytes.truncate(sound.len() - (seed >> 20) as usize % 9);
            frames(&bytes);
        }
        assert!((0..=60).filter_map(Verb::of).count() > 30);
    }
}
