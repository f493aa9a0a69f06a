//! Starts of further depots in the owner's process: those that fail, over an arena that is in use,
//! and those that nobody wants any more. What they have made is gone, and nobody else notices.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_store::{Config, Error};
use serde_json::{Value, json};

use crate::world::{Law, World, law};

/// How long such a start waits for an owner that may end.
const LOCK_WAIT: Duration = Duration::from_secs(5);

impl World {
    /// Starts a depot over an arena that is in use, with a new one before it or without; or over a
    /// new one alone, at the owner's socket or to let it go unused.
    pub(super) fn start(&self, kind: u8) -> Law {
        let used = self.media.borrow().iter().find(|one| one.present).cloned();
        let Some(used) = used.filter(|_| self.has_far()) else {
            return Ok(());
        };
        let fresh = self.dir.path().join("fresh");
        let paths: &[&Path] = match kind {
            0 => &[&used.path],
            1 => &[&fresh, &used.path],
            _ => &[&fresh],
        };
        let before = self.files()?;
        let socket = (kind == 2 && self.shape.socket).then(|| self.socket());
        let config = self.further(paths, socket.as_deref());
        // Its end lets the lanes take their turns, which are those of all depots here.
        self.may_evict();
        let mut answer = Ok(());
        let begun = Instant::now();
        self.alone(|| answer = kvdepot_service::start(&config).map(drop));
        let no_room = |error: &Error| {
            let text = error.to_string();
            self.room.get().is_some()
                && text.contains("capacity: ")
                && text.contains("the free space of")
        };
        match answer {
            Err(error) if kind > 0 && no_room(&error) => self.fault("no room on disk"),
            Err(Error::Locked { pid, .. }) if kind < 2 => {
                self.door("second depot");
                // It could only end by itself, so nobody waits for it.
                let waited = begun.elapsed();
                let at_once = pid == std::process::id() && waited < LOCK_WAIT;
                law!(at_once, "after {waited:?} process {pid} was named");
            }
            Err(error) if socket.is_some() => {
                self.door("failed start");
                law!(error.to_string().contains("socket"), "{error}");
                let there = socket.as_deref().map(UnixStream::connect);
                law!(
                    matches!(there, Some(Ok(_))),
                    "the owner's socket: {there:?}"
                );
            }
            Ok(()) if kind >= 2 && socket.is_none() => self.door("start given up"),
            other => return Err(format!("a start over {paths:?}: {other:?}")),
        }
        let after = self.files()?;
        law!(
            after == before,
            "a start over {paths:?} left {after:?} of {before:?}"
        );
        Ok(())
    }

    /// The configuration of another depot with the tiers of this history.
    fn further(&self, paths: &[&Path], socket: Option<&Path>) -> Config {
        let device = |path: &&Path| json!({"path": path, "capacity": self.shape.dax << 10});
        let devices: Vec<Value> = paths.iter().map(device).collect();
        let socket = socket.map_or_else(|| "off".into(), |path| path.display().to_string());
        let mut settings = json!({"socket": socket, "lock_wait": LOCK_WAIT.as_secs(), "lanes": 1});
        settings[self.far().to_ascii_lowercase()] =
            json!({"devices": devices, "records": self.shape.records});
        if self.shape.pipeline.contains("Cache") {
            settings["cache"] = json!({"capacity": "64KiB"});
        }
        let pipeline = self.shape.pipeline.replace("Dax", self.far());
        Config::new(&pipeline, &settings).unwrap()
    }
}
