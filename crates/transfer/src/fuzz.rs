//! Any bytes, as if a peer had said them: greetings, heads and rows are read or refused, and what
//! was read is what the same bytes are written as.

use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{
    BYTES_MAX, Bytes, Challenge, HEAD, Head, Hello, NAME_MAX, ROW, ROWS_MAX, Row, Status, Verb,
    rows_sum, total,
};

/// Decodes `bytes` as each kind of message, and returns the number of successful decodings.
pub fn wire(bytes: &[u8]) -> usize {
    let mut read = 0;
    if let Ok((hello, _)) = Hello::read_from_prefix(bytes) {
        read += usize::from(hello.greet().is_ok());
        assert_eq!(hello.as_bytes(), &bytes[..size_of::<Hello>()]);
    }
    if let Ok((challenge, _)) = Challenge::read_from_prefix(bytes) {
        read += usize::from(challenge.refusal().is_ok());
    }
    let mut rest = bytes;
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD>() {
        rest = behind;
        let head = Head::read(head);
        answers(&head);
        let Ok(asked) = head.asks() else { continue };
        read += 1;
        // What a target makes room for before it has heard it.
        assert!(asked.rows <= ROWS_MAX && asked.bytes <= BYTES_MAX);
        assert!(asked.verb != Verb::Open || asked.bytes <= NAME_MAX as u64);
        if !matches!(asked.verb, Verb::Read | Verb::Write) {
            assert!(!head.is_summed());
            continue;
        }
        let Some((rows, _)) = rest.split_at_checked((asked.rows - 1) * ROW) else {
            continue;
        };
        let _sum = rows_sum(head.as_bytes(), rows);
        let Ok(others) = <[Row]>::ref_from_bytes(rows) else {
            unreachable!("a row has no padding");
        };
        let all = [&[head.first], others].concat();
        if let Ok(bytes) = total(&all) {
            assert!((1..=BYTES_MAX).contains(&bytes));
            let sum: u128 = all.iter().map(|row| u128::from(row.len.get())).sum();
            assert_eq!(sum, u128::from(bytes));
        }
    }
    read
}

/// The same bytes as an answer: what an initiator takes has the length that it expected.
fn answers(head: &Head) {
    for most in [Bytes::Just(24), Bytes::Upto(BYTES_MAX)] {
        if let Ok(status) = head.answers(Verb::Read, head.number.get(), most) {
            let bytes = head.bytes.get();
            assert!(bytes <= BYTES_MAX && (status == Status::Done || bytes == 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_kind_are_read_or_refused() {
        let head = Head::request(Verb::Write, 2, 1, 40, true).with(Row::new(1, 2, 20));
        let mut sound = head.as_bytes().to_vec();
        sound.extend(Row::new(1, 90, 20).as_bytes());
        sound.extend(Head::request(Verb::Ping, 0, 2, 0, false).as_bytes());
        assert_eq!(wire(&sound), 1);
        let hello = Hello::new(1, [2; 16], [3; 32]);
        assert!(wire(hello.as_bytes()) >= 2);
        let mut seed = 1_u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let (at, bit) = ((seed >> 33) as usize % sound.len(), (seed >> 60) & 7);
            let mut bytes = sound.clone();
            bytes[at] ^= 1 << bit;
            bytes.truncate(sound.len() - (seed >> 20) as usize % 9);
            wire(&bytes);
        }
    }
}
