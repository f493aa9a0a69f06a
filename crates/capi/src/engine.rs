//! Transfer engines, regions and segments of this process, and remotes: segments of peers.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_transfer::{
    Config, Engine, Error, Published, Refused, Registered, Remote, Rights, Settings, resolve,
};
use serde_json::{Value, json};

use crate::depot::Setting;
use crate::given::{Given, Growing, In, NONE, Out, Plain, Text, maybe};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};
use crate::memory::{Lent, Piece, pieces};

/// Registered memory of this process, which batches may use.
#[derive(Debug)]
pub struct Region {
    registered: Registered,
    lent: Lent,
}

/// Published memory of this process, which peers may use.
#[derive(Debug)]
pub struct Segment {
    published: Published,
    lent: Lent,
}

/// A segment of a peer, and the engine that opened it.
#[derive(Debug)]
pub struct Far {
    pub(crate) remote: Remote,
    pub(crate) engine: Arc<Engine>,
}

/// Description of a remote, `kvd_remote_about`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct About {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Size in bytes.
    pub len: u64,
    /// Remaining lifetime in milliseconds when it was opened, or `KVD_NONE`.
    pub lasts_ms: u64,
    /// A `kvd_rights`.
    pub rights: u32,
    /// A `kvd_path`.
    pub path: u32,
}

// SAFETY: numbers.
unsafe impl Plain for About {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for About {
    const FIRST: usize = 32;
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match &error {
            Error::Input { .. } => Status::Input,
            Error::Closed => Status::Closed,
            _ => Status::System,
        };
        let said = match error {
            Error::Input {
                field,
                value,
                allowed,
            } => return Failure::input(field, value, allowed),
            other => other.to_string(),
        };
        Failure::new(status, said)
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        Failure::config(refused.field, refused.value, refused.allowed)
    }
}

/// Converts the text of an option into the type that the engine expects.
fn value_of(name: &str, text: &str) -> Value {
    match (name, text) {
        ("listen", "none") => Value::Null,
        ("rdma", "none") => Value::Array(Vec::new()),
        ("rdma", names) => names.split(',').map(str::trim).collect(),
        ("token", text) => text.into(),
        (_, "true") => true.into(),
        (_, "false") => false.into(),
        _ => text.into(),
    }
}

fn config(given: &[Setting]) -> Result<Config, Failure> {
    let mut settings = Settings::default();
    for (at, one) in given.iter().enumerate() {
        let (name, value) = one.texts(at)?;
        settings.set(name, &value_of(name, value))?;
    }
    settings.config().map_err(as_option)
}

/// Converts an error of an argument into one of an option.
fn as_option(error: Error) -> Failure {
    match error {
        Error::Input {
            field,
            value,
            allowed,
        } => Failure::config(field, value, allowed),
        other => other.into(),
    }
}

fn rights(number: u32) -> Result<Rights, Failure> {
    match number {
        1 => Ok(Rights::READ),
        2 => Ok(Rights::WRITE),
        3 => Ok(Rights::BOTH),
        other => {
            let allowed = "KVD_RIGHTS_READ, KVD_RIGHTS_WRITE or KVD_RIGHTS_BOTH";
            Err(Failure::input("rights", other, allowed))
        }
    }
}

fn publish(
    engine: &Arc<Engine>,
    name: Option<&[u8]>,
    given: &[Piece],
    allows: u32,
    lasts_ms: u64,
) -> Result<Segment, Failure> {
    let allows = rights(allows)?;
    if lasts_ms == 0 {
        let allowed = "milliseconds above 0, or KVD_NONE for the time until it is closed";
        return Err(Failure::input("lasts_ms", 0, allowed));
    }
    let lasts = maybe(lasts_ms).map(Duration::from_millis);
    let lent = Lent::new();
    let buffers = pieces(&lent, "buffers", given, allows.write)?;
    let published = match name {
        Some(name) => engine.publish(name, &buffers, allows, lasts)?,
        None => engine.grant(&buffers, allows, lasts)?,
    };
    Ok(Segment { published, lent })
}

/// Resolves a text to its first address.
fn address(given: &Text) -> Result<std::net::SocketAddr, Failure> {
    let text = given.read("address")?;
    resolve(text).ok_or_else(|| {
        let allowed = "the address of an engine, such as 10.0.0.1:7000";
        Failure::input("address", text, allowed)
    })
}

fn stats(engine: &Engine) -> Value {
    let stats = engine.stats();
    json!({
        "requests": stats.requests,
        "bytes": stats.bytes,
        "frames": stats.frames,
        "posts": stats.posts,
        "work_requests": stats.work_requests,
        "peers": stats.peers,
        "connections": stats.connections,
        "refused_greetings": stats.refused_greetings,
        "refused_grants": stats.refused_grants,
        "malformed_frames": stats.malformed_frames,
    })
}

exported! {
    /// Implements `kvd_engine_open`.
    fn kvd_engine_open(given: In<Setting>, given_len: usize, engine: Made<Arc<Engine>>) {
        let engine = engine.making("engine")?;
        let config = config(given.slice("options", given_len)?)?;
        let started = Engine::start(config).map_err(as_option)?;
        engine.put(Arc::new(started));
        Ok(())
    }

    /// Implements `kvd_engine_address`.
    fn kvd_engine_address(engine: Ref<Arc<Engine>>, address: Out<Given>) {
        let place = address.place("address")?;
        let at = engine.get("engine")?.address();
        place.put(Given::new(&at.map_or(String::new(), |at| at.to_string())));
        Ok(())
    }

    /// Implements `kvd_engine_stats`.
    fn kvd_engine_stats(engine: Ref<Arc<Engine>>, json: Out<Given>) {
        let json = json.place("json")?;
        json.put(Given::new(&stats(engine.get("engine")?).to_string()));
        Ok(())
    }

    /// Implements `kvd_engine_close`.
    fn kvd_engine_close(engine: Ref<Arc<Engine>>) {
        if let Some(engine) = engine.end() {
            engine.close();
        }
        Ok(())
    }

    /// Implements `kvd_region_open`.
    fn kvd_region_open(
        engine: Ref<Arc<Engine>>, buffers: In<Piece>, buffers_len: usize, is_written: u32,
        region: Made<Region>,
    ) {
        let region = region.making("region")?;
        let engine = engine.get("engine")?;
        let is_written = crate::given::flag("is_written", is_written)?;
        let given = buffers.slice("buffers", buffers_len)?;
        let lent = Lent::new();
        let buffers = pieces(&lent, "buffers", given, is_written)?;
        let registered = engine.register(&buffers)?;
        region.put(Region { registered, lent });
        Ok(())
    }

    /// Implements `kvd_region_close`. No batch uses the memory when it returns.
    fn kvd_region_close(region: Ref<Region>) {
        if let Some(Region { registered, lent }) = region.end() {
            drop(registered);
            lent.take_back();
        }
        Ok(())
    }

    /// Implements `kvd_segment_open`.
    fn kvd_segment_open(
        engine: Ref<Arc<Engine>>, name: In<u8>, name_len: usize, buffers: In<Piece>,
        buffers_len: usize, rights: u32, lasts_ms: u64, segment: Made<Segment>,
    ) {
        let segment = segment.making("segment")?;
        let engine = engine.get("engine")?;
        let name = match name.is_null() {
            true if name_len == 0 => None,
            _ => Some(name.slice("name", name_len)?),
        };
        let given = buffers.slice("buffers", buffers_len)?;
        segment.put(publish(engine, name, given, rights, lasts_ms)?);
        Ok(())
    }

    /// Implements `kvd_segment_name`.
    fn kvd_segment_name(
        segment: Ref<Segment>, name: Out<*const u8>, name_len: Out<usize>,
    ) {
        let (name, name_len) = (name.place("name")?, name_len.place("name_len")?);
        let its = segment.get("segment")?.published.name();
        name.put(its.as_ptr());
        name_len.put(its.len());
        Ok(())
    }

    /// Implements `kvd_segment_close`. No peer uses the memory when it returns.
    fn kvd_segment_close(segment: Ref<Segment>) {
        if let Some(Segment { published, lent }) = segment.end() {
            drop(published);
            lent.take_back();
        }
        Ok(())
    }

    /// Implements `kvd_remote_open`.
    fn kvd_remote_open(
        engine: Ref<Arc<Engine>>, at: Text, name: In<u8>, name_len: usize, remote: Made<Far>,
    ) {
        let place = remote.making("remote")?;
        let engine = engine.get("engine")?;
        let name = name.slice("name", name_len)?;
        let remote = engine.open(address(&at)?, name)?;
        let engine = Arc::clone(engine);
        place.put(Far { remote, engine });
        Ok(())
    }

    /// Implements `kvd_remote_info`.
    fn kvd_remote_info(remote: Ref<Far>, about: Out<About>) {
        let about = about.sized("about")?;
        let Far { remote, .. } = remote.get("remote")?;
        let (rights, lasts) = (remote.rights(), remote.lasts());
        about.put(&About {
            struct_size: 0,
            len: remote.len(),
            lasts_ms: lasts.map_or(NONE, |lasts| lasts.as_millis() as u64),
            rights: u32::from(rights.read) | u32::from(rights.write) << 1,
            path: match (remote.is_near(), remote.is_rdma()) {
                (true, _) => 1,
                (false, true) => 2,
                (false, false) => 0,
            },
        });
        Ok(())
    }

    /// Implements `kvd_remote_close`.
    fn kvd_remote_close(remote: Ref<Far>) {
        drop(remote.end());
        Ok(())
    }
}
