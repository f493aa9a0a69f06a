//! Transfer engine: batches of many small transfers between processes and hosts, at the speed of
//! one large transfer.
//!
//! A process has one [`Engine`]. It registers local memory, publishes memory under names, opens
//! names of other engines, and submits batches of reads and writes. A published range with its
//! rights is a *grant*. The *initiator* submits a batch; the *target* published the memory and
//! needs no other call.
//!
//! | type | content |
//! | --- | --- |
//! | [`Engine`], [`Config`], [`Settings`] | engine of this process, and its options |
//! | [`Registered`] | local memory that batches may use |
//! | [`Published`], [`Rights`] | memory of this process that peers may use: a grant |
//! | [`Remote`] | memory of a peer, opened by its name |
//! | [`Request`], [`Task`] | one range of a batch, and a submitted batch |
//! | [`Answers`] | responses to the calls of peers |
//! | [`membership::Membership`] | hosts of a cluster |
//! | [`homes::HomeMap`] | replica hosts of a key |
//!
//! If both processes are on one host and of one user, the initiator copies from and to shared
//! memory. Otherwise bytes move over RDMA devices if both ends have some, or else over TCP
//! connections. `docs/transfer.md` describes options, guarantees and security, and
//! `docs/design/transfer.md` the wire format.
//!
//! [`install`] makes the tier `Peer` known to configurations of this process.
//!
//! # Examples
//! ```
//! use std::sync::Arc;
//!
//! use kvdepot_media::Buffer;
//! use kvdepot_transfer::{Config, Engine, Op, Options, Request, Rights};
//!
//! // The target, usually on another host.
//! let target = Arc::new(Engine::start(Config::default())?);
//! let memory = Buffer::from_vec(vec![7; 4096]);
//! let _published = target.publish(b"pages", &[memory], Rights::READ, None)?;
//! let address = target.address().expect("the default configuration listens");
//!
//! // The initiator.
//! let engine = Engine::start(Config { listen: None, ..Config::default() })?;
//! let pages = Buffer::from_vec(vec![0; 4096]);
//! let _registered = engine.register(&[pages.clone()])?;
//! let remote = engine.open(address, b"pages")?;
//! let local = pages.addr() as u64;
//! let request = Request { op: Op::Read, local, remote: &remote, offset: 0, len: 4096 };
//! let task = engine.run([request].into_iter(), Options::default())?;
//! assert!(task.is_done(), "{:?}", task.fault());
//! assert_eq!(pages.to_vec(), [7; 4096]);
//! # Ok::<_, kvdepot_transfer::Error>(())
//! ```

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
mod stats;
mod task;
mod tls;
mod verbs;
mod watch;
mod window;
mod wire;

pub use batch::Request;
pub use config::{Config, Options};
pub use engine::{Engine, Published, REQUESTS_MAX, Registered};
pub use error::{Error, Fault};
pub use flight::Op;
pub use grant::Rights;
pub use peer_tier::{install, tier_kind};
pub use remote::Remote;
pub use serve::Answers;
pub use settings::{Refused, Settings, resolve};
pub use stats::Stats;
pub use task::{Priority, Status, Task};
pub use tls::Tls;
