//! ds4's files as a whole: nothing panics, and nothing changes on the way through.

use std::cell::RefCell;
use std::io::{self, Cursor, Read, Seek, SeekFrom};

use crate::files::{Model, head, token_at, written};
use kvdepot_session::ds4::{
    Error, Flags, Head, Kind, Layout, Parts, Reason, Trailer, name_of, parse, write,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Reads a file and writes it again, part by part.
fn rewritten(file: &[u8], parts: &Parts) -> Vec<u8> {
    let (mut one, mut other) = (Cursor::new(file), Cursor::new(file));
    let text = parts.read_text(&mut one).unwrap();
    let payload = parts.payload(&mut one);
    let trailer = parts.trailer(&mut other);
    let mut again = Vec::new();
    write(&mut again, &parts.head, &text, payload, trailer).unwrap();
    again
}

/// Everything that reads, over any bytes.
fn read_all(file: &[u8]) -> Result<(), Error> {
    let mut reader = Cursor::new(file);
    let parts = parse(&mut reader)?;
    assert!(
        rewritten(file, &parts) == file,
        "bytes changed on the way through"
    );
    let name = parts.read_name(&mut reader)?;
    assert_eq!(name, name_of(&parts.read_text(&mut reader)?));
    let mut trailer = Vec::new();
    parts.trailer(&mut reader).read_to_end(&mut trailer)?;
    let _ = Trailer::decode(parts.head.flags, &trailer);
    let layout = Layout::read(&mut reader, &parts)?;
    layout.read_tokens(&mut reader, 0..u32::MAX)?;
    Ok(())
}

fn models() -> impl Strategy<Value = Model> {
    let dims = (1..9u32, 1..5u32, 1..17u32);
    (1..3u32, 1..600u32, 1..8u32, dims, any::<bool>()).prop_map(
        |(version, tokens, layers, (head_dim, index_dim, vocab), is_pro)| Model {
            version,
            tokens,
            layers,
            head_dim,
            index_dim,
            vocab,
            is_pro,
            bits: 0,
        },
    )
}

prop_compose! {
    fn heads()(
        bytes in any::<[u8; 8]>(),
        numbers in any::<(u32, u32)>(),
        tokens in 1..=u32::MAX,
        times in any::<(u64, u64)>(),
    ) -> Head {
        let [quant_bits, reason, flags, model, revision, a, b, c] = bytes;
        Head {
            quant_bits,
            reason: Reason(reason),
            flags: Flags(flags),
            model,
            tokens,
            hits: numbers.0,
            context: numbers.1,
            revision,
            reserved: [a, b, c],
            created: times.0,
            last_used: times.1,
            payload_len: 0,
        }
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in vec(any::<u8>(), 0..400)) {
        let _ = read_all(&bytes);
    }

    #[test]
    fn no_bytes_behind_a_magic_panic(bytes in vec(any::<u8>(), 0..400), len in 0..400u64) {
        let mut file = b"KVC\x01".to_vec();
        file.extend(bytes);
        if let Some(field) = file.get_mut(40..52) {
            field[..8].copy_from_slice(&len.to_le_bytes());
            field[8..].copy_from_slice(&(len as u32 / 3).to_le_bytes());
        }
        let _ = read_all(&file);
    }

    #[test]
    fn a_mutated_file_is_refused_or_kept_as_it_is(
        model in models(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        is_in_heads in any::<bool>(),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut file = model.file(b"text", b"\x02\0\0\0hi");
        // Heads are a small part of a file: half of the cases change only them.
        let len = if is_in_heads { 56 + 52 } else { file.len() };
        for (at, byte) in changes {
            file[at.index(len)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        let _ = read_all(&file);
    }

    #[test]
    fn parts_come_back_and_bytes_do(
        head in heads(),
        text in vec(any::<u8>(), 0..200),
        payload in vec(any::<u8>(), 0..2000),
        trailer in vec(any::<u8>(), 0..100),
    ) {
        let head = Head { payload_len: payload.len() as u64, ..head };
        let file = written(&head, &text, &payload, &trailer);
        let parts = parse(&mut Cursor::new(&file)).unwrap();
        prop_assert_eq!(parts.head, head);
        let part = |range: &std::ops::Range<u64>| &file[range.start as usize..range.end as usize];
        prop_assert_eq!(part(&parts.text), text);
        prop_assert_eq!(part(&parts.payload), payload);
        prop_assert_eq!(part(&parts.trailer), trailer);
        prop_assert_eq!(rewritten(&file, &parts), file);
    }

    #[test]
    fn a_payload_is_tiled_by_its_parts_and_cut_by_tokens(
        model in models(),
        cut in any::<prop::sample::Index>(),
    ) {
        let file = model.file(b"some text", b"");
        let mut reader = Cursor::new(&file);
        let parts = parse(&mut reader).unwrap();
        let layout = Layout::read(&mut reader, &parts).unwrap();
        let (mut end, cut) = (0, cut.index(model.tokens as usize + 1) as u32);
        for part in layout.parts() {
            prop_assert_eq!(part.bytes.start, end);
            end = part.bytes.end;
            let Some(before) = part.rows_of(0..cut) else { continue };
            let after = part.rows_of(cut..model.tokens).unwrap();
            prop_assert_eq!(before.start, part.bytes.start);
            prop_assert_eq!(before.end, after.start);
            prop_assert_eq!(after.end, part.bytes.end);
        }
        prop_assert_eq!(end, parts.payload.end - parts.payload.start);
        let tokens = layout.read_tokens(&mut reader, cut..model.tokens).unwrap();
        prop_assert_eq!(tokens, (cut..model.tokens).map(token_at).collect::<Vec<_>>());
    }

    #[test]
    fn a_payload_of_another_length_is_refused(model in models(), by in 1..40usize) {
        let mut payload = model.payload();
        payload.truncate(payload.len() - by);
        let file = written(&head(model.tokens, payload.len() as u64), b"", &payload, b"");
        let mut reader = Cursor::new(&file);
        let parts = parse(&mut reader).unwrap();
        prop_assert!(Layout::read(&mut reader, &parts).is_err());
        let says = |payload: &[u8]| {
            write(io::sink(), &parts.head, b"", payload, io::empty()).unwrap_err().to_string()
        };
        let short = says(&payload[1..]);
        prop_assert!(short.contains("payload length"), "{}", short);
        payload.push(0);
        let long = says(&payload);
        prop_assert!(long.contains("more than"), "{}", long);
    }
}

/// Flash's real size, at a length where every kind of row exists.
const FLASH: Model = Model {
    version: 2,
    tokens: 300,
    layers: 43,
    head_dim: 512,
    index_dim: 128,
    vocab: 129_280,
    is_pro: false,
    bits: 0,
};

#[test]
fn models_are_told_apart_by_the_length_of_the_payload() {
    let kinds = |model: Model| {
        let file = model.file(b"", b"");
        let mut reader = Cursor::new(&file);
        let parts = parse(&mut reader).unwrap();
        let layout = Layout::read(&mut reader, &parts).unwrap();
        let first = layout.parts().iter().filter(|part| part.layer == Some(0));
        first.map(|part| part.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(FLASH), [Kind::Window]);
    let pro = Model {
        layers: 61,
        is_pro: true,
        ..FLASH
    };
    assert_eq!(
        kinds(pro),
        [Kind::Window, Kind::Rows, Kind::State, Kind::Score]
    );
}

#[test]
fn lengths_beyond_the_file_are_refused_with_what_is_left() {
    let says = |at: usize, byte: u8| {
        let mut file = written(&head(1, 3), b"text", b"abc", b"");
        file[at] = byte;
        parse(&mut Cursor::new(&file)).unwrap_err().to_string()
    };
    assert_eq!(
        says(48, 8),
        "ds4 file: text length: 8 is not allowed; \
         allowed: at most 7, the rest of the file of 59 bytes"
    );
    assert_eq!(
        says(47, 255),
        "ds4 file: payload length: 18374686479671623683 is not allowed; \
         allowed: at most 3, the rest of the file of 59 bytes"
    );
    let empty = parse(&mut Cursor::new([])).unwrap_err().to_string();
    assert_eq!(
        empty,
        "ds4 file: file length: 0 is not allowed; allowed: 52 bytes or more"
    );
}

#[test]
fn a_stripped_session_has_no_payload() {
    let file = written(&head(7, 0), b"text", b"", b"\x02\0\0\0hi");
    let mut reader = Cursor::new(&file);
    let parts = parse(&mut reader).unwrap();
    assert!(parts.payload.is_empty());
    assert_eq!(rewritten(&file, &parts), file);
    let error = Layout::read(&mut reader, &parts).unwrap_err().to_string();
    assert!(error.contains("payload length: 0"), "{error}");
}

#[test]
fn row_counts_that_are_not_the_tokens_are_refused() {
    let model = Model {
        layers: 4,
        head_dim: 2,
        index_dim: 1,
        vocab: 3,
        ..FLASH
    };
    let mut payload = model.payload();
    let at = 52 + 4 * 300 + 4 * 3 + 4 * 2;
    assert_eq!(payload[at], 75);
    payload[at] = 74;
    let file = written(&head(300, payload.len() as u64), b"", &payload, b"");
    let mut reader = Cursor::new(&file);
    let parts = parse(&mut reader).unwrap();
    let error = Layout::read(&mut reader, &parts).unwrap_err().to_string();
    assert_eq!(
        error,
        "ds4 file: rows of a layer: 74 is not allowed; allowed: 75, the number for 300 tokens"
    );
}

/// Fails at call N, and gives a byte at a time until then.
struct Failing<'a> {
    file: Cursor<&'a [u8]>,
    calls_left: u32,
}

impl Failing<'_> {
    fn call(&mut self) -> io::Result<()> {
        let left = self.calls_left.checked_sub(1);
        self.calls_left = left.ok_or_else(|| io::Error::other("call N"))?;
        Ok(())
    }
}

impl Read for Failing<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.call()?;
        let len = buffer.len().min(1);
        self.file.read(&mut buffer[..len])
    }
}

impl Seek for Failing<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.call()?;
        self.file.seek(to)
    }
}

#[test]
fn a_reader_that_fails_anywhere_is_an_error_and_short_reads_are_none() {
    let model = Model {
        tokens: 9,
        layers: 3,
        head_dim: 1,
        index_dim: 1,
        vocab: 1,
        ..FLASH
    };
    let file = model.file(b"some text", b"\x02\0\0\0hi");
    let read = |calls_left: u32| -> Result<String, Error> {
        let file = Cursor::new(&file[..]);
        let mut reader = Failing { file, calls_left };
        let parts = parse(&mut reader)?;
        let layout = Layout::read(&mut reader, &parts)?;
        layout.read_tokens(&mut reader, 0..9)?;
        parts.read_name(&mut reader)
    };
    let calls = (0..).find(|&calls| read(calls).is_ok()).unwrap();
    assert!(calls > 100, "{calls}");
    for failing in 0..calls {
        assert!(matches!(read(failing), Err(Error::Io(_))), "{failing}");
    }
    assert_eq!(read(calls).unwrap(), name_of(b"some text"));
}

#[test]
fn a_file_that_was_cut_after_it_was_opened_is_refused() {
    let file = written(&head(1, 3), b"text", b"abc", b"");
    let parts = parse(&mut Cursor::new(&file)).unwrap();
    let mut cut = Cursor::new(&file[..54]);
    assert!(parts.read_text(&mut cut).is_err());
    assert!(parts.read_name(&mut cut).is_err());
    let payload = parts.payload(&mut cut);
    assert!(write(io::sink(), &parts.head, b"text", payload, io::empty()).is_err());
}

/// A handle of a file that shares its position with others.
struct Shared<'a>(&'a RefCell<Cursor<&'a [u8]>>);

impl Read for Shared<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(buffer)
    }
}

impl Seek for Shared<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.borrow_mut().seek(to)
    }
}

#[test]
fn streams_of_handles_that_share_a_position_do_not_disturb_each_other() {
    let file = written(&head(1, 3), b"text", b"abc", b"trailer");
    let cursor = RefCell::new(Cursor::new(&file[..]));
    let (mut one, mut other) = (Shared(&cursor), Shared(&cursor));
    let parts = parse(&mut one).unwrap();
    let (payload, trailer) = (parts.payload(&mut one), parts.trailer(&mut other));
    let mut again = Vec::new();
    write(&mut again, &parts.head, b"text", payload, trailer).unwrap();
    assert_eq!(again, file);
}
