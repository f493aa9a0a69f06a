//! Media before and after their arena: what lies at a path, what is made of it, and its end.

mod create;
mod erase;
mod take;
mod treatment;

pub use create::{Promised, UNFINISHED, default_capacity, default_path, erase_unfinished};
pub(crate) use create::{check, format, layout_for, open_error, space_error};
pub(crate) use erase::Fresh;
pub use erase::{check_erasable, erase};
pub(crate) use take::{Taken, take};
pub(crate) use treatment::{Treatment, treatment};
