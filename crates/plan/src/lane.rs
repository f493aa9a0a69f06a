//! Which lane gets the next slice: the one with the least bytes.

/// Bytes given to each lane in this batch.
#[derive(Debug)]
pub(crate) struct Loads {
    bytes: Vec<u64>,
    /// Where the search begins, so that ties do not always favour lane 0.
    first: usize,
}

impl Loads {
    pub(crate) fn new(lanes: usize) -> Loads {
        Loads {
            bytes: vec![0; lanes],
            first: 0,
        }
    }

    /// Charges `bytes` to the lane with the least, and returns it. Taking the least each time
    /// keeps any two lanes within one slice of each other.
    pub(crate) fn assign(&mut self, bytes: u64) -> usize {
        let lanes = self.bytes.len();
        let mut best = self.first;
        for step in 1..lanes {
            let lane = (self.first + step) % lanes;
            if self.bytes[lane] < self.bytes[best] {
                best = lane;
            }
        }
        self.bytes[best] = self.bytes[best].saturating_add(bytes);
        best
    }

    pub(crate) fn bytes(&self) -> &[u64] {
        &self.bytes
    }

    /// Forgets all loads. `first` is taken modulo the number of lanes.
    pub(crate) fn reset(&mut self, lanes: usize, first: usize) {
        self.bytes.clear();
        self.bytes.resize(lanes, 0);
        self.first = first % lanes;
    }

    pub(crate) fn first(&self) -> usize {
        self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_loaded_lane_is_next_and_ties_start_at_first() {
        let mut loads = Loads::new(3);
        loads.reset(3, 4);
        let order: Vec<_> = [5, 1, 1, 1, 9]
            .iter()
            .map(|&bytes| loads.assign(bytes))
            .collect();
        assert_eq!(order, [1, 2, 0, 2, 0]);
        assert_eq!(loads.bytes(), [10, 5, 2]);
    }
}
