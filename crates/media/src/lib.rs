//! How bytes move: shared memory, mapped files and DAX, copies with fused checksums.
