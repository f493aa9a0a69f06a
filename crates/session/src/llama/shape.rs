//! What a model's states have in common, whatever their tokens.

use std::fmt::{self, Display, Formatter};

use super::error::{Error, refuse};
use super::reader::Reader;
use super::rest;

/// Element types that ggml has, with room for those to come. A larger number is torn data.
const KINDS: i32 = 256;
/// Longer rows than any model has: 16 MiB.
const ROW_MAX: u64 = 16 << 20;
/// More layers than any model has.
const LAYERS_MAX: u32 = 4096;

/// Bytes in front of the rows of a table: type and size, or type, element and width.
pub(super) const TABLE_HEAD: usize = 12;

/// Shape of the rows of the keys, or the values, of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Table {
    /// Element type, as a number of ggml.
    pub kind: i32,
    /// Number of contiguous bytes per token: a row, or one element if the table is transposed.
    pub unit: usize,
    /// Number of these units per token: 1, or the number of elements per row if the table is
    /// transposed.
    pub units: usize,
}

/// Shape of a model's layers, which all states of one context share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub(super) transposed: bool,
    /// Of all layers.
    pub(super) keys: Vec<Table>,
    /// Of all layers, or none.
    pub(super) values: Vec<Table>,
}

impl Table {
    /// Returns the number of bytes per token.
    #[must_use]
    pub fn row(&self) -> usize {
        self.unit.saturating_mul(self.units)
    }

    fn read(reader: &mut Reader<'_>, transposed: bool) -> Result<Table, Error> {
        let kind = reader.signed("element type")?;
        if !(0..KINDS).contains(&kind) {
            return refuse("element type", kind, format_args!("0 to {}", KINDS - 1));
        }
        let (unit, units) = match transposed {
            false => (reader.long("bytes of a row")?, 1),
            true => {
                let unit = reader.number("bytes of an element")?;
                (u64::from(unit), reader.number("elements of a row")?)
            }
        };
        let row = unit.saturating_mul(u64::from(units));
        if !(1..=ROW_MAX).contains(&row) {
            return refuse("bytes of a row", row, format_args!("1 to {ROW_MAX}"));
        }
        // Both are at most `ROW_MAX` now.
        Ok(Table {
            kind,
            unit: unit as usize,
            units: units as usize,
        })
    }

    /// What stands in front of its rows.
    pub(super) fn head(&self, transposed: bool) -> [u8; TABLE_HEAD] {
        let mut head = [0; TABLE_HEAD];
        let (kind, sizes) = head.split_at_mut(4);
        kind.copy_from_slice(&self.kind.to_le_bytes());
        let both = match transposed {
            false => self.unit as u64,
            // The element comes first: it is the lower half.
            true => self.unit as u64 | (self.units as u64) << 32,
        };
        sizes.copy_from_slice(&both.to_le_bytes());
        head
    }
}

impl Shape {
    /// Tables in the state's order, and whether each is transposed.
    pub(super) fn tables(&self) -> impl Iterator<Item = (&Table, bool)> {
        let keys = self.keys.iter().map(|table| (table, false));
        keys.chain(self.values.iter().map(|table| (table, self.transposed)))
    }

    /// Returns the number of bytes per token in all tables: the size of a piece with one token.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        let rows = self.tables().map(|(table, _)| table.row());
        rows.fold(0, usize::saturating_add)
    }

    /// Returns the number of layers with attention.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.keys.len()
    }

    /// Returns true if values are stored transposed.
    #[must_use]
    pub fn transposed(&self) -> bool {
        self.transposed
    }

    /// Reads the tables of so many tokens, and goes over their rows, to the rest.
    pub(super) fn read(reader: &mut Reader<'_>, tokens: usize) -> Result<Shape, Error> {
        let transposed = match reader.number("flag for transposed values")? {
            0 => false,
            1 => true,
            other => return refuse("flag for transposed values", other, "0 or 1"),
        };
        let layers = reader.number("layers")?;
        if !(1..=LAYERS_MAX).contains(&layers) {
            return refuse("layers", layers, format_args!("1 to {LAYERS_MAX}"));
        }
        let mut shape = Shape {
            transposed,
            keys: tables(reader, layers, tokens, false)?,
            values: Vec::new(),
        };
        // Latent attention has no values, and says so nowhere: what stands behind tells.
        let mut ahead = *reader;
        match tables(&mut ahead, layers, tokens, transposed) {
            Ok(values) if rest::begins(ahead, tokens) => {
                shape.values = values;
                *reader = ahead;
            }
            _ if rest::begins(*reader, tokens) => {}
            Err(error) => return Err(error),
            Ok(_) => {
                let value = format_args!("{} bytes of unknown content", ahead.left());
                return refuse("data after the rows", value, rest::ALLOWED);
            }
        }
        Ok(shape)
    }
}

fn tables(
    reader: &mut Reader<'_>,
    layers: u32,
    tokens: usize,
    transposed: bool,
) -> Result<Vec<Table>, Error> {
    let mut tables = Vec::new();
    for _ in 0..layers {
        let table = Table::read(reader, transposed)?;
        reader.skip("bytes of a layer's rows", table.row().checked_mul(tokens))?;
        tables.push(table);
    }
    Ok(tables)
}

/// One line that differs where the rows do: for the key of a space.
impl Display for Shape {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        write!(to, "v_trans={}", u8::from(self.transposed))?;
        for (name, tables) in [("k", &self.keys), ("v", &self.values)] {
            write!(to, " {name}")?;
            for table in tables {
                write!(to, " {}:{}x{}", table.kind, table.unit, table.units)?;
            }
        }
        Ok(())
    }
}
