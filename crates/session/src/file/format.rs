//! The bytes of a session's file, version 2: encoded and decoded, and nothing of how they move.
//!
//! A head of one page, the members (pieces, then objects) each from a page on, then what the file
//! says of itself with a checksum for each chunk of its members. The head is written last.

use kvdepot_media::checksum;
use kvdepot_media::file::PAGE;
use kvdepot_media::{Checksum, PartId};

use super::about::About;
use crate::error::Error;
use crate::store::MANIFEST_MAX;

/// What every file of a session begins with, of either version.
pub(crate) const MAGIC: &[u8; 8] = b"kvsessar";

/// The version that is written.
const VERSION: u32 = 2;

/// Bytes of the head.
pub(crate) const HEAD: usize = PAGE;

/// Bytes that have a checksum of their own: enough that its sixteen bytes are nothing beside them
/// and a request of the disk is long, few enough that several lanes have some of a small session.
pub(crate) const CHUNK: u64 = 4 << 20;

/// Bytes of a checksum.
const SUM: usize = 16;

/// Chunks of a file, at most: 16 TiB, of which the table takes 64 MiB of memory.
const CHUNKS_MAX: u64 = (64 << 20) / SUM as u64;

/// Why a file is none whose tail does not verify.
pub(crate) const CHANGED: &str = "its description is corrupt";

/// What the head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Bytes of the whole file.
    pub(crate) len: u64,
    /// Where the tail begins: what the file says of itself, and the table of checksums.
    pub(crate) tail: u64,
    /// Bytes of what it says of itself.
    pub(crate) about: u64,
    /// Checksums in the table.
    pub(crate) chunks: u64,
    /// Drawn at random for this file: each chunk is checked against it.
    pub(crate) key: [u8; 32],
    /// The namespace, which each chunk is checked against too.
    pub(crate) namespace: [u8; 16],
    /// XXH3-128 of the tail.
    pub(crate) sum: Checksum,
}

impl Head {
    /// Bytes of the tail.
    pub(crate) fn tail_len(&self) -> Option<u64> {
        self.chunks.checked_mul(SUM as u64)?.checked_add(self.about)
    }

    /// As it is written.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(HEAD);
        page.extend_from_slice(MAGIC);
        page.extend_from_slice(&VERSION.to_le_bytes());
        page.extend_from_slice(&(CHUNK as u32).to_le_bytes());
        for number in [self.len, self.tail, self.about, self.chunks] {
            page.extend_from_slice(&number.to_le_bytes());
        }
        page.extend_from_slice(&self.key);
        page.extend_from_slice(&self.namespace);
        page.extend_from_slice(&self.sum.0);
        page.resize(HEAD - SUM, 0);
        let sum = Checksum::from_u128(checksum::digest(&page));
        page.extend_from_slice(&sum.0);
        page
    }

    /// Reads the head of a file of `len` bytes.
    ///
    /// # Errors
    /// Why it is none.
    pub(crate) fn decode(page: &[u8], len: u64) -> Result<Head, String> {
        let mut rest = page;
        let mut take = |count: usize| {
            let (some, behind) = rest.split_at_checked(count)?;
            rest = behind;
            Some(some)
        };
        let cut = || "it is truncated".to_owned();
        if take(8) != Some(MAGIC) {
            return Err("it is not a session file".to_owned());
        }
        let u32_of = |bytes: &[u8]| Some(u32::from_le_bytes(bytes.try_into().ok()?));
        let u64_of = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
        let version = take(4).and_then(u32_of).ok_or_else(cut)?;
        if version != VERSION {
            return Err(format!(
                "it has format version {version}; this release reads versions 1 and {VERSION}"
            ));
        }
        let chunk = take(4).and_then(u32_of).ok_or_else(cut)?;
        let mut next = || take(8).and_then(u64_of).ok_or_else(cut);
        let (said, tail, about, chunks) = (next()?, next()?, next()?, next()?);
        let fixed = |bytes: Option<&[u8]>| bytes.and_then(|bytes| bytes.try_into().ok());
        let head = Head {
            len: said,
            tail,
            about,
            chunks,
            key: take(32)
                .and_then(|bytes| bytes.try_into().ok())
                .ok_or_else(cut)?,
            namespace: fixed(take(16)).ok_or_else(cut)?,
            sum: Checksum(fixed(take(SUM)).ok_or_else(cut)?),
        };
        let (body, sum) = page
            .split_at_checked(HEAD - SUM)
            .filter(|(_, sum)| sum.len() == SUM)
            .ok_or_else(cut)?;
        if Checksum::from_u128(checksum::digest(body)).0 != sum {
            return Err("its head is corrupt".to_owned());
        }
        let end = head.tail_len().and_then(|bytes| bytes.checked_add(tail));
        let fits = end.and_then(page_up) == Some(len) && said == len;
        // A member is named by a byte or more, and its last chunk alone is short. What has a hole
        // says nothing about its length: the table is read into memory.
        let full = tail.saturating_sub(HEAD as u64) / CHUNK;
        let fits = fits && chunks <= full.saturating_add(about).min(CHUNKS_MAX);
        match fits && chunk == CHUNK as u32 && about <= MANIFEST_MAX && tail >= HEAD as u64 {
            true => Ok(head),
            false if said != len => Err(format!("it has {len} of {said} bytes")),
            false => Err("its head does not match its length".to_owned()),
        }
    }

    /// Bytes from the tail to the end of the file, of a head that was decoded.
    pub(crate) fn tail_bytes(&self) -> usize {
        self.len.saturating_sub(self.tail) as usize
    }
}

/// What a chunk is, so that no other one verifies in its place: no two files have one key.
pub(crate) fn part(namespace: [u8; 16], key: [u8; 32], chunk: u64) -> PartId {
    PartId {
        namespace,
        key,
        // No file has as many chunks as this counts.
        part: chunk as u32,
        parts: 0,
    }
}

/// What is behind the members: what the file says of itself, and the table.
pub(crate) fn encode_tail(about: &About, sums: &[Checksum]) -> Result<(Vec<u8>, u64), Error> {
    let mut tail = about.encode()?;
    let len = tail.len() as u64;
    if len > MANIFEST_MAX {
        let value = format!("{} tokens", about.tokens.len());
        let allowed = "a session whose description has at most 256MiB";
        return Err(Error::input("tokens", value, allowed));
    }
    sums.iter().for_each(|sum| tail.extend_from_slice(&sum.0));
    Ok((tail, len))
}

/// The checksum of the tail.
pub(crate) fn sum_of(tail: &[u8]) -> Checksum {
    Checksum::from_u128(checksum::digest(tail))
}

/// Reads the tail of a head that was decoded, and the zeros behind it.
///
/// # Errors
/// Why it does not fit.
pub(crate) fn decode_tail(head: &Head, tail: &[u8]) -> Result<(About, Vec<Checksum>), String> {
    let len = head.tail_len().unwrap_or(u64::MAX) as usize;
    let (tail, zeros) = tail.split_at_checked(len).ok_or("it is truncated")?;
    if sum_of(tail) != head.sum || zeros.iter().any(|byte| *byte != 0) {
        return Err(CHANGED.to_owned());
    }
    let (about, table) = tail
        .split_at_checked(head.about as usize)
        .ok_or("it is truncated")?;
    let about = About::decode(about)?;
    if about.namespace != head.namespace {
        return Err("its head names a different namespace".to_owned());
    }
    let places = Places::of(&about).ok_or("its pieces or objects are too long")?;
    if places.end != head.tail || places.chunks != head.chunks {
        return Err("its pieces and objects do not match its length".to_owned());
    }
    let sums = table.chunks_exact(SUM);
    let sums = sums.filter_map(|sum| sum.try_into().ok().map(Checksum));
    Ok((about, sums.collect()))
}

/// Rounded up to whole pages.
pub(crate) fn page_up(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE as u64)
}

/// A member's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Where it begins in the file.
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    /// The number of its first chunk.
    pub(crate) first: u64,
}

impl Place {
    /// Its chunks: number, where it begins in the member, bytes.
    pub(crate) fn chunks(self) -> impl Iterator<Item = (u64, u64, u64)> {
        let count = self.bytes.div_ceil(CHUNK);
        (0..count).map(move |at| {
            let begin = at * CHUNK;
            (self.first + at, begin, CHUNK.min(self.bytes - begin))
        })
    }
}

/// Where all members lie.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) members: Vec<Place>,
    /// Behind the last one.
    pub(crate) end: u64,
    pub(crate) chunks: u64,
}

impl Places {
    /// Of no member.
    pub(crate) fn none() -> Places {
        Places {
            members: Vec::new(),
            end: HEAD as u64,
            chunks: 0,
        }
    }

    /// Adds one behind the others; `None` beyond what a file can have.
    pub(crate) fn add(&mut self, bytes: u64) -> Option<Place> {
        let place = Place {
            at: self.end,
            bytes,
            first: self.chunks,
        };
        let end = self.end.checked_add(bytes).and_then(page_up)?;
        let chunks = self.chunks + bytes.div_ceil(CHUNK);
        if i64::try_from(end).is_err() || chunks > CHUNKS_MAX {
            return None;
        }
        (self.end, self.chunks) = (end, chunks);
        self.members.push(place);
        Some(place)
    }

    /// Of those that a file says it has.
    pub(crate) fn of(about: &About) -> Option<Places> {
        let mut places = Places::none();
        for bytes in about.members() {
            places.add(bytes)?;
        }
        Some(places)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::about::tests::about;
    use super::*;

    fn whole() -> (Head, Vec<u8>, Vec<u8>) {
        let about = about();
        let places = Places::of(&about).unwrap();
        let sums = vec![Checksum([5; 16]); places.chunks as usize];
        let (tail, len) = encode_tail(&about, &sums).unwrap();
        let head = Head {
            len: page_up(places.end + tail.len() as u64).unwrap(),
            tail: places.end,
            about: len,
            chunks: places.chunks,
            key: [3; 32],
            namespace: about.namespace,
            sum: sum_of(&tail),
        };
        (head, head.encode(), tail)
    }

    #[test]
    fn a_head_and_a_tail_are_read_as_they_were_written() {
        let (head, page, tail) = whole();
        assert_eq!(page.len(), HEAD);
        assert_eq!(Head::decode(&page, head.len), Ok(head));
        let (read, sums) = decode_tail(&head, &tail).unwrap();
        assert_eq!((read, sums.len() as u64), (about(), head.chunks));
        assert!(Head::decode(&page, head.len + 4096).is_err());
        for end in [0, 7, 8, 11, 60, 4095] {
            assert!(Head::decode(&page[..end], head.len).is_err());
        }
    }

    #[test]
    fn no_changed_byte_of_a_head_or_a_tail_passes() {
        let (head, page, tail) = whole();
        for at in 0..page.len() {
            let mut page = page.clone();
            page[at] ^= 1 << (at % 8);
            assert!(Head::decode(&page, head.len).is_err(), "byte {at}");
        }
        for at in 0..tail.len() {
            let mut tail = tail.clone();
            tail[at] ^= 1 << (at % 8);
            assert!(decode_tail(&head, &tail).is_err(), "byte {at}");
        }
    }

    #[test]
    fn no_head_has_more_checksums_than_its_members_have_chunks() {
        let (head, ..) = whole();
        // A file with a hole has any length, and its table would be read into memory.
        for chunks in [
            head.chunks + head.about,
            u64::from(u32::MAX),
            1 << 40,
            1 << 58,
        ] {
            let len = page_up(head.tail + head.about + 16 * chunks).unwrap();
            let forged = Head {
                len,
                chunks,
                ..head
            };
            let read = Head::decode(&forged.encode(), len);
            assert!(read.is_err(), "{chunks} checksums");
        }
    }

    #[test]
    fn members_begin_at_pages_and_have_their_chunks() {
        let mut places = Places::none();
        assert_eq!(places.add(1).unwrap().at, 4096);
        let second = places.add(CHUNK + 1).unwrap();
        assert_eq!((second.at, second.first), (8192, 1));
        let chunks: Vec<_> = second.chunks().collect();
        assert_eq!(chunks, [(1, 0, CHUNK), (2, CHUNK, 1)]);
        assert_eq!((places.end, places.chunks), (8192 + CHUNK + 4096, 3));
        assert!(places.add(u64::MAX - 5).is_none() && places.add(1 << 63).is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_are_trouble(bytes in prop::collection::vec(any::<u8>(), 0..200), len: u64) {
            let (head, mut page, _) = whole();
            // What an adversary writes has a right checksum.
            let end = bytes.len() + 8;
            page[8..end].copy_from_slice(&bytes);
            let sum = checksum::digest(&page[..HEAD - SUM]).to_le_bytes();
            page[HEAD - SUM..].copy_from_slice(&sum);
            let _read = (Head::decode(&page, len), Head::decode(&bytes, len));
            let forged = Head { sum: sum_of(&bytes), about: len, ..head };
            let _read = decode_tail(&forged, &bytes);
        }
    }
}
