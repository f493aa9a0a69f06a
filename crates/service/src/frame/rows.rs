//! What frames hold many of: rows of a fixed width, one behind the other. They are read where they
//! lie, and a count of them cannot claim more than the frame has bytes.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use kvdepot_arena::format::record::Packed;
use kvdepot_arena::verdict::Moved;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Token};
use kvdepot_media::Checksum;
use kvdepot_store::{Outcome, Outside};
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::frame::refusal::broken;

/// Most keys of one call: those of a prompt of millions of tokens. It bounds what the owner does,
/// and keeps in memory, for one call of one client.
pub(crate) const KEYS_MAX: usize = 1 << 20;

/// Rows as they stand in a frame, or are to stand there.
#[derive(Clone, Debug)]
pub(crate) struct Rows<'a, T: Clone>(Cow<'a, [T]>);

impl<T: Clone> Deref for Rows<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<'a, T: Clone> From<&'a [T]> for Rows<'a, T> {
    fn from(rows: &'a [T]) -> Rows<'a, T> {
        Rows(Cow::Borrowed(rows))
    }
}

impl<T: Clone> FromIterator<T> for Rows<'_, T> {
    fn from_iter<I: IntoIterator<Item = T>>(rows: I) -> Self {
        Rows(Cow::Owned(rows.into_iter().collect()))
    }
}

impl<T: Clone + IntoBytes + Immutable> Serialize for Rows<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0.as_bytes())
    }
}

impl<'de: 'a, 'a, T> Deserialize<'de> for Rows<'a, T>
where
    T: Clone + FromBytes + KnownLayout + Immutable + Unaligned + 'a,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(Reader(PhantomData))
    }
}

struct Reader<'a, T>(PhantomData<&'a T>);

impl<'de: 'a, 'a, T> Visitor<'de> for Reader<'a, T>
where
    T: Clone + FromBytes + KnownLayout + Immutable + Unaligned + 'a,
{
    type Value = Rows<'a, T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows of {} bytes", size_of::<T>())
    }

    fn visit_borrowed_bytes<E: serde::de::Error>(self, bytes: &'de [u8]) -> Result<Self::Value, E> {
        let rows = <[T]>::ref_from_bytes(bytes);
        let rows = rows.map_err(|_| E::invalid_length(bytes.len(), &self))?;
        Ok(Rows(Cow::Borrowed(rows)))
    }
}

/// The keys of a call.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Keys<'a>(#[serde(borrow)] Rows<'a, Key>);

impl<'a> From<&'a [Key]> for Keys<'a> {
    fn from(keys: &'a [Key]) -> Keys<'a> {
        Keys(keys.into())
    }
}

impl Keys<'_> {
    /// The keys, where they are no more than a call may have.
    pub(crate) fn allowed(&self) -> Result<&[Key], Error> {
        if self.0.len() > KEYS_MAX {
            let allowed = format!("at most {KEYS_MAX} keys per call to a served depot");
            return Err(Error::input("keys", self.0.len(), allowed));
        }
        Ok(&self.0)
    }
}

/// Whether, or in which tier, for each key of a call: 0 for no.
pub(crate) type Marks<'a> = Rows<'a, u8>;

/// A tier as it is marked, counted from 1.
pub(crate) fn mark(tier: Option<usize>) -> u8 {
    tier.map_or(0, |tier| tier as u8 + 1)
}

/// The tier of a mark.
pub(crate) fn marked(mark: u8) -> Option<usize> {
    usize::from(mark).checked_sub(1)
}

/// Lists that follow each other, by their lengths.
pub(crate) fn split<'a, T>(
    lens: &'a [U32],
    mut all: &'a [T],
) -> Result<impl Iterator<Item = &'a [T]>, Error> {
    let whole: u64 = lens.iter().map(|len| u64::from(len.get())).sum();
    if whole != all.len() as u64 {
        return Err(broken(format!(
            "{} entries, but {whole} were announced",
            all.len()
        )));
    }
    Ok(lens.iter().map(move |len| {
        let (now, rest) = all.split_at(len.get() as usize);
        all = rest;
        now
    }))
}

/// A pin or reservation as a client names it: by tier and token.
pub(crate) type Name = (usize, Token);

/// A [`Name`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct NameRow {
    tier: u8,
    token: TokenRow,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct TokenRow {
    device: U32,
    slot: U32,
    sequence: U64,
}

impl From<Token> for TokenRow {
    fn from(token: Token) -> TokenRow {
        TokenRow {
            device: token.device.into(),
            slot: token.slot.into(),
            sequence: token.sequence.into(),
        }
    }
}

impl From<TokenRow> for Token {
    fn from(row: TokenRow) -> Token {
        Token {
            device: row.device.get(),
            slot: row.slot.get(),
            sequence: row.sequence.get(),
        }
    }
}

impl From<Name> for NameRow {
    fn from((tier, token): Name) -> NameRow {
        NameRow {
            tier: tier as u8,
            token: token.into(),
        }
    }
}

impl From<NameRow> for Name {
    fn from(row: NameRow) -> Name {
        (row.tier.into(), row.token.into())
    }
}

/// All of a place but its identity.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct PlaceRow {
    token: TokenRow,
    len: U64,
    checksum: [u8; 16],
    parts: U16,
    extents: [U64; 4],
}

impl From<&Place> for PlaceRow {
    fn from(place: &Place) -> PlaceRow {
        PlaceRow {
            token: place.token.into(),
            len: place.len.into(),
            checksum: place.checksum.0,
            parts: place.parts.into(),
            extents: place.extents.0.map(U64::new),
        }
    }
}

impl PlaceRow {
    pub(crate) fn token(&self) -> Token {
        self.token.into()
    }

    /// The place of this identity, in a file or in extents.
    pub(crate) fn of(&self, identity: Identity, file: Option<&Outside>) -> Result<Place, Error> {
        let extents = Packed(self.extents.map(U64::get));
        let (len, parts) = (self.len.get(), self.parts.get());
        // Lengths that do not fit would be copied beyond their extents.
        let fits = match file {
            Some(file) => file.offset.checked_add(len).is_some(),
            None => len <= extents.room(),
        };
        if !fits || parts == 0 {
            return Err(broken("a placement with inconsistent lengths"));
        }
        Ok(Place {
            token: self.token.into(),
            identity,
            extents,
            len,
            parts,
            checksum: Checksum(self.checksum),
            stamp: 0,
        })
    }
}

/// Those places of a frame that are files, by their position, rising.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(crate) struct Files<'a>(#[serde(borrow)] Vec<FileRow<'a>>);

/// Where a place lies that is in no medium: the name of a file has no links and leads nowhere else.
#[derive(Debug, Serialize, Deserialize)]
struct FileRow<'a> {
    at: u32,
    number: u64,
    offset: u64,
    name: Cow<'a, str>,
}

impl Files<'_> {
    /// Of those places that have one.
    pub(crate) fn of(files: impl IntoIterator<Item = Option<Outside>>) -> Files<'static> {
        let each = files.into_iter().enumerate();
        let row = |(at, file): (usize, Option<Outside>)| {
            let Outside {
                name,
                number,
                offset,
            } = file?;
            Some(FileRow {
                at: at as u32,
                number,
                offset,
                name: name.into(),
            })
        };
        Files(each.filter_map(row).collect())
    }

    /// The file of each place, in turn.
    pub(crate) fn each(&self) -> impl Iterator<Item = Option<Outside>> {
        let mut rows = self.0.iter().peekable();
        (0..).map(move |at: u32| {
            let row = rows.next_if(|row| row.at == at)?;
            Some(Outside {
                name: row.name.clone().into_owned(),
                number: row.number,
                offset: row.offset,
            })
        })
    }
}

/// A block to be moved: its index in the task's call, and where it lies.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct MoveRow {
    pub(crate) index: U32,
    pub(crate) place: PlaceRow,
}

/// What became of a move: 1 done, with its checksum, 2 corrupt, 0 failed.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct MovedRow {
    kind: u8,
    checksum: [u8; 16],
}

impl From<&Moved> for MovedRow {
    fn from(moved: &Moved) -> MovedRow {
        let (kind, checksum) = match moved {
            Moved::Done(checksum) => (1, *checksum),
            Moved::Corrupt => (2, Checksum::default()),
            Moved::Failed | Moved::Abandoned => (0, Checksum::default()),
        };
        MovedRow {
            kind,
            checksum: checksum.0,
        }
    }
}

impl From<&MovedRow> for Moved {
    fn from(row: &MovedRow) -> Moved {
        match row.kind {
            1 => Moved::Done(Checksum(row.checksum)),
            2 => Moved::Corrupt,
            _ => Moved::Failed,
        }
    }
}

/// A key of a task that has its outcome.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct SettledRow {
    index: U32,
    outcome: u8,
}

/// The outcomes as they travel: their order is the protocol's.
const OUTCOMES: [Outcome; 9] = [
    Outcome::Pending,
    Outcome::Done,
    Outcome::Miss,
    Outcome::Corrupt,
    Outcome::Length,
    Outcome::Full,
    Outcome::Dropped,
    Outcome::Closed,
    Outcome::Declined,
];

impl From<&(usize, Outcome)> for SettledRow {
    fn from((index, outcome): &(usize, Outcome)) -> SettledRow {
        let code = OUTCOMES.iter().position(|known| known == outcome);
        SettledRow {
            index: (*index as u32).into(),
            outcome: code.unwrap_or_default() as u8,
        }
    }
}

impl From<&SettledRow> for (usize, Outcome) {
    fn from(row: &SettledRow) -> (usize, Outcome) {
        let outcome = OUTCOMES.get(usize::from(row.outcome)).copied();
        (row.index.get() as usize, outcome.unwrap_or(Outcome::Miss))
    }
}

/// A block of a listing.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct BlockRow {
    pub(crate) key: Key,
    pub(crate) bytes: U64,
}

/// A block that left.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct GoneRow {
    namespace: [u8; 16],
    block: BlockRow,
}

impl From<&(Identity, u64)> for GoneRow {
    fn from((identity, bytes): &(Identity, u64)) -> GoneRow {
        GoneRow {
            namespace: identity.namespace.0,
            block: BlockRow {
                key: identity.key,
                bytes: (*bytes).into(),
            },
        }
    }
}

impl From<&GoneRow> for (Identity, u64) {
    fn from(row: &GoneRow) -> (Identity, u64) {
        let identity = Identity {
            namespace: NamespaceId(row.namespace),
            key: row.block.key,
        };
        (identity, row.block.bytes.get())
    }
}

/// A value as JSON, where later releases may add to it within a version.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<T: Serialize> Serialize for Json<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&serde_json::to_string(&self.0).unwrap_or_default())
    }
}

impl<'de, T: serde::de::DeserializeOwned> Deserialize<'de> for Json<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&str>::deserialize(deserializer)?;
        serde_json::from_str(text)
            .map(Json)
            .map_err(D::Error::custom)
    }
}
