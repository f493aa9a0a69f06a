//! The format on the medium, declared once and read in place. This module does no I/O and does not
//! panic on any bytes.
//!
//! `docs/format.md` specifies the format byte by byte; a test compares its tables with these
//! declarations.

pub mod directory;
pub mod file_header;
pub mod file_note;
pub mod layout;
pub mod owner;
pub mod record;
pub mod superblock;

use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Allocation unit of an arena in bytes: each extent starts at a multiple of it and has a multiple
/// of it as its length.
pub const GRANULE: u64 = 4096;

/// Bytes with their XXH3-64 behind them.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Sealed<T> {
    body: T,
    checksum: U64,
}

impl<T: IntoBytes + Immutable> Sealed<T> {
    fn new(body: T, seed: u64) -> Sealed<T> {
        let checksum = xxh3_64_with_seed(body.as_bytes(), seed).into();
        Sealed { body, checksum }
    }

    /// The bytes, if they are what was sealed. Opening asks this of every record.
    #[inline]
    fn verified(&self, seed: u64) -> Option<&T> {
        let checksum = xxh3_64_with_seed(self.body.as_bytes(), seed);
        (self.checksum == checksum).then_some(&self.body)
    }
}

/// Text in a fixed field: as many whole characters as fit, the rest zeros.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
struct Text<const ROOM: usize>([u8; ROOM]);

impl<const ROOM: usize> Text<ROOM> {
    fn new(text: &str) -> Text<ROOM> {
        let mut end = text.len().min(ROOM);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut field = [0; ROOM];
        field[..end].copy_from_slice(&text.as_bytes()[..end]);
        Text(field)
    }
}

impl<const ROOM: usize> From<&Text<ROOM>> for String {
    fn from(Text(field): &Text<ROOM>) -> String {
        let text = field.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

/// A check of a declaration against the table of `docs/format.md` that follows a heading.
#[cfg(test)]
macro_rules! assert_documented {
    ($heading:literal, $body:ident { $($field:ident),* } unused { $($unused:ident),* }) => {{
        // All of its fields, and no others.
        let _all = |$body { $($field: _,)* $($unused: _,)* }: $body| ();
        fn len<T>(_: impl Fn(&$body) -> &T) -> usize {
            size_of::<T>()
        }
        let rows = [$((std::mem::offset_of!($body, $field), len(|body| &body.$field))),*];
        crate::format::tests::assert_documented($heading, &rows, size_of::<$body>());
    }};
}
#[cfg(test)]
pub(crate) use assert_documented;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The offsets and sizes of a table's rows.
    pub(crate) fn assert_documented(heading: &str, rows: &[(usize, usize)], len: usize) {
        let page = include_str!("../../../../docs/format.md");
        let (_, section) = page.split_once(&format!("\n{heading}\n")).unwrap();
        let lines = section.lines().skip_while(|line| !line.starts_with('|'));
        let table = lines.skip(2).take_while(|line| line.starts_with('|'));
        let number = |cell: Option<&str>| cell.unwrap().trim().parse().unwrap();
        let row = |line: &str| {
            let mut cells = line.split('|').skip(1);
            (number(cells.next()), number(cells.next()))
        };
        let mut written: Vec<(usize, usize)> = table.map(row).collect();
        // The checksum, which seals what is before it.
        written.pop_if(|last| *last == (len, size_of::<U64>()));
        assert_eq!(written, rows, "{heading}");
    }

    #[test]
    fn text_is_cut_at_a_whole_character() {
        let text = |text| String::from(&Text::<4>::new(text));
        assert_eq!(text("abc"), "abc");
        assert_eq!(text("abcde"), "abcd");
        assert_eq!(text("abc\u{e9}"), "abc");
        assert_eq!(String::from(&Text([b'a', 0xFF, b'b', 0])), "a\u{FFFD}b");
    }
}
