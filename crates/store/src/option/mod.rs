//! Options: what declares one also reads its value and writes its page.

mod spec;
mod value;

pub use spec::{Kind, OptionSpec};
pub use value::Section;
pub(crate) use value::{Parsed, absolute};
