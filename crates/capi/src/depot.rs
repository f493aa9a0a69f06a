//! Depots: opening, closing and statistics.

use std::path::Path;

use kvdepot_store::config::{read_below, read_text, set, value_of};
use kvdepot_store::{Config, Depot, Kinds};
use serde_json::{Map, Value};

use crate::given::{Given, In, Out, Plain, Text, span};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};

/// Endings by which a name without a separator is a configuration file.
const ENDINGS: [&str; 3] = [".yaml", ".yml", ".json"];

/// Prefix of the socket of a depot that another process serves.
const SERVICE: &str = "unix:";

/// Options that are allowed for a depot that another process serves.
const CLIENTS: [&str; 2] = ["lanes", "timeout"];

/// An option, `kvd_option`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Setting {
    /// Name with its section, for example `cache.capacity`.
    pub name: Text,
    /// Value as text.
    pub value: Text,
}

// SAFETY: pointers.
unsafe impl Plain for Setting {}

impl Setting {
    /// Returns the name and the value.
    pub(crate) fn texts(&self, at: usize) -> Result<(&str, &str), Failure> {
        let name = format!("options[{at}].name");
        let named = self.name.read(&name)?;
        if named.is_empty() {
            let allowed = "the name of an option, such as cache.capacity";
            return Err(Failure::input(name, "\"\"", allowed));
        }
        Ok((named, self.value.read(&format!("options[{at}].value"))?))
    }
}

/// Converts options into the value that the schema reads.
fn options(given: &[Setting]) -> Result<Value, Failure> {
    let mut all = Value::Object(Map::new());
    for (at, one) in given.iter().enumerate() {
        let (name, value) = one.texts(at)?;
        set(&mut all, name, value_of(name, value));
    }
    Ok(all)
}

/// Connects to a depot that another process serves; its other options are the server's.
fn served(socket: &str, given: &Value) -> Result<Depot, Failure> {
    let refused = |value: &str, allowed: &str| Failure::config("where", value, allowed);
    if socket.is_empty() {
        return Err(refused(SERVICE, "unix: followed by the path of a socket"));
    }
    let mut names = given.as_object().into_iter().flat_map(Map::keys);
    if let Some(name) = names.find(|name| !CLIENTS.contains(&name.as_str())) {
        let allowed = "only lanes and timeout in a client; set other options in the server";
        return Err(refused(name, allowed));
    }
    let checked = Config::new("Cache", given)?;
    let socket = Path::new(socket);
    let depot = kvdepot_service::connect_within(socket, checked.lanes, checked.timeout);
    Ok(depot?)
}

fn opened(config: &Config) -> Result<Depot, Failure> {
    Ok(kvdepot_service::open(config)?)
}

exported! {
    /// Implements `kvd_depot_open`.
    fn kvd_depot_open(
        at: Text, given: In<Setting>, given_len: usize, depot: Made<Depot>,
    ) {
        let depot = depot.making("depot")?;
        let at = at.read("where")?;
        let given = options(given.slice("options", given_len)?)?;
        Kinds::know(kvdepot_transfer::tier_kind());
        let is_file = at.contains('/') || ENDINGS.iter().any(|ending| at.ends_with(ending));
        depot.put(match at.strip_prefix(SERVICE) {
            Some(socket) => served(socket, &given)?,
            None if is_file => opened(&Config::from_value(&read_below(Path::new(at), given)?)?)?,
            None => opened(&Config::new(at, &given)?)?,
        });
        Ok(())
    }

    /// Implements `kvd_depot_open_text`.
    fn kvd_depot_open_text(
        text: Text, given: In<Setting>, given_len: usize, depot: Made<Depot>,
    ) {
        let depot = depot.making("depot")?;
        let text = text.read("text")?;
        let given = options(given.slice("options", given_len)?)?;
        Kinds::know(kvdepot_transfer::tier_kind());
        depot.put(opened(&Config::from_value(&read_text("text", text, given)?)?)?);
        Ok(())
    }

    /// Implements `kvd_depot_drain`.
    fn kvd_depot_drain(depot: Ref<Depot>, timeout_ms: u64) {
        let limit = span(timeout_ms).unwrap_or(std::time::Duration::MAX);
        match depot.get("depot")?.drain(limit) {
            true => Ok(()),
            false => Err(Failure::new(
                Status::Timeout,
                format!("write-back did not finish within {timeout_ms} ms"),
            )),
        }
    }

    /// Implements `kvd_depot_stats`.
    fn kvd_depot_stats(depot: Ref<Depot>, json: Out<Given>) {
        let json = json.place("json")?;
        json.put(Given::new(&depot.get("depot")?.stats().shown().to_string()));
        Ok(())
    }

    /// Implements `kvd_depot_metrics`.
    fn kvd_depot_metrics(depot: Ref<Depot>, text: Out<Given>) {
        let text = text.place("text")?;
        text.put(Given::new(&depot.get("depot")?.stats().prometheus()));
        Ok(())
    }

    /// Implements `kvd_depot_close`.
    fn kvd_depot_close(depot: Ref<Depot>) {
        if let Some(depot) = depot.end() {
            depot.close();
        }
        Ok(())
    }
}
