//! Blocks of the tier `S3` are written on the condition that nothing has their names: by one
//! request, without a look before it, and over nothing that ought to stay.

use std::fs;
use std::time::Duration;

use crate::bucket::{LEN, Server, Trouble};
use crate::common::{self, eventually, has, keys, namespace, put};
use hyper::Method;
use kvdepot_arena::format::file_header;
use kvdepot_store::Depot;
use serde_json::json;

/// Requests for blocks since the last time, by their methods.
fn asked(server: &Server) -> Vec<String> {
    let seen = server.seen().into_iter();
    let seen = seen.filter(|line| line.contains("/blocks/"));
    seen.map(|line| line.split(' ').next().unwrap_or("").to_owned())
        .collect()
}

fn stored(depot: &Depot) -> u64 {
    depot.stats().tiers[0].stored_blocks
}

#[test]
fn a_block_costs_one_request_and_what_another_one_wrote_is_there() {
    let server = Server::start();
    let (one, other) = (server.open(), server.open());
    assert_eq!(put(&namespace(&one), &[1], LEN), [true]);
    assert_eq!(asked(&server), ["PUT"]);
    let before = fs::metadata(&server.objects()[0]).unwrap();
    assert_eq!(put(&namespace(&other), &[1], LEN), [true]);
    assert_eq!(asked(&server), ["PUT", "HEAD"]);
    let after = fs::metadata(&server.objects()[0]).unwrap();
    assert_eq!(
        before.modified().unwrap(),
        after.modified().unwrap(),
        "it was written again"
    );
    assert_eq!((stored(&one), stored(&other)), (1, 0));
    assert!(has(&namespace(&other), &[1], LEN));
    // What was found lately is looked at, and not sent.
    asked(&server);
    assert_eq!(put(&namespace(&other), &[1], LEN), [true]);
    assert_eq!(asked(&server), ["HEAD"]);
    // It may have been removed by another one.
    namespace(&one).remove(&keys([1])).unwrap();
    assert_eq!(put(&namespace(&other), &[1], LEN), [true]);
    // Who has removed it remembers that for a moment.
    eventually("the block", || has(&namespace(&one), &[1], LEN));
    one.close();
    other.close();
}

#[test]
fn a_block_of_many_bytes_is_looked_for_before() {
    let server = Server::start();
    let settings = json!({"capacity": "1GiB"});
    let (one, other) = (
        server.open_with("S3", &settings),
        server.open_with("S3", &settings),
    );
    assert_eq!(put(&namespace(&one), &[1], 17 << 20), [true]);
    asked(&server);
    assert_eq!(put(&namespace(&other), &[1], 17 << 20), [true]);
    assert_eq!(asked(&server), ["HEAD"]);
    one.close();
    other.close();
}

#[test]
fn a_request_whose_answer_was_lost_has_stored_its_block() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    server.trouble(Some(Method::PUT), "/blocks/", 1, Trouble::Lost);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert_eq!(asked(&server), ["PUT", "PUT", "HEAD"]);
    assert!(has(&ns, &[1], LEN));
    depot.close();
}

#[test]
fn what_does_not_belong_there_is_written_over_unless_it_is_of_a_later_release() {
    let server = Server::start();
    let depot = server.open();
    assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    depot.close();
    let object = &server.objects()[0];
    let good = fs::read(object).unwrap();
    for strange in [vec![], vec![7; good.len()], good[..good.len() / 2].to_vec()] {
        server.replace(object, &strange, None);
        let depot = server.open();
        let ns = namespace(&depot);
        assert_eq!(put(&ns, &[1], LEN), [true]);
        assert!(has(&ns, &[1], LEN));
        depot.close();
    }
    let mut newer = good;
    newer[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(file_header::FileHeader::is_newer(
        newer.first_chunk().unwrap()
    ));
    server.replace(object, &newer, None);
    let depot = server.open();
    assert_eq!(put(&namespace(&depot), &[1], LEN), [false]);
    assert_eq!(fs::read(object).unwrap(), newer);
    depot.close();
}

#[test]
fn a_store_that_knows_no_conditions_is_looked_at_before() {
    let server = Server::start();
    server.trouble(
        Some(Method::PUT),
        "/blocks/",
        usize::MAX,
        Trouble::NoConditions,
    );
    let depot = server.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert_eq!(asked(&server), ["PUT", "HEAD", "PUT"]);
    assert_eq!(put(&ns, &[2], LEN), [true]);
    assert_eq!(asked(&server), ["HEAD", "PUT"]);
    assert!(has(&ns, &[1, 2], LEN));
    depot.close();
}

#[test]
fn what_is_there_needs_no_room() {
    const LEN: usize = 400_000;
    let server = Server::start();
    let one = server.open();
    assert_eq!(put(&namespace(&one), &[1, 2, 3, 4], LEN), [true; 4]);
    let little = server.open_with("S3", &json!({"staging": "1MiB"}));
    let ns = namespace(&little);
    assert_eq!(put(&ns, &[1, 2, 3, 4], LEN), [true; 4]);
    assert_eq!(put(&ns, &[5, 6, 7, 8], LEN), [true, true, false, false]);
    one.close();
    little.close();
}

#[test]
fn a_put_waits_for_the_memory_of_another_one_that_is_slow() {
    const LEN: usize = 400_000;
    let server = Server::start();
    let depot = server.open_with("S3", &json!({"staging": "1MiB"}));
    let ns = namespace(&depot);
    let slow = Trouble::Slow(Duration::from_secs(2));
    server.trouble(Some(Method::PUT), "/blocks/", 2, slow);
    let first = common::start_put(&ns, &[1, 2], LEN);
    eventually("both uploads", || server.asked("/blocks/") >= 2);
    assert_eq!(put(&ns, &[3], LEN), [true]);
    assert_eq!(first.wait(Some(common::PATIENCE)).unwrap(), [true, true]);
    depot.close();
}

#[test]
fn another_ones_block_of_that_key_is_there() {
    let server = Server::start();
    let (one, other) = (server.open(), server.open());
    assert_eq!(put(&namespace(&one), &[1], LEN), [true]);
    // The same tokens, computed otherwise.
    let put_other = |number: u64| {
        let bytes = common::block(number, LEN);
        let task = namespace(&other).put(keys([1]), kvdepot_store::BlockBuffers::whole([bytes]));
        task.unwrap().wait(Some(common::PATIENCE)).unwrap()
    };
    let first = put_other(2);
    let second = put_other(2);
    assert_eq!((first, second), (vec![true], vec![true]));
    assert!(has(&namespace(&other), &[1], LEN));
    one.close();
    other.close();
}
