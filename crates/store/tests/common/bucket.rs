//! A real object store in this process, over a directory, and depots of it.

#![allow(
    dead_code,
    unused_imports,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use kvdepot_store::{Config, Depot, Error};
pub(crate) use kvdepot_testkit::s3::Trouble;
use kvdepot_testkit::s3::Troubled;
use serde_json::{Value, json};

pub(crate) const LEN: usize = 70_001;

pub(crate) struct Server {
    troubled: Troubled,
    timeout: &'static str,
}

impl Deref for Server {
    type Target = Troubled;

    fn deref(&self) -> &Troubled {
        &self.troubled
    }
}

impl Server {
    /// Its depots wait longer than any machine stands still.
    pub(crate) fn start() -> Server {
        Server {
            troubled: Troubled::start(&std::env::temp_dir()),
            timeout: "60s",
        }
    }

    /// For tests in which it does not answer.
    pub(crate) fn start_impatient() -> Server {
        Server {
            timeout: "3s",
            ..Server::start()
        }
    }

    pub(crate) fn settings(&self) -> Value {
        json!({
            "url": "s3://bucket/kv/test",
            "endpoint": self.endpoint(),
            "allow_http": true,
            "credentials": self.credentials(),
            "capacity": "64MiB",
            "timeout": self.timeout,
            "lookup_timeout": self.timeout,
        })
    }

    pub(crate) fn try_open(&self, pipeline: &str, s3: &Value) -> Result<Depot, Error> {
        self.open_of(pipeline, s3, json!({}))
    }

    /// With a file of keys.
    pub(crate) fn open_keyed(&self, pipeline: &str, s3: &Value, keys: &Path) -> Depot {
        let keyed = self.open_of(pipeline, s3, json!({"mac_key_file": keys}));
        keyed.unwrap()
    }

    fn open_of(&self, pipeline: &str, s3: &Value, mut settings: Value) -> Result<Depot, Error> {
        settings["lanes"] = json!(2);
        settings["close_timeout"] = json!("10s");
        settings["socket"] = json!("off");
        for tier in pipeline.split('|') {
            match tier {
                "Cache" => settings["cache"] = json!({"capacity": "1MiB"}),
                "Dax" => {
                    let path = self.path().join("dax");
                    settings["dax"] = json!({"path": path, "capacity": "2MiB"});
                }
                _ => {
                    settings["s3"] = self.settings();
                    for (name, value) in s3.as_object().unwrap() {
                        settings["s3"][name] = value.clone();
                        if value.is_null() {
                            settings["s3"].as_object_mut().unwrap().remove(name);
                        }
                    }
                }
            }
        }
        Depot::open(&Config::new(pipeline, &settings)?)
    }

    pub(crate) fn open_with(&self, pipeline: &str, s3: &Value) -> Depot {
        self.try_open(pipeline, s3).unwrap()
    }

    pub(crate) fn open(&self) -> Depot {
        self.open_with("S3", &json!({}))
    }

    /// The objects of blocks, as files.
    pub(crate) fn objects(&self) -> Vec<PathBuf> {
        self.troubled.objects("kv/test/blocks")
    }

    pub(crate) fn is_of(&self, object: &Path, number: u64) -> bool {
        let name = object.file_name().unwrap().to_string_lossy();
        name.starts_with(&super::common::key(number).to_string())
    }

    pub(crate) fn attributes(&self, object: &Path) -> Vec<u8> {
        fs::read(&self.beside(object)[0]).unwrap()
    }

    /// Puts something else in the place of an object.
    pub(crate) fn replace(&self, object: &Path, bytes: &[u8], attributes: Option<&[u8]>) {
        for file in self.beside(object) {
            let _or_none = fs::remove_file(file);
        }
        fs::write(object, bytes).unwrap();
        if let Some(attributes) = attributes {
            fs::write(&self.beside(object)[0], attributes).unwrap();
        }
    }

    /// Their bytes.
    pub(crate) fn used(&self) -> u64 {
        let len = |path: &PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
        self.objects().iter().map(len).sum()
    }
}
