//! The namespace directory: digests with the description that made them, so that tools can say
//! which model a block belongs to. Informative: a namespace that finds no room is served alike.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::{Sealed, Text, layout};
use crate::key::NamespaceId;

/// Bytes of an entry.
pub const LEN: usize = size_of::<Row>();
/// Entries of the directory.
pub const ENTRIES: u64 = (layout::TABLE - layout::DIRECTORY) / LEN as u64;

/// An entry as it stands on the medium.
type Row = Sealed<Body>;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Body {
    namespace: NamespaceId,
    description: Text<488>,
}

/// Encodes one entry; a long description is cut.
#[must_use]
pub fn encode(namespace: NamespaceId, description: &str) -> [u8; LEN] {
    let description = Text::new(description);
    let body = Body {
        namespace,
        description,
    };
    transmute!(Row::new(body, 0))
}

/// Decodes one entry; `None` when it is unused or does not verify.
#[must_use]
pub fn decode(entry: &[u8; LEN]) -> Option<(NamespaceId, String)> {
    let row: &Row = transmute_ref!(entry);
    let body = row.verified(0)?;
    Some((body.namespace, (&body.description).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_page_says() {
        crate::format::assert_documented!(
            "## Namespace directory",
            Body { namespace, description } unused {  }
        );
    }
}
