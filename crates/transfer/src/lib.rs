//! Batched transfer between processes and hosts: thousands of small pieces at the speed of one
//! large one.
//!
//! An [`Engine`] registers memory of its process, publishes some of it, opens what others have
//! published, and submits batches of reads and writes. Processes of one host copy by themselves;
//! others go by RDMA devices where both ends have some, or over connections. What goes over the
//! wire, and what may be relied on, is written down in `docs/transfer.md`.
//!
//! [`membership`] knows which hosts there are, and [`homes`] on which of them a key's block lives.

#![expect(
    unsafe_code,
    reason = "bytes go between sockets and memory that others may change meanwhile"
)]

mod arrivals;
mod batch;
mod config;
mod engine;
mod error;
mod flight;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod grant;
pub mod homes;
mod line;
mod local;
pub mod membership;
mod memory;
mod peer;
mod peer_tier;
mod rdma;
mod remote;
mod serve;
mod settings;
mod socket;
mod task;
mod tls;
mod verbs;
mod watch;
mod window;
mod wire;

pub use batch::Request;
pub use config::{Config, Options};
pub use engine::{Engine, Published, REQUESTS_MAX, Registered, Stats};
pub use error::{Error, Fault};
pub use flight::Op;
pub use grant::Rights;
pub use peer_tier::{install, tier_kind};
pub use remote::Remote;
pub use serve::Answers;
pub use settings::{Refused, Settings, resolve};
pub use task::{Priority, Status, Task};
pub use tls::Tls;
