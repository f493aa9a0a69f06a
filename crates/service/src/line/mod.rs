//! The connection that owner and client have in common: what comes, what waits to be sent, and how
//! much a client may have asked for.

pub(crate) mod credit;
pub(crate) mod incoming;
pub(crate) mod outbox;
