//! Engines whose bytes go by two Soft-RoCE devices.

use super::cable::Cable;
use super::{MIB, content, ok};
use crate::{Config, Engine, Fault, Op, Options, Remote, Request, Rights, Status};
use kvdepot_media::Buffer;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn engine(devices: &[&str], watermark: usize) -> Arc<Engine> {
    let devices = devices.iter().map(|&name| name.to_owned()).collect();
    Arc::new(
        Engine::start(Config {
            local: false,
            rdma: Some(devices),
            slice_size: 64 << 10,
            tail_merge: 16 << 10,
            watermark,
            ..Config::default()
        })
        .unwrap(),
    )
}

/// Pieces of 20 KB, backwards, so that nothing continues anything.
fn requests<'a>(op: Op, local: &Buffer, remote: &'a Remote) -> Vec<Request<'a>> {
    let (at, len) = (local.addr() as u64, local.len() as u64);
    let request = |offset: u64| Request {
        op,
        local: at + offset,
        remote,
        offset,
        len: 20_000.min(len - offset),
    };
    let count = len.div_ceil(20_000);
    (0..count)
        .rev()
        .map(|number| request(number * 20_000))
        .collect()
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn batches_go_by_one_device_and_by_two() {
    let _cable = Cable::lay();
    let ways: [(&[&str], &[&str]); 2] = [
        (&["rxe0"], &["rxe1"]),
        (&["rxe0", "rxe1"], &["rxe1", "rxe0"]),
    ];
    for (here, there) in ways {
        let (one, other) = (engine(here, 4), engine(there, 4));
        let bytes = content(7, 2 * MIB);
        // Of two ranges.
        let homes = [
            Buffer::from_vec(bytes[..MIB].to_vec()),
            Buffer::from_vec(bytes[MIB..].to_vec()),
        ];
        let published = other.publish(b"home", &homes, Rights::BOTH, None).unwrap();
        let local = Buffer::from_vec(vec![0; 2 * MIB]);
        let _registered = one.register(std::slice::from_ref(&local)).unwrap();
        let remote = one.open(other.address().unwrap(), b"home").unwrap();
        assert!(remote.is_rdma());
        let frames = one.stats().frames;
        let all = requests(Op::Read, &local, &remote).into_iter();
        let task = one.run(all, Options::default()).unwrap();
        assert!(task.is_done(), "{:?}", task.fault());
        assert!(local.to_vec() == bytes);
        local.write_at(0, &content(8, 2 * MIB)).unwrap();
        let all = requests(Op::Write, &local, &remote).into_iter();
        let task = one.run(all, Options::default()).unwrap();
        assert!(task.is_done(), "{:?}", task.fault());
        let found = homes.iter().flat_map(Buffer::to_vec).collect::<Vec<u8>>();
        assert!(found == content(8, 2 * MIB));
        let stats = one.stats();
        assert_eq!(stats.frames, frames, "nothing went by a connection");
        ok(format!(
            "{} devices: 2 x 2 MiB in {} posts, {} work requests",
            here.len(),
            stats.posts,
            stats.work_requests
        ));
        // What is withdrawn is unknown by whichever way.
        drop(published);
        let all = requests(Op::Read, &local, &remote).into_iter();
        let task = one.run(all, Options::default()).unwrap();
        let unknown = Status::Failed(Fault::Unknown);
        assert!(task.statuses().all(|status| status == unknown));
        drop(remote);
        one.close();
        other.close();
        assert!(
            homes.map(Buffer::into_vec).iter().all(Result::is_ok),
            "nobody has the memory"
        );
    }
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn a_device_whose_network_is_cut_leaves_the_rest_to_connections() {
    let cable = Cable::lay();
    let (one, other) = (engine(&["rxe0"], 4), engine(&["rxe1"], 4));
    let bytes = content(3, 2 * MIB);
    let home = Buffer::from_vec(bytes.clone());
    let _published = other.publish(b"home", &[home], Rights::BOTH, None).unwrap();
    let local = Buffer::from_vec(vec![0; 2 * MIB]);
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    let remote = one.open(other.address().unwrap(), b"home").unwrap();
    assert!(remote.is_rdma());
    Cable::run("ip link set left down");
    let begun = Instant::now();
    let options = Options {
        timeout: Duration::from_secs(2),
        ..Options::default()
    };
    let task = one
        .run(requests(Op::Read, &local, &remote).into_iter(), options)
        .unwrap();
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(2600), "{took:?}");
    ok(format!(
        "after a cut a task ends in {took:?}, as {:?}",
        task.fault()
    ));
    // By connections from now on.
    assert!(!remote.is_rdma());
    let all = requests(Op::Read, &local, &remote).into_iter();
    let task = one.run(all, Options::default()).unwrap();
    assert!(task.is_done(), "{:?}", task.fault());
    assert!(local.to_vec() == bytes);
    cable.mend();
}
