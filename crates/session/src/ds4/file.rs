//! A whole file: where its parts lie, and how it is written.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use sha1::{Digest, Sha1};

use super::error::{Error, refuse};
use super::head::{HEAD_LEN, Head};
use super::name::name;

/// Offset of the text in a file, in bytes: after the head and the length of the text.
pub const TEXT_AT: u64 = HEAD_LEN as u64 + 4;
/// Bytes copied at once: enough that the calls cost nothing, and they stay in the cache.
const COPY_LEN: usize = 256 * 1024;

/// Head of a file, and the byte ranges of its other parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Head of the file.
    pub head: Head,
    /// Rendered text.
    pub text: Range<u64>,
    /// State of the engine.
    pub payload: Range<u64>,
    /// All bytes after the payload.
    pub trailer: Range<u64>,
}

/// Reads the head and the lengths, 52 bytes, and checks them against the length of the file.
///
/// The file begins at position 0 of `reader`.
///
/// # Errors
/// [`Error::Format`] if the head is invalid or a length exceeds the file, and [`Error::Io`] if the
/// reader fails.
pub fn parse(reader: &mut (impl Read + Seek)) -> Result<Parts, Error> {
    let file_len = reader.seek(SeekFrom::End(0))?;
    if file_len < TEXT_AT {
        return refuse(
            "file length",
            file_len,
            format_args!("{TEXT_AT} bytes or more"),
        );
    }
    reader.seek(SeekFrom::Start(0))?;
    let (mut head, mut text_len) = ([0; HEAD_LEN], [0; 4]);
    reader.read_exact(&mut head)?;
    reader.read_exact(&mut text_len)?;
    let head = Head::decode(&head)?;
    let text_len = u64::from(u32::from_le_bytes(text_len));
    let text_end = end("text length", TEXT_AT, text_len, file_len)?;
    let payload_end = end("payload length", text_end, head.payload_len, file_len)?;
    Ok(Parts {
        head,
        text: TEXT_AT..text_end,
        payload: text_end..payload_end,
        trailer: payload_end..file_len,
    })
}

/// Where a part ends that begins at `start`.
fn end(field: &'static str, start: u64, len: u64, file_len: u64) -> Result<u64, Error> {
    let left = file_len.saturating_sub(start);
    if len > left {
        let allowed = format_args!("at most {left}, the rest of the file of {file_len} bytes");
        return refuse(field, len, allowed);
    }
    Ok(start.saturating_add(len))
}

impl Parts {
    /// Reads the text into memory. Check the length of [`text`](Parts::text) first if memory is
    /// limited.
    ///
    /// # Errors
    /// [`Error::Format`] if the file was truncated after it was parsed, and [`Error::Io`] if the
    /// reader fails.
    pub fn read_text(&self, reader: &mut (impl Read + Seek)) -> Result<Vec<u8>, Error> {
        let mut text = Vec::new();
        let read = Section::new(reader, &self.text).read_to_end(&mut text)?;
        whole("text", read as u64, &self.text)?;
        Ok(text)
    }

    /// Returns the file name that belongs to the text. The text is hashed without keeping it in
    /// memory.
    ///
    /// # Errors
    /// [`Error::Format`] if the file was truncated after it was parsed, and [`Error::Io`] if the
    /// reader fails.
    pub fn read_name(&self, reader: &mut (impl Read + Seek)) -> Result<String, Error> {
        let mut hash = Sha1::new();
        let read = copy(Section::new(reader, &self.text), Hashing(&mut hash))?;
        whole("text", read, &self.text)?;
        Ok(name(hash))
    }

    /// Returns a reader for the payload.
    pub fn payload<'a, R: Read + Seek>(&self, reader: &'a mut R) -> Section<'a, R> {
        Section::new(reader, &self.payload)
    }

    /// Returns a reader for the trailer.
    pub fn trailer<'a, R: Read + Seek>(&self, reader: &'a mut R) -> Section<'a, R> {
        Section::new(reader, &self.trailer)
    }
}

/// Reader for one part of a file.
///
/// It keeps its own position, and seeks before each read, because two handles of a file may share
/// one position (`File::try_clone`).
#[derive(Debug)]
pub struct Section<'a, R> {
    reader: &'a mut R,
    at: u64,
    end: u64,
}

impl<'a, R: Read + Seek> Section<'a, R> {
    fn new(reader: &'a mut R, part: &Range<u64>) -> Section<'a, R> {
        Section {
            reader,
            at: part.start,
            end: part.end,
        }
    }
}

impl<R: Read + Seek> Read for Section<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_sub(self.at);
        if left == 0 {
            return Ok(0);
        }
        self.reader.seek(SeekFrom::Start(self.at))?;
        let read = self.reader.by_ref().take(left).read(buffer)?;
        self.at = self.at.saturating_add(read as u64);
        Ok(read)
    }
}

/// Refuses a part of which the reader had only `read` bytes.
fn whole(field: &'static str, read: u64, part: &Range<u64>) -> Result<(), Error> {
    let len = part.end.saturating_sub(part.start);
    if read == len {
        return Ok(());
    }
    let value = format_args!("{read} bytes");
    refuse(
        field,
        value,
        format_args!("{len} bytes; the file was truncated after it was opened"),
    )
}

/// Writes a whole file, and returns its length in bytes.
///
/// `payload` must have exactly the length in `head`. `trailer` may have any length. After an error
/// `writer` contains a truncated file, which the caller must discard.
///
/// # Errors
/// [`Error::Format`] if the head has no tokens, the text has 4 GiB or more, or the payload has
/// another length, and [`Error::Io`] if a reader or the writer fails.
pub fn write(
    mut writer: impl Write,
    head: &Head,
    text: &[u8],
    mut payload: impl Read,
    trailer: impl Read,
) -> Result<u64, Error> {
    head.check()?;
    let Ok(text_len) = u32::try_from(text.len()) else {
        return refuse(
            "text length",
            text.len(),
            format_args!("at most {}", u32::MAX),
        );
    };
    writer.write_all(&head.encode())?;
    writer.write_all(&text_len.to_le_bytes())?;
    writer.write_all(text)?;
    let len = head.payload_len;
    let copied = copy(payload.by_ref().take(len), &mut writer)?;
    let allowed = format_args!("exactly {len}, the length in the head");
    if copied < len {
        return refuse("payload length", copied, allowed);
    }
    if copy(payload.take(1), io::sink())? > 0 {
        return refuse("payload length", format_args!("more than {len}"), allowed);
    }
    let trailer_len = copy(trailer, &mut writer)?;
    writer.flush()?;
    Ok(TEXT_AT + u64::from(text_len) + len + trailer_len)
}

/// Copies to the reader's end.
fn copy(mut reader: impl Read, mut writer: impl Write) -> io::Result<u64> {
    let mut buffer = vec![0; COPY_LEN];
    let mut copied = 0;
    loop {
        let read = match reader.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        writer.write_all(buffer.get(..read).unwrap_or_default())?;
        copied += read as u64;
    }
}

/// A hash as something to write to.
struct Hashing<'a>(&'a mut Sha1);

impl Write for Hashing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
