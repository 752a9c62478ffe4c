//! Races between CTAs on global memory, which are looked for when [`Options::global_races`](crate::Options::global_races) asks.
//!
//! Who wrote and who read each byte last is remembered. What CTAs of one cluster do counts as done by one. An atomic, or a
//! strong load or store, on an address orders whoever accesses it so later after all who did before: coarser than the memory
//! model (PTX ISA 8), so a race may be missed, and none is made up.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::race::Access;

/// Bytes of a page of what is remembered.
const PAGE: u64 = 1 << 10;

/// An access: the cluster plus one, 0 for none, and the instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Last {
    cluster: u32,
    position: u32,
}

/// What is known of a byte: its last plain write, reads by two clusters, and the last atomic.
#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    write: Last,
    reads: [Last; 2],
    atomic: Last,
}

#[derive(Debug, Default)]
struct State {
    /// By allocation and page.
    pages: HashMap<(usize, u64), Box<[Byte]>>,
    /// By allocation and offset: the clusters that accessed it by atomics, and those that they follow.
    flags: HashMap<(usize, u64), HashSet<u32>>,
    /// By cluster: those it follows.
    follows: HashMap<u32, HashSet<u32>>,
}

/// The accesses of a launch.
#[derive(Debug, Default)]
pub(crate) struct GlobalRaces(Mutex<State>);

impl GlobalRaces {
    /// Notes an access of a cluster to bytes of an allocation; what it races with, and the byte.
    fn note(
        &self,
        cluster: u32,
        (buffer, offset, bytes): (usize, u64, u64),
        access: Access,
        position: u32,
    ) -> Option<(Last, u64)> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { pages, flags, follows } = &mut *state;
        let own = cluster + 1;
        if access == Access::Atomic {
            let known = follows.entry(own).or_default();
            let flag = flags.entry((buffer, offset)).or_default();
            known.extend(flag.iter().copied());
            flag.extend(known.iter().copied());
            flag.insert(own);
        }
        let known = follows.get(&own);
        let against = |last: Last| {
            last.cluster != 0 && last.cluster != own && !known.is_some_and(|known| known.contains(&last.cluster))
        };
        let now = Last { cluster: own, position };
        for at in offset..offset + bytes {
            let page = pages
                .entry((buffer, at / PAGE))
                .or_insert_with(|| vec![Byte::default(); PAGE as usize].into_boxed_slice());
            let byte = &mut page[(at % PAGE) as usize];
            let others = [byte.write, byte.reads[0], byte.reads[1], byte.atomic];
            let writes = matches!(access, Access::Write | Access::Repeat);
            let checked = if writes { &others[..] } else { &others[..1] };
            if let Some(other) = checked.iter().find(|last| against(**last)) {
                return Some((*other, at));
            }
            match access {
                Access::Write | Access::Repeat => byte.write = now,
                Access::Atomic => byte.atomic = now,
                Access::Read if byte.reads[0].cluster == own => {}
                Access::Read => byte.reads = [now, byte.reads[0]],
            }
        }
        None
    }
}

impl Worker<'_> {
    /// Notes an access to global memory by a lane of a warp, where such races are looked for.
    #[inline(always)]
    pub(crate) fn note_between_ctas(
        &mut self,
        place: (usize, u64, u64),
        access: Access,
        position: usize,
        thread: (usize, u32),
    ) -> Result<(), Fail> {
        if self.job.global_races.is_none() { Ok(()) } else { self.note_between(place, access, position, thread) }
    }

    #[cold]
    fn note_between(
        &mut self,
        place: (usize, u64, u64),
        access: Access,
        position: usize,
        (warp, lane): (usize, u32),
    ) -> Result<(), Fail> {
        let Some(races) = &self.job.global_races else { return Ok(()) };
        let access = if self.program.orders[position].strong { Access::Atomic } else { access };
        match races.note(self.cluster, place, access, position as u32) {
            None => Ok(()),
            Some((other, at)) => {
                let address = self.job.memory.buffers()[place.0].base() + at;
                let [x, y, z] = self.job.cta_index(u64::from(other.cluster - 1), 0);
                let kind = FaultKind::GlobalRace {
                    address,
                    other_cta: format!("({x}, {y}, {z})"),
                    other: self.job.instruction(other.position as usize),
                };
                Err(Box::new((kind, position, warp, lane)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_orders_and_nothing_else_does() {
        let races = GlobalRaces::default();
        let (data, flag) = ((0, 8, 4), (0, 64, 4));
        assert_eq!(races.note(0, data, Access::Write, 1), None);
        assert_eq!(races.note(1, data, Access::Read, 2), Some((Last { cluster: 1, position: 1 }, 8)));
        races.note(0, flag, Access::Atomic, 3);
        races.note(1, flag, Access::Atomic, 4);
        assert_eq!(races.note(1, data, Access::Read, 2), None);
        assert_eq!(races.note(2, data, Access::Write, 5).map(|(last, _)| last.cluster), Some(1));
    }

    #[test]
    fn reads_and_atomics_do_not_race_with_their_kind() {
        let races = GlobalRaces::default();
        for cluster in 0..3 {
            assert_eq!(races.note(cluster, (0, 0, 4), Access::Read, 1), None);
            assert_eq!(races.note(cluster, (0, 4, 4), Access::Atomic, 1), None);
        }
        assert!(races.note(0, (0, 0, 4), Access::Write, 2).is_some());
        assert!(races.note(0, (0, 1, 1), Access::Write, 2).is_some());
    }
}
