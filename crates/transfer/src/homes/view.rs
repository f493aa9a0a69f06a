//! The hosts, as of a moment.

use thiserror::Error;

/// Host that may store blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name of the host, which stays the same when its address changes. Homes depend on it.
    pub name: String,
    /// Address that the host's engine listens on.
    pub address: String,
    /// Contributed capacity, in bytes. A host with 0 is a member, and no replica host.
    pub capacity: u64,
    /// Number that distinguishes a process from earlier ones with the same name; later processes
    /// have higher numbers. With 0 the membership chooses one when it registers the host.
    pub incarnation: u64,
}

/// Reason of a rejected view.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViewError {
    /// Two hosts have the same name.
    #[error("hosts: duplicate host name {0:?}")]
    Twice(String),
    /// A host has no name.
    #[error("hosts: a host name is empty; give each host a name")]
    Nameless,
    /// There are more than 65,536 hosts.
    #[error("hosts: {0} hosts are not allowed; allowed: at most 65536")]
    TooMany(usize),
}

/// Most hosts of a view: far more than one view shall have, and few enough for any sum of them.
const HOSTS_MAX: usize = 65_536;

/// Hosts at one moment, in the order of their names. The [module](super) has an example.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    epoch: u64,
    hosts: Vec<Host>,
}

impl View {
    /// Creates a view of these hosts.
    ///
    /// # Errors
    /// [`ViewError`] if a name is empty or occurs twice, or if there are more than 65,536 hosts.
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

    /// Returns the number of the source's state that this view shows.
    ///
    /// Views with the same epoch are equal on all hosts, and a higher epoch is later, as long as
    /// the source keeps its data.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the hosts, in the order of their names.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the index of the host with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        let by = |host: &Host| host.name.as_str().cmp(name);
        self.hosts.binary_search_by(by).ok()
    }

    /// Returns the total capacity of all hosts, in bytes.
    #[must_use]
    pub fn capacity(&self) -> u128 {
        let capacities = self.hosts.iter().map(|host| u128::from(host.capacity));
        capacities.sum()
    }

    /// Returns the memory that the view uses, in bytes.
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
