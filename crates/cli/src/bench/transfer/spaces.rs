//! Two network namespaces with a veth pair between them, as `ip` makes them: this thread enters
//! one, the target runs in the other. The machine's own network is not touched.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::fd::AsFd;
use rustix::process::geteuid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::Error;

/// Addresses of the two; nobody else is there, so they may be any.
const NEAR: Ipv4Addr = Ipv4Addr::new(10, 203, 0, 1);
pub(super) const FAR: Ipv4Addr = Ipv4Addr::new(10, 203, 0, 2);

/// The beginning of the names; the process that made them, and which it is, follow.
const PREFIX: &str = "kvdepot-bench-";

/// One namespace, until it is dropped.
struct Space(String);

impl Space {
    fn new(which: &str) -> Result<Space, Error> {
        let own = std::process::id();
        // Before it is made: a failure may leave half of it.
        let space = Space(format!("{PREFIX}{own}-{which}"));
        ip(&["netns", "add", &space.0])?;
        Ok(space)
    }

    fn bring_up(&self, address: Ipv4Addr) -> Result<(), Error> {
        let address = format!("{address}/24");
        ip(&["-n", &self.0, "address", "add", &address, "dev", "net"])?;
        ip(&["-n", &self.0, "link", "set", "lo", "up"])?;
        ip(&["-n", &self.0, "link", "set", "net", "up"])
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // Where it could not be made there is none.
        let _gone = ip(&["netns", "delete", &self.0]);
    }
}

/// Both, and what lies between.
pub(super) struct Spaces {
    near: Space,
    far: Space,
}

impl Spaces {
    /// Refuses a system that has none to give.
    pub(super) fn check() -> Result<(), Error> {
        if !geteuid().is_root() {
            return Err(refused("only root can create network namespaces"));
        }
        ip(&["netns", "list"])
    }

    pub(super) fn new() -> Result<Spaces, Error> {
        sweep()?;
        let (near, far) = (Space::new("near")?, Space::new("far")?);
        let pair = ["type", "veth", "peer", "name", "net", "netns", &far.0];
        ip(&[&["-n", &near.0, "link", "add", "net"][..], &pair].concat())?;
        near.bring_up(NEAR)?;
        far.bring_up(FAR)?;
        Ok(Spaces { near, far })
    }

    /// A program in the far one.
    pub(super) fn far(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.far.0]).arg(program);
        command
    }

    /// Has this thread, and those that it starts, be in the near one until what is returned is
    /// dropped.
    pub(super) fn enter(&self) -> Result<Inside, Error> {
        let own = Path::new("/proc/thread-self/ns/net");
        let outside = File::open(own).map_err(Error::io(own))?;
        let path = Path::new("/run/netns").join(&self.near.0);
        let inside = File::open(&path).map_err(Error::io(&path))?;
        enter(&inside).map_err(Error::io(path))?;
        Ok(Inside { outside })
    }
}

/// A thread that is in a namespace.
pub(super) struct Inside {
    outside: File,
}

impl Drop for Inside {
    fn drop(&mut self) {
        // Nothing but the end of the command follows.
        let _back = enter(&self.outside);
    }
}

fn enter(namespace: &File) -> std::io::Result<()> {
    let entered = move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network));
    entered.map_err(Into::into)
}

/// Removes what processes have left that were killed.
fn sweep() -> Result<(), Error> {
    let listed = said(&["netns", "list"])?;
    for name in listed.lines().filter_map(|line| line.split(' ').next()) {
        let numbers = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split_once('-'));
        let pid = numbers.and_then(|(pid, _)| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another run may do the same.
            let _or_gone = ip(&["netns", "delete", name]);
        }
    }
    Ok(())
}

fn ip(args: &[&str]) -> Result<(), Error> {
    said(args).map(drop)
}

/// What `ip` prints.
fn said(args: &[&str]) -> Result<String, Error> {
    // Ctrl-C is for this process, which cleans up.
    let ran = Command::new("ip").args(args).process_group(0).output();
    let ran = ran.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            refused("the command ip is not installed (Debian: iproute2)")
        }
        _ => Error::io("ip")(error),
    })?;
    if !ran.status.success() {
        let why = String::from_utf8_lossy(&ran.stderr);
        return Err(refused(&format!("ip {}: {}", args.join(" "), why.trim())));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

fn refused(why: &str) -> Error {
    Error::Bench(format!("--where veth: {why}"))
}
