//! Requests of one connection, each answered before the next one is heard.

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvdepot_media::Checksum;
use zerocopy::{FromBytes, IntoBytes};

use super::House;
use super::served::Served;
use super::session::Session;
use crate::grant::{Grant, Use};
use crate::rdma::Fabric;
use crate::socket::{self, Ranges};
use crate::wire::{
    Asked, BYTES_MAX, HEAD, Head, Malformed, Opened, ROW, Row, SUM, Status, Verb, rows_sum, total,
};

/// Answers until the connection ends, or breaks a rule.
pub(super) fn serve(house: &House, session: &Session, served: &Served) {
    let mut frames = Frames {
        house,
        session,
        served,
        rows: Vec::new(),
        bytes: Vec::new(),
        lead: Vec::new(),
        sum: [0; SUM],
        ranges: Ranges::default(),
    };
    loop {
        let Err(error) = frames.answer_one() else {
            continue;
        };
        if error.kind() == io::ErrorKind::InvalidData {
            house.counts.frames.fetch_add(1, Ordering::Relaxed);
            if let Some(unsaid) = house.malformed.may_say() {
                let peer = served.line.peer();
                tracing::warn!(%peer, %error, unsaid, "malformed frame; closing connection");
            }
        }
        return;
    }
}

struct Frames<'a> {
    house: &'a House,
    session: &'a Session,
    served: &'a Served,
    rows: Vec<Row>,
    bytes: Vec<u8>,
    /// The head of a read's answer, and the sum of its bytes.
    lead: Vec<u8>,
    sum: [u8; SUM],
    ranges: Ranges,
}

/// Why a slice is refused: the number of the row, where it is one's fault.
type Refused = (Status, usize);

impl Frames<'_> {
    fn answer_one(&mut self) -> io::Result<()> {
        let mut head = [0; HEAD];
        socket::receive(self.served.line.as_fd(), &mut head)?;
        let head = Head::read(&head);
        let asked = head.asks().map_err(broken)?;
        match asked.verb {
            Verb::Read => self.read(&head, asked),
            Verb::Write => self.write(&head, asked),
            Verb::Open => self.open(&head, asked),
            Verb::Close => {
                self.session.close(head.first.grant.get());
                self.tell(head.answer(Status::Done, 0))
            }
            Verb::Ping => self.tell(head.answer(Status::Done, 0)),
            Verb::Call => self.call(&head, asked),
            Verb::Join => self.join(&head, asked),
            Verb::Expose => {
                let number = head.first.grant.get();
                self.far(&head, |fabric, session| session.expose(fabric, number))
            }
            Verb::Map | Verb::Unmap | Verb::Withdraw => {
                Err(broken(Malformed("a verb of local connections")))
            }
        }
    }

    fn tell(&self, head: Head) -> io::Result<()> {
        socket::send(self.served.line.as_fd(), head.as_bytes())
    }

    fn refuse(&self, head: &Head, (status, row): Refused) -> io::Result<()> {
        self.house.counts.grants.fetch_add(1, Ordering::Relaxed);
        self.tell(head.answer(status, 0).with(Row::new(0, row as u64, 0)))
    }

    /// The rows of a slice, the first of which is in its head; their bytes.
    fn hear_rows(&mut self, head: &Head, asked: Asked) -> io::Result<u64> {
        self.rows.clear();
        self.rows.push(head.first);
        let (rows, sum) = (
            (asked.rows - 1) * ROW,
            if head.is_summed() { SUM } else { 0 },
        );
        self.bytes.resize(rows + sum, 0);
        socket::receive(self.served.line.as_fd(), &mut self.bytes)?;
        let (rest, said) = self.bytes.split_at(rows);
        if head.is_summed() && said != rows_sum(head.as_bytes(), rest) {
            return Err(broken(Malformed("checksum mismatch in the head or rows")));
        }
        let rest = <[Row]>::ref_from_bytes(rest);
        let rest = rest.map_err(|_| broken(Malformed("rows of unexpected length")))?;
        self.rows.extend_from_slice(rest);
        total(&self.rows).map_err(broken)
    }

    /// Uses what the rows name, if all of them may be: their memory is what the ranges have then,
    /// behind the lead of a read, and stays until [`Frames::over`]. When the first of the grants is
    /// over, where that is known.
    fn begin(&mut self, writes: bool) -> Result<Option<Instant>, Refused> {
        let mut until: Option<Instant> = None;
        let mut last: Option<(u32, Arc<Grant>)> = None;
        // Under the lock until all are there: who withdraws one either comes first, or finds this
        // connection by it.
        let mut using = self.served.using.lock();
        using.writes = writes;
        let uses = &mut using.grants;
        self.ranges.clear();
        if !writes {
            // SAFETY: the lead stays as it is until the ranges are cleared.
            unsafe { self.ranges.push_bytes(&self.lead) };
        }
        for (number, row) in self.rows.iter().enumerate() {
            let name = row.grant.get();
            let grant = match last.take() {
                Some((known, grant)) if known == name => grant,
                _ => self.session.find(name).ok_or((Status::Unknown, number))?,
            };
            if !uses.iter().any(|one| one.is_of(&grant)) {
                uses.push(Use::begin(&grant).ok_or((Status::Unknown, number))?);
                until = until.into_iter().chain(grant.until).min();
            }
            grant
                .check(row, writes)
                .map_err(|status| (status, number))?;
            // SAFETY: the row was just checked; the grant is used until the ranges are forgotten,
            // here by who hears of the refusal, or by `over`.
            unsafe { grant.add_to(row, &mut self.ranges) };
            last = Some((name, grant));
        }
        Ok(until)
    }

    fn over(&mut self) {
        self.ranges.clear();
        self.served.using.lock().grants.clear();
    }

    fn read(&mut self, head: &Head, asked: Asked) -> io::Result<()> {
        let bytes = self.hear_rows(head, asked)?;
        let answer = head.answer(Status::Done, bytes);
        self.lead.clear();
        self.lead.extend_from_slice(answer.as_bytes());
        let until = match self.begin(false) {
            Ok(until) => until,
            Err(refused) => {
                self.over();
                return self.refuse(head, refused);
            }
        };
        if head.is_summed() {
            self.sum = self.ranges.sum(1, bytes).0;
            // SAFETY: it stays as it is until the ranges are cleared.
            unsafe { self.ranges.push_bytes(&self.sum) };
        }
        let sent = self.ranges.send_by(self.served.line.as_fd(), until);
        self.over();
        sent
    }

    fn write(&mut self, head: &Head, asked: Asked) -> io::Result<()> {
        let bytes = self.hear_rows(head, asked)?;
        if bytes != asked.bytes {
            return Err(broken(Malformed("byte count does not match the rows")));
        }
        let until = match self.begin(true) {
            Ok(until) => until,
            Err(refused) => {
                self.over();
                let sum = if head.is_summed() { SUM as u64 } else { 0 };
                socket::skip(self.served.line.as_fd(), bytes + sum)?;
                return self.refuse(head, refused);
            }
        };
        let status = self.receive_bytes(head, bytes, until);
        self.over();
        self.tell(head.answer(status?, 0))
    }

    fn receive_bytes(
        &mut self,
        head: &Head,
        bytes: u64,
        until: Option<Instant>,
    ) -> io::Result<Status> {
        let socket = self.served.line.as_fd();
        let summed = head.is_summed().then_some(bytes);
        let sum = self.ranges.receive_by(socket, summed, until)?;
        let Some(sum) = sum else {
            return Ok(Status::Done);
        };
        let mut said = [0; SUM];
        match until {
            Some(until) => socket::receive_by(socket, &mut said, until)?,
            None => socket::receive(socket, &mut said)?,
        }
        match sum == Checksum(said) {
            true => Ok(Status::Done),
            false => Ok(Status::Checksum),
        }
    }

    fn hear_body(&self, asked: Asked) -> io::Result<Vec<u8>> {
        let mut body = vec![0; asked.bytes as usize];
        socket::receive(self.served.line.as_fd(), &mut body)?;
        Ok(body)
    }

    fn open(&self, head: &Head, asked: Asked) -> io::Result<()> {
        let name = self.hear_body(asked)?;
        let Some(grant) = self.house.names.find(&name) else {
            return self.refuse(head, (Status::Unknown, 0));
        };
        let now = Instant::now();
        let left = grant
            .until
            .map(|until| until.saturating_duration_since(now).as_millis());
        let lasts_ms = left.map_or(u64::MAX, |ms| u64::try_from(ms).unwrap_or(u64::MAX));
        let opened = Opened {
            len: grant.len().into(),
            lasts_ms: lasts_ms.into(),
            rights: grant.rights.bits().into(),
            zero: 0.into(),
        };
        let Some(number) = self.session.open(grant, &self.house.numbers) else {
            return self.refuse(head, (Status::Failed, 0));
        };
        let answer = head.answer(Status::Done, size_of::<Opened>() as u64);
        self.say(&answer.with(Row::new(number, 0, 0)), opened.as_bytes())
    }

    fn call(&self, head: &Head, asked: Asked) -> io::Result<()> {
        let call = self.hear_body(asked)?;
        let answers = self.house.terms.answers.as_ref();
        let answer = AssertUnwindSafe(|| answers?.answer(self.session.engine, &call));
        // Who panics has no answer, and nobody waits for this connection's end in vain.
        let answer = catch_unwind(answer).unwrap_or_default();
        match answer.filter(|answer| answer.len() as u64 <= BYTES_MAX) {
            Some(answer) => self.say(&head.answer(Status::Done, answer.len() as u64), &answer),
            None => self.tell(head.answer(Status::Failed, 0)),
        }
    }

    fn join(&self, head: &Head, asked: Asked) -> io::Result<()> {
        let ends = self.hear_body(asked)?;
        let failures = &self.house.unjoined;
        self.far(head, |fabric, session| {
            session.join(fabric, &ends, failures)
        })
    }

    /// Answers what devices of this end are asked, where there are any.
    fn far(
        &self,
        head: &Head,
        work: impl FnOnce(&Fabric, &Session) -> Option<Vec<u8>>,
    ) -> io::Result<()> {
        let fabric = self.house.terms.fabric.as_ref();
        match fabric.and_then(|fabric| work(fabric, self.session)) {
            Some(said) => self.say(&head.answer(Status::Done, said.len() as u64), &said),
            None => self.tell(head.answer(Status::Unknown, 0)),
        }
    }

    fn say(&self, head: &Head, body: &[u8]) -> io::Result<()> {
        let mut ranges = Ranges::with_room(2);
        // SAFETY: both outlive the ranges.
        unsafe {
            ranges.push_bytes(head.as_bytes());
            ranges.push_bytes(body);
        }
        ranges.send(self.served.line.as_fd())
    }
}

fn broken(error: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
