//! `kvdepot serve`: a depot for all processes of a host.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use kvdepot_host::dirs;
use kvdepot_host::socket::PassedSocket;
use kvdepot_store::Config;
use kvdepot_store::config::set;
use serde_json::{Value, json};
use signal_hook::consts::SIGHUP;

use super::options::{self, refused};
use crate::args::Serve;
use crate::error::Error;
use crate::interrupt::{Interrupt, Request};
use crate::output::Output;

/// How long a signal may go unnoticed.
const LOOK: Duration = Duration::from_millis(50);

/// Tiers where nobody has chosen.
const PIPELINE: &str = "Cache|Dax";

pub(crate) fn run(args: &Serve, output: &mut Output) -> Result<i32, Error> {
    let passed = PassedSocket::take().map_err(|error| {
        let allowed = "one listening Unix stream socket with a path, from the service manager";
        refused("LISTEN_FDS", &error.to_string(), allowed)
    })?;
    let config = config(args, passed.as_ref().map(PassedSocket::path))?;
    // Before the depot opens, which may wait for another owner.
    // A terminal that is closed ends the server; without one the signal is a service manager's.
    let (interrupt, reload) = match std::io::stdin().is_terminal() {
        true => (Interrupt::catch()?, None),
        false => (
            Interrupt::catch_except(&[SIGHUP])?,
            Some(Request::catch(SIGHUP)?),
        ),
    };
    let started = match interrupt.during(|| kvdepot_service::start_on(&config, passed)) {
        Err(kvdepot_store::Error::Interrupted) => return Ok(crate::status::OK),
        started => started?,
    };
    if interrupt.came() {
        // What was made for it goes again, for it is not kept.
        return Ok(crate::status::OK);
    }
    let depot = started.keep();
    depot.populate_aside()?;
    let (socket, http) = (depot.socket().unwrap_or_default(), depot.http());
    if output.is_json() {
        output.object(&json!({
            "event": "serving",
            "socket": socket,
            "http": http,
            "tiers": depot.tiers(),
            "blocks": depot.opening().blocks,
        }))?;
    } else {
        let http = http.map_or_else(String::new, |http| format!(", HTTP at {http}"));
        output.line(&format!(
            "serving {} at unix:{}{http}",
            depot.description(),
            socket.display()
        ))?;
    }
    output.flush()?;
    notify("READY=1");
    while !interrupt.came() {
        std::thread::sleep(LOOK);
        if reload.as_ref().is_some_and(Request::came) {
            match depot.renew() {
                Ok(()) => tracing::info!("credentials read again; new connections use them"),
                Err(error) => tracing::warn!(%error,
                    "cannot read the credentials again; the server keeps the credentials that it has"),
            }
        }
    }
    notify("STOPPING=1");
    depot.close();
    Ok(crate::status::OK)
}

/// The options of the file, with those of the command line in their place. The socket is the one
/// at `passed`, if the service manager has bound one.
fn config(args: &Serve, passed: Option<&Path>) -> Result<Config, Error> {
    let beside = |name: &str| match name {
        "pipeline" => args.pipeline.clone(),
        "socket" => args.socket.as_deref().map(text),
        "http" => args.http.clone(),
        _ => None,
    };
    let pipeline = args.pipeline.as_deref();
    let mut all = options::read(args.config.as_deref(), &args.options, pipeline, beside)?;
    if all.get("pipeline").is_none() {
        set(&mut all, "pipeline", PIPELINE.into());
    }
    let socket = match (&args.socket, all.get("socket")) {
        (Some(path), _) => path.clone(),
        (None, None) => match passed {
            Some(passed) => passed.to_owned(),
            None => dirs::runtime_dir()
                .map_err(kvdepot_store::Error::from)?
                .join(name_for(&all)),
        },
        (None, Some(given)) => match given.as_str() {
            Some("off" | "auto") | None => {
                return Err(refused(
                    "socket",
                    &given.to_string(),
                    "the path of the socket to listen on",
                ));
            }
            Some(path) => path.into(),
        },
    };
    if let Some(passed) = passed.filter(|passed| **passed != socket) {
        let allowed = format!("{}, the socket of the service manager", passed.display());
        return Err(refused("socket", &text(&socket), &allowed));
    }
    set(&mut all, "socket", text(&socket).into());
    if let Some(address) = &args.http {
        set(&mut all, "http", address.as_str().into());
    }
    Ok(Config::from_value(&all)?)
}

/// The name of the socket, one an instance.
fn name_for(all: &Value) -> String {
    // The schema refuses what is no name.
    match all.get("instance").and_then(Value::as_str) {
        Some(name) if !name.contains('/') => format!("kvdepot-{name}.sock"),
        _ => "kvdepot.sock".into(),
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Tells the service manager that started this process, where one asked to be told
/// (`sd_notify(3)`).
fn notify(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Ok(name) = std::env::var("NOTIFY_SOCKET") else {
        return;
    };
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let sent = address
        .and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, name,
            "cannot notify systemd of the server's state; with Type=notify, systemd may end the \
             server");
    }
}
