//! Options, as they are declared.

/// Type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A size in bytes, with or without a unit.
    Size,
    /// A duration, with or without a unit.
    Duration,
    /// A whole number, at least 1.
    Count,
    /// `true` or `false`.
    Flag,
    /// A text that is not empty, for example a path or a name.
    Text,
    /// Permission bits: a text of octal digits.
    Mode,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of media, each with its path and its capacity.
    Devices,
}

/// Declaration of one option.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OptionSpec {
    /// Section of the tier; empty for options of the depot.
    pub section: &'static str,
    /// Name of the option in its section.
    pub name: &'static str,
    /// Type of the value.
    pub kind: Kind,
    /// Description of the default.
    pub default: &'static str,
    /// Description of the option, for the reference page.
    pub help: &'static str,
}

impl OptionSpec {
    /// Declares an option.
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
    /// Declares the option `durability` of a tier.
    pub(crate) const fn durability(section: &'static str) -> OptionSpec {
        OptionSpec::new(
            section,
            "durability",
            Kind::Choice(&["process", "power"]),
            "process",
            "Failures that an [acknowledged](glossary.md#acknowledged) (stored) block survives. \
             `process`: the termination of the process. `power`: also a power loss, but puts are \
             slower than with `process`.",
        )
    }
}
