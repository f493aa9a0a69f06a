//! Files with the addresses of HTTP servers whose ports the system has selected.
//!
//! Such a file is next to the socket of its depot, and exists as long as the server listens.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use kvdepot_host::socket;

/// End of the file's name, after the path of the socket.
const END: &str = ".http";

/// End of the name while the file is being written.
const UNFINISHED: &str = ".new";

/// Returns the path of the file for the depot with this socket.
pub(super) fn path_for(socket: &Path) -> PathBuf {
    with_end(socket, END)
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// Writes `address` to `file` in one step.
pub(super) fn publish(file: &Path, address: &str) -> io::Result<()> {
    let new = with_end(file, UNFINISHED);
    // Of a killed server. The new file is not written through a link of another user.
    let _stale = fs::remove_file(&new);
    let mut options = File::options();
    // Whatever the umask is: who can write the file gets the tokens of those who read it.
    options.write(true).create_new(true).mode(0o644);
    let created = options.open(&new);
    let written = created.and_then(|mut file| file.write_all(format!("{address}\n").as_bytes()));
    let published = written.and_then(|()| fs::rename(&new, file));
    published.inspect_err(|_| {
        let _unfinished = fs::remove_file(&new);
    })
}

/// Removes a file that a killed server has left.
pub(super) fn remove(file: &Path) {
    let _gone = fs::remove_file(file);
}

/// Removes the files in `directory` whose sockets do not exist.
pub(crate) fn sweep(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.to_str().unwrap_or_default();
        let name = name.strip_suffix(UNFINISHED).unwrap_or(name);
        let socket = name.strip_suffix(END).map(Path::new);
        let is_socket = |path: &&Path| path.extension().is_some_and(|end| end == "sock");
        // A server that is starting has the socket first, and writes its address after that.
        if let Some(socket) = socket.filter(is_socket).filter(|socket| !socket.exists()) {
            socket::remove_beside(socket, &path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_in_one_step_and_never_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let file = path_for(&dir.path().join("a.sock"));
        assert!(file.ends_with("a.sock.http"));
        let other = dir.path().join("other");
        fs::write(&other, "mine").unwrap();
        let read = || fs::read_to_string(&file).unwrap();
        for address in ["127.0.0.1:1", "[::1]:65535"] {
            std::os::unix::fs::symlink(&other, with_end(&file, UNFINISHED)).unwrap();
            publish(&file, address).unwrap();
            assert_eq!(read(), format!("{address}\n"));
        }
        assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert!(publish(&other.join("below"), "x").is_err());
    }

    #[test]
    fn files_without_their_sockets_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in [
            "a.sock",
            "a.sock.http",
            "b.sock.http",
            "c.sock.http.new",
            "d.http",
            "e",
        ] {
            fs::write(at(name), "").unwrap();
        }
        sweep(dir.path());
        let left = ["a.sock", "a.sock.http", "d.http", "e"];
        assert!(left.iter().all(|name| at(name).exists()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), left.len());
        sweep(&at("none"));
    }
}
