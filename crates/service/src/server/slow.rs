//! Calls that may take minutes: devices that are added, drained, removed or grown. They come over
//! the connection of the tasks, so that others do not wait behind them.

use std::path::Path;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_store::{Core, DrainTo};

use crate::frame::rows::Json;
use crate::frame::verbs::{AddDevice, Devices, DrainDevice, GrowDevice, RemoveDevice, Verb};
use crate::frame::{Frame, Out};

/// The owner's answer.
pub(crate) fn answer(core: &Core, request: &Frame) -> Result<Out, Error> {
    let number = request.number;
    match request.verb {
        Verb::Devices => {
            let Devices {} = request.read()?;
            Ok(Out::answer::<Devices>(number, &Json(core.devices()?)))
        }
        Verb::AddDevice => {
            let AddDevice { path, capacity } = request.read()?;
            let opening = core.add_device(Path::new(path), capacity)?;
            Ok(Out::answer::<AddDevice<'_>>(number, &Json(opening)))
        }
        Verb::DrainDevice => {
            let call: DrainDevice<'_> = request.read()?;
            let to = match call.to_others {
                true => DrainTo::Others,
                false => DrainTo::Nowhere,
            };
            let patience = Duration::from_millis(call.patience_ms);
            let drained = core.drain_device(Path::new(call.path), to, patience)?;
            Ok(Out::answer::<DrainDevice<'_>>(number, &Json(drained)))
        }
        Verb::RemoveDevice => {
            let call: RemoveDevice<'_> = request.read()?;
            let patience = Duration::from_millis(call.patience_ms);
            core.remove_device(Path::new(call.path), call.force, patience)?;
            Ok(Out::answer::<RemoveDevice<'_>>(number, &()))
        }
        _ => {
            let GrowDevice { path, capacity } = request.read()?;
            core.grow_device(Path::new(path), capacity)?;
            Ok(Out::answer::<GrowDevice<'_>>(number, &()))
        }
    }
}
