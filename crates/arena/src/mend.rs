//! What an opening has found and writes down: records that others outrank, and damage.

use crate::body::Arena;
use crate::format::record::{self, Record, State as RecordState};
use crate::medium::Written;

impl Arena {
    /// Marks outranked records dead on the medium: what outranks them may be reused one day, and
    /// they must not come back then.
    pub(crate) fn outrank(&self, outranked: &[(u32, Record)]) {
        let dead = |(slot, record): &(u32, Record)| {
            let state = RecordState::Dead;
            (*slot, Record { state, ..*record })
        };
        let mut dead: Vec<(u32, Record)> = outranked.iter().map(dead).collect();
        self.read_created(&mut dead);
        self.write_records(&dead);
    }

    /// Makes slots empty on the medium that hold no record: else each check would find them as long
    /// as nothing else comes there.
    pub(crate) fn mend(&self, damaged: &[u32]) {
        let layout = self.layout();
        let places = damaged
            .iter()
            .map(|slot| (layout.record(*slot), record::LEN as u64));
        // What is lost is as good as empty, and takes nothing.
        let places: Vec<(u64, u64)> = places
            .filter(|(at, len)| !self.is_lost(*at, *len))
            .collect();
        if places.is_empty() {
            return;
        }
        let empty = |(at, _): &(u64, u64)| (*at, [0; record::LEN]);
        let empty: Vec<Written> = places.iter().map(empty).collect();
        self.medium.load().commit(&empty, self.is_durable());
        let path = self.path().map(|path| path.display().to_string());
        tracing::warn!(
            path,
            records = places.len(),
            "damaged records cleared; the blocks of these records are lost"
        );
    }
}
