//! How the owner of a history is opened, closed and killed.

use std::path::PathBuf;

use kvdepot_store::{Config, Depot};
use serde_json::{Value, json};

use crate::history::{KEYS, NAMESPACES};
use crate::world::{Counts, Law, Medium, World, eventually, key, law};

impl World {
    pub fn config(&self) -> Config {
        let shape = &self.shape;
        let mut settings = json!({
            "socket": if shape.socket { self.socket().to_str().unwrap().to_owned() } else { "off".into() },
            "lock_wait": "5s",
            "lanes": 2,
            "close_timeout": if self.is_scheduled() { "0s" } else { "1s" },
            "promote": shape.promote,
            "admission": if shape.learned { "learned" } else { "all" },
            "overload": if shape.drop { "drop" } else { "wait" },
        });
        if shape.write_back > 0 {
            settings["write_back_depth"] = Value::from(shape.write_back << 10);
        }
        if shape.pipeline.contains("Cache") {
            settings["cache"] = json!({"capacity": shape.cache << 10});
        }
        if self.has_far() {
            let media = self.media.borrow();
            let here = media.iter().filter(|medium| medium.present);
            let devices: Vec<Value> = here
                .map(|medium| json!({"path": medium.path, "capacity": medium.kib << 10}))
                .collect();
            settings[self.far().to_ascii_lowercase()] = json!({
                "devices": devices,
                "records": shape.records,
                "durability": if shape.power { "power" } else { "process" },
            });
        }
        let pipeline = shape.pipeline.replace("Dax", self.far());
        Config::new(&pipeline, &settings).unwrap()
    }

    /// The name of the tier that lasts.
    pub fn far(&self) -> &'static str {
        match self.shape.disk {
            true => "Nvme",
            false => "Dax",
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join(format!("s{}", self.copies.get()))
    }

    /// Opens the owner and whoever works with it.
    pub fn open(&self) -> Law {
        self.door("open");
        crate::log::expect_losses(false);
        let depot =
            kvdepot_service::open(&self.config()).map_err(|error| format!("open: {error}"))?;
        self.media.borrow_mut().iter_mut().for_each(Medium::read);
        for _ in 0..self.shape.clients {
            let client = kvdepot_service::connect(&self.socket(), Some(1));
            let client = client.map_err(|error| format!("connect: {error}"))?;
            self.clients.borrow_mut().push(client);
        }
        *self.depot.borrow_mut() = Some(depot);
        *self.counts.borrow_mut() = Counts {
            sure: self.shape.devices <= 1,
            ..Counts::default()
        };
        self.seen.borrow_mut().evicted = 0;
        self.early.borrow_mut().clear();
        self.unread.borrow_mut().clear();
        for ns in 0..NAMESPACES {
            self.namespace(0, ns as u8)?;
        }
        for door in 0..self.doors() {
            let gone = self
                .at(door)
                .gone(1000)
                .map_err(|error| error.to_string())?;
            law!(
                gone.blocks.is_empty(),
                "a new listener was told of {gone:?}"
            );
        }
        if !self.is_scheduled() && self.has_far() {
            // Those who worked for the last owner are gone soon.
            eventually(|| {
                let scratch = [(key(KEYS as u16 + 300), vec![1])];
                let namespace = self.namespace(0, 0)?;
                let reserved = namespace.reserve_strict(&scratch);
                let reserved = reserved.map_err(|error| format!("a new owner: {error}"))?;
                namespace.abort(&reserved.into_iter().flatten().collect::<Vec<_>>());
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Lets the mover and the clients go, and closes.
    pub fn close(&self) -> Law {
        self.door("close");
        *self.mover.borrow_mut() = None;
        if !self.is_scheduled() {
            // A client's close waits a minute for puts that wait for somebody's reservation.
            for held in self.held.borrow_mut().drain(..) {
                self.namespace(held.door, held.id.0)?
                    .abort(&[held.reservation]);
            }
        }
        let clients = std::mem::take(&mut *self.clients.borrow_mut());
        clients.iter().for_each(Depot::close);
        let depot = self.depot.borrow_mut().take().unwrap();
        self.alone(|| depot.close());
        // Whatever was under way has its outcome.
        for flying in self.flying.borrow_mut().drain(..) {
            law!(
                flying.task.is_done(),
                "a {:?} of {:?} has no outcome after close: {:?}",
                flying.asked,
                flying.ids,
                flying.task.outcomes()
            );
        }
        Ok(())
    }

    /// Nothing else happens meanwhile.
    pub fn alone(&self, call: impl FnOnce()) {
        self.nested.set(self.nested.get() + 1);
        call();
        self.nested.set(self.nested.get() - 1);
    }

    /// As a kill: what the files hold now is what the next owner finds.
    pub fn crash(&self) {
        self.copies.set(self.copies.get() + 1);
        let copy = self.copies.get();
        // The copies are the simulator's own.
        crate::disk::leave(None);
        for (device, medium) in self.media.borrow_mut().iter_mut().enumerate() {
            if medium.path.exists() {
                let to = self.dir.path().join(format!("arena{device}.{copy}"));
                std::fs::copy(&medium.path, &to).unwrap();
                medium.path = to;
            }
        }
        crate::disk::leave(self.room.get());
        *self.mover.borrow_mut() = None;
        self.clients.borrow_mut().clear();
        // What it still writes, it writes into the files that nobody opens any more.
        let killed = self.depot.borrow_mut().take();
        let groups = self.groups.take();
        self.alone(|| drop((killed, groups)));
        self.flying.borrow_mut().clear();
        self.forget_held();
    }

    /// Nothing that was held means anything any more.
    pub fn forget_held(&self) {
        self.held.borrow_mut().clear();
        self.ended.borrow_mut().clear();
        self.pins.borrow_mut().clear();
        self.groups.borrow_mut().clear();
        self.twin.borrow_mut().end_all();
    }
}
