//! The thirteen numbers that a payload begins with: what its parts' lengths follow from.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned, transmute_ref};

use super::error::{Error, refuse};

/// Length of a payload's head, in bytes.
pub const SHAPE_LEN: usize = 52;
/// First bytes of a payload.
pub const PAYLOAD_MAGIC: [u8; 4] = *b"DSV4";
/// Payload versions with a known content. Their layout is the same.
pub const PAYLOAD_VERSIONS: [u32; 2] = [1, 2];
/// Largest accepted number of layers, which bounds memory for damaged files. DeepSeek V4 has 43 or
/// 61.
pub const LAYERS_MAX: u32 = 1024;

/// Tokens behind a row of every even layer from 2 up; these layers have an index too.
pub(super) const FINE: u32 = 4;
/// Tokens behind a row of every odd layer from 3 up.
pub(super) const COARSE: u32 = 128;

/// Head of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Version of the payload.
    pub version: u32,
    /// Context size, in tokens.
    pub context: u32,
    /// Number of tokens that the engine prefilled in one step.
    pub prefill: u32,
    /// Capacity of the engine's ring of raw rows, in rows.
    pub ring: u32,
    /// Size of the sliding window, in tokens.
    pub window: u32,
    /// Capacity of a layer for compressed rows, in rows.
    pub rows_max: u32,
    /// Number of tokens of the session.
    pub tokens: u32,
    /// Number of layers of the model.
    pub layers: u32,
    /// Numbers per raw or compressed row.
    pub head_dim: u32,
    /// Numbers per row of the index.
    pub index_dim: u32,
    /// Size of the vocabulary, and of the logits.
    pub vocab: u32,
    /// Number of raw rows of each layer, for the last tokens.
    pub raw_rows: u32,
}

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: U32,
    context: U32,
    prefill: U32,
    ring: U32,
    window: U32,
    rows_max: U32,
    tokens: U32,
    layers: U32,
    head_dim: U32,
    index_dim: U32,
    vocab: U32,
    raw_rows: U32,
}

impl Shape {
    /// Reads the head of a payload.
    ///
    /// # Errors
    /// [`Error::Format`] if the magic or the version is another one, or if a number cannot belong
    /// to a session.
    pub fn decode(bytes: &[u8; SHAPE_LEN]) -> Result<Shape, Error> {
        let raw: &Raw = transmute_ref!(bytes);
        if raw.magic != PAYLOAD_MAGIC {
            let value = format_args!("{:02x?}", raw.magic);
            return refuse("payload's magic", value, "DSV4 (44 53 56 34)");
        }
        let shape = Shape {
            version: raw.version.get(),
            context: raw.context.get(),
            prefill: raw.prefill.get(),
            ring: raw.ring.get(),
            window: raw.window.get(),
            rows_max: raw.rows_max.get(),
            tokens: raw.tokens.get(),
            layers: raw.layers.get(),
            head_dim: raw.head_dim.get(),
            index_dim: raw.index_dim.get(),
            vocab: raw.vocab.get(),
            raw_rows: raw.raw_rows.get(),
        };
        shape.check()?;
        Ok(shape)
    }

    fn check(&self) -> Result<(), Error> {
        if !PAYLOAD_VERSIONS.contains(&self.version) {
            return refuse("payload's version", self.version, "1 or 2");
        }
        if self.layers == 0 || self.layers > LAYERS_MAX {
            return refuse("layers", self.layers, format_args!("1 to {LAYERS_MAX}"));
        }
        let dims = [
            ("row dimension", self.head_dim),
            ("index dimension", self.index_dim),
            ("vocabulary", self.vocab),
        ];
        for (field, dim) in dims {
            if dim == 0 {
                return refuse(field, dim, "1 or more");
            }
        }
        if self.raw_rows > self.tokens {
            let allowed = format_args!(
                "at most {}, the number of tokens of the session",
                self.tokens
            );
            return refuse("raw rows", self.raw_rows, allowed);
        }
        Ok(())
    }

    /// Tokens behind a compressed row of a layer, 0 where it has none. Only the first two layers
    /// differ between models: `leading` is theirs.
    pub(super) fn ratio(layer: u32, leading: u32) -> u32 {
        match layer {
            0 | 1 => leading,
            _ if layer.is_multiple_of(2) => FINE,
            _ => COARSE,
        }
    }

    /// Compressed rows behind the session's tokens: a row is written when its last token is.
    pub(super) fn rows(&self, ratio: u32) -> u32 {
        self.tokens.checked_div(ratio).unwrap_or(0)
    }
}
