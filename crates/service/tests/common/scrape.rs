//! Requests to the HTTP server of a depot, and their responses.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use super::PATIENCE;

/// What `/metrics` may send.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
pub const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// In lower case, with their values.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let header = headers.find(|(one, _)| one == name);
        header.map(|(_, value)| value.as_str())
    }
}

/// A connection to the server.
pub struct Scraper<S>(pub S);

impl Scraper<TcpStream> {
    pub fn connect(address: &str) -> Scraper<TcpStream> {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Scraper(stream)
    }
}

impl Scraper<UnixStream> {
    /// As the depot names it: `unix:` and a path.
    pub fn connect_unix(address: &str) -> Scraper<UnixStream> {
        let stream = UnixStream::connect(address.strip_prefix("unix:").unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Scraper(stream)
    }
}

impl<S: Read + Write> Scraper<S> {
    /// Requests a page with further lines of the head; the status and the rest of the response.
    pub fn get(&mut self, path: &str, lines: &[&str]) -> Response {
        self.ask("GET", path, &[&["Host: localhost"], lines].concat())
            .unwrap()
    }

    /// Sends a request without a body; `None` if the server ends the connection without a response.
    pub fn ask(&mut self, method: &str, path: &str, lines: &[&str]) -> Option<Response> {
        let lines: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        let request = format!("{method} {path} HTTP/1.1\r\n{lines}\r\n");
        // If the connection has ended, there is no response.
        let _sent = self.0.write_all(request.as_bytes());
        self.response(method == "HEAD")
    }

    /// Reads a response.
    pub fn response(&mut self, is_head: bool) -> Option<Response> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).ok()?;
            head.extend(byte);
        }
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let headers = lines.map(|line| {
            let (name, value) = line.split_once(": ").unwrap();
            (name.to_ascii_lowercase(), value.to_owned())
        });
        let mut response = Response {
            status: status.parse().unwrap(),
            headers: headers.collect(),
            body: String::new(),
        };
        let len = response.header("content-length").unwrap().parse().unwrap();
        if !is_head {
            let mut body = vec![0; len];
            self.0.read_exact(&mut body).unwrap();
            response.body = String::from_utf8(body).unwrap();
        }
        Some(response)
    }

    /// Waits until the server ends the connection.
    pub fn has_ended(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}
