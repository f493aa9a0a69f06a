//! What a namespace is, for people: a small text beside the blocks of a tier that others share.

/// The folder that has them, by the namespaces' digests.
pub(super) const FOLDER: &str = "namespaces";

/// The first line; the description follows.
const KIND: &str = "kvdepot namespace 1\n";

/// Most bytes of one, and most of them: they are in no capacity.
pub(super) const LEN_MAX: usize = 4096;
pub(super) const MOST: usize = 4096;

/// As it is written, cut where it is too long.
pub(super) fn encode(description: &str) -> String {
    let room = LEN_MAX - KIND.len() - 1;
    let ends = (0..=room).rev();
    let mut kept = ends.filter_map(|end| description.get(..end.min(description.len())));
    format!("{KIND}{}\n", kept.next().unwrap_or_default())
}

pub(super) fn decode(text: &str) -> Option<String> {
    let description = text.strip_prefix(KIND)?;
    let description = description.strip_suffix('\n').unwrap_or(description);
    Some(description.to_owned())
}
