//! Calls that may take minutes: devices that are added, drained, removed or grown. They go over
//! the connection of the tasks, so that others do not wait behind them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_arena::{Error, Opening};
use kvdepot_store::{Core, DeviceStats, DrainTo, Drained};

use crate::client::Client;
use crate::frame::{In, Out, Verb};

/// The owner's answer.
pub(crate) fn answer(core: &Core, verb: Verb, number: u64, body: &[u8]) -> Result<Out, Error> {
    let mut body = In(body);
    let mut out = Out::new(verb, number);
    match verb {
        Verb::Devices => out.json(&core.devices()?),
        Verb::AddDevice => {
            let path = PathBuf::from(body.text()?);
            let (given, capacity) = (body.flag()?, body.long()?);
            out.json(&core.add_device(&path, given.then_some(capacity))?);
        }
        Verb::DrainDevice => {
            let path = PathBuf::from(body.text()?);
            let to = match body.flag()? {
                true => DrainTo::Others,
                false => DrainTo::Nowhere,
            };
            let patience = Duration::from_millis(body.long()?);
            out.json(&core.drain_device(&path, to, patience)?);
        }
        Verb::RemoveDevice => {
            let path = PathBuf::from(body.text()?);
            let (force, patience) = (body.flag()?, Duration::from_millis(body.long()?));
            core.remove_device(&path, force, patience)?;
        }
        _ => {
            let path = PathBuf::from(body.text()?);
            core.grow_device(&path, body.long()?)?;
        }
    }
    body.end()?;
    Ok(out)
}

fn about_path(verb: Verb, path: &Path) -> Out {
    let mut out = Out::new(verb, 0);
    out.text(&path.to_string_lossy());
    out
}

impl Client {
    pub(crate) fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        match self.ask_slowly(Out::new(Verb::Devices, 0), |body| body.json()) {
            // As an empty depot answers.
            Err(Error::Peer { .. }) => Ok(Vec::new()),
            answer => answer,
        }
    }

    pub(crate) fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        let mut out = about_path(Verb::AddDevice, path);
        out.flag(capacity.is_some());
        out.long(capacity.unwrap_or(0));
        self.ask_slowly(out, |body| body.json())
    }

    pub(crate) fn drain_device(
        &self,
        path: &Path,
        to: DrainTo,
        patience: Duration,
    ) -> Result<Drained, Error> {
        let mut out = about_path(Verb::DrainDevice, path);
        out.flag(to == DrainTo::Others);
        out.long(patience.as_millis().try_into().unwrap_or(u64::MAX));
        self.ask_slowly(out, |body| body.json())
    }

    pub(crate) fn remove_device(
        &self,
        path: &Path,
        force: bool,
        patience: Duration,
    ) -> Result<(), Error> {
        let mut out = about_path(Verb::RemoveDevice, path);
        out.flag(force);
        out.long(patience.as_millis().try_into().unwrap_or(u64::MAX));
        self.ask_slowly(out, |_| Ok(()))
    }

    pub(crate) fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        let mut out = about_path(Verb::GrowDevice, path);
        out.long(capacity);
        self.ask_slowly(out, |_| Ok(()))
    }
}
