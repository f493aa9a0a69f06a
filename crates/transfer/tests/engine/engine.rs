//! What one engine promises to its user, and another to its peers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{bytes, config, engine_of as engine};
use kvdepot_media::Buffer;
use kvdepot_transfer::{
    Config, Engine, Error, Fault, Op, Options, Remote, Request, Rights, Status, Task,
};

/// Longer than a machine stands still.
const SOON: Duration = Duration::from_secs(20);

/// Settings of an engine that would wait for longer.
fn patient() -> Config {
    Config {
        timeout: 3 * SOON,
        ..config()
    }
}

/// Ranges of `local` and of the remote, in this order.
fn requests<'a>(
    op: Op,
    local: &'a Buffer,
    remote: &'a Remote,
    pieces: &'a [(u64, u64, u64)],
) -> impl ExactSizeIterator<Item = Request<'a>> + 'a {
    pieces.iter().map(move |&(at, offset, len)| Request {
        op,
        local: local.addr() as u64 + at,
        remote,
        offset,
        len,
    })
}

fn ended(task: &Task) {
    assert!(task.wait(Some(Duration::from_secs(60))), "the task hangs");
}

#[test]
fn what_is_written_in_pieces_is_read_back_in_others() {
    for checksum in [false, true] {
        let (one, other) = (
            engine(Config {
                checksum,
                ..config()
            }),
            engine(config()),
        );
        let len = 8 << 20;
        let home = Buffer::from_vec(vec![0; len]);
        let _published = other
            .publish(b"home", std::slice::from_ref(&home), Rights::BOTH, None)
            .unwrap();
        let content = bytes(len, 1);
        let local = Buffer::from_vec(content.clone());
        let _registered = one.register(std::slice::from_ref(&local)).unwrap();
        let remote = one.open(other.address().unwrap(), b"home").unwrap();
        assert_eq!((remote.len(), remote.rights()), (len as u64, Rights::BOTH));

        // Backwards, so that nothing continues anything.
        let size = 37_123;
        let piece = |at: usize| (at as u64, at as u64, size.min(len - at) as u64);
        let pieces: Vec<_> = (0..len).step_by(size).map(piece).rev().collect();
        let task = one.submit(
            requests(Op::Write, &local, &remote, &pieces),
            Options::default(),
        );
        let task = task.unwrap();
        ended(&task);
        assert!(task.is_done(), "{:?}", task.fault());
        assert!(home.to_vec() == content);

        let back = Buffer::from_vec(vec![0; len]);
        let _registered = one.register(std::slice::from_ref(&back)).unwrap();
        let pieces: Vec<_> = (0..len as u64)
            .step_by(1 << 12)
            .map(|at| (at, at, 1 << 12))
            .collect();
        let task = one
            .run(
                requests(Op::Read, &back, &remote, &pieces),
                Options::default(),
            )
            .unwrap();
        assert!(task.is_done(), "{:?}", task.fault());
        assert!(back.to_vec() == content);
    }
}

#[test]
fn small_requests_are_carried_by_who_asks() {
    let (one, other) = (engine(config()), engine(config()));
    let home = Buffer::from_vec(bytes(1 << 20, 2));
    let _published = other
        .publish(b"home", std::slice::from_ref(&home), Rights::BOTH, None)
        .unwrap();
    let local = Buffer::from_vec(vec![0; 1 << 20]);
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    let remote = one.open(other.address().unwrap(), b"home").unwrap();
    for round in 0..2000_u64 {
        let piece = [(round * 300, round * 300, 300)];
        let task = one
            .run(
                requests(Op::Read, &local, &remote, &piece),
                Options::default(),
            )
            .unwrap();
        assert_eq!(task.status(0), Status::Done);
    }
    assert!(local.to_vec()[..600_000] == home.to_vec()[..600_000]);
}

#[test]
fn each_request_that_cannot_be_fails_alone() {
    let (one, other) = (engine(config()), engine(config()));
    let home = Buffer::from_vec(vec![0; 4096]);
    let _published = other
        .publish(b"read", std::slice::from_ref(&home), Rights::READ, None)
        .unwrap();
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = one
        .register(&[local.slice(0, 100).unwrap().read_only()])
        .unwrap();
    let _more = one.register(&[local.slice(100, 3996).unwrap()]).unwrap();
    let remote = one.open(other.address().unwrap(), b"read").unwrap();
    let at = local.addr() as u64;
    let request = |op, local, offset, len| Request {
        op,
        local,
        remote: &remote,
        offset,
        len,
    };
    let all = [
        (request(Op::Read, at + 100, 0, 10), Status::Done),
        (
            request(Op::Read, at + 50, 0, 10),
            Status::Failed(Fault::Local),
        ),
        (
            request(Op::Read, at + 99, 0, 10),
            Status::Failed(Fault::Local),
        ),
        (request(Op::Read, 64, 0, 10), Status::Failed(Fault::Local)),
        (
            request(Op::Read, at + 100, 4090, 7),
            Status::Failed(Fault::Range),
        ),
        (
            request(Op::Read, at + 100, u64::MAX, 2),
            Status::Failed(Fault::Range),
        ),
        (
            request(Op::Read, at + 100, 0, 0),
            Status::Failed(Fault::Range),
        ),
        (
            request(Op::Write, at + 100, 0, 10),
            Status::Failed(Fault::Rights),
        ),
        (request(Op::Read, at + 110, 10, 3986), Status::Done),
    ];
    let task = one
        .submit(all.iter().map(|(request, _)| *request), Options::default())
        .unwrap();
    ended(&task);
    let wanted: Vec<Status> = all.iter().map(|(_, status)| *status).collect();
    assert_eq!(task.statuses().collect::<Vec<_>>(), wanted);
    let missing = one.open(other.address().unwrap(), b"missing").unwrap_err();
    assert!(matches!(missing, Error::Refused { .. }), "{missing}");
}

#[test]
fn what_is_withdrawn_is_unknown_and_what_is_over_too() {
    let (one, other) = (engine(config()), engine(config()));
    let home = Buffer::from_vec(vec![7; 4096]);
    let published = other
        .publish(b"home", std::slice::from_ref(&home), Rights::READ, None)
        .unwrap();
    // Longer than a machine stands still.
    let lasts = Duration::from_secs(5);
    let short = other
        .grant(std::slice::from_ref(&home), Rights::READ, Some(lasts))
        .unwrap();
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    let address = other.address().unwrap();
    let remotes = [
        one.open(address, b"home").unwrap(),
        one.open(address, short.name()).unwrap(),
    ];
    assert!(remotes[1].lasts().is_some_and(|left| left <= lasts));
    let read = |remote: &Remote| {
        let task = one.run(
            requests(Op::Read, &local, remote, &[(0, 0, 10)]),
            Options::default(),
        );
        task.unwrap().status(0)
    };
    assert_eq!(remotes.each_ref().map(read), [Status::Done; 2]);
    drop(published);
    std::thread::sleep(lasts);
    let unknown = Status::Failed(Fault::Unknown);
    assert_eq!(remotes.each_ref().map(read), [unknown; 2]);
    // The memory is nobody else's any more.
    drop(short);
    assert!(home.into_vec().is_ok());
}

#[test]
fn a_peer_that_starts_anew_is_found_again() {
    let one = engine(config());
    let mut other = engine(config());
    let address = other.address().unwrap();
    let home = Buffer::from_vec(vec![1; 4096]);
    let mut published = other.publish(b"home", &[home], Rights::READ, None).unwrap();
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    let remote = one.open(address, b"home").unwrap();
    for round in 2..5_u8 {
        drop(published);
        other.close();
        other = engine(Config {
            listen: Some(address),
            ..config()
        });
        let home = Buffer::from_vec(vec![round; 4096]);
        published = other.publish(b"home", &[home], Rights::READ, None).unwrap();
        let task = one.run(
            requests(Op::Read, &local, &remote, &[(0, 0, 10)]),
            Options::default(),
        );
        assert_eq!(task.unwrap().status(0), Status::Done, "round {round}");
        assert_eq!(local.to_vec()[..10], [round; 10]);
    }
}

#[test]
fn nobody_without_the_token_gets_anything() {
    let token = |token: &[u8]| Config {
        token: token.to_vec(),
        ..patient()
    };
    let other = engine(token(b"right"));
    let address = other.address().unwrap();
    let home = Buffer::from_vec(vec![1; 4096]);
    let _published = other.publish(b"home", &[home], Rights::READ, None).unwrap();
    assert!(engine(token(b"right")).open(address, b"home").is_ok());
    for wrong in [&b""[..], b"wrong"] {
        let begun = Instant::now();
        let refused = engine(token(wrong)).open(address, b"home").unwrap_err();
        assert!(
            refused.to_string().contains("cannot be reached"),
            "{refused}"
        );
        assert!(begun.elapsed() < SOON);
    }
    assert_eq!(other.stats().refused_greetings, 2);
    let everywhere = Config {
        listen: Some("0.0.0.0:0".parse().unwrap()),
        ..config()
    };
    let refused = Engine::start(everywhere.clone()).unwrap_err();
    assert!(
        refused.to_string().contains("allow_unauthenticated"),
        "{refused}"
    );
    assert!(
        Engine::start(Config {
            token: b"x".to_vec(),
            ..everywhere
        })
        .is_ok()
    );
}

#[test]
fn a_peer_that_is_gone_fails_at_once_and_again_and_again() {
    let one = engine(patient());
    let other = engine(config());
    let address = other.address().unwrap();
    let home = Buffer::from_vec(vec![1; 4096]);
    let published = other.publish(b"home", &[home], Rights::BOTH, None).unwrap();
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    let remote = one.open(address, b"home").unwrap();
    drop(published);
    other.close();
    for _ in 0..20 {
        let begun = Instant::now();
        let task = one.run(
            requests(Op::Write, &local, &remote, &[(0, 0, 10)]),
            Options::default(),
        );
        assert_eq!(task.unwrap().status(0), Status::Failed(Fault::Lost));
        assert!(begun.elapsed() < SOON);
    }
}

#[test]
fn a_batch_of_every_size_is_taken_and_its_callback_called_once() {
    let (one, other) = (engine(config()), engine(config()));
    let home = Buffer::from_vec(vec![0; 1 << 20]);
    let _published = other
        .publish(b"home", std::slice::from_ref(&home), Rights::BOTH, None)
        .unwrap();
    let local = Buffer::from_vec(bytes(1 << 20, 3));
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    let remote = one.open(other.address().unwrap(), b"home").unwrap();
    let called = Arc::new(AtomicUsize::new(0));
    for count in [0, 1, 3_000, 300_000] {
        let pieces: Vec<_> = (0..count).rev().map(|n| (n * 3, n * 3, 3)).collect();
        let then = Arc::clone(&called);
        let task = one.submit_then(
            requests(Op::Write, &local, &remote, &pieces),
            Options::default(),
            move || {
                then.fetch_add(1, Ordering::Relaxed);
            },
        );
        let task = task.unwrap();
        ended(&task);
        assert!(task.is_done() && task.len() == count as usize);
    }
    assert_eq!(called.load(Ordering::Relaxed), 4);
    assert!(home.to_vec()[..900_000] == local.to_vec()[..900_000]);
    let pieces = vec![(0, 0, 1); 1_000_001];
    let refused = one.submit(
        requests(Op::Write, &local, &remote, &pieces),
        Options::default(),
    );
    assert!(refused.unwrap_err().to_string().contains("1000000"));
}
