//! What a `cp.async` leaves of an earlier, longer one to the same place, as the stage of a ring that is filled anew by less. That is
//! well-defined (PTX ISA 9.7.9.25.3), and a mistake where the result is wrong:
//! [`Options::stale_copies`](crate::Options::stale_copies) asks for it.

use std::collections::HashMap;

use crate::copy::words;
use crate::cta::Worker;
use crate::mbarrier::Place;
use crate::warp::PendingCopy;

/// The copies of a cluster so far.
#[derive(Debug, Default)]
pub(crate) struct StaleCopies {
    /// The bytes of the last copy to each place.
    copied: HashMap<Place, u32>,
    /// By 4-byte word: the instruction that left it.
    left: HashMap<Place, usize>,
}

impl StaleCopies {
    pub(crate) fn reset(&mut self) {
        self.copied.clear();
        self.left.clear();
    }

    /// The instruction that left a word.
    pub(crate) fn of(&self, word: Place) -> Option<usize> {
        self.left.get(&word).copied()
    }
}

impl Worker<'_> {
    /// A copy begins: what it leaves of an earlier one counts as unwritten, where that is asked for.
    pub(crate) fn leave_stale(&mut self, copy: &PendingCopy) {
        let Some(stale) = &mut self.stale else { return };
        let (start, bytes) = (copy.to, copy.bytes.len());
        let Some(earlier) = stale.copied.insert((self.rank, start as u32), bytes as u32) else { return };
        let rest = (start + bytes, (earlier as usize).saturating_sub(bytes));
        for (word, bits) in words(rest.0, rest.1) {
            self.written[word] &= !bits;
        }
        for word in (rest.0..rest.0 + rest.1).step_by(4) {
            stale.left.insert((self.rank, word as u32), copy.position);
        }
        self.written_since += 1;
    }
}
