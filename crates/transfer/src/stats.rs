//! Counters of an engine.

/// Counters of an engine since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Number of submitted requests.
    pub requests: u64,
    /// Bytes of the submitted requests, without invalid ones.
    pub bytes: u64,
    /// Number of frames sent to peers.
    pub frames: u64,
    /// Number of posts to RDMA devices. One post contains several work requests.
    pub posts: u64,
    /// Number of RDMA work requests.
    pub work_requests: u64,
    /// Number of known peers.
    pub peers: u64,
    /// Number of connections from peers.
    pub connections: u64,
    /// Number of connections from peers that failed the handshake, for example because of another
    /// token or too many connections.
    pub refused_greetings: u64,
    /// Number of rejected slices, names and calls.
    pub refused_grants: u64,
    /// Number of connections that were closed because of a malformed frame.
    pub malformed_frames: u64,
}
