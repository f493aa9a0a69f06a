//! Plans against naive twins: what the slices deliver is what a byte-by-byte copy delivers, and
//! every promise about sizes, lanes and submissions holds for random batches.

use kvdepot_plan::{
    Error, Limits, Piece, Planner, Range, Ready, Side, Slice, Span, coalesce, zip, zip_units,
};
use proptest::prelude::*;

/// A gather or scatter list over disjoint ranges of one address space, in any order.
#[derive(Debug, Clone)]
struct Layout {
    ranges: Vec<Range>,
    size: usize,
}

/// Cuts `total` bytes at `cuts`, puts gaps between the pieces, and shuffles by `keys`. A gap of
/// zero leaves neighbours touching, which is what coalescing is for.
fn lay_out(total: u64, cuts: &[u64], gaps: &[u64], keys: &[u8]) -> Layout {
    let mut ends: Vec<u64> = cuts.iter().map(|cut| cut % (total + 1)).collect();
    ends.push(total);
    ends.sort_unstable();
    let mut addr = 0;
    let mut from = 0;
    let mut keyed = Vec::new();
    for (at, end) in ends.into_iter().enumerate() {
        addr += gaps.get(at).copied().unwrap_or(0);
        let len = end - from;
        keyed.push((keys.get(at).copied().unwrap_or(0), Range::new(addr, len)));
        addr += len;
        from = end;
    }
    keyed.sort_by_key(|(key, _)| *key);
    Layout {
        ranges: keyed.into_iter().map(|(_, range)| range).collect(),
        size: addr as usize,
    }
}

/// One side cut into at most ten ranges. Gaps and keys are zero half the time.
fn side(total: u64) -> impl Strategy<Value = Layout> {
    let gap = prop_oneof![Just(0u64), 0u64..20];
    let key = prop_oneof![Just(0u8), 0u8..4];
    (
        prop::collection::vec(any::<u64>(), 0..9),
        prop::collection::vec(gap, 0..10),
        prop::collection::vec(key, 0..10),
    )
        .prop_map(move |(cuts, gaps, keys)| lay_out(total, &cuts, &gaps, &keys))
}

fn movement() -> impl Strategy<Value = (Layout, Layout)> {
    (0u64..300).prop_flat_map(|total| (side(total), side(total)))
}

fn limits() -> impl Strategy<Value = Limits> {
    (1u64..64, 0u64..64, 1usize..6, 1usize..6).prop_map(|(slice_size, tail, lanes, watermark)| {
        Limits {
            slice_size,
            tail_merge: tail.min(slice_size),
            lanes,
            watermark,
        }
    })
}

/// Memory whose bytes are all different from their neighbours and never zero.
fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at % 251 + 1) as u8).collect()
}

/// The twin: one byte after the other, in list order.
fn naive_copy(src: &[Range], dst: &[Range], from: &[u8], to: &mut [u8]) {
    let sources = src
        .iter()
        .flat_map(|range| range.addr..range.addr + range.len);
    let targets = dst
        .iter()
        .flat_map(|range| range.addr..range.addr + range.len);
    for (source, target) in sources.zip(targets) {
        to[target as usize] = from[source as usize];
    }
}

/// Moves spans, and counts how often each destination byte is written.
struct Memory {
    from: Vec<u8>,
    to: Vec<u8>,
    writes: Vec<u32>,
}

impl Memory {
    fn new(src: &Layout, dst: &Layout) -> Memory {
        let (from, to) = (pattern(src.size), vec![0; dst.size]);
        Memory {
            from,
            to,
            writes: vec![0; dst.size],
        }
    }

    fn run(&mut self, span: &Span) {
        for at in 0..span.len {
            self.to[(span.dst + at) as usize] = self.from[(span.src + at) as usize];
            self.writes[(span.dst + at) as usize] += 1;
        }
    }

    fn check(&self, src: &Layout, dst: &Layout) {
        let mut expected = vec![0; dst.size];
        naive_copy(&src.ranges, &dst.ranges, &self.from, &mut expected);
        assert_eq!(self.to, expected, "bytes");
        for (at, &writes) in self.writes.iter().enumerate() {
            let wanted = u32::from(expected[at] != 0);
            assert_eq!(writes, wanted, "destination byte {at}");
        }
    }
}

/// Everything a planner handed out, and how often.
#[derive(Default)]
struct Handed {
    slices: Vec<(Slice, Vec<Piece>)>,
    submissions: usize,
}

impl Handed {
    fn take(&mut self, ready: Ready<'_>, watermark: usize, last: bool) {
        if ready.is_empty() {
            return;
        }
        assert!(
            last || ready.len() >= watermark,
            "{} slices below the watermark",
            ready.len()
        );
        assert_eq!(ready.iter().len(), ready.len());
        self.submissions += 1;
        self.slices
            .extend(ready.iter().map(|(slice, pieces)| (slice, pieces.to_vec())));
    }

    /// Sizes, lanes and submissions. A push that cuts a span can make many slices ready at once,
    /// so submissions are bounded by slices over watermark, and exact when no push does.
    fn check(&self, planner: &Planner, whole_pieces: bool) {
        let limits = planner.limits();
        let slice_max = limits.slice_size + limits.tail_merge;
        let mut lanes = vec![0u64; limits.lanes];
        for (slice, pieces) in &self.slices {
            assert_eq!(slice.bytes, pieces.iter().map(Piece::bytes).sum::<u64>());
            let single_unit = matches!(pieces.as_slice(), [Piece::Unit(_)]);
            assert!(
                slice.bytes <= slice_max || single_unit,
                "slice of {} bytes",
                slice.bytes
            );
            assert!(slice.bytes > 0);
            lanes[slice.lane] += slice.bytes;
        }
        assert_eq!(lanes, planner.lane_bytes());
        let largest = self
            .slices
            .iter()
            .map(|(slice, _)| slice.bytes)
            .max()
            .unwrap_or(0);
        let most = lanes.iter().max().copied().unwrap_or(0);
        let least = lanes.iter().min().copied().unwrap_or(0);
        assert!(
            most - least <= largest,
            "lanes {lanes:?}, largest slice {largest}"
        );
        assert_eq!(self.slices.len(), planner.slice_count());
        assert_eq!(self.submissions, planner.submission_count());
        let counted = self.slices.len().div_ceil(limits.watermark);
        assert!(
            self.submissions <= counted,
            "{} submissions",
            self.submissions
        );
        if whole_pieces {
            assert_eq!(self.submissions, counted);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn zipped_spans_deliver_what_a_naive_copy_delivers((src, dst) in movement()) {
        let mut spans = Vec::new();
        let bytes = zip(&src.ranges, &dst.ranges, &mut spans).unwrap();
        prop_assert_eq!(bytes, spans.iter().map(|span| span.len).sum::<u64>());
        let mut memory = Memory::new(&src, &dst);
        spans.iter().for_each(|span| memory.run(span));
        memory.check(&src, &dst);
        for pair in spans.windows(2) {
            let joined = pair[0].src + pair[0].len == pair[1].src
                && pair[0].dst + pair[0].len == pair[1].dst;
            prop_assert!(!joined, "{:?} should be one span", pair);
        }
    }

    #[test]
    fn sorted_spans_deliver_the_same((src, dst) in movement(), by_src in any::<bool>()) {
        let mut spans = Vec::new();
        zip(&src.ranges, &dst.ranges, &mut spans).unwrap();
        let zipped = spans.len();
        coalesce(&mut spans, if by_src { Side::Src } else { Side::Dst }).unwrap();
        prop_assert!(spans.len() <= zipped);
        let key = |span: &Span| if by_src { span.src } else { span.dst };
        prop_assert!(spans.is_sorted_by_key(key));
        let mut memory = Memory::new(&src, &dst);
        spans.iter().for_each(|span| memory.run(span));
        memory.check(&src, &dst);
    }

    #[test]
    fn slices_of_spans_deliver_every_byte_once((src, dst) in movement(), limits in limits()) {
        let mut spans = Vec::new();
        zip(&src.ranges, &dst.ranges, &mut spans).unwrap();
        let mut planner = Planner::new(limits).unwrap();
        let mut handed = Handed::default();
        for span in &spans {
            handed.take(planner.push_span(3, *span).unwrap(), limits.watermark, false);
        }
        handed.take(planner.finish(), limits.watermark, true);
        handed.check(&planner, false);

        let mut memory = Memory::new(&src, &dst);
        for piece in handed.slices.iter().flat_map(|(_, pieces)| pieces) {
            prop_assert_eq!(piece.tag(), 3);
            match piece {
                Piece::Span { span, .. } => memory.run(span),
                Piece::Unit(unit) => panic!("{unit:?} was never pushed"),
            }
        }
        memory.check(&src, &dst);
    }

    #[test]
    fn units_arrive_whole_and_once(
        moves in prop::collection::vec(movement(), 0..6),
        unit_size in 1u64..80,
        limits in limits(),
    ) {
        let (mut spans, mut units) = (Vec::new(), Vec::new());
        for (tag, (src, dst)) in moves.iter().enumerate() {
            let from = units.len();
            let bytes = zip_units(
                tag as u32, &src.ranges, &dst.ranges, unit_size, &mut spans, &mut units,
            ).unwrap();
            prop_assert_eq!(units.len() - from, bytes.div_ceil(unit_size) as usize);
            for (index, unit) in units[from..].iter().enumerate() {
                let at = index as u64 * unit_size;
                prop_assert_eq!(unit.index as usize, index);
                prop_assert_eq!(unit.bytes, unit_size.min(bytes - at));
                let own = unit.spans(&spans).unwrap();
                prop_assert_eq!(own.iter().map(|span| span.len).sum::<u64>(), unit.bytes);
            }
        }
        let mut planner = Planner::new(limits).unwrap();
        let mut handed = Handed::default();
        for unit in &units {
            handed.take(planner.push_unit(*unit).unwrap(), limits.watermark, false);
        }
        handed.take(planner.finish(), limits.watermark, true);
        handed.check(&planner, true);

        let mut arrived = Vec::new();
        let mut memories: Vec<_> = moves.iter().map(|(src, dst)| Memory::new(src, dst)).collect();
        for piece in handed.slices.iter().flat_map(|(_, pieces)| pieces) {
            let Piece::Unit(unit) = piece else { panic!("{piece:?} was never pushed") };
            for span in unit.spans(&spans).unwrap() {
                memories[unit.tag as usize].run(span);
            }
            arrived.push(*unit);
        }
        prop_assert_eq!(arrived, units);
        for (memory, (src, dst)) in memories.iter().zip(&moves) {
            memory.check(src, dst);
        }
    }

    #[test]
    fn a_reused_planner_plans_as_a_new_one_does(
        before in prop::collection::vec(1u64..100, 0..20),
        batch in prop::collection::vec(1u64..100, 0..20),
        limits in limits(),
    ) {
        let plan = |planner: &mut Planner, lens: &[u64]| {
            let mut handed = Handed::default();
            for &len in lens {
                handed.take(planner.push_span(0, Span::new(0, 0, len)).unwrap(), 1, false);
            }
            handed.take(planner.finish(), 1, true);
            handed.slices
        };
        let mut reused = Planner::new(limits).unwrap();
        plan(&mut reused, &before);
        reused.reset_at(0);
        let mut new = Planner::new(limits).unwrap();
        prop_assert_eq!(plan(&mut reused, &batch), plan(&mut new, &batch));
    }

    #[test]
    fn any_ranges_are_planned_or_refused_but_never_panic(
        src in prop::collection::vec((any::<u64>(), any::<u64>()), 0..4),
        dst in prop::collection::vec((any::<u64>(), any::<u64>()), 0..4),
        unit_size in any::<u64>(),
    ) {
        let ranges = |list: &[(u64, u64)]| -> Vec<Range> {
            list.iter().map(|&(addr, len)| Range::new(addr, len)).collect()
        };
        let (src, dst) = (ranges(&src), ranges(&dst));
        let (mut out, mut units) = (Vec::new(), Vec::new());
        let total = |side: &[Range]| side.iter().map(|range| u128::from(range.len)).sum::<u128>();
        match zip(&src, &dst, &mut out) {
            Ok(bytes) => {
                prop_assert_eq!(u128::from(bytes), total(&src));
                prop_assert_eq!(u128::from(bytes), total(&dst));
            }
            Err(Error::LengthMismatch { src: s, dst: d }) => prop_assert_ne!(s, d),
            Err(_) => prop_assert!(out.is_empty()),
        }
        // Units of at least 2^48 bytes, so that a valid plan stays small.
        let unit_size = unit_size | 1 << 48;
        if zip_units(0, &src, &dst, unit_size, &mut out, &mut units).is_err() {
            prop_assert!(units.is_empty());
        }
    }
}
