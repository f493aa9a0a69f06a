//! A list of hosts that never changes.

use super::board::Board;
use super::error::Error;
use crate::homes::{Host, View};

/// A board where they hang from the beginning.
pub(super) fn board(hosts: Vec<Host>) -> Result<Board, Error> {
    let board = Board::new(Box::new(|_| ()), false);
    board.publish(View::new(1, hosts)?);
    board.heard();
    Ok(board)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Membership, Standing};
    use super::*;

    #[test]
    fn fixed_hosts_are_there_at_once_and_stay() {
        let host = |name: &str| Host {
            name: name.into(),
            address: "10.0.0.1:7700".into(),
            capacity: 1 << 30,
            incarnation: 0,
        };
        let membership = Membership::fixed(vec![host("b"), host("a")]).unwrap();
        let view = membership.view();
        assert_eq!((view.epoch(), view.hosts().len()), (1, 2));
        let status = membership.status();
        assert!(status.is_current && status.standing == Standing::Looking);
        assert!(membership.announce(host("a")).is_err());
        assert!(membership.close(Duration::ZERO));
        assert_eq!(membership.view(), view);
        assert!(Membership::fixed(vec![host("a"), host("a")]).is_err());
    }
}
