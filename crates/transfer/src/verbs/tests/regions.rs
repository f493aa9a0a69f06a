//! Regions over the double: what is registered, refused and kept.

use super::double::{self, Mood};
use super::*;

fn register(buffer: Buffer, rights: Rights) -> Result<Arc<Region>> {
    Region::register(&double::open("double0"), buffer, rights)
}

#[test]
fn memory_is_let_go_once_the_library_has_taken_it_back() {
    let (buffer, has_gone) = watched(vec![1; 100]);
    let region = register(buffer, BOTH).unwrap();
    assert_eq!(
        (region.buffer().len(), region.addr()),
        (100, region.buffer().addr() as u64)
    );
    let piece = region.piece(99, 1).unwrap();
    assert_eq!(piece.len(), 1);
    drop(region);
    assert!(!has_gone.load(SeqCst), "a piece keeps its region");
    drop(piece);
    assert!(has_gone.load(SeqCst));
    assert_eq!(double::seen().events, ["take back", "memory", "close"]);
}

#[test]
fn what_the_library_does_not_give_back_is_kept() {
    let (buffer, has_gone) = watched(vec![1; 100]);
    let region = register(buffer, BOTH).unwrap();
    double::set(Mood {
        take_back: libc::EBUSY,
        ..Mood::default()
    });
    drop(region);
    assert!(!has_gone.load(SeqCst));
}

#[test]
fn pieces_stay_inside_their_region() {
    let region = register(Buffer::from_vec(vec![0; 100]), BOTH).unwrap();
    for (offset, len) in [(0, 101), (100, 1), (usize::MAX, 1), (1, usize::MAX)] {
        let error = region.piece(offset, len).unwrap_err();
        assert!(
            matches!(error, Error::OutOfBounds { end: 100, .. }),
            "{error}"
        );
    }
    let error = region.piece(0, 0).unwrap_err().to_string();
    assert_eq!(
        error,
        "length of a piece: 0 is not allowed; allowed: 1 to 4294967295"
    );
}

#[test]
fn what_cannot_be_registered_is_refused_with_what_to_do() {
    for (errno, says) in [
        (libc::EOPNOTSUPP, "use the DAX device"),
        (libc::ENOMEM, "ulimit -l"),
        (libc::EFAULT, "register memory with double0: Bad address"),
    ] {
        double::set(Mood {
            register: errno,
            ..Mood::default()
        });
        let (buffer, has_gone) = watched(vec![1; 100]);
        let error = register(buffer, BOTH).unwrap_err().to_string();
        assert!(error.contains(says), "{error:?} does not say {says:?}");
        assert!(has_gone.load(SeqCst), "{errno}");
    }
    double::set(Mood::default());
    let read_only = Buffer::from_vec(vec![1; 9]).read_only();
    assert!(matches!(
        register(read_only.clone(), BOTH),
        Err(Error::ReadOnly { .. })
    ));
    let readable = Rights {
        remote_write: false,
        ..BOTH
    };
    register(read_only, readable).unwrap();
    assert!(matches!(
        register(Buffer::from_vec(Vec::new()), BOTH),
        Err(Error::Invalid { .. })
    ));
}

#[test]
fn the_port_that_is_active_is_chosen_and_others_are_refused_by_their_state() {
    let device = double::open("double0");
    let port: Port = device.port(Choice::default()).unwrap();
    // The double is not in sysfs, so that of its addresses IPv4 is preferred for itself.
    assert_eq!(
        (port.number, port.gid_index, port.mtu, port.gid[15]),
        (2, 1, 5, 1)
    );
    let choose = |port, gid_index| device.port(Choice { port, gid_index });
    assert_eq!(choose(Some(2), Some(0)).unwrap().gid[..2], [0xFE, 0x80]);
    for (port, index, says) in [
        (Some(1), None, "double0 has no active port: port 1 is down"),
        (Some(2), Some(2), "no address at 2 on port 2"),
        (Some(3), None, "port: 3 is not allowed; allowed: 1 to 2"),
        (Some(0), None, "port: 0 is not allowed; allowed: 1 to 2"),
    ] {
        let error = choose(port, index).unwrap_err().to_string();
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    }
    let error = Device::open_by(Arc::new(double::functions()), "mlx5_0");
    let error = error.map(drop).unwrap_err().to_string();
    assert_eq!(error, "no RDMA device mlx5_0; available: double0, double1");
}
