//! How bytes go from one kind of end to another: the one table of it.
//!
//! | from \ to | only hashed | memory | a carrier |
//! | --- | --- | --- | --- |
//! | memory | in place | one copy, hashed on the way | straight, hashed before; or a region |
//! | a carrier | through a region | straight, hashed there; or a region | through a region |
//!
//! *Straight* is for spans that the carrier takes as they lie, and that are worth a carry each.
//! *Through a region* of the slab, neighbours at the carrier's end are one carry, however scattered
//! they are in memory, and what a lane copies between region and memory is hashed as it passes.

use crate::carrier::Alignment;
use kvdepot_plan::Span;

/// How a unit goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By a lane alone.
    Fused,
    /// Carried from or to the caller's memory.
    Straight,
    /// Carried from or to a region, or both.
    Region,
}

/// A span of less than this is copied through a region if its unit has others: asking for it costs
/// more than copying it.
const STRAIGHT_MIN: u64 = 64 << 10;

/// Which side of a unit has what carrier; `copies` is false for what is only hashed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides {
    pub(crate) from: Option<Alignment>,
    pub(crate) to: Option<Alignment>,
    pub(crate) copies: bool,
}

impl Sides {
    /// The way of a unit with these spans.
    pub(crate) fn way(self, spans: &[Span]) -> Way {
        let straight = |alignment: Alignment, place: fn(&Span) -> (u64, u64)| {
            let worth = |span: &Span| spans.len() == 1 || span.len >= STRAIGHT_MIN;
            let fits = |span: &Span, memory: usize| {
                let (there, here) = place(span);
                (there | span.len).is_multiple_of(alignment.at)
                    && here.is_multiple_of(memory as u64)
            };
            let taken = alignment
                .memory
                .is_some_and(|memory| spans.iter().all(|s| worth(s) && fits(s, memory)));
            match taken {
                true => Way::Straight,
                false => Way::Region,
            }
        };
        match (self.from, self.to, self.copies) {
            (None, None, _) => Way::Fused,
            (Some(from), None, true) => straight(from, |span| (span.src, span.dst)),
            (None, Some(to), _) => straight(to, |span| (span.dst, span.src)),
            (Some(_), _, _) => Way::Region,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECT: Alignment = Alignment {
        at: 4096,
        memory: Some(512),
    };
    const DEVICE: Alignment = Alignment {
        at: 1,
        memory: None,
    };

    fn way(from: Option<Alignment>, to: Option<Alignment>, copies: bool, spans: &[Span]) -> Way {
        Sides { from, to, copies }.way(spans)
    }

    #[test]
    fn every_pair_of_ends_has_its_way() {
        let page = [Span::new(8192, 512, 4096)];
        let back = [Span::new(512, 8192, 4096)];
        assert_eq!(way(None, None, true, &page), Way::Fused);
        assert_eq!(way(None, None, false, &page), Way::Fused);
        assert_eq!(way(Some(DIRECT), None, true, &page), Way::Straight);
        assert_eq!(way(Some(DIRECT), None, false, &page), Way::Region);
        assert_eq!(way(None, Some(DIRECT), true, &back), Way::Straight);
        assert_eq!(way(Some(DIRECT), Some(DIRECT), true, &page), Way::Region);
        assert_eq!(way(Some(DEVICE), None, true, &page), Way::Region);
        assert_eq!(way(None, Some(DEVICE), true, &page), Way::Region);
        assert_eq!(way(Some(Alignment::NONE), None, true, &page), Way::Straight);
    }

    #[test]
    fn what_a_carrier_does_not_take_goes_through_a_region() {
        for span in [
            Span::new(8193, 512, 4096),
            Span::new(8192, 511, 4096),
            Span::new(8192, 512, 4095),
        ] {
            assert_eq!(way(Some(DIRECT), None, true, &[span]), Way::Region);
        }
        let small = [Span::new(0, 0, 4096), Span::new(8192, 4096, 4096)];
        assert_eq!(way(Some(DIRECT), None, true, &small), Way::Region);
        let large = [
            Span::new(0, 0, 1 << 16),
            Span::new(1 << 20, 1 << 16, 1 << 16),
        ];
        assert_eq!(way(Some(DIRECT), None, true, &large), Way::Straight);
    }
}
