//! The hosts, as of a moment.

use thiserror::Error;

/// A host that may hold blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, which stays when its address changes. Homes are drawn by it.
    pub name: String,
    /// Where its engine listens.
    pub address: String,
    /// Bytes that it offers. One with none is there, and is nobody's home.
    pub capacity: u64,
    /// Tells a process from the one that had the name before; a later one has a higher number. 0:
    /// the membership draws one when it registers the host.
    pub incarnation: u64,
}

/// What is not allowed in a view.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViewError {
    /// Two hosts of one name.
    #[error("hosts: {0:?} is not allowed twice: names are of one host each")]
    Twice(String),
    /// A host without a name.
    #[error("hosts: \"\" is not allowed: a name of one byte or more")]
    Nameless,
    /// More hosts than places in a row have numbers for.
    #[error("hosts: {0} is not allowed: at most 65536")]
    TooMany(usize),
}

/// Most hosts of a view: far more than one view shall have, and few enough for any sum of them.
const HOSTS_MAX: usize = 65_536;

/// The hosts as of a moment, in order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    epoch: u64,
    hosts: Vec<Host>,
}

impl View {
    /// A view of these hosts.
    ///
    /// # Errors
    /// [`ViewError`] where a name is empty or stands twice, or there are too many.
    pub fn new(epoch: u64, mut hosts: Vec<Host>) -> Result<View, ViewError> {
        if hosts.len() > HOSTS_MAX {
            return Err(ViewError::TooMany(hosts.len()));
        }
        hosts.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        if hosts.first().is_some_and(|host| host.name.is_empty()) {
            return Err(ViewError::Nameless);
        }
        if let Some(pair) = hosts.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(ViewError::Twice(pair[0].name.clone()));
        }
        Ok(View { epoch, hosts })
    }

    /// Which of the source's states this is: views of one epoch are the same on all hosts, and a
    /// higher one is later, as long as the source has its memory.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The hosts, in order of their names.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Where the host of a name stands among them.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        let by = |host: &Host| host.name.as_str().cmp(name);
        self.hosts.binary_search_by(by).ok()
    }

    /// The bytes that all of them offer.
    #[must_use]
    pub fn capacity(&self) -> u128 {
        let capacities = self.hosts.iter().map(|host| u128::from(host.capacity));
        capacities.sum()
    }

    /// The bytes of memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let texts = |host: &Host| host.name.capacity() + host.address.capacity();
        let texts: usize = self.hosts.iter().map(texts).sum();
        size_of::<View>() + self.hosts.capacity() * size_of::<Host>() + texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Host {
        Host {
            name: name.into(),
            address: String::new(),
            capacity: 1,
            incarnation: 0,
        }
    }

    #[test]
    fn names_are_of_one_host_each_and_stand_in_order() {
        let view = View::new(1, vec![host("b"), host("a")]).unwrap();
        assert_eq!((view.find("a"), view.find("b")), (Some(0), Some(1)));
        assert_eq!(view.find("c"), None);
        let twice = View::new(1, vec![host("b"), host("a"), host("b")]);
        assert_eq!(twice.unwrap_err(), ViewError::Twice("b".into()));
        let nameless = View::new(1, vec![host("b"), host("")]);
        assert_eq!(nameless.unwrap_err(), ViewError::Nameless);
    }
}
