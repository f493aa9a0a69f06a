//! The namespace directory: digests of namespaces with the descriptions from which they were
//! computed.
//!
//! Tools use it to show the model of a block. It is informative: a namespace without an entry is
//! served in the same way.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::{Sealed, Text, layout};
use crate::key::NamespaceId;

/// Size of an entry in bytes.
pub const LEN: usize = size_of::<Row>();
/// Number of entries in the directory.
pub const ENTRIES: u64 = (layout::TABLE - layout::DIRECTORY) / LEN as u64;

/// An entry as it stands on the medium.
type Row = Sealed<Body>;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Body {
    namespace: NamespaceId,
    description: Text<488>,
}

/// Encodes one entry; a long description is truncated.
#[must_use]
pub fn encode(namespace: NamespaceId, description: &str) -> [u8; LEN] {
    let description = Text::new(description);
    let body = Body {
        namespace,
        description,
    };
    transmute!(Row::new(body, 0))
}

/// Decodes one entry. Returns `None` if it is unused or fails verification.
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
