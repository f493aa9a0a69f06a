//! Kinds of tiers that crates above add: a name, its section of the configuration, an opener.

use std::fmt;
use std::sync::Arc;

use kvdepot_arena::Error;
use parking_lot::Mutex;

use super::contract::{Terms, Tier};
use super::posix;
use crate::option::{OptionSpec, Section};

/// Opens a tier with its settings.
pub type Opener = dyn Fn(&Section, Terms) -> Result<Arc<dyn Tier>, Error> + Send + Sync;

/// A kind of tier.
#[derive(Clone)]
pub struct TierKind {
    /// As a pipeline names it. Its section has the same name in lower case.
    pub name: &'static str,
    /// What may stand there, beside what [every section](crate::config::schema::EDGE) may have,
    /// and those of [tiers that may answer late](crate::config::schema::LATE).
    pub options: &'static [OptionSpec],
    /// Refuses settings of the section that opening would, and opens nothing. Whether files that
    /// they name are read, which may be another machine's, the caller says.
    pub check: fn(&Section, bool) -> Result<(), Error>,
    /// Opens one.
    pub open: Arc<Opener>,
}

/// Kinds of crates above that this process was told of.
static KNOWN: Mutex<Vec<TierKind>> = Mutex::new(Vec::new());

/// The kinds that a program knows beside those of arenas.
#[derive(Clone, Default)]
pub struct Kinds(Vec<TierKind>);

impl Kinds {
    /// None.
    #[must_use]
    pub fn new() -> Kinds {
        Kinds::default()
    }

    /// Those of this crate, and those that this process was [told of](Kinds::know).
    #[must_use]
    pub fn standard() -> Kinds {
        let known = KNOWN.lock().clone();
        known.into_iter().fold(Kinds::own(), Kinds::with)
    }

    /// Has a kind of a crate above be one of the [standard](Kinds::standard) ones of this process:
    /// a program says so before it reads a configuration.
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

    /// These and one more, which takes the place of one of its name.
    #[must_use]
    pub fn with(mut self, kind: TierKind) -> Kinds {
        self.0.retain(|known| known.name != kind.name);
        self.0.push(kind);
        self
    }

    /// The kind of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&TierKind> {
        self.0.iter().find(|kind| kind.name == name)
    }

    /// Their names.
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
