//! Any bytes, as if a medium or a file had them: manifests, archives and files of ds4 are read or
//! refused, and what was read is read again as what it is written as.

use std::io::{Cursor, Read};
use std::path::Path;

use crate::archive::Archive;
use crate::ds4::{self, Layout, Trailer};
use crate::index::{Id, Index};
use crate::manifest::Manifest;
use crate::restore::Found;

/// Returns true if `bytes` are a manifest. Everything that is computed from a manifest is computed.
pub fn manifest(bytes: &[u8]) -> bool {
    let Ok(read) = Manifest::decode(bytes) else {
        return false;
    };
    let written = read.encode().expect("what was read can be written");
    let again = Manifest::decode(&written).expect("what was written can be read");
    assert!(again == read, "another one is read again");
    let pieces = read.piece_bytes.len();
    assert_eq!(read.keys().len(), pieces);
    assert_eq!(read.object_keys().len(), read.objects.len());
    assert!(read.bytes() >= pieces as u64);
    let key = read.links().last().expect("a piece").manifest(&[7; 32]);
    let mut index = Index::new(read.piece_tokens);
    let id = index.add(key, bytes.len() as u64, &read);
    assert_eq!(id, Id::of(&key));
    let mut prompt = read.tokens.clone();
    prompt.push(7);
    assert_eq!(index.by_tokens(&prompt).found[0].id, id);
    assert_eq!(index.same(&read.tokens), [id]);
    if !read.text.is_empty() {
        assert_eq!(index.by_text(&read.text).found[0].id, id);
    }
    index.remove(id);
    assert!(index.by_tokens(&prompt).found.is_empty());
    // The pieces' runs are all tokens, in their order.
    let count = read.tokens.len();
    let found = Found::new(id, read);
    let mut end = 0;
    for (run, _) in &found.pieces {
        assert!(run.start == end && run.end > end, "{run:?} behind {end}");
        end = run.end;
    }
    assert_eq!(end, count);
    true
}

/// Returns true if `bytes` are a session file, unchanged or after their checksum is corrected.
pub fn archive(bytes: &[u8]) -> bool {
    let forged = [bytes, blake3::hash(bytes).as_bytes()].concat();
    let [as_is, forged] = [bytes, &forged].map(|bytes| {
        let len = bytes.len() as u64;
        let read = Archive::read(Path::new("a file"), Cursor::new(bytes), len).ok()?;
        let written = read.manifest.encode().expect("it was read");
        // What it says of its parts is what is there.
        assert!(read.manifest.bytes() + 56 <= len);
        manifest(&written).then_some(())
    });
    as_is.or(forged).is_some()
}

/// Returns true if `bytes` are a file of ds4 with a known payload. The whole file is written again.
pub fn ds4(bytes: &[u8]) -> bool {
    let mut reader = Cursor::new(bytes);
    let Ok(parts) = ds4::parse(&mut reader) else {
        return false;
    };
    let text = parts.read_text(&mut reader).expect("its text is there");
    let mut other = reader.clone();
    let (payload, trailer) = (parts.payload(&mut reader), parts.trailer(&mut other));
    let mut again = Vec::new();
    let written = ds4::write(&mut again, &parts.head, &text, payload, trailer);
    assert_eq!(written.expect("it is written"), bytes.len() as u64);
    assert!(again == bytes, "bytes changed on the way through");
    let mut trailer = Vec::new();
    let rest = parts.trailer(&mut reader).read_to_end(&mut trailer);
    rest.expect("its trailer is there");
    let _sections = Trailer::decode(parts.head.flags, &trailer);
    let Ok(layout) = Layout::read(&mut reader, &parts) else {
        return false;
    };
    tiled(&layout, parts.payload.end - parts.payload.start);
    let tokens = layout.read_tokens(&mut reader, 0..u32::MAX);
    let tokens = tokens.expect("its tokens are there");
    assert_eq!(tokens.len(), layout.shape().tokens as usize);
    true
}

/// All bytes of a payload are in one part, and the rows of any two runs of tokens that touch, too.
fn tiled(layout: &Layout, len: u64) {
    let mut end = 0;
    let (middle, tokens) = (layout.shape().tokens / 2, layout.shape().tokens);
    for part in layout.parts() {
        assert_eq!(part.bytes.start, end);
        end = part.bytes.end;
        let runs = (part.rows_of(0..middle), part.rows_of(middle..tokens));
        if let (Some(one), Some(other)) = runs {
            assert_eq!((one.start, other.end), (part.bytes.start, end));
            assert_eq!(one.end, other.start);
        }
    }
    assert_eq!(end, len);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ds4::{Flags, Head, PAYLOAD_MAGIC, Reason as Ds4Reason};
    use crate::manifest::sample;

    /// As many rounds as are quickly done: the fuzz targets have the time.
    const ROUNDS: usize = 20_000;

    /// Changes of sound bytes: some bits, some bytes, other ends, and a part at another place.
    fn changes(sound: &[u8], mut look: impl FnMut(&[u8])) {
        let mut seed = 1_u64;
        let mut next = |most: usize| {
            seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            (seed >> 33) as usize % most
        };
        for _ in 0..ROUNDS {
            let mut bytes = sound.to_vec();
            for _ in 0..=next(3) {
                let at = next(bytes.len());
                match next(4) {
                    0 => bytes[at] ^= 1 << next(8),
                    1 => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][next(5)],
                    2 => bytes.truncate(at + 1),
                    _ => bytes.copy_within(at.., next(at + 1)),
                }
            }
            look(&bytes);
        }
    }

    #[test]
    fn any_bytes_are_a_manifest_or_none() {
        let sound = sample().encode().unwrap();
        assert!(manifest(&sound));
        let mut read = 0;
        changes(&sound, |bytes| read += usize::from(manifest(bytes)));
        // Many bits of one say only what it is.
        assert!((1000..ROUNDS).contains(&read), "{read}");
    }

    #[test]
    fn any_bytes_are_an_archive_or_none() {
        let encoded = sample().encode().unwrap();
        let mut body = b"kvsessar\x01\0\0\0\0\0\0\0".to_vec();
        body.extend((encoded.len() as u64).to_le_bytes());
        body.extend(&encoded);
        body.extend([5; 912]);
        assert!(archive(&body), "with its sum");
        assert!(archive(
            &[&body[..], blake3::hash(&body).as_bytes()].concat()
        ));
        let mut read = 0;
        changes(&body, |bytes| read += usize::from(archive(bytes)));
        assert!((1000..ROUNDS).contains(&read), "{read}");
    }

    #[test]
    fn any_bytes_are_a_file_of_ds4_or_none() {
        let tokens = 9_u32;
        let mut words = vec![2, 4096, 128, 32, 16, 1024, tokens, 3, 2, 2, 4, tokens];
        words.extend(0..tokens + 4);
        // Rows of the third layer, and of its index.
        words.extend([0, 0, 2, 0, 0, 2]);
        // Windows; rows, state and score; index rows, state and score.
        words.extend(vec![7; (3 * 9 * 2) + (2 * 2 + 2 * 32) + (2 * 2 + 2 * 32)]);
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let payload = [&PAYLOAD_MAGIC[..], &payload].concat();
        let head = Head {
            quant_bits: 2,
            reason: Ds4Reason::COLD,
            flags: Flags(9),
            model: 0,
            tokens,
            hits: 3,
            context: 4096,
            revision: 2,
            reserved: [0; 3],
            created: 1_780_000_000,
            last_used: 1_780_000_001,
            payload_len: payload.len() as u64,
        };
        let mut sound = Vec::new();
        let trailer = b"KTM\x01\x01\0\0\0\x02\0\0\0\x03\0\0\0idabc\x02\0\0\0hi";
        ds4::write(&mut sound, &head, b"a text", &payload[..], &trailer[..]).unwrap();
        assert!(ds4(&sound));
        let mut read = 0;
        changes(&sound, |bytes| read += usize::from(ds4(bytes)));
        assert!((1000..ROUNDS).contains(&read), "{read}");
    }
}
