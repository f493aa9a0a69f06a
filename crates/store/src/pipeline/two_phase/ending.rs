//! How reservations end: published, or given back.

use kvdepot_arena::parts;
use kvdepot_arena::{Error, Place, Token};
use kvdepot_media::Checksum;

use super::{Core, Reservation, Way};
use crate::pipeline::ledger::{Dues, Held};
use crate::tier::{Apart, Arenas, Ends, Stage};

/// A reservation that a commit has ended: its number in the call, where the block is, what went
/// with it, and whether it is stored.
type Ended = (usize, Place, Dues, bool);

/// A reservation with the checksum of each of its parts.
type Filled<'a> = (usize, &'a Reservation, &'a [Checksum]);

impl Core {
    /// Publishes reservations whose parts are all in place.
    ///
    /// `checksums` has a list per reservation, with one checksum per part. The result of a
    /// reservation is true if its block is stored, and false if the reservation has already ended.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] for wrong arguments.
    /// * [`Error::Media`] if a part table cannot be written.
    /// * [`Error::Closed`].
    pub fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        let _pass = self.gate.enter_as("commit", reservations.len())?;
        for (reservation, checksums) in reservations.iter().zip(checksums) {
            reservation.check(checksums)?;
        }
        let mut stored = vec![false; reservations.len()];
        for way in self.ways() {
            let each = reservations.iter().zip(checksums).enumerate();
            let mine = each.filter(|(_, (one, _))| one.way == way);
            let mine: Vec<Filled<'_>> =
                mine.map(|(at, (one, sums))| (at, one, &sums[..])).collect();
            if mine.is_empty() {
                continue;
            }
            let tier = way.tier();
            let goes_on = way != Way::NearOnly && self.goes_on(tier);
            let ended = match &self.tiers[tier] {
                Stage::Here(arenas) => self.commit_here((tier, arenas), &mine, goes_on)?,
                Stage::Apart(apart) => self.commit_late((tier, apart), &mine, goes_on),
            };
            for (at, _, _, is_stored) in &ended {
                stored[*at] = *is_stored;
            }
            let places: Vec<Place> = match self.tiers[tier] {
                Stage::Here(_) => mine.iter().map(|(_, one, _)| one.place).collect(),
                // They are joined by their identities: what others have ended, others may write.
                Stage::Apart(_) => ended.iter().map(|(_, place, ..)| *place).collect(),
            };
            self.committed(tier, goes_on, ended);
            self.resolve(tier, &places);
        }
        Ok(stored)
    }

    fn commit_here(
        &self,
        (tier, arenas): (usize, &Arenas),
        mine: &[Filled<'_>],
        pinned: bool,
    ) -> Result<Vec<Ended>, Error> {
        let tokens: Vec<Token> = mine.iter().map(|(_, one, _)| one.place.token).collect();
        // From here on nobody can end these: the part tables go into room that is theirs. Another
        // call may have claimed the others.
        let claims = arenas.claim(&tokens);
        let mine = mine.iter().zip(claims).filter(|(_, claimed)| *claimed);
        let mine: Vec<&Filled<'_>> = mine.map(|(one, _)| one).collect();
        let claimed: Vec<Token> = mine.iter().map(|(_, one, _)| one.place.token).collect();
        let mut written = Vec::with_capacity(mine.len());
        for (_, reservation, sums) in &mine {
            let checksum = seal(arenas.devices().as_ref(), reservation, sums)
                .inspect_err(|_| arenas.unclaim(&claimed))?;
            written.push((reservation.place.token, checksum));
        }
        let committed = arenas.commit_claimed(&written, pinned);
        let mut ledger = self.ledger.lock();
        let each = mine.iter().zip(&written).zip(committed).enumerate();
        let ended = each.map(|(turn, (((at, one, _), (token, checksum)), stored))| {
            ledger.take_turns(turn);
            let place = Place {
                checksum: *checksum,
                ..one.place
            };
            let held = ledger.held.remove(&(tier, *token));
            let dues = held.map(|held| held.dues).unwrap_or_default();
            (*at, place, dues, stored)
        });
        Ok(ended.collect())
    }

    /// The same in a tier that may answer late: waits for its answer.
    fn commit_late(
        &self,
        (tier, apart): (usize, &Apart),
        mine: &[Filled<'_>],
        pinned: bool,
    ) -> Vec<Ended> {
        // From here on nobody else can end these.
        let taken: Vec<Option<Box<Held>>> = {
            let mut ledger = self.ledger.lock();
            let names = mine.iter().map(|(_, one, _)| (tier, one.place.token));
            let mut take = |(turn, name)| {
                ledger.take_turns(turn);
                ledger.held.remove(&name)
            };
            names.enumerate().map(&mut take).collect()
        };
        let ends = apart.tier().ends();
        let (mut written, mut ended, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for ((at, one, sums), held) in mine.iter().zip(taken) {
            let Some((reserved, dues)) = held.and_then(|held| Some((held.reserved?, held.dues)))
            else {
                continue;
            };
            match seal(ends.as_ref(), one, sums) {
                Ok(checksum) => {
                    let place = Place {
                        checksum,
                        ..one.place
                    };
                    ended.push((*at, place, dues, false));
                    written.push((reserved, checksum));
                }
                Err(error) => {
                    tracing::warn!(%error, key = %one.key(),
                        "cannot combine the parts of a block; the block is not stored");
                    failed.push((*at, one.place, dues, false));
                }
            }
        }
        if written.is_empty() {
            return failed;
        }
        self.publishes(tier, written.iter().map(|(one, _)| one.identity));
        let answers = apart.commit(written, pinned).wait();
        let mut answers = answers.unwrap_or_default().into_iter();
        for (_, _, dues, stored) in &mut ended {
            match answers.next() {
                Some(answer) => *stored = answer,
                // It may be there.
                None => dues.spent.written(),
            }
        }
        let stored = ended.iter().filter(|(.., stored)| *stored);
        self.share_done(tier, stored.map(|(_, place, ..)| place.identity));
        ended.extend(failed);
        ended
    }

    /// Sends on what has been stored, where it goes on.
    fn committed(&self, tier: usize, goes_on: bool, ended: Vec<Ended>) {
        let mut stay = Vec::new();
        {
            let mut ledger = self.ledger.lock();
            let stored = ended.into_iter().filter(|(.., stored)| *stored);
            for (turn, (_, place, mut dues, _)) in stored.enumerate() {
                ledger.take_turns(turn);
                dues.spent.written();
                self.note_stored(place.identity.namespace, &place.identity.key, place.len);
                if !goes_on {
                    continue;
                }
                let spent = self.edges[tier].admits(&place.identity, place.len).ok();
                let share = dues.share.or_else(|| self.room_in(tier, place.len));
                stay.extend(match share.zip(spent) {
                    Some(paid) => self.send_later(&mut ledger, tier, place, paid, Vec::new()),
                    None => Some(place),
                });
            }
        }
        self.tiers[tier].unpin(stay.iter());
    }

    /// Releases reservations.
    ///
    /// Every worker that had one of their placements must have stopped.
    pub fn abort(&self, reservations: &[Reservation]) {
        if self.gate.forked() {
            return;
        }
        for way in self.ways() {
            let tier = way.tier();
            let mine = reservations.iter().filter(|one| one.way == way);
            let mut places: Vec<Place> = mine.map(|one| one.place).collect();
            if places.is_empty() {
                continue;
            }
            // What others have ended, or publish now, is not ended once more: what went with it is
            // theirs.
            if let Some(arenas) = self.tiers[tier].here() {
                let tokens: Vec<Token> = places.iter().map(|place| place.token).collect();
                let mut ended = arenas.abort(&tokens).into_iter();
                places.retain(|_| ended.next() == Some(true));
            }
            let mut given_back = Vec::new();
            {
                let mut ledger = self.ledger.lock();
                let apart = self.tiers[tier].apart().is_some();
                let mut turn = 0;
                places.retain(|place| {
                    ledger.take_turns(turn);
                    turn += 1;
                    let held = ledger.held.remove(&(tier, place.token));
                    let is_mine = held.is_some() || !apart;
                    given_back.extend(held);
                    is_mine
                });
            }
            // Before those who joined begin anew, and without a lock: it may be a file's end.
            drop(given_back);
            self.resolve(tier, &places);
        }
    }
}

/// Writes the part table of a block that has one; the checksum of its record.
fn seal(
    ends: &dyn Ends,
    reservation: &Reservation,
    checksums: &[Checksum],
) -> Result<Checksum, Error> {
    let Reservation { place, parts, .. } = reservation;
    let mut parts = parts.to_vec();
    for (part, checksum) in parts.iter_mut().zip(checksums) {
        part.checksum = *checksum;
    }
    if parts.len() > 1 {
        ends.write_parts(place, &parts)?;
    }
    Ok(parts::record_checksum(&place.identity, &parts))
}
