//! Kinds of tiers that crates above add: a name, its section of the configuration, an opener.

use std::fmt;
use std::sync::Arc;

use kvdepot_arena::Error;
use parking_lot::Mutex;

use super::contract::{Terms, Tier};
use super::posix;
use crate::option::{OptionSpec, Section};

/// Function that opens a tier with its settings.
pub type Opener = dyn Fn(&Section, Terms) -> Result<Arc<dyn Tier>, Error> + Send + Sync;

/// A kind of asynchronous tier.
#[derive(Clone)]
pub struct TierKind {
    /// Name in a pipeline. The section of the tier has this name in lower case.
    pub name: &'static str,
    /// Options of the section, in addition to those of [every tier](crate::config::schema::EDGE)
    /// and of [asynchronous tiers](crate::config::schema::LATE).
    pub options: &'static [OptionSpec],
    /// Checks the settings of a section as opening does, without opening anything.
    ///
    /// The flag is true if the files that the settings name are read too. They may be files of
    /// another machine.
    pub check: fn(&Section, bool) -> Result<(), Error>,
    /// Opens a tier.
    pub open: Arc<Opener>,
}

/// Kinds of crates above that this process was told of.
static KNOWN: Mutex<Vec<TierKind>> = Mutex::new(Vec::new());

/// Kinds of asynchronous tiers that a program supports.
#[derive(Clone, Default)]
pub struct Kinds(Vec<TierKind>);

impl Kinds {
    /// Creates an empty set of kinds.
    #[must_use]
    pub fn new() -> Kinds {
        Kinds::default()
    }

    /// Returns the kinds of this crate and those that the process has [registered](Kinds::know).
    #[must_use]
    pub fn standard() -> Kinds {
        let known = KNOWN.lock().clone();
        known.into_iter().fold(Kinds::own(), Kinds::with)
    }

    /// Registers a kind of another crate as one of the [standard](Kinds::standard) kinds of this
    /// process.
    ///
    /// A program calls it before it reads a configuration.
    pub fn know(kind: TierKind) {
        let mut known = KNOWN.lock();
        known.retain(|other| other.name != kind.name);
        known.push(kind);
    }

    fn own() -> Kinds {
        let kinds = Kinds::new().with(posix::kind()).with(posix::kind_of_3fs());
        #[cfg(feature = "s3")]
        let kinds = kinds.with(super::s3::kind());
        kinds
    }

    /// Returns these kinds and `kind`, which replaces a kind of the same name.
    #[must_use]
    pub fn with(mut self, kind: TierKind) -> Kinds {
        self.0.retain(|known| known.name != kind.name);
        self.0.push(kind);
        self
    }

    /// Returns the kind named `name`.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&TierKind> {
        self.0.iter().find(|kind| kind.name == name)
    }

    /// Returns the names of the kinds.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<'_> {
        self.0.iter().map(|kind| kind.name)
    }
}

impl PartialEq for Kinds {
    fn eq(&self, other: &Kinds) -> bool {
        self.names().eq(other.names())
    }
}

impl fmt::Debug for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
