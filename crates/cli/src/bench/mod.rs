//! `kvdepot bench`: this machine's limits, what kvdepot reaches, and the ratio.
