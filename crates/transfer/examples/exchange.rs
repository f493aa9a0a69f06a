//! One end of an exchange, for who speaks the protocol without this crate (`tests/reader`).
//!
//! `exchange serve TOKEN`: publishes 64 KiB as `home`, in which byte `n` is `n % 251`, says its
//! address, and the memory's content in hexadecimal at the end of its input.
//! `exchange use ADDRESS TOKEN`: reads and writes pieces of that, under checksums.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::allow_attributes,
    reason = "it fails by panicking, and says what it was asked for"
)]

use std::fmt::Write as _;
use std::io::Read;
use std::sync::Arc;

use kvdepot_media::Buffer;
use kvdepot_transfer::{Config, Engine, Op, Options, Request, Rights};

const LEN: usize = 64 << 10;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", token] => serve(token),
        ["use", address, token] => exchange(address, token),
        _ => panic!("serve TOKEN, or use ADDRESS TOKEN"),
    }
}

fn config(token: &str) -> Config {
    Config {
        token: token.as_bytes().to_vec(),
        checksum: true,
        streams: 1,
        local: false,
        ..Config::default()
    }
}

fn serve(token: &str) {
    let engine = Arc::new(Engine::start(config(token)).unwrap());
    let memory = Buffer::from_vec((0..LEN).map(|n| (n % 251) as u8).collect());
    let home = std::slice::from_ref(&memory);
    let _home = engine.publish(b"home", home, Rights::BOTH, None).unwrap();
    println!("{}", engine.address().unwrap());
    let mut end = Vec::new();
    std::io::stdin().read_to_end(&mut end).unwrap();
    let mut hex = String::new();
    for byte in memory.to_vec() {
        write!(hex, "{byte:02x}").unwrap();
    }
    println!("{hex}");
}

fn exchange(address: &str, token: &str) {
    let engine = Engine::start(config(token)).unwrap();
    let memory = Buffer::from_vec(vec![7; LEN]);
    let _registered = engine.register(std::slice::from_ref(&memory)).unwrap();
    let remote = engine.open(address.parse().unwrap(), b"home").unwrap();
    for op in [Op::Read, Op::Write] {
        let request = |n: u64| Request {
            op,
            local: memory.addr() as u64 + n * 3000,
            remote: &remote,
            offset: (4 - n) * 5000,
            len: 100 + n,
        };
        let task = engine.run([0, 1, 2, 3, 4].into_iter().map(request), Options::default());
        assert!(task.unwrap().is_done());
    }
    drop(remote);
    engine.ping(address.parse().unwrap()).unwrap();
}
