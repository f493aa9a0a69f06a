//! The options of `bench transfer`.

use std::net::Ipv4Addr;

use super::values::{bytes, count};

/// Options of `transfer`.
#[derive(clap::Args)]
pub(crate) struct Transfer {
    /// Quick run: three batches, three message sizes and 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Metric to measure; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "batch_over_tcp", "over_memcpy", "batch_over_one_by_one", "one_by_one_over_pingpong",
        "first_byte_on_over_off", "total_on_over_off", "messages_per_s",
        "read_rtt_over_pingpong", "read_rtt_us", "submit_ns", "cpu_s_per_gb", "register_s",
        "resolve_ms",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Network between the two processes: `loopback`, or `veth` (two network namespaces; needs
    /// root); repeatable [default: loopback].
    #[arg(long = "where", value_name = "WHERE", value_parser = ["loopback", "veth"])]
    pub(crate) places: Vec<String>,
    /// Operation to measure; repeatable [default: both operations].
    #[arg(long = "op", value_name = "OP", value_parser = ["read", "write"])]
    pub(crate) ops: Vec<String>,
    /// Size of a batch in megabytes (1 to 16384), and number of requests in the batch, such as
    /// 200/5000; repeatable. A request has at least 1000 bytes [default: the batches of the
    /// published table, and 256/1].
    #[arg(long = "batch", value_name = "MB/CHUNKS", value_parser = batch)]
    pub(crate) batches: Vec<(u64, usize)>,
    /// Message size; repeatable [default: several sizes from 4KiB to 4MiB].
    #[arg(long = "message", value_name = "SIZE", value_parser = bytes)]
    pub(crate) messages: Vec<u64>,
    /// Number of measured rounds, at least 1 [default: 5].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Number of connections, at least 1 [default: the transfer engine's default].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) streams: Option<usize>,
    /// Maximum size of a slice (unit of transfer on a connection) [default: the transfer engine's
    /// default].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) slice_size: Option<u64>,
    /// Maximum number of slices (units of transfer) in flight per connection, at least 1 [default:
    /// the transfer engine's default].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) window: Option<usize>,
    /// Internal: serve this number of bytes as the target process.
    #[arg(long, hide = true)]
    pub(crate) child: Option<u64>,
    /// Internal: address of the target process.
    #[arg(long, hide = true)]
    pub(crate) listen: Option<Ipv4Addr>,
    /// Internal: run the batches that standard input describes (`make bench-transfer`).
    #[arg(long, hide = true)]
    pub(crate) drive: Option<u64>,
}

/// `200/5000`: megabytes, and how many pieces.
fn batch(text: &str) -> Result<(u64, usize), String> {
    let expected = || String::from("expected MEGABYTES/PIECES, for example 256/1000");
    let (megabytes, chunks) = text.split_once('/').ok_or_else(expected)?;
    let megabytes = megabytes.parse::<u64>().map_err(|_| expected())?;
    let chunks = chunks.parse::<usize>().map_err(|_| expected())?;
    let fits = (1..=16_384).contains(&megabytes) && (1..=1_000_000).contains(&chunks);
    match fits && chunks as u64 <= megabytes * 1000 {
        true => Ok((megabytes, chunks)),
        false => Err("expected at most 16384 MB, and pieces of at least 1000 bytes".into()),
    }
}
