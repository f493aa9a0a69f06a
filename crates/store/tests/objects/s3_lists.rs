//! Long listings of a bucket under the tier `S3`: a page that fails costs no count, and nothing
//! grows with what others have written.

use std::fs;
use std::time::{Duration, Instant};

use crate::bucket::{LEN, Server, Trouble};
use crate::common::{self, eventually, key, keys, namespace, put};
use hyper::Method;
use serde_json::json;

/// More than two pages of a listing.
const MANY: usize = 2100;

fn litter(server: &Server, folder: &str, count: usize, bytes: &[u8]) {
    let folder = server.path().join("bucket/kv/test").join(folder);
    fs::create_dir_all(&folder).unwrap();
    for number in 0..count {
        fs::write(folder.join(format!("{number:032x}")), bytes).unwrap();
    }
}

#[test]
fn a_page_that_fails_is_asked_for_again_and_the_count_goes_on_from_it() {
    for trouble in [
        Trouble::Answer(503, "SlowDown"),
        Trouble::Closed,
        Trouble::Silence,
    ] {
        let server = Server::start_impatient();
        litter(&server, "blocks/000", MANY, &[7; 100]);
        // What any page of any list that is not the first has in its query.
        server.trouble(Some(Method::GET), "continuation-token", 2, trouble.clone());
        let settings = json!({"timeout": "3s", "lookup_timeout": "3s"});
        let depot = server.open_with("S3", &settings);
        let ns = namespace(&depot);
        eventually("the first count", || put(&ns, &[1], LEN) == [true]);
        let stats = depot.stats();
        assert!(stats.tiers[0].retries >= 2, "{trouble:?}");
        let live = stats.tiers[0].live_bytes;
        assert!(live >= (MANY * 100 + LEN) as u64, "{live} bytes");
        // A second listing begins with another page that has no token.
        let begun = server.asked("prefix=kv%2Ftest%2Fblocks%2F&");
        let pages = server.asked("continuation-token");
        assert_eq!(begun - pages, 1, "{trouble:?}");
        // On a machine that stalls, a page may be asked for once more.
        assert!(pages >= 4, "{trouble:?}: {pages} pages");
        depot.close();
    }
}

#[test]
fn what_others_say_of_namespaces_is_read_as_far_as_anybody_looks() {
    const MOST: usize = 4096;
    let server = Server::start_impatient();
    let text = b"kvdepot namespace 1\nmany\n";
    litter(&server, "namespaces", MOST + 1500, text);
    // Beside other programs it takes its time.
    let depot = server.open_with("S3", &json!({"timeout": "60s"}));
    let found = depot.namespaces().unwrap();
    assert_eq!(found.len(), MOST);
    let asked = server.asked("/kv/test/namespaces/");
    assert!(asked <= MOST, "{asked} requests");
    let listed = server.asked("prefix=kv%2Ftest%2Fnamespaces%2F");
    assert!(listed <= 5, "{listed} pages");
    // What has not changed is listed again, and not read again.
    assert_eq!(depot.namespaces().unwrap(), found);
    assert_eq!(server.asked("/kv/test/namespaces/"), asked);
    depot.close();
}

/// Whether it goes well with a time-out, or one of those that are twice as long each: a machine may
/// stand still for the first. Each takes longer than its time-out however fast the machine is.
fn in_time(goes_well: impl Fn(u32) -> bool) -> bool {
    (0..4).map(|doubled| 1 << doubled).any(goes_well)
}

#[test]
fn a_time_out_bounds_silence_and_not_how_many_requests_a_question_takes() {
    const LATER: Duration = Duration::from_millis(30);
    let server = Server::start_impatient();
    let text = b"kvdepot namespace 1\nmany\n";
    litter(&server, "namespaces", MANY, text);
    let within = "/kv/test/namespaces/";
    server.trouble(None, within, usize::MAX, Trouble::Slow(LATER));
    let all_found = in_time(|seconds| {
        let at_once = 32 / seconds;
        assert!(LATER * (MANY as u32 / at_once) > Duration::from_secs(seconds.into()));
        let settings = json!({"timeout": format!("{seconds}s"), "requests": 2 * at_once});
        let depot = server.open_with("S3", &settings);
        let found = depot.namespaces();
        depot.close();
        found.is_ok_and(|found| found.len() == MANY)
    });
    assert!(all_found);
}

#[test]
fn requests_that_time_out_keep_no_call_going() {
    let server = Server::start_impatient();
    let settings = json!({"timeout": "2s", "lookup_timeout": "60s", "requests": 16});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..400).collect();
    // On a busy machine some take longer than the time-out.
    eventually("400 blocks", || put(&ns, &all, 100).iter().all(|ok| *ok));
    // Requests that are answered one after the other spread the time-outs of those that are not.
    let slow = Trouble::Slow(Duration::from_millis(100));
    server.trouble(None, "/blocks/", 40, slow);
    server.trouble(None, "/blocks/", usize::MAX, Trouble::Silence);
    let begun = Instant::now();
    assert!(ns.remove(&keys(all)).is_err());
    // Eight at a time, each for 2 s, would take 90 s.
    assert!(begun.elapsed() < Duration::from_secs(30));
    depot.close();
}

#[test]
fn what_a_lookup_has_found_by_its_limit_is_found() {
    let groups = [0, 100, 200, 300].map(|first| (first..first + 10).collect::<Vec<u64>>());
    let server = Server::start_impatient();
    let depot = server.open();
    let ns = namespace(&depot);
    for group in &groups {
        common::stored(&ns, group, 100);
        // One of them is not answered.
        let silent = key(group[7]).to_string().leak();
        server.trouble(None, silent, usize::MAX, Trouble::Silence);
    }
    depot.close();
    let all_others = in_time(|seconds| {
        let depot = server.open_with("S3", &json!({"lookup_timeout": format!("{seconds}s")}));
        let ns = namespace(&depot);
        // More often than a tier may be silent before it is left alone.
        let found = groups
            .each_ref()
            .map(|group| ns.contains(&keys(group.iter().copied())).unwrap());
        let stats = depot.stats();
        depot.close();
        let others = [true, true, true, true, true, true, true, false, true, true];
        found == [others; 4] && stats.tiers[0].circuit_open == 0
    });
    assert!(all_others);
}
