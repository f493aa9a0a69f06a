//! Files that are mostly zeros, small enough to be kept beside a test.
//!
//! Little-endian: 8 bytes `KVDRUNS1`, u64 length of the file, then runs: u64 offset, u32 times,
//! u32 length, and so many bytes, which stand in the file so many times one behind the other. All
//! else is zero.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

const MAGIC: [u8; 8] = *b"KVDRUNS1";
const PAGE: usize = 4096;

/// The file as runs of pages that are not zero; equal pages that follow each other are one run.
///
/// # Panics
/// When the file cannot be read.
#[must_use]
pub fn pack(path: &Path) -> Vec<u8> {
    let mut file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let mut packed = MAGIC.to_vec();
    packed.extend_from_slice(&len.to_le_bytes());
    let mut last: Option<(u64, u32, Vec<u8>)> = None;
    let mut offset = 0;
    while offset < len {
        let mut page = vec![0; PAGE.min((len - offset) as usize)];
        file.read_exact(&mut page).unwrap();
        match &mut last {
            Some((begin, times, bytes)) if *bytes == page => {
                let follows = *begin + u64::from(*times) * PAGE as u64 == offset;
                assert!(follows, "a run that ended was kept");
                *times += 1;
            }
            _ => {
                last.take().iter().for_each(|run| write(&mut packed, run));
                let zero = page.iter().all(|byte| *byte == 0);
                last = (!zero).then_some((offset, 1, page));
            }
        }
        offset += PAGE as u64;
    }
    last.iter().for_each(|run| write(&mut packed, run));
    packed
}

fn write(packed: &mut Vec<u8>, (offset, times, page): &(u64, u32, Vec<u8>)) {
    // The zeros behind the last byte of a page that stands alone go without saying.
    let used = page.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
    let bytes = if *times == 1 { &page[..used] } else { page };
    packed.extend_from_slice(&offset.to_le_bytes());
    packed.extend_from_slice(&times.to_le_bytes());
    packed.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    packed.extend_from_slice(bytes);
}

/// Writes the file that was packed.
///
/// # Panics
/// When these are no runs, or the file cannot be written.
pub fn unpack(packed: &[u8], path: &Path) {
    let (magic, rest) = packed.split_first_chunk::<8>().unwrap();
    assert_eq!(*magic, MAGIC, "no packed file");
    let (len, mut rest) = rest.split_first_chunk::<8>().unwrap();
    let mut file = File::create(path).unwrap();
    file.set_len(u64::from_le_bytes(*len)).unwrap();
    while let Some((head, more)) = rest.split_first_chunk::<16>() {
        let offset = u64::from_le_bytes(head[..8].try_into().unwrap());
        let times = u32::from_le_bytes(head[8..12].try_into().unwrap());
        let count = u32::from_le_bytes(head[12..].try_into().unwrap());
        let (bytes, more) = more.split_at(count as usize);
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(&bytes.repeat(times as usize)).unwrap();
        rest = more;
    }
    assert!(rest.is_empty(), "a run that is cut");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_after_packing_and_unpacking() {
        let dir = std::env::temp_dir().join(format!("kvdepot-runs-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (one, other) = (dir.join("one"), dir.join("other"));
        let mut bytes = vec![0; 3 << 20];
        bytes[5000..5010].fill(7);
        bytes[1 << 20..2 << 20].fill(9);
        bytes[(2 << 20) + 1] = 1;
        bytes.extend_from_slice(&[0, 3, 0]);
        std::fs::write(&one, &bytes).unwrap();
        let packed = pack(&one);
        assert!(packed.len() < 3 * PAGE, "{} bytes", packed.len());
        unpack(&packed, &other);
        assert!(std::fs::read(&other).unwrap() == bytes);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
