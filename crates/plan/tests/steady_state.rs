//! A warm planner allocates nothing.

use kvdepot_plan::{Error, Limits, Planner, Range, Side, Span, Unit, coalesce, zip, zip_units};

const LIMITS: Limits = Limits {
    slice_size: 4096,
    tail_merge: 512,
    lanes: 4,
    watermark: 3,
};

struct Tables {
    spans: Vec<Span>,
    units: Vec<Unit>,
    planner: Planner,
}

fn plan_batch(tables: &mut Tables, src: &[Range], dst: &[Range]) -> Result<usize, Error> {
    tables.spans.clear();
    tables.units.clear();
    let mut slices = 0;
    zip_units(0, src, dst, 1024, &mut tables.spans, &mut tables.units)?;
    for unit in &tables.units {
        slices += tables.planner.push_unit(*unit)?.len();
    }
    tables.spans.clear();
    zip(src, dst, &mut tables.spans)?;
    coalesce(&mut tables.spans, Side::Dst)?;
    for span in &tables.spans {
        slices += tables.planner.push_span(1, *span)?.len();
    }
    slices += tables.planner.finish().len();
    tables.planner.reset();
    Ok(slices)
}

#[test]
fn a_warm_planner_allocates_nothing() {
    let src: Vec<_> = (0..200).map(|at| Range::new(at * 3000, 2000)).collect();
    let dst: Vec<_> = (0..100)
        .rev()
        .map(|at| Range::new(at * 5000, 4000))
        .collect();
    let planner = Planner::new(LIMITS).unwrap();
    let mut tables = Tables {
        spans: Vec::new(),
        units: Vec::new(),
        planner,
    };
    let mut planned = 0;
    let cold =
        allocation_counter::measure(|| planned = plan_batch(&mut tables, &src, &dst).unwrap());
    assert!(cold.count_total > 0, "the counter counts");
    assert!(planned > 100);
    let warm = allocation_counter::measure(|| {
        for _ in 0..10 {
            assert_eq!(plan_batch(&mut tables, &src, &dst), Ok(planned));
        }
    });
    assert_eq!(warm.count_total, 0);
}
