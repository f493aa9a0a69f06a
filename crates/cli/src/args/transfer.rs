//! The options of `bench transfer`.

use std::net::Ipv4Addr;

use super::{bytes, count};

/// Options of `transfer`.
#[derive(clap::Args)]
pub(crate) struct Transfer {
    /// Three batches, three sizes of messages, 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "batch_over_tcp", "over_memcpy", "batch_over_one_by_one", "one_by_one_over_pingpong",
        "first_byte_on_over_off", "total_on_over_off", "messages_per_s",
        "read_rtt_over_pingpong", "read_rtt_us", "submit_ns", "cpu_s_per_gb", "register_s",
        "resolve_ms",
    ])]
    pub(crate) metrics: Vec<String>,
    /// loopback, or veth: between two network namespaces, which root makes; loopback unless given.
    #[arg(long = "where", value_name = "WHERE", value_parser = ["loopback", "veth"])]
    pub(crate) places: Vec<String>,
    /// read or write; both unless given.
    #[arg(long = "op", value_name = "OP", value_parser = ["read", "write"])]
    pub(crate) ops: Vec<String>,
    /// Megabytes and pieces of a batch, such as 200/5000; those of the published table, and 256/1,
    /// unless given.
    #[arg(long = "batch", value_name = "MB/CHUNKS", value_parser = batch)]
    pub(crate) batches: Vec<(u64, usize)>,
    /// Bytes of a message; 4KiB to 4MiB unless given.
    #[arg(long = "message", value_name = "SIZE", value_parser = bytes)]
    pub(crate) messages: Vec<u64>,
    /// Rounds that count; 5 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Connections of the engine; its default unless given.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) streams: Option<usize>,
    /// Most bytes of a slice; the engine's default unless given.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) slice_size: Option<u64>,
    /// Unanswered slices of a connection; the engine's default unless given.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) window: Option<usize>,
    /// Has so many bytes for others; what the target's process does.
    #[arg(long, hide = true)]
    pub(crate) child: Option<u64>,
    /// Where the target's process listens; loopback unless given.
    #[arg(long, hide = true)]
    pub(crate) listen: Option<Ipv4Addr>,
    /// Moves batches of at most so many bytes as lines tell it; what `make bench-transfer` runs.
    #[arg(long, hide = true)]
    pub(crate) drive: Option<u64>,
}

/// `200/5000`: megabytes, and how many pieces.
fn batch(text: &str) -> Result<(u64, usize), String> {
    let expected = || String::from("expected megabytes, a slash, and the number of pieces");
    let (megabytes, chunks) = text.split_once('/').ok_or_else(expected)?;
    let megabytes = megabytes.parse::<u64>().map_err(|_| expected())?;
    let chunks = chunks.parse::<usize>().map_err(|_| expected())?;
    let fits = (1..=16_384).contains(&megabytes) && (1..=1_000_000).contains(&chunks);
    match fits && chunks as u64 <= megabytes * 1000 {
        true => Ok((megabytes, chunks)),
        false => Err("expected at most 16384 MB, in pieces of 1000 bytes or more".into()),
    }
}
