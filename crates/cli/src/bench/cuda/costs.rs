//! What a device's blocks cost beside the copies: memory, and the start.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_host::limits;
use kvdepot_media::cuda::Device;
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Config};
use serde_json::json;

use super::super::media::spec;
use super::super::memory::all;
use super::super::random::Random;
use super::super::report::{Report, Row};
use super::super::rounds::median;
use super::{Bench, Plan};
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) const METRICS: [&str; 3] = ["pinned_bytes", "device_bytes", "attach_s"];

/// At most, each in its row's unit.
const PINNED: f64 = (256 << 20) as f64;
const DEVICE: f64 = (64 << 20) as f64;
const ATTACH_S: f64 = 1.0;

/// The file of the far tier, which takes no space.
const FAR: u64 = 64 << 30;
const FAR_STEP: u64 = 1 << 30;

fn within(row: Row, value: f64, most: f64) -> Row {
    Row {
        value,
        limit: Some(most),
        ratio: Some(most / value.max(1e-9)),
        limit_name: Some("the target"),
        ..row
    }
}

impl Bench<'_> {
    /// What is kvdepot's own on the device and of pinned memory, by now.
    pub(super) fn memory(&mut self, report: &mut Report<'_>) -> Result<(), Error> {
        // A block each way, so that both ways have what they need.
        let (keys, pages) = (
            self.store.keys(1),
            [self.there.slice(0, 4096)?, self.there.slice(8192, 4096)?],
        );
        let mut buffers = BlockBuffers::default();
        buffers.push(pages);
        all(
            &self
                .store
                .namespace()
                .put(keys.clone(), buffers.clone())?
                .wait(None)?,
            "stored",
        )?;
        all(
            &self.store.namespace().get(keys, buffers)?.wait(None)?,
            "got",
        )?;
        let found = [
            ("pinned_bytes", Device::pinned_bytes(), PINNED),
            ("device_bytes", self.device.ring_bytes(), DEVICE),
        ];
        for (metric, bytes, most) in found {
            if self.plan.wants(metric) {
                let case = json!({"lanes": self.plan.lanes, "where": self.place()});
                let row = self.cost(metric, "bytes", case);
                report.row(within(row, bytes as f64, most))?;
                report.case_done(metric);
            }
        }
        Ok(())
    }
}

/// From nothing until a first block could be asked for.
pub(super) fn attach(
    plan: &Plan,
    device: &Arc<Device>,
    dir: &Path,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let cache = limits::memory_allowed()? / 4;
    // As much as the disk would have room for, were it written.
    let far = FAR.min(limits::disk_free(dir)? / 2 / FAR_STEP * FAR_STEP);
    if far == 0 {
        tracing::warn!(
            "measurement attach_s skipped: not enough free space in {}",
            dir.display()
        );
        report.case_done("attach");
        return Ok(());
    }
    let mut times = Vec::new();
    for _ in 0..plan.rounds.min(3) {
        report.interrupt.check()?;
        let scratch = Scratch::new(dir)?;
        let path = scratch.path().join("far");
        let file = std::fs::File::create(&path).map_err(Error::io(&path))?;
        file.set_len(far).map_err(Error::io(&path))?;
        let settings = json!({
            "cache": {"capacity": cache}, "dax": {"path": &path}, "lanes": plan.lanes,
            "socket": scratch.path().join("sock"),
        });
        let start = Instant::now();
        let depot = kvdepot_service::open(&Config::new("Cache|Dax", &settings)?)?;
        depot.populate_aside()?;
        let ns = depot.namespace(&spec())?;
        let socket = depot.socket().unwrap_or_default();
        let mover = Mover::attach(&socket, Some(plan.lanes), true)?;
        mover.populate_aside()?;
        ns.contains(&[Random(9).key()])?;
        times.push(start.elapsed().as_secs_f64());
        mover.close();
        depot.close();
    }
    let rounds = times.len();
    let case = json!({
        "cache": cache, "far": far, "where": if device.name()? == super::DOUBLE { "double" } else { "device" },
    });
    let row = Row {
        bench: "cuda",
        case,
        metric: "attach_s",
        unit: "s",
        value: 0.0,
        limit: None,
        ratio: None,
        rounds,
        limit_name: None,
    };
    report.row(within(row, median(times), ATTACH_S))?;
    report.case_done("attach");
    Ok(())
}
