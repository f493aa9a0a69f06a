//! Depots that another process serves: the same verbs, the same promises.

#![expect(
    unsafe_code,
    reason = "becomes another user, and has process numbers of its own"
)]

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::slice::from_ref;
use std::time::Duration;

use crate::common;
use crate::common::frames::{BLOCKS, Bare, VERSION, WELCOME, hello, varint};
use crate::common::raw::Raw;
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, eventually, get, has, key, keys, namespace, put,
};
use crate::realm;
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Depot, DrainTo, Error, GetOptions, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};

const LEN: usize = 40_000;

fn connect(place: &Place) -> Depot {
    kvdepot_service::connect(&place.socket(), Some(2)).unwrap()
}

#[test]
fn a_client_has_the_verbs_of_the_depot() {
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "4MiB", "16MiB");
        let owner = place.serve();
        let client = connect(&place);
        assert_eq!(client.tiers(), owner.tiers());
        assert_eq!(client.path(), owner.path());
        assert_eq!(client.description(), owner.description());
        let (there, here) = (namespace(&client), namespace(&owner));
        let numbers: Vec<u64> = (0..60).collect();
        assert!(put(&there, &numbers, LEN).iter().all(|stored| *stored));
        // Again, by either side: they are there.
        assert!(put(&here, &numbers, LEN).iter().all(|stored| *stored));
        assert!(put(&there, &numbers, LEN).iter().all(|stored| *stored));
        assert!(client.drain(PATIENCE));
        assert!(
            has(&there, &numbers, LEN) && has(&here, &numbers, LEN),
            "{pipeline}"
        );
        let some = keys([1, 2, 99, 3]);
        assert_eq!(there.contains(&some).unwrap(), [true, true, false, true]);
        assert_eq!(there.prefix(&some).unwrap(), 2);
        assert_eq!(there.nearest(&some).unwrap(), here.nearest(&some).unwrap());
        let len = Some(LEN as u64);
        assert_eq!(there.acknowledged(&some).unwrap(), [len, len, None, len]);
        assert_eq!(get(&there, &[1, 99], LEN), [Outcome::Done, Outcome::Miss]);
        assert_eq!(get(&there, &[1], LEN + 1), [Outcome::Length]);
        assert_eq!(there.remove(&keys([5, 6, 99, 6, 5])).unwrap(), 2);
        assert!(!here.contains(&keys([5])).unwrap()[0]);
        assert!(there.clear().unwrap() > 0);
        assert_eq!(here.prefix(&keys([1])).unwrap(), 0);
        let stats = client.stats();
        assert_eq!(stats.tiers, owner.stats().tiers);
        assert_eq!(stats.put_blocks, 180);
        let wrong = there.put(keys([1]), BlockBuffers::default());
        assert!(matches!(wrong, Err(Error::Input { .. })));
        client.close();
        assert!(matches!(there.prefix(&some), Err(Error::Closed(_))));
        assert_at_rest(&owner);
    }
}

#[test]
fn pins_and_reservations_of_a_client_are_its_own() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let (one, other) = (connect(&place), connect(&place));
    let (ns, foreign) = (namespace(&one), namespace(&other));
    let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let lens = vec![5000, 3000];
    let reserved = ns
        .reserve(&[(key(1), lens.clone())])
        .unwrap()
        .remove(0)
        .unwrap();
    assert!(foreign.reserve(&[(key(1), lens)]).unwrap()[0].is_none());
    let mut sums = Vec::new();
    for (part, len) in [(0, 5000), (1, 3000)] {
        let buffers = BlockBuffers::whole([common::block(part, len)]);
        let job = mover
            .store(&[reserved.placement()], &buffers, part as u32)
            .unwrap();
        assert!(job.wait(Some(PATIENCE)));
        sums.push(job.checksums()[0].unwrap());
    }
    let few = ns.commit(from_ref(&reserved), &[vec![sums[0]]]);
    assert!(matches!(few, Err(Error::Input { .. })));
    // Another client cannot end it, and this one only once.
    foreign.abort(from_ref(&reserved));
    assert_eq!(
        ns.commit(from_ref(&reserved), from_ref(&sums)).unwrap(),
        [true]
    );
    assert_eq!(ns.commit(&[reserved], &[sums]).unwrap(), [false]);
    let pin = ns.pin(&keys([1, 2]), false).unwrap().remove(0).unwrap();
    assert_eq!(pin.bytes(), 8000);
    foreign.unpin(from_ref(&pin), false);
    assert_eq!(owner.stats().tiers[0].pinned_blocks, 1);
    let buffer = Buffer::from_vec(vec![0; 3000]);
    let job = mover
        .load(
            &[pin.placement()],
            &BlockBuffers::whole([buffer.clone()]),
            1,
        )
        .unwrap();
    assert!(job.wait(Some(PATIENCE)));
    assert_eq!(buffer.to_vec(), content(1, 3000));
    // The whole block, its parts one behind the other.
    let whole = Buffer::from_vec(vec![0; 8000]);
    let task = ns
        .get(keys([1]), BlockBuffers::whole([whole.clone()]))
        .unwrap();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
    assert_eq!(whole.to_vec()[5000..], content(1, 3000));
    assert_eq!(ns.discard(from_ref(&pin)), 1);
    ns.unpin(from_ref(&pin), false);
    ns.unpin(&[pin], false);
    eventually("the pin's end", || {
        owner.stats().tiers[0].pinned_blocks == 0
    });
    // What is not ended ends when the client takes leave.
    let _kept = ns.reserve(&[(key(7), vec![100])]).unwrap();
    assert_eq!(owner.stats().tiers[0].reserved_blocks, 1);
    one.close();
    eventually("the end", || owner.stats().tiers[0].reserved_blocks == 0);
    drop(mover);
    assert_at_rest(&owner);
}

#[test]
fn each_client_is_told_what_is_there_and_what_left() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let (one, other) = (connect(&place), connect(&place));
    let ns = namespace(&one);
    for depot in [&owner, &one, &other] {
        assert!(depot.gone(100).unwrap().blocks.is_empty());
    }
    put(&ns, &[1, 2, 3], LEN);
    assert_eq!(ns.blocks().unwrap(), namespace(&owner).blocks().unwrap());
    assert_eq!(ns.blocks().unwrap().len(), 3);
    let known = one.namespaces().unwrap();
    assert_eq!(known, owner.namespaces().unwrap());
    assert_eq!((known[0].id, known[0].blocks), (ns.id(), 3));
    ns.remove(&keys([2])).unwrap();
    for depot in [&owner, &one, &other] {
        let gone = depot.gone(100).unwrap();
        let left: Vec<_> = gone
            .blocks
            .iter()
            .map(|(identity, _)| identity.key)
            .collect();
        assert_eq!((left, gone.overflowed), (keys([2]), false));
        assert!(depot.gone(100).unwrap().blocks.is_empty());
    }
}

#[test]
fn a_client_stages_stops_at_the_first_gap_and_prefetches() {
    let place = Place::new("Cache|Dax", "4MiB", "16MiB");
    let owner = place.serve();
    let client = connect(&place);
    let ns = namespace(&client);
    put(&ns, &(0..20).filter(|n| *n != 7).collect::<Vec<u64>>(), LEN);
    assert!(client.drain(PATIENCE));
    let buffers: Vec<Buffer> = (0..20).map(|_| Buffer::from_vec(vec![0xEE; LEN])).collect();
    let mut options = GetOptions::default();
    (options.prefix, options.staged) = (true, true);
    let wanted = BlockBuffers::whole(buffers.clone());
    let task = ns.get_with(keys(0..20), wanted, options).unwrap();
    let served = task.wait(Some(PATIENCE)).unwrap();
    for (number, buffer) in buffers.iter().enumerate() {
        assert_eq!(served[number], number < 7);
        let expected = match number < 7 {
            true => content(number as u64, LEN),
            false => vec![0xEE; LEN],
        };
        assert!(buffer.to_vec() == expected, "block {number}");
    }
    let near = |ns: &kvdepot_store::Namespace| ns.nearest(&keys([0])).unwrap() == [Some("Cache")];
    client.close();
    owner.close();
    let _owner = place.serve();
    let client = connect(&place);
    let ns = namespace(&client);
    assert!(!near(&ns));
    let task = ns.prefetch(&keys(0..20)).unwrap();
    let ahead = task.wait(Some(PATIENCE)).unwrap();
    assert_eq!(ahead.iter().filter(|ahead| **ahead).count(), 7);
    assert!(near(&ns));
}

#[test]
fn devices_come_and_go_under_a_client() {
    let place = Place::new("Dax", "", "4MiB").with("dax", "records", 1024);
    let owner = place.serve();
    let client = connect(&place);
    let ns = namespace(&client);
    let first: Vec<u64> = (0..40).collect();
    put(&ns, &first, LEN);
    // What the client knows nothing of yet: a medium that appears, and one that grows.
    let second = place.dir().join("second");
    client.add_device(&second, Some(4 << 20)).unwrap();
    let more: Vec<u64> = (100..140).collect();
    assert!(put(&ns, &more, LEN).iter().all(|stored| *stored));
    assert!(
        client
            .devices()
            .unwrap()
            .iter()
            .all(|device| device.blocks > 0)
    );
    client.grow_device(&second, 16 << 20).unwrap();
    let many: Vec<u64> = (200..400).collect();
    assert!(put(&ns, &many, LEN).iter().all(|stored| *stored));
    let newest = get(&ns, &many[many.len() - 150..], LEN);
    assert_eq!(newest, [Outcome::Done; 150]);
    // A client's get is done before its owner has ended the pins of it.
    eventually("the same devices", || {
        client.devices().unwrap() == owner.devices().unwrap()
    });
    let drained = client
        .drain_device(&place.arena(), DrainTo::Others, Duration::from_secs(1))
        .unwrap();
    assert!(drained.moved_blocks > 0, "{drained:?}");
    client
        .remove_device(&place.arena(), false, Duration::ZERO)
        .unwrap();
    assert!(has(&ns, &many[many.len() - 150..], LEN));
    // This process lets go of its memory too: another depot may allocate there.
    let other = Place::new("Dax", "", "4MiB").with("dax", "records", 1024);
    let other = other.with("dax", "path", place.arena().to_str().unwrap());
    let next = other.serve();
    eventually("room", || put(&namespace(&next), &[900], LEN) == [true]);
    next.close();
    let error = client.grow_device(&second, 1 << 20).unwrap_err();
    assert!(matches!(error, Error::Input { .. }), "{error}");
    let pin = ns.pin(&keys([399]), false).unwrap().remove(0).unwrap();
    client.add_device(&place.arena(), None).unwrap();
    let busy = client.drain_device(&second, DrainTo::Others, Duration::from_millis(50));
    assert!(
        matches!(busy, Err(Error::Busy { pinned: 1, .. })),
        "{busy:?}"
    );
    ns.unpin(&[pin], false);
}

#[test]
fn a_full_tier_is_an_error_only_where_that_was_asked_for() {
    let place = Place::new("Dax", "", "1MiB").with("dax", "records", 16);
    let _owner = place.serve();
    let client = connect(&place);
    let ns = namespace(&client);
    let block = [(key(1), vec![8 << 20])];
    assert!(ns.reserve(&block).unwrap()[0].is_none());
    let error = ns.reserve_strict(&block).unwrap_err();
    assert!(matches!(error, Error::Full { tier: "Dax", requested, .. } if requested == 8 << 20));
}

#[test]
fn a_block_that_rots_is_found_by_the_client_and_fetched_from_the_next_tier() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let client = connect(&place);
    let ns = namespace(&client);
    put(&ns, &[1, 2, 3], LEN);
    let raw = Raw::open(&place.arena());
    let (at, _) = raw.live(&key(2)).unwrap().1.extents.iter().next().unwrap();
    let byte = raw.file.read(at, 1)[0];
    raw.file.write(at, &[!byte]);
    assert_eq!(
        get(&ns, &[1, 2, 3], LEN),
        [Outcome::Done, Outcome::Corrupt, Outcome::Done]
    );
    // Unpublished: the next put writes it again.
    assert_eq!(ns.contains(&keys([2])).unwrap(), [false]);
    assert_eq!(put(&ns, &[2], LEN), [true]);
    assert!(has(&ns, &[1, 2, 3], LEN));
    assert_eq!(owner.stats().tiers[0].corrupt_blocks, 1);
    assert_at_rest(&owner);
}

#[test]
fn nonsense_on_the_socket_ends_that_connection_and_nothing_else() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let client = connect(&place);
    let ns = namespace(&client);
    put(&ns, &[1], LEN);
    let answer = |bytes: &[u8]| {
        let mut socket = UnixStream::connect(place.socket()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // The owner may close with bytes unread, which is an error here.
        let _ended = socket.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    for version in [0, 1, VERSION - 1, VERSION + 1, u32::MAX] {
        let text = answer(&hello(version, 2, 77));
        assert!(
            text.contains(&format!("protocol version {version}")),
            "{text}"
        );
    }
    assert!(answer(&hello(VERSION, 9, 77)).contains("role 9"));
    assert!(answer(&hello(VERSION, 3, 77)).contains("client 77 is unknown"));
    assert!(answer(b"GET / HTTP/1.1\r\n\r\nxxxxxxxx").contains("does not use"));
    // Frames of a client that has attached.
    let mut seed = 1u64;
    for round in 0..200u64 {
        let mut socket = UnixStream::connect(place.socket()).unwrap();
        socket.write_all(&hello(VERSION, 2, 77)).unwrap();
        let mut welcome = [0; WELCOME + 16];
        socket.read_exact(&mut welcome).unwrap();
        let number = u64::from_le_bytes(welcome[24..32].try_into().unwrap());
        let mut tasks = UnixStream::connect(place.socket()).unwrap();
        tasks.write_all(&hello(VERSION, 3, number)).unwrap();
        let mut noise = vec![0; 16 + (round % 80) as usize];
        for byte in &mut noise {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (seed >> 56) as u8;
        }
        let len = (noise.len() - 16) as u32;
        noise[..4].copy_from_slice(&len.to_le_bytes());
        noise[4..6].copy_from_slice(&((round % 40) as u16).to_le_bytes());
        let _refused = socket.write_all(&noise);
        let _refused = tasks.write_all(&noise);
    }
    assert!(has(&ns, &[1], LEN));
    client.close();
    eventually("rest", || owner.stats().tiers[0].reserved_blocks == 0);
    assert_at_rest(&owner);
}

#[test]
fn a_listing_comes_in_frames_of_a_bounded_length() {
    let place = Place::new("Cache", "256MiB", "");
    let owner = place.serve();
    let ns = namespace(&owner);
    let numbers: Vec<u64> = (0..40_000).collect();
    assert!(put(&ns, &numbers, 1).iter().all(|stored| *stored));
    let client = connect(&place);
    let listed = namespace(&client).blocks().unwrap();
    assert_eq!(listed.len(), 40_000);
    assert_eq!(listed, ns.blocks().unwrap());
    let mut bare = Bare::attach(&place.socket(), 0);
    let mut from = vec![0];
    let mut count = 0;
    loop {
        let body = [&ns.id().0[..], &from, &varint(u64::MAX)].concat();
        let (status, answer) = bare.ask(BLOCKS, &body);
        assert!(status == 0 && answer.len() < 1 << 20);
        count += answer.len() / 40;
        if answer[0] == 0 {
            break;
        }
        from = answer[..21].to_vec();
    }
    assert_eq!(count, 40_000);
}

#[test]
fn a_connection_of_another_process_leaves_a_client_that_attaches() {
    const TEST: &str = "service::a_connection_of_another_process_leaves_a_client_that_attaches";
    if child::role().is_some() {
        let number = child::value("number").parse().unwrap();
        let tasks = Bare::second_half(child::value("socket").as_ref(), number);
        child::say(if tasks.is_none() { "refused" } else { "taken" });
        return;
    }
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    put(&namespace(&owner), &[1], LEN);
    let socket = place.socket();
    let (calls, number) = Bare::first_half(&socket, 0, 0);
    let named = number.to_string();
    let values = [("socket", socket.to_str().unwrap()), ("number", &named)];
    let mut other = Child::start(TEST, "other", &values);
    other.expect("refused");
    let tasks = Bare::second_half(&socket, number).expect("its own second connection");
    let mut client = Bare {
        calls,
        tasks,
        number,
    };
    let body = [&namespace(&owner).id().0[..], &[0], &varint(u64::MAX)].concat();
    assert_eq!(client.ask(BLOCKS, &body).0, 0);
}

#[test]
fn another_user_has_the_blocks_and_not_the_devices() {
    const TEST: &str = "service::another_user_has_the_blocks_and_not_the_devices";
    if child::role().is_some() {
        // SAFETY: changes the user of this process alone, which is the test's child.
        unsafe { assert_eq!((libc::setgid(65_534), libc::setuid(65_534)), (0, 0)) };
        let client = kvdepot_service::connect(child::value("socket").as_ref(), Some(1)).unwrap();
        let ns = namespace(&client);
        assert!(has(&ns, &[1], LEN) && put(&ns, &[2], LEN) == [true]);
        assert_eq!(ns.remove(&keys([2])).unwrap(), 1);
        assert_eq!(client.devices().unwrap().len(), 1);
        let (arena, new) = (child::value("arena"), child::value("new"));
        let none = Duration::ZERO;
        let refused = [
            client.add_device(new.as_ref(), Some(4 << 20)).err(),
            client.grow_device(arena.as_ref(), 8 << 20).err(),
            client
                .drain_device(arena.as_ref(), DrainTo::Nowhere, none)
                .err(),
            client.remove_device(arena.as_ref(), true, none).err(),
            ns.clear().err(),
        ];
        for error in refused {
            let text = error.unwrap().to_string();
            assert!(text.contains("another user"), "{text}");
        }
        child::say("refused");
        return;
    }
    // SAFETY: has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("only root can be two users");
        return;
    }
    let place = Place::new("Dax", "", "4MiB").with("", "socket_mode", "0666");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.dir(), open).unwrap();
    let owner = place.serve();
    let ns = namespace(&owner);
    put(&ns, &[1], LEN);
    let new = place.dir().join("new");
    let values = [
        ("socket", place.socket()),
        ("arena", place.arena()),
        ("new", new.clone()),
    ];
    let values = values
        .each_ref()
        .map(|(name, path)| (*name, path.to_str().unwrap()));
    let mut child = Child::start(TEST, "client", &values);
    child.expect("refused");
    assert!(has(&ns, &[1], LEN) && !new.exists());
    assert_eq!(owner.devices().unwrap().len(), 1);
    // The owner's own user may.
    let client = connect(&place);
    client.add_device(&new, Some(4 << 20)).unwrap();
    assert_eq!(namespace(&client).clear().unwrap(), 1);
}

/// Has a child be the first process of a namespace of process numbers, as one in a container is. It
/// ends with the process that waits for it here.
fn in_a_container(command: &mut Command) {
    let apart = || {
        let done = |answer: i32| match answer {
            -1 => Err(std::io::Error::last_os_error()),
            answer => Ok(answer),
        };
        // SAFETY: the child of a fork, which has one thread, makes system calls.
        unsafe {
            done(libc::unshare(libc::CLONE_NEWPID))?;
            let inner = done(libc::fork())?;
            if inner == 0 {
                done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
                return Ok(());
            }
            // Whoever waits for the ends of its pipes waits for the inner one's.
            libc::close_range(0, libc::c_uint::MAX, 0);
            libc::waitpid(inner, std::ptr::null_mut(), 0);
            libc::_exit(0)
        }
    };
    // SAFETY: as above.
    unsafe { command.pre_exec(apart) };
}

#[test]
fn a_client_whose_process_the_owner_cannot_see_is_served_and_its_end_is_noticed() {
    const TEST: &str = "service::\
        a_client_whose_process_the_owner_cannot_see_is_served_and_its_end_is_noticed";
    match child::role().as_deref() {
        Some("owner") => {
            let config = common::config_of(&child::value("spec"));
            let _owner = kvdepot_service::open(&config).unwrap();
            child::say("serving");
            child::sleep_until_killed();
        }
        Some(_) => {
            let socket = child::value("socket");
            let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
            let ns = namespace(&client);
            assert!(has(&ns, &[1], LEN) && put(&ns, &[2], LEN) == [true]);
            assert!(ns.pin(&keys([1]), false).unwrap()[0].is_some());
            child::say("pinned");
            // Its connections end, and it stands still.
            common::frames::break_connections(socket.as_ref());
            // SAFETY: has no memory in its arguments.
            unsafe { libc::raise(libc::SIGSTOP) };
            eventually("the next connection", || has(&ns, &[1], LEN));
            child::say("back");
            child::sleep_until_killed();
        }
        None => {}
    }
    let place = Place::new("Cache", "1MiB", "");
    let values = [("spec", &*place.spec())];
    // Its own namespace has no number for any process of this test.
    let mut owner = match Child::try_start(TEST, "owner", &values, in_a_container) {
        Ok(owner) => owner,
        Err(error) => return realm::skip("a namespace of process numbers", &error),
    };
    owner.expect("serving");
    let other = match kvdepot_service::connect(&place.socket(), Some(2)) {
        Ok(other) => other,
        // A kernel before 6.5, which says what to share.
        Err(error) => {
            let text = error.to_string();
            for said in ["rejected", "6.5", "shareProcessNamespace", "hostPID"] {
                assert!(text.contains(said), "{text}");
            }
            return;
        }
    };
    let ns = namespace(&other);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    let socket = place.socket();
    let values = [("socket", socket.to_str().unwrap())];
    let mut client = Child::start(TEST, "client", &values);
    client.expect("pinned");
    let stat = format!("/proc/{}/stat", client.pid());
    let stands = || std::fs::read_to_string(&stat).unwrap().contains(") T ");
    eventually("that the client stands still", stands);
    // Others use up the tier: what it pins is neither evicted nor used again.
    for number in 100..200 {
        assert_eq!(put(&ns, &[number], LEN), [true]);
    }
    assert!(has(&ns, &[1], LEN) && !has(&ns, &[2], LEN));
    assert_eq!(other.stats().tiers[0].pinned_blocks, 1);
    // SAFETY: has no memory in its arguments.
    unsafe { libc::kill(client.pid().try_into().unwrap(), libc::SIGCONT) };
    client.expect("back");
    assert_eq!(other.stats().tiers[0].pinned_blocks, 1);
    client.kill();
    eventually("the end of its pin", || {
        other.stats().tiers[0].pinned_blocks == 0
    });
    // A process that only moves needs no number, either.
    drop(Mover::attach(&socket, Some(1), true).unwrap());
}

#[test]
fn a_client_in_a_container_whose_process_the_owner_sees_is_served_and_its_end_is_noticed() {
    const TEST: &str = "service::\
        a_client_in_a_container_whose_process_the_owner_sees_is_served_and_its_end_is_noticed";
    if child::role().is_some() {
        let client = kvdepot_service::connect(child::value("socket").as_ref(), Some(1)).unwrap();
        let ns = namespace(&client);
        assert!(has(&ns, &[1], LEN) && put(&ns, &[2], LEN) == [true]);
        let pins = ns.pin(&keys([1]), false).unwrap();
        assert!(pins[0].is_some());
        child::say("pinned");
        child::sleep_until_killed();
    }
    // As the owner has it with `hostPID`, or where containers share their process numbers.
    let place = Place::new("Cache", "1MiB", "");
    let owner = place.serve();
    let ns = namespace(&owner);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    let socket = place.socket();
    let values = [("socket", socket.to_str().unwrap())];
    let mut client = match Child::try_start(TEST, "client", &values, in_a_container) {
        Ok(client) => client,
        Err(error) => return realm::skip("a namespace of process numbers", &error),
    };
    client.expect("pinned");
    assert!(has(&ns, &[2], LEN));
    assert_eq!(owner.stats().tiers[0].pinned_blocks, 1);
    client.kill();
    eventually("the end of its pin", || {
        owner.stats().tiers[0].pinned_blocks == 0
    });
}

#[test]
fn the_mode_of_the_socket_is_what_was_asked_for() {
    let mode = |place: &Place| {
        let data = std::fs::metadata(place.socket()).unwrap();
        data.permissions().mode() & 0o777
    };
    let place = Place::new("Cache", "1MiB", "");
    let owner = place.serve();
    assert_eq!(mode(&place), 0o600);
    drop(owner);
    let place = Place::new("Cache", "1MiB", "").with("", "socket_mode", "0660");
    let _owner = place.serve();
    assert_eq!(mode(&place), 0o660);
}

#[test]
fn nobody_at_the_socket_is_an_error_that_names_it() {
    let place = Place::new("Cache", "1MiB", "");
    let error = kvdepot_service::connect(&place.socket(), None)
        .err()
        .unwrap();
    assert!(
        error.to_string().contains(place.socket().to_str().unwrap()),
        "{error}"
    );
}
