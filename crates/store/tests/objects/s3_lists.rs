//! Long listings of a bucket under the tier `S3`: a page that fails costs no count, and nothing
//! grows with what others have written.

use std::fs;

use crate::bucket::{LEN, Server, Trouble};
use crate::common::{eventually, namespace, put};
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
        let server = Server::start();
        litter(&server, "blocks/000", MANY, &[7; 100]);
        // What any page of any list that is not the first has in its query.
        server.trouble(Some(Method::GET), "continuation-token", 2, trouble.clone());
        let settings = json!({"timeout": "1s", "lookup_timeout": "1s"});
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
        assert_eq!((begun - pages, pages), (1, 4), "{trouble:?}");
        depot.close();
    }
}

#[test]
fn what_others_say_of_namespaces_is_read_as_far_as_anybody_looks() {
    const MOST: usize = 4096;
    let server = Server::start();
    let text = b"kvdepot namespace 1\nmany\n";
    litter(&server, "namespaces", MOST + 1500, text);
    let depot = server.open();
    let found = depot.namespaces().unwrap();
    assert_eq!(found.len(), MOST);
    let asked = server.asked("/kv/test/namespaces/");
    assert!(asked <= MOST, "{asked} requests");
    let listed = server.asked("prefix=kv%2Ftest%2Fnamespaces%2F");
    assert!(listed <= 5, "{listed} pages");
    depot.close();
}
