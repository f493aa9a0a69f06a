//! What is said to etcd and what it answers, as its JSON gateway writes it: bytes in base64, large
//! numbers as strings, and nothing that is nought.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::homes::Host;

/// Where hosts stand below the prefix.
const HOSTS: &str = "/hosts/";

/// What a host's key holds. Fields that a later version adds are passed over.
#[derive(Debug, Deserialize, Serialize)]
struct Record {
    address: String,
    capacity: u64,
    incarnation: u64,
}

/// What begins every answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) cluster: String,
    pub(super) revision: i64,
}

/// One host's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    /// None where its key holds something else.
    pub(super) host: Option<Host>,
    pub(super) lease: String,
    pub(super) mod_revision: i64,
}

/// What a watch says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Watched {
    /// It has begun.
    Created(Header),
    /// What happened, in order: keys that were written, and names whose keys are gone.
    Events(Header, Vec<Result<Entry, String>>),
    /// What it should begin with has been compacted away.
    Compacted,
    /// It ends, for this reason.
    Canceled(String),
}

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    /// What all of them begin with.
    start: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Keys {
        let prefix = prefix.trim_end_matches('/');
        Keys {
            start: format!("{prefix}{HOSTS}"),
        }
    }

    fn of(&self, name: &str) -> String {
        STANDARD.encode(format!("{}{name}", self.start))
    }

    /// The first key that is none of these: `0` follows the slash.
    fn end(&self) -> String {
        let start = self.start.trim_end_matches('/');
        STANDARD.encode(format!("{start}0"))
    }

    pub(super) fn list(&self) -> Value {
        json!({"key": self.of(""), "range_end": self.end()})
    }

    /// As little as can be asked for.
    pub(super) fn count(&self) -> Value {
        json!({"key": self.of(""), "range_end": self.end(), "count_only": true})
    }

    pub(super) fn get(&self, name: &str) -> Value {
        json!({"key": self.of(name)})
    }

    pub(super) fn watch(&self, revision: i64) -> Value {
        json!({"create_request": {
            "key": self.of(""), "range_end": self.end(), "start_revision": revision.to_string(),
        }})
    }

    /// Writes a host's key where it is as it was seen: not there at all with a revision of nought.
    pub(super) fn put(&self, host: &Host, lease: &str, seen: i64) -> Value {
        let key = self.of(&host.name);
        let record = json!({
            "address": host.address, "capacity": host.capacity, "incarnation": host.incarnation,
        });
        let value = STANDARD.encode(record.to_string());
        json!({
            "compare": [{
                "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": seen.to_string(),
            }],
            "success": [{"request_put": {"key": key, "value": value, "lease": lease}}],
        })
    }

    fn entry(&self, of: &Value) -> Option<Entry> {
        let bytes = |field: &str| STANDARD.decode(text(of, field)?).ok();
        let key = String::from_utf8(bytes("key")?).ok()?;
        let name = key.strip_prefix(&self.start)?.to_owned();
        let record: Option<Record> =
            bytes("value").and_then(|value| serde_json::from_slice(&value).ok());
        let host = record.filter(|_| !name.is_empty()).map(|record| Host {
            name: name.clone(),
            address: record.address,
            capacity: record.capacity,
            incarnation: record.incarnation,
        });
        Some(Entry {
            name,
            host,
            lease: text(of, "lease").unwrap_or("0").to_owned(),
            mod_revision: number(of, "mod_revision"),
        })
    }

    /// What a list or a get answers.
    pub(super) fn listed(&self, answer: &Value) -> (Header, Vec<Entry>) {
        let entries = answer.get("kvs").and_then(Value::as_array);
        let entries = entries.into_iter().flatten();
        let entries = entries.filter_map(|entry| self.entry(entry)).collect();
        (header(answer), entries)
    }

    /// What a watch says; none where it says nothing.
    pub(super) fn watched(&self, answer: &Value) -> Option<Watched> {
        let result = answer.get("result")?;
        let is = |field: &str| result.get(field).and_then(Value::as_bool) == Some(true);
        if is("canceled") {
            return Some(match number(result, "compact_revision") {
                0 => {
                    let reason = text(result, "cancel_reason");
                    Watched::Canceled(reason.unwrap_or("the watch was cancelled").to_owned())
                }
                _ => Watched::Compacted,
            });
        }
        let header = header(result);
        if is("created") {
            return Some(Watched::Created(header));
        }
        let events = result.get("events").and_then(Value::as_array)?.iter();
        let events = events.filter_map(|event| {
            let entry = self.entry(event.get("kv")?)?;
            let is_gone = text(event, "type") == Some("DELETE");
            Some(if is_gone { Err(entry.name) } else { Ok(entry) })
        });
        Some(Watched::Events(header, events.collect()))
    }
}

pub(super) fn header(answer: &Value) -> Header {
    let header = answer.get("header").unwrap_or(&Value::Null);
    Header {
        cluster: text(header, "cluster_id").unwrap_or_default().to_owned(),
        revision: number(header, "revision"),
    }
}

/// Whether a transaction did what it should.
pub(super) fn succeeded(answer: &Value) -> bool {
    answer.get("succeeded").and_then(Value::as_bool) == Some(true)
}

/// A lease for so many seconds.
pub(super) fn grant(seconds: u64) -> Value {
    json!({"TTL": seconds.to_string()})
}

/// The name of the lease that was granted.
pub(super) fn granted(answer: &Value) -> Option<String> {
    text(answer, "ID").map(str::to_owned)
}

pub(super) fn lease(id: &str) -> Value {
    json!({"ID": id})
}

/// Whether a lease that was to be kept alive was still there.
pub(super) fn is_alive(answer: &Value) -> bool {
    answer
        .get("result")
        .is_some_and(|result| number(result, "TTL") > 0)
}

fn text<'a>(of: &'a Value, field: &str) -> Option<&'a str> {
    of.get(field).and_then(Value::as_str)
}

/// A number, which is a string, unless a later gateway writes it as one; what is left out is 0.
fn number(of: &Value, field: &str) -> i64 {
    match of.get(field) {
        Some(Value::String(text)) => text.parse().unwrap_or(0),
        Some(value) => value.as_i64().unwrap_or(0),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host {
            name: "a".into(),
            address: "10.0.0.1:7700".into(),
            capacity: u64::MAX,
            incarnation: 1 << 60,
        }
    }

    #[test]
    fn a_host_is_read_as_it_was_written() {
        let keys = Keys::new("/kvdepot/");
        let put = keys.put(&host(), "77", 5);
        let put = &put["success"][0]["request_put"];
        let answer = json!({"header": {"cluster_id": "9", "revision": "12"}, "kvs": [{
            "key": put["key"], "value": put["value"], "lease": put["lease"], "mod_revision": "6",
        }]});
        let (header, entries) = keys.listed(&answer);
        assert_eq!((header.cluster.as_str(), header.revision), ("9", 12));
        let [entry] = &entries[..] else {
            panic!("{entries:?}")
        };
        assert_eq!(entry.host, Some(host()));
        assert_eq!((entry.lease.as_str(), entry.mod_revision), ("77", 6));
        let decoded = STANDARD.decode(keys.end()).unwrap();
        assert_eq!(decoded, b"/kvdepot/hosts0");
    }

    #[test]
    fn what_a_watch_says_is_understood() {
        let keys = Keys::new("/k");
        let of = |text: &str| keys.watched(&serde_json::from_str(text).unwrap());
        let header = |revision| Header {
            cluster: "1".into(),
            revision,
        };
        assert_eq!(
            of(r#"{"result":{"header":{"cluster_id":"1","revision":"3"},"created":true}}"#),
            Some(Watched::Created(header(3)))
        );
        let key = keys.of("a");
        let gone = format!(
            r#"{{"result":{{"header":{{"cluster_id":"1","revision":"4"}},"events":[
                {{"type":"DELETE","kv":{{"key":"{key}","mod_revision":"4"}}}},
                {{"kv":{{"key":"{key}","value":"bm8=","mod_revision":"5"}}}}]}}}}"#
        );
        let nothing = Entry {
            name: "a".into(),
            host: None,
            lease: "0".into(),
            mod_revision: 5,
        };
        assert_eq!(
            of(&gone),
            Some(Watched::Events(
                header(4),
                vec![Err("a".into()), Ok(nothing)]
            ))
        );
        let compacted = r#"{"result":{"header":{},"canceled":true,"compact_revision":"3"}}"#;
        assert_eq!(of(compacted), Some(Watched::Compacted));
        let canceled = of(r#"{"result":{"canceled":true,"cancel_reason":"no"}}"#);
        assert_eq!(canceled, Some(Watched::Canceled("no".into())));
        assert_eq!(of(r#"{"result":{"header":{"revision":"9"}}}"#), None);
        assert_eq!(of("{}"), None);
    }

    #[test]
    fn a_lease_is_alive_while_it_has_time() {
        let of = |text: &str| is_alive(&serde_json::from_str(text).unwrap());
        assert!(of(r#"{"result":{"ID":"1","TTL":"2"}}"#));
        assert!(!of(r#"{"result":{"ID":"1"}}"#) && !of("{}"));
    }
}
