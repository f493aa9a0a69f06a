//! Spans, coalescing, slices, watermark, join: what moves when. No I/O.
