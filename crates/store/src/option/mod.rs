//! Options of a configuration: their declarations and the parsed settings of a section.
//!
//! A declaration validates the value of an option and generates its entry in the reference page.

mod file_version;
mod spec;
mod tokens;
mod value;

pub use file_version::FileVersion;
pub use spec::{Kind, OptionSpec};
pub use tokens::read_tokens;
pub use value::Section;
pub(crate) use value::{Parsed, absolute};
