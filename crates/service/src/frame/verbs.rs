//! Each frame, declared once: its number, its name, what it carries, and what answers it. The
//! types, how they are written and read, and the table in `docs/protocol.md` follow from that.

use kvdepot_arena::{Class, NamespaceId, Opening};
use kvdepot_store::{DeviceStats, Drained};
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U32, U64};

use crate::frame::refusal::Refusal;
use crate::frame::rows::{
    BlockRow, Files, GoneRow, Json, Keys, Marks, MoveRow, MovedRow, NameRow, PlaceRow, Rows,
    SettledRow,
};
#[cfg(any(test, fuzzing))]
use crate::frame::{Frame, Out};

/// What a frame carries.
pub(crate) trait Says: Serialize {
    const VERB: Verb;
}

/// What is answered, by a frame of the same verb and number.
pub(crate) trait Asks: Says {
    type Answer<'b>: Serialize + Deserialize<'b>;
}

macro_rules! frames {
    (@says $name:ident <'a> { $($field:ident: $type:ty),* } $(=> $answer:ty)?) => {
        #[derive(Debug, Serialize, Deserialize)]
        #[serde(bound(deserialize = "'de: 'a"))]
        pub(crate) struct $name<'a> {
            $(pub(crate) $field: $type,)*
        }

        impl Says for $name<'_> {
            const VERB: Verb = Verb::$name;
        }

        $(impl Asks for $name<'_> {
            type Answer<'b> = $answer;
        })?
    };
    (@says $name:ident { $($field:ident: $type:ty),* } $(=> $answer:ty)?) => {
        #[derive(Debug, Serialize, Deserialize)]
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)*
        }

        impl Says for $name {
            const VERB: Verb = Verb::$name;
        }

        $(impl Asks for $name {
            type Answer<'b> = $answer;
        })?
    };
    (@again $frame:ident, $said:ty $(=> $answer:ty)?) => {{
        let said = $frame.read::<$said>().map(|said| Out::new(&said));
        let all = said.into_iter();
        $(
            let answer = $frame.read::<$answer>();
            let answer = answer.map(|answer| Out::answer::<$said>($frame.number, &answer));
            let all = all.chain(answer);
        )?
        all.collect()
    }};
    ($(
        #[doc = $doc:tt]
        $number:literal $name:ident $(<$life:lifetime>)? { $($fields:tt)* } $(=> $answer:ty)?;
    )*) => {
        /// What a frame asks or tells.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub(crate) enum Verb {
            $(#[doc = $doc] $name = $number,)*
        }

        impl Verb {
            pub(crate) fn of(number: u16) -> Option<Verb> {
                match number {
                    $($number => Some(Verb::$name),)*
                    _ => None,
                }
            }
        }

        $(frames!(@says $name $(<$life>)? { $($fields)* } $(=> $answer)?);)*

        /// Reads a frame as what it says that it is, and as an answer, and writes it again.
        #[cfg(any(test, fuzzing))]
        pub(crate) fn again<'a: 'b, 'b>(frame: &'a Frame) -> Vec<Out> {
            match frame.verb {
                $(Verb::$name => frames!(@again frame, $name $(<$life>)? $(=> $answer)?),)*
            }
        }

        /// Number, name, doc, fields and answer of each.
        #[cfg(test)]
        const DECLARED: &[[&str; 5]] = &[$([
            stringify!($number),
            stringify!($name),
            $doc,
            stringify!($($fields)*),
            concat!($(stringify!($answer))?),
        ],)*];
    };
}

// Calls, then tasks from the client, calls that may take long, and tasks from the owner.
frames! {
    /// Describes a namespace, and its salt, which selects its MAC key.
    1 Namespace<'a> {
        namespace: NamespaceId, description: &'a str, salted: bool, salt: &'a str
    } => ();
    /// Returns which keys have blocks.
    2 Contains<'a> { namespace: NamespaceId, keys: Keys<'a> } => Marks<'b>;
    /// Returns the number of consecutive keys with blocks, from the first key.
    3 Prefix<'a> { namespace: NamespaceId, keys: Keys<'a> } => u64;
    /// Returns the uppermost tier that has each key.
    4 Nearest<'a> { namespace: NamespaceId, keys: Keys<'a> } => Marks<'b>;
    /// Pins blocks; with `prefix` only up to the first miss.
    5 Pin<'a> { namespace: NamespaceId, prefix: bool, keys: Keys<'a> } => Grant<'b>;
    /// Releases pins; `served` if their bytes were used.
    6 Unpin<'a> { served: bool, names: Rows<'a, NameRow> };
    /// Removes pinned corrupt blocks, and returns their number.
    7 Discard<'a> { names: Rows<'a, NameRow> } => u64;
    /// Reserves space for blocks; parts per block, and the length of each part.
    8 Reserve<'a> {
        namespace: NamespaceId, after: Option<[u8; 32]>, no_room: u8, keys: Keys<'a>,
        parts: Rows<'a, U32>, lens: Rows<'a, U64>
    } => Grant<'b>;
    /// Publishes reservations; parts per block, and their checksums. Returns which are published.
    9 Commit<'a> {
        names: Rows<'a, NameRow>, parts: Rows<'a, U32>, checksums: Rows<'a, [u8; 16]>
    } => Marks<'b>;
    /// Releases reservations.
    10 Abort<'a> { names: Rows<'a, NameRow> };
    /// Removes blocks, and returns their number.
    11 Remove<'a> { namespace: NamespaceId, keys: Keys<'a> } => u64;
    /// Removes all blocks of a namespace, and returns their number.
    12 Clear { namespace: NamespaceId } => u64;
    /// Returns the statistics.
    14 Stats {} => Json<kvdepot_store::Stats>;
    /// Waits `millis` milliseconds for the write-back queue, and returns whether it is empty.
    15 Drain { millis: u64 } => bool;
    /// Returns the description of the depot.
    16 About {} => Json<kvdepot_store::About>;
    /// Returns a page of namespaces after a namespace.
    17 Namespaces { after: Option<NamespaceId> } => Vec<Usage>;
    /// Returns a page of a namespace's blocks from a cursor.
    18 Blocks { namespace: NamespaceId, from: Option<[u8; 20]>, limit: u64 } => Page<'b>;
    /// Returns the blocks that were removed since the last such request.
    19 Gone { limit: u64 } => Left<'b>;
    /// Adds blocks to the client's group with this number; a group is evicted as a whole.
    20 Group<'a> { number: u64, namespace: NamespaceId, class: Class, keys: Keys<'a> } => ();
    /// Deletes a group.
    21 Dissolve { number: u64 };
    /// Returns each block's size plus 1 in the acknowledging tier; 0 without a block.
    22 Acknowledged<'a> { namespace: NamespaceId, keys: Keys<'a> } => Rows<'b, U64>;

    /// Stores blocks of these lengths after the block `after`, as a task.
    32 Put<'a> {
        namespace: NamespaceId, after: Option<[u8; 32]>, keys: Keys<'a>, lens: Rows<'a, U64>
    };
    /// Loads blocks of these lengths, as a task.
    33 Get<'a> { namespace: NamespaceId, prefix: bool, keys: Keys<'a>, lens: Rows<'a, U64> };
    /// Reports the outcomes of the blocks of the `Move` with this number.
    34 Moved<'a> { moved: Rows<'a, MovedRow> };
    /// Disconnects: the client's copy threads have stopped; its pins and reservations end.
    35 Goodbye {} => ();
    /// Promotes blocks into the first tier, as a task.
    41 Prefetch<'a> { namespace: NamespaceId, keys: Keys<'a> };
    /// Reports that the copy threads of the previous connections have stopped.
    42 Quiet {};
    /// Looks up keys, as a task.
    44 Lookup<'a> { namespace: NamespaceId, keys: Keys<'a> };
    /// Heartbeat; the response is immediate.
    43 Ping {} => ();

    /// Returns the devices.
    36 Devices {} => Json<Vec<DeviceStats>>;
    /// Adds a device.
    37 AddDevice<'a> { path: &'a str, capacity: Option<u64> } => Json<Opening>;
    /// Drains a device: moves its blocks to other devices, or evicts them.
    38 DrainDevice<'a> { path: &'a str, to_others: bool, patience_ms: u64 } => Json<Drained>;
    /// Removes a device.
    39 RemoveDevice<'a> { path: &'a str, force: bool, patience_ms: u64 } => ();
    /// Enlarges a device.
    40 GrowDevice<'a> { path: &'a str, capacity: u64 } => ();

    /// Copy these blocks of a task; some are in files.
    48 Move<'a> { task: u64, blocks: Rows<'a, MoveRow>, files: Files<'a> };
    /// Progress of the task with this number: outcomes of keys, and the number released.
    49 Step<'a> { released: u32, settled: Rows<'a, SettledRow> };
    /// The task with this number was rejected.
    50 Refused { error: Refusal };
    /// The server is closing and accepts no new tasks.
    51 Closing {};
    /// The server has released the medium with this number.
    52 Removed {};
}

impl Verb {
    /// Whether it is a call of the connection of the tasks.
    pub(crate) fn is_slow(self) -> bool {
        (Verb::Devices as u16..=Verb::GrowDevice as u16).contains(&(self as u16))
    }
}

/// The tier of each key, and where those lie that have one, some of them in files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(crate) struct Grant<'a> {
    pub(crate) tiers: Marks<'a>,
    pub(crate) places: Rows<'a, PlaceRow>,
    #[serde(borrow)]
    pub(crate) files: Files<'a>,
}

/// A namespace of a listing.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) namespace: NamespaceId,
    pub(crate) description: Option<String>,
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

/// A page of a listing, and where the next one begins.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(crate) struct Page<'a> {
    pub(crate) next: Option<[u8; 20]>,
    pub(crate) blocks: Rows<'a, BlockRow>,
}

/// Blocks that left, and whether more did than were noted.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(crate) struct Left<'a> {
    pub(crate) overflowed: bool,
    pub(crate) blocks: Rows<'a, GoneRow>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_about_the_protocol_names_each_frame_as_it_is_declared() {
        let plain = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let rows = DECLARED.iter().map(|[number, name, doc, fields, answer]| {
            let fields = plain(fields.trim_matches(['{', '}', ' ', '\n']));
            let code = |text: &str| match text {
                "" => String::new(),
                text => format!("`{text}`"),
            };
            let (fields, answer) = (code(&fields), code(&plain(answer)));
            format!(
                "| {number} | {name} | {} | {fields} | {answer} |",
                doc.trim()
            )
        });
        let table = rows.collect::<Vec<_>>().join("\n");
        let plain = ["<'a>", "<'b>", "'a ", "'a, ", "'b, ", "kvdepot_store::"];
        let table = plain
            .iter()
            .fold(table, |table, name| table.replace(name, ""));
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol.md");
        let page = std::fs::read_to_string(page).unwrap();
        assert!(
            page.contains(&table),
            "docs/protocol.md should have\n\n{table}\n"
        );
    }
}
