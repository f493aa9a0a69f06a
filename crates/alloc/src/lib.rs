//! Offset allocator: where in an arena. No dependencies, usable alone.
