//! Tiers on disks, and other processes that read and write them by themselves.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;

use common::{PATIENCE, get, has, key, keys, namespace, put};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Outcome};
use kvdepot_testkit::bytes::content;
use serde_json::json;

const LEN: usize = 70_001;

fn serve(home: &Path, pipeline: &str) -> Depot {
    let mut settings = json!({"lanes": 2, "close_timeout": "10s", "socket": home.join("s")});
    for tier in pipeline.split('|') {
        settings[tier.to_ascii_lowercase()] = match tier {
            "Cache" => json!({"capacity": "1MiB"}),
            _ => json!({"path": home.join(tier), "capacity": "16MiB"}),
        };
    }
    kvdepot_service::open(&Config::new(pipeline, &settings).unwrap()).unwrap()
}

#[test]
fn clients_and_workers_move_blocks_of_tiers_on_disks() {
    for pipeline in [
        "Nvme",
        "Cache|Nvme",
        "Posix",
        "Cache|Posix",
        "Cache|Nvme|Posix",
        "Dax|Nvme",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let all: Vec<u64> = (0..40).collect();
        let owner = serve(home, pipeline);
        let client = kvdepot_service::connect(&home.join("s"), Some(2)).unwrap();
        let there = namespace(&client);
        assert!(put(&there, &all, LEN).iter().all(|ok| *ok), "{pipeline}");
        client.close();
        assert!(owner.drain(PATIENCE));
        owner.close();
        let owner = serve(home, pipeline);
        let client = kvdepot_service::connect(&home.join("s"), Some(2)).unwrap();
        let worker = Mover::attach(&home.join("s"), Some(1), true).unwrap();
        let (there, here) = (namespace(&client), namespace(&owner));
        for ns in [&there, &here] {
            let pinned = ns.pin(&[key(7)], false).unwrap().remove(0).unwrap();
            let buffer = Buffer::from_vec(vec![0; LEN]);
            let buffers = BlockBuffers::whole([buffer.clone()]);
            let job = worker.load(&[pinned.placement()], &buffers, 0).unwrap();
            assert!(job.wait(Some(PATIENCE)));
            assert!(
                job.checksums()[0].is_some(),
                "{pipeline}: {:?}",
                job.error()
            );
            assert!(buffer.to_vec() == content(7, LEN), "{pipeline}");
            ns.unpin(&[pinned], false);
        }
        assert!(has(&there, &all, LEN), "{pipeline}");
        assert_eq!(get(&there, &[1, 99], LEN), [Outcome::Done, Outcome::Miss]);
        if !pipeline.starts_with("Posix") {
            // The two-phase verbs, of two parts.
            let lens = vec![5000, LEN as u64];
            let reserved = there
                .reserve(&[(key(50), lens)])
                .unwrap()
                .remove(0)
                .unwrap();
            let sums = [(0, 5000), (1, LEN)].map(|(part, len)| {
                let buffers = BlockBuffers::whole([Buffer::from_vec(content(50 + part, len))]);
                let job = worker
                    .store(&[reserved.placement()], &buffers, part as u32)
                    .unwrap();
                assert!(job.wait(Some(PATIENCE)));
                job.checksums()[0].unwrap_or_else(|| panic!("{pipeline}: {:?}", job.error()))
            });
            let committed = there.commit(&[reserved], &[sums.to_vec()]).unwrap();
            assert_eq!(committed, [true], "{pipeline}");
            let pinned = there.pin(&keys([50]), false).unwrap().remove(0).unwrap();
            for (part, len) in [(0, 5000), (1, LEN)] {
                let buffer = Buffer::from_vec(vec![0; len]);
                let buffers = BlockBuffers::whole([buffer.clone()]);
                let job = worker
                    .load(&[pinned.placement()], &buffers, part as u32)
                    .unwrap();
                assert!(job.wait(Some(PATIENCE)));
                assert!(buffer.to_vec() == content(50 + part, len), "{pipeline}");
            }
            there.unpin(&[pinned], false);
        }
        drop(worker);
        client.close();
        owner.close();
    }
}
