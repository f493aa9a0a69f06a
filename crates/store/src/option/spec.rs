//! Options, as they are declared.

/// What an option's value must look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A size in bytes, units allowed.
    Size,
    /// A duration, units allowed.
    Duration,
    /// A whole number from 1.
    Count,
    /// `true` or `false`.
    Flag,
    /// A path or a name.
    Text,
    /// Permission bits: a text of octal digits.
    Mode,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Several media, each with its path and its capacity.
    Devices,
}

/// One option of the configuration.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OptionSpec {
    /// The tier's section, empty for the depot's own options.
    pub section: &'static str,
    /// Its name inside the section.
    pub name: &'static str,
    /// What it accepts.
    pub kind: Kind,
    /// What holds when it is absent, in words.
    pub default: &'static str,
    /// What it does.
    pub help: &'static str,
}

impl OptionSpec {
    /// Declares one.
    #[must_use]
    pub const fn new(
        section: &'static str,
        name: &'static str,
        kind: Kind,
        default: &'static str,
        help: &'static str,
    ) -> OptionSpec {
        OptionSpec {
            section,
            name,
            kind,
            default,
            help,
        }
    }
}
