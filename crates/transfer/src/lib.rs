//! Batched transfer between processes and hosts, and what one depot over many hosts needs: where a
//! key's block lives (`homes`).

#![forbid(unsafe_code)]

pub mod homes;
