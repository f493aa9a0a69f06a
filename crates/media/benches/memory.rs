//! Copies with checksums against the best plain copy of the same pieces.
//!
//! `cargo bench -p kvdepot-media --bench memory -- [get|put] [threads] [rounds]`
//!
//! A get copies random blocks of shared memory to places that no cache holds; a put copies random
//! blocks of private memory to prefaulted shared memory. All ways copy the same pieces in every
//! round, one after the other; the figures are medians over the rounds. Building and submitting
//! the batch is part of kvdepot's time.

#![expect(clippy::print_stdout, reason = "a benchmark prints its table")]

use kvdepot_media::{Buffer, Copier, CopierConfig, Mapping, PartId, Plain};
use kvdepot_plan::Span;
use std::error::Error;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const SOURCE: usize = 1 << 30;
const TARGET: usize = 512 << 20;
const BLOCKS: [usize; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let chosen = |at: usize| arguments.get(at).map(String::as_str);
    let rounds = chosen(2).map_or(Ok(31), str::parse)?;
    let all = ["get", "put"];
    for op in all
        .into_iter()
        .filter(|op| chosen(0).is_none_or(|name| name == *op))
    {
        let shared = Mapping::anonymous(
            "kvdepot-bench",
            if op == "get" { SOURCE } else { TARGET } as u64,
        )?;
        shared.populate_write(0, shared.len())?;
        let shared = shared.buffer(0, shared.len())?;
        let private = vec![1; if op == "get" { TARGET } else { SOURCE } + 4096];
        let private = Buffer::from_vec(private);
        let aligned = private.addr().next_multiple_of(4096) - private.addr();
        let private = private.slice(aligned, private.len() - 4096)?;
        let (src, dst) = if op == "get" {
            (shared, private)
        } else {
            (private, shared)
        };
        for threads in [1, 2] {
            if chosen(1).map_or(Ok(threads), str::parse)? == threads {
                table(op, threads, rounds, &src, &dst)?;
            }
        }
    }
    Ok(())
}

fn table(
    op: &str,
    threads: usize,
    rounds: usize,
    src: &Buffer,
    dst: &Buffer,
) -> Result<(), Box<dyn Error>> {
    let mut config = CopierConfig::default();
    config.lanes = threads;
    let copier = Copier::new(config)?;
    let ways = Plain::all();
    print!("{op} {threads}t {:10}", copier.kernel(1 << 20).name());
    ways.iter().for_each(|way| print!(" {:>16}", way.name()));
    println!(" {:>9} {:>6} {:>10}", "kvdepot", "ratio", "ns/block");
    for block in BLOCKS {
        let mut times = vec![Vec::new(); ways.len() + 1];
        for round in 0..rounds {
            for (way, times) in times.iter_mut().enumerate() {
                let seed = (round * 64 + way) as u64;
                let pieces = pieces(block, seed, src.len(), dst.len());
                times.push(match ways.get(way) {
                    Some(plain) => run_plain(*plain, threads, src, dst, &pieces)?,
                    None => run_copier(&copier, src, dst, &pieces)?,
                });
            }
        }
        let bytes = (pieces(block, 0, src.len(), dst.len()).len() * block) as f64;
        let ratio = median_ratio(&times);
        let rates: Vec<f64> = times
            .iter_mut()
            .map(|t| bytes / median(t).as_secs_f64())
            .collect();
        let (ours, plain) = (rates[ways.len()], &rates[..ways.len()]);
        let best = plain.iter().copied().fold(0.0, f64::max);
        print!("{op} {threads}t {:10}", block);
        plain.iter().for_each(|rate| print!(" {:16.1}", rate / 1e9));
        let overhead = (1.0 / ours - 1.0 / best) * block as f64 * 1e9;
        println!(" {:9.1} {:6.2} {overhead:10.0}", ours / 1e9, ratio);
    }
    Ok(())
}

/// The best plain way's time over kvdepot's, as the median over the rounds: a round's times were
/// taken one after the other, so what slows the machine down slows all of them. The best way is
/// the one with the best median, or else noise would choose the luckiest of each round.
fn median_ratio(times: &[Vec<Duration>]) -> f64 {
    let Some((ours, plain)) = times.split_last() else {
        return 0.0;
    };
    let best = plain.iter().min_by_key(|times| median(&mut times.to_vec()));
    let mut ratios: Vec<f64> = best
        .into_iter()
        .flatten()
        .zip(ours)
        .map(|(plain, ours)| plain.as_secs_f64() / ours.as_secs_f64())
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(0.0)
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Blocks at random places of the source, to targets that were not used for a long time.
fn pieces(block: usize, seed: u64, src: usize, dst: usize) -> Vec<Span> {
    let count = (64 << 20) / block;
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let start = (seed as usize * 7 * (64 << 20) / 5) % dst / block;
    (0..count)
        .map(|number| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let from = (state % (src / block) as u64) * block as u64;
            let to = (start + number) % (dst / block) * block;
            Span::new(from, to as u64, block as u64)
        })
        .collect()
}

/// From the start of the first thread to the end of the last.
fn run_plain(
    way: Plain,
    threads: usize,
    src: &Buffer,
    dst: &Buffer,
    pieces: &[Span],
) -> Result<Duration, Box<dyn Error>> {
    let barrier = Barrier::new(threads);
    let share = pieces.len().div_ceil(threads);
    let times = std::thread::scope(|scope| {
        let run = |pieces| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                way.copy(src, dst, pieces).map(|()| (start, Instant::now()))
            })
        };
        let threads: Vec<_> = pieces.chunks(share).map(run).collect();
        threads
            .into_iter()
            .map(|thread| thread.join())
            .collect::<Vec<_>>()
    });
    let mut range: Option<(Instant, Instant)> = None;
    for time in times {
        let (start, end) = time.map_err(|_| "a thread panicked")??;
        let (first, last) = range.unwrap_or((start, end));
        range = Some((first.min(start), last.max(end)));
    }
    let (first, last) = range.ok_or("no pieces")?;
    Ok(last - first)
}

fn run_copier(
    copier: &Copier,
    src: &Buffer,
    dst: &Buffer,
    pieces: &[Span],
) -> Result<Duration, Box<dyn Error>> {
    let id = PartId::whole([1; 16], [2; 32]);
    let blocks: Vec<_> = pieces
        .iter()
        .map(|piece| {
            let from = src.slice(piece.src as usize, piece.len as usize)?;
            let to = dst.slice(piece.dst as usize, piece.len as usize)?;
            Ok(([from], [to]))
        })
        .collect::<kvdepot_media::Result<_>>()?;
    let start = Instant::now();
    let mut batch = copier.batch();
    for (from, to) in &blocks {
        batch.part(&id, from, to, None, 0)?;
    }
    let ticket = copier.submit(batch, |done| assert!(done.is_clean()));
    if !ticket.wait(None) {
        return Err("the batch did not end".into());
    }
    Ok(start.elapsed())
}
