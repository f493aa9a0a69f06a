//! Several media as one tier: `dax.devices`, `nvme.devices`.

use kvdepot_arena::Error;
use serde_json::{Map, Value};

use super::{ArenaConfig, DeviceConfig};
use crate::option::{Kind, Parsed, absolute};
use crate::placement::MEDIA_MAX;

/// What the option accepts, for messages.
pub(super) const HELP: &str =
    "a list such as [{path: /dev/dax0.0}, {path: /mnt/pmem/kv, capacity: 64GiB}]";

/// Reads the list. `field` is its name in messages.
pub(super) fn parse(field: &str, value: &Value) -> Result<Vec<DeviceConfig>, Error> {
    match value {
        Value::Array(items) if !items.is_empty() => (0..)
            .zip(items)
            .map(|(index, item): (usize, _)| device(&format!("{field}[{index}]"), item))
            .collect(),
        other => Err(Error::config(field, other, HELP)),
    }
}

fn device(field: &str, value: &Value) -> Result<DeviceConfig, Error> {
    let options: &Map<String, Value> = value
        .as_object()
        .ok_or_else(|| Error::config(field, value, "a mapping with the keys path and capacity"))?;
    let (mut path, mut capacity) = (None, None);
    for (name, value) in options {
        let field = format!("{field}.{name}");
        match name.as_str() {
            "path" => path = Some(absolute(&Parsed::new(&field, Kind::Text, value)?.text)),
            "capacity" => capacity = Some(Parsed::new(&field, Kind::Size, value)?.number),
            _ => {
                return Err(Error::config(
                    field,
                    value,
                    "the keys path and capacity only",
                ));
            }
        }
    }
    match path {
        Some(path) => Ok(DeviceConfig { path, capacity }),
        None => Err(Error::config(field, value, "a mapping with the key path")),
    }
}

impl ArenaConfig {
    /// Either one medium or a list of them, in the section of that name.
    pub(super) fn check_devices(&self, section: &str) -> Result<(), Error> {
        // Beside them there may be a `Cache`.
        if self.devices.len() >= MEDIA_MAX {
            let count = format!("a list of {} devices", self.devices.len());
            let allowed = format!("at most {} devices", MEDIA_MAX - 1);
            return Err(Error::config(format!("{section}.devices"), count, allowed));
        }
        let other = match (&self.path, self.capacity) {
            _ if self.devices.is_empty() => return Ok(()),
            (Some(_), _) => "path",
            (None, Some(_)) => "capacity",
            (None, None) => return Ok(()),
        };
        let count = format!("a list of {} devices", self.devices.len());
        let allowed = format!("either this list or {section}.{other}, not both");
        Err(Error::config(format!("{section}.devices"), count, allowed))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Config;

    fn open(dax: Value) -> Result<Config, String> {
        Config::new("Dax", &json!({ "dax": dax })).map_err(|error| error.to_string())
    }

    #[test]
    fn a_list_of_devices_is_read() {
        let list = json!([{"path": "/a"}, {"path": "/b", "capacity": "2GiB"}]);
        let config = open(json!({ "devices": list })).unwrap();
        let read = config.dax.devices.iter().map(|device| device.capacity);
        assert_eq!(read.collect::<Vec<_>>(), [None, Some(2 << 30)]);
        assert_eq!(config.dax.devices[1].path.to_str(), Some("/b"));
    }

    #[test]
    fn what_can_never_open_is_refused_before_anything_is_opened() {
        let cases = [
            ("Posix", json!({}), "posix.path"),
            ("Ds3fs", json!({}), "ds3fs.path"),
            (
                "Posix",
                json!({"posix": {"path": "/x", "fan_out": 4097}}),
                "posix.fan_out",
            ),
            (
                "Cache|Posix",
                json!({"posix": {"path": "/x", "capacity": 1}}),
                "posix.capacity",
            ),
            ("Cache", json!({"mac_key_file": "/x"}), "mac_key_file"),
            (
                "Dax",
                json!({"dax": {"devices": [{"path": "/x/a"}, {"path": "/x/./a"}]}}),
                "dax.devices[1].path",
            ),
            (
                "Dax|Nvme",
                json!({"dax": {"path": "/x/a"}, "nvme": {"path": "/x/a"}}),
                "nvme.path",
            ),
            #[cfg(feature = "s3")]
            (
                "S3",
                json!({"s3": {"url": "s3://bucket/kv", "capacity": "1GiB", "requests": 1}}),
                "s3.requests",
            ),
        ];
        for (pipeline, settings, named) in cases {
            let error = Config::new(pipeline, &settings).unwrap_err().to_string();
            assert!(error.starts_with(named), "{error}");
        }
        // Two media that nobody has named are two.
        Config::new("Dax|Nvme", &json!({})).unwrap();
    }

    #[test]
    fn mistakes_name_the_device_and_the_field() {
        let cases = [
            (json!([]), "dax.devices: []"),
            (json!("/a"), "dax.devices: \"/a\""),
            (json!(["/a"]), "dax.devices[0]: \"/a\""),
            (json!([{"path": "/a"}, {}]), "dax.devices[1]: {}"),
            (json!([{"path": ""}]), "dax.devices[0].path"),
            (
                json!([{"path": "/a", "capacity": "x"}]),
                "dax.devices[0].capacity",
            ),
            (json!([{"path": "/a", "size": 1}]), "dax.devices[0].size"),
        ];
        for (list, said) in cases {
            let error = open(json!({ "devices": list })).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
        let list = json!([{"path": "/a"}]);
        for (name, value) in [("path", json!("/b")), ("capacity", json!("1GiB"))] {
            let error = open(json!({ "devices": list, name: value })).unwrap_err();
            assert!(
                error.contains(&format!("this list or dax.{name}")),
                "{error}"
            );
        }
    }
}
