//! What may stand behind an attention: nothing, another attention, or a recurrent state.

use super::reader::Reader;

/// What may stand there, in words.
pub(super) const ALLOWED: &str = "nothing, an attention cache, or a recurrent state";

/// Whether one of them begins here, in a state of so many tokens. Just enough is read to tell them
/// from rows: what they hold is llama.cpp's.
pub(super) fn begins(reader: Reader<'_>, tokens: usize) -> bool {
    reader.left() == 0 || attention(reader, tokens) || recurrent(reader, tokens)
}

/// A position of the sequence.
fn is_position(position: i32, tokens: usize) -> bool {
    usize::try_from(position).is_ok_and(|position| position < tokens)
}

/// One stream, and the first of its cells, if it has any: a window may have none.
fn attention(mut reader: Reader<'_>, tokens: usize) -> bool {
    let mut read = || {
        reader.expect("streams", 1)?;
        let cells = reader.number("cells")?;
        if cells == 0 {
            return Ok(true);
        }
        let position = reader.signed("position")?;
        reader.expect("sequences of a cell", 1)?;
        Ok::<_, super::Error>(cells as usize <= tokens && is_position(position, tokens))
    };
    read().unwrap_or(false)
}

/// One cell, at the last token, of no named sequence, not transposed.
fn recurrent(mut reader: Reader<'_>, tokens: usize) -> bool {
    let mut read = || {
        reader.expect("cells", 1)?;
        let position = reader.signed("position")?;
        reader.expect("sequences of a cell", 0)?;
        reader.expect("whether states are transposed", 0)?;
        Ok::<_, super::Error>(is_position(position, tokens))
    };
    read().unwrap_or(false)
}
