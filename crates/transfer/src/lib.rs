//! Batched transfer between processes and hosts, and what one depot over many hosts needs: who is
//! there (`membership`), and where a key's block lives (`homes`).

#![forbid(unsafe_code)]

pub mod homes;
pub mod membership;
