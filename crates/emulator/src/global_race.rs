//! Races on global memory, which are looked for when [`Options::global_races`](crate::Options::global_races) asks.
//!
//! Between CTAs: who wrote and who read each byte last is remembered. What CTAs of one cluster do counts as done by one. An atomic, or a
//! strong load or store, on an address hands on to whoever accesses it so later what its cluster did before, up to its last fence if
//! it does not release itself; who does not acquire has learnt it after its next fence (PTX ISA 8.8.4, release and acquire
//! patterns). A fence counts for its whole cluster, which is coarser than the memory model: a race may be missed, and none is made up.
//!
//! Between warps of a cluster: a plain access follows another when the clocks of the race check ([`crate::race`]) say so. Two
//! writes are not compared, nor what copies access: such bytes only keep the check from being complete, unless copies alone store
//! there, and the same. So do atomics that meet others, or plain accesses, which nothing orders: what they find depends on who is
//! faster. Where nobody learns from them they may meet each other.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::program::Order;
use crate::race::{Access, Interval, Stamp};

/// Bytes of a page of what is remembered.
const PAGE: u64 = 1 << 10;

/// An access: the cluster plus one, 0 for none, the instruction, and the cluster's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Last {
    cluster: u32,
    position: u32,
    time: u32,
}

/// By cluster plus one, the first of its times that is not ordered before whoever holds this.
#[derive(Clone, Debug, Default)]
struct Known(HashMap<u32, u32>);

impl Known {
    fn join(&mut self, other: &Self) {
        for (&cluster, &time) in &other.0 {
            let known = self.0.entry(cluster).or_default();
            *known = time.max(*known);
        }
    }
}

/// A cluster.
#[derive(Debug, Default)]
struct Cluster {
    /// How often it has released what it did.
    time: u32,
    known: Known,
    /// What its last fence released, and what its next will have it know.
    fenced: Known,
    observed: Known,
}

impl Cluster {
    /// What it has done so far and what it knows, for others to learn.
    fn release(&mut self, own: u32) -> Known {
        self.time += 1;
        let mut released = self.known.clone();
        released.0.insert(own, self.time);
        released
    }
}

/// What is known of a byte: its last plain write, reads by two clusters, and the last atomic.
#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    write: Last,
    reads: [Last; 2],
    atomic: Last,
    /// Whether somebody learns from atomics on it, and whether those of several clusters met.
    flag: bool,
    common: bool,
}

#[derive(Debug, Default)]
struct State {
    /// By allocation and page.
    pages: HashMap<(usize, u64), Box<[Byte]>>,
    /// By allocation and offset: what atomics on it hand on.
    flags: HashMap<(usize, u64), Known>,
    clusters: HashMap<u32, Cluster>,
    /// Whether an atomic met another cluster's that it must not be exchanged with, or its reads.
    unordered: bool,
}

/// What warps of a cluster did to a byte: the last write, and the last reads of some.
#[derive(Clone, Debug, Default)]
struct Within {
    write: Option<(Stamp, u32)>,
    reads: Vec<(Stamp, u32)>,
    /// The last atomics of some, and the lane of such as somebody learns from.
    atomics: Vec<(Stamp, Option<u32>)>,
    copied: bool,
    /// What the last copy stored.
    stored: Option<u8>,
    reduced: bool,
}

/// The plain accesses of a cluster's warps, by allocation and page.
#[derive(Debug, Default)]
pub(crate) struct ClusterRaces(HashMap<(usize, u64), Vec<Within>>);

/// What came of an access.
#[derive(Debug, PartialEq, Eq)]
enum Met {
    Nothing,
    /// Something that is not compared.
    Unknown,
    /// What it races with, and the byte.
    Race(Stamp, u32, u64),
}

impl ClusterRaces {
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Notes an access; `interval` is of the warp, nothing for a copy, and `stored` what a copy stores.
    fn note(
        &mut self,
        (buffer, offset, bytes): (usize, u64, u64),
        access: Access,
        position: u32,
        interval: Option<&mut Interval>,
        stored: &[u8],
    ) -> Met {
        let writes = access != Access::Read;
        let mut met = Met::Nothing;
        let mut interval = interval;
        for at in offset..offset + bytes {
            let page = self.0.entry((buffer, at / PAGE)).or_insert_with(|| vec![Within::default(); PAGE as usize]);
            let byte = &mut page[(at % PAGE) as usize];
            if access == Access::Atomic {
                if byte.write.is_some() || !byte.reads.is_empty() || byte.copied {
                    met = Met::Unknown;
                }
                byte.reduced = true;
                continue;
            }
            if byte.reduced {
                met = Met::Unknown;
                continue;
            }
            let Some(interval) = interval.as_deref_mut() else {
                let stores = stored.get((at - offset) as usize).copied();
                let again = byte.copied && stores.is_some() && stores == byte.stored;
                if !byte.reads.is_empty() && writes || !again && (byte.write.is_some() || writes && byte.copied) {
                    met = Met::Unknown;
                }
                byte.copied = true;
                if writes {
                    byte.write = Some((Stamp::default(), position));
                    byte.stored = stores;
                }
                continue;
            };
            if byte.copied && (writes || byte.write.is_some()) {
                met = Met::Unknown;
                continue;
            }
            let now = interval.stamp();
            if !byte.atomics.iter().all(|(then, _)| interval.is_after(*then)) {
                met = Met::Unknown;
            }
            let unordered = |(then, _): &&(Stamp, u32)| !interval.is_after(*then);
            if writes {
                if let Some(&(then, other)) = byte.reads.iter().find(unordered) {
                    return Met::Race(then, other, at);
                }
                if byte.write.as_ref().is_some_and(|write| unordered(&write)) {
                    met = Met::Unknown;
                }
                byte.write = Some((now, position));
                byte.reads.clear();
            } else {
                if let Some(&(then, other)) = byte.write.as_ref().filter(unordered) {
                    return Met::Race(then, other, at);
                }
                byte.reads.retain(|read| unordered(&read));
                byte.reads.push((now, position));
            }
        }
        met
    }

    /// Notes an atomic of a warp, or of its lane if somebody learns from it. Whether all is ordered before it that it must not be
    /// exchanged with.
    fn note_atomic(
        &mut self,
        (buffer, offset, bytes): (usize, u64, u64),
        learns: Option<u32>,
        interval: &mut Interval,
    ) -> bool {
        let now = interval.stamp();
        let after = |then: Stamp| interval.is_after(then);
        let mut ordered = true;
        for at in offset..offset + bytes {
            let page = self.0.entry((buffer, at / PAGE)).or_insert_with(|| vec![Within::default(); PAGE as usize]);
            let byte = &mut page[(at % PAGE) as usize];
            let mut plain = byte.write.iter().chain(&byte.reads);
            let exchangeable = |&(then, other): &(Stamp, Option<u32>)| {
                let alone = then.agent != now.agent || other == learns;
                learns.is_none() && other.is_none() || after(then) && alone
            };
            ordered &= !byte.copied && !byte.reduced && plain.all(|&(then, _)| after(then));
            ordered &= byte.atomics.iter().all(exchangeable);
            byte.atomics.retain(|&(then, _)| then.agent != now.agent && !after(then));
            byte.atomics.push((now, learns));
        }
        ordered
    }
}

/// The accesses of a launch.
#[derive(Debug, Default)]
pub(crate) struct GlobalRaces(Mutex<State>);

impl GlobalRaces {
    /// Whether no atomic met another cluster's that it must not be exchanged with, or its reads.
    pub(crate) fn atomics_are_ordered(&self) -> bool {
        !self.0.lock().unwrap_or_else(PoisonError::into_inner).unordered
    }

    /// A cluster executes a fence.
    fn fence(&self, cluster: u32) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = cluster + 1;
        let cluster = state.clusters.entry(own).or_default();
        let observed = std::mem::take(&mut cluster.observed);
        cluster.known.join(&observed);
        cluster.fenced = cluster.release(own);
    }

    /// Notes an access of a cluster to bytes of an allocation; what it races with, and the byte. `order` is of an atomic by which others
    /// may learn what came before.
    fn note(
        &self,
        cluster: u32,
        (buffer, offset, bytes): (usize, u64, u64),
        access: Access,
        position: u32,
        order: Option<Order>,
    ) -> Option<(Last, u64)> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { pages, flags, clusters, unordered } = &mut *state;
        let own = cluster + 1;
        let cluster = clusters.entry(own).or_default();
        if access == Access::Atomic
            && let Some(order) = order
        {
            let flag = flags.entry((buffer, offset)).or_default();
            if order.acquires {
                cluster.known.join(flag)
            } else {
                cluster.observed.join(flag)
            }
            if order.releases { flag.join(&cluster.release(own)) } else { flag.join(&cluster.fenced) }
        }
        let against = |last: Last| {
            let ordered = || cluster.known.0.get(&last.cluster).is_some_and(|&time| last.time < time);
            last.cluster != 0 && last.cluster != own && !ordered()
        };
        let now = Last { cluster: own, position, time: cluster.time };
        for at in offset..offset + bytes {
            let page = pages
                .entry((buffer, at / PAGE))
                .or_insert_with(|| vec![Byte::default(); PAGE as usize].into_boxed_slice());
            let byte = &mut page[(at % PAGE) as usize];
            let others = [byte.write, byte.reads[0], byte.reads[1], byte.atomic];
            let writes = matches!(access, Access::Write | Access::Repeat);
            if access == Access::Atomic {
                byte.flag |= order.is_some();
                let other = |last: Last| last.cluster != 0 && last.cluster != own;
                byte.common |= other(byte.atomic);
                *unordered |= byte.flag && byte.common || byte.reads.into_iter().any(against);
            } else {
                *unordered |= byte.common || against(byte.atomic);
            }
            let checked = if writes { &others[..] } else { &others[..1] };
            if let Some(other) = checked.iter().find(|last| against(**last)) {
                return Some((*other, at));
            }
            match access {
                Access::Write | Access::Repeat => byte.write = now,
                Access::Atomic => byte.atomic = now,
                Access::Read if byte.reads[0].cluster == own => byte.reads[0] = now,
                Access::Read => byte.reads = [now, byte.reads[0]],
            }
        }
        None
    }
}

impl Worker<'_> {
    /// A warp executes a fence.
    pub(crate) fn fence_between_ctas(&self) {
        if let Some(races) = &self.job.global_races {
            races.fence(self.cluster);
        }
    }

    /// Notes an access to global memory by a lane of a warp, or by a copy, where such races are looked for.
    #[inline(always)]
    pub(crate) fn note_between_ctas(
        &mut self,
        place: (usize, u64, u64),
        access: Access,
        position: usize,
        thread: Option<(usize, u32)>,
    ) -> Result<(), Fail> {
        if self.job.global_races.is_none() { Ok(()) } else { self.note_between(place, access, position, thread, &[]) }
    }

    /// As [`Worker::note_between_ctas`], of bytes that a copy stores.
    pub(crate) fn note_copied_between_ctas(
        &mut self,
        (buffer, offset): (usize, u64),
        access: Access,
        position: usize,
        stored: &[u8],
    ) -> Result<(), Fail> {
        if self.job.global_races.is_none() {
            return Ok(());
        }
        self.note_between((buffer, offset, stored.len() as u64), access, position, None, stored)
    }

    #[cold]
    fn note_between(
        &mut self,
        place: (usize, u64, u64),
        access: Access,
        position: usize,
        thread: Option<(usize, u32)>,
        stored: &[u8],
    ) -> Result<(), Fail> {
        let Some(races) = &self.job.global_races else { return Ok(()) };
        let access = if self.program.orders[position].strong { Access::Atomic } else { access };
        let (warp, lane) = thread.unwrap_or_default();
        let reduces = thread.is_none() && access == Access::Atomic;
        if access != Access::Atomic || reduces {
            let interval = thread.map(|(warp, _)| &mut self.races.open[warp]);
            match self.cluster_races.note(place, access, position as u32, interval, stored) {
                Met::Nothing => {}
                Met::Unknown => self.races.forgot = true,
                Met::Race(then, other, at) => {
                    let address = self.job.memory.buffers()[place.0].base() + at;
                    let (who, other) = (self.agent(then.agent as usize), self.job.instruction(other as usize));
                    return Err(Box::new((FaultKind::GlobalRace { address, who, other }, position, warp, lane)));
                }
            }
        }
        let order = self.program.orders[position];
        let order = (!reduces && order.hands_on).then_some(order);
        if access == Access::Atomic && !reduces {
            let interval = &mut self.races.open[warp];
            self.races.forgot |= !self.cluster_races.note_atomic(place, order.map(|_| lane), interval);
        }
        match races.note(self.cluster, place, access, position as u32, order) {
            None => Ok(()),
            Some((other, at)) => {
                let address = self.job.memory.buffers()[place.0].base() + at;
                let [x, y, z] = self.job.cta_index(u64::from(other.cluster - 1), 0);
                let kind = FaultKind::GlobalRace {
                    address,
                    who: format!("CTA ({x}, {y}, {z})"),
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
        let order = Some(Order { releases: true, acquires: true, ..Order::default() });
        assert_eq!(races.note(0, data, Access::Write, 1, None), None);
        assert_eq!(races.note(1, data, Access::Read, 2, None), Some((Last { cluster: 1, position: 1, time: 0 }, 8)));
        races.note(0, flag, Access::Atomic, 3, order);
        races.note(1, flag, Access::Atomic, 4, order);
        assert_eq!(races.note(1, data, Access::Read, 2, None), None);
        assert_eq!(races.note(2, data, Access::Write, 5, None).map(|(last, _)| last.cluster), Some(1));
    }

    #[test]
    fn a_relaxed_flag_takes_fences_on_both_sides() {
        for (written, read, ordered) in [(true, true, true), (false, true, false), (true, false, false)] {
            let races = GlobalRaces::default();
            let (data, flag) = ((0, 8, 4), (0, 64, 4));
            let relaxed = Some(Order::default());
            races.note(0, data, Access::Write, 1, None);
            if written {
                races.fence(0);
            }
            races.note(0, flag, Access::Atomic, 2, relaxed);
            races.note(1, flag, Access::Atomic, 2, relaxed);
            if read {
                races.fence(1);
            }
            assert_eq!(races.note(1, data, Access::Read, 3, None).is_none(), ordered);
        }
    }

    #[test]
    fn atomics_that_somebody_learns_from_must_be_ordered() {
        let mut clocks = crate::race::Races::default();
        clocks.reset(1, 2, 64);
        let mut races = ClusterRaces::default();
        let mut note = |clocks: &mut crate::race::Races, at, warp: usize, learns| {
            races.note_atomic((0, at, 4), learns, &mut clocks.open[warp])
        };
        assert!(note(&mut clocks, 0, 0, Some(3)) && note(&mut clocks, 0, 0, Some(3)));
        assert!(!note(&mut clocks, 0, 0, Some(4)));
        assert!(!note(&mut clocks, 0, 1, Some(3)));
        assert!(note(&mut clocks, 8, 0, None) && note(&mut clocks, 8, 1, None));
        assert!(!note(&mut clocks, 8, 1, Some(0)));
        let (place, warp) = ((0, 8, 4), &mut clocks.open[0]);
        assert_eq!(races.note(place, Access::Read, 1, Some(warp), &[]), Met::Unknown);

        let races = GlobalRaces::default();
        races.note(0, place, Access::Atomic, 1, None);
        races.note(1, place, Access::Atomic, 1, None);
        assert!(races.atomics_are_ordered());
        races.note(1, place, Access::Atomic, 1, Some(Order::default()));
        assert!(!races.atomics_are_ordered());
    }

    #[test]
    fn what_comes_after_a_fence_is_not_handed_on_by_it() {
        let races = GlobalRaces::default();
        let (data, flag) = ((0, 8, 4), (0, 64, 4));
        let relaxed = Some(Order::default());
        races.fence(0);
        races.note(0, data, Access::Write, 1, None);
        races.note(0, flag, Access::Atomic, 2, relaxed);
        races.note(1, flag, Access::Atomic, 2, relaxed);
        races.fence(1);
        assert!(races.note(1, data, Access::Read, 3, None).is_some());
    }

    #[test]
    fn reads_and_atomics_do_not_race_with_their_kind() {
        let races = GlobalRaces::default();
        for cluster in 0..3 {
            assert_eq!(races.note(cluster, (0, 0, 4), Access::Read, 1, None), None);
            assert_eq!(races.note(cluster, (0, 4, 4), Access::Atomic, 1, None), None);
        }
        assert!(races.note(0, (0, 0, 4), Access::Write, 2, None).is_some());
        assert!(races.note(0, (0, 1, 1), Access::Write, 2, None).is_some());
    }

    struct Nothing;

    impl crate::race::Expand for Nothing {
        fn expand(&self, _: crate::race::Read) -> (usize, &[(i64, u64)]) {
            (0, &[])
        }
    }

    #[test]
    fn warps_of_a_cluster_need_a_barrier() {
        let mut clocks = crate::race::Races::default();
        clocks.reset(1, 2, 64);
        let mut races = ClusterRaces::default();
        let mut note = |clocks: &mut crate::race::Races, warp: usize, access, position| {
            races.note((0, 8, 4), access, position, Some(&mut clocks.open[warp]), &[])
        };
        assert_eq!(note(&mut clocks, 0, Access::Write, 1), Met::Nothing);
        assert_eq!(note(&mut clocks, 0, Access::Read, 2), Met::Nothing);
        let race = note(&mut clocks, 1, Access::Read, 3);
        assert!(matches!(race, Met::Race(Stamp { agent: 0, .. }, 1, 8)), "{race:?}");
        assert_eq!(note(&mut clocks, 1, Access::Write, 4), Met::Race(clocks.open[0].now(), 2, 8));
        clocks.barrier(0b11, &crate::race::Clock::default(), &Nothing).unwrap();
        assert_eq!(note(&mut clocks, 1, Access::Read, 3), Met::Nothing);
        assert_eq!(note(&mut clocks, 1, Access::Write, 4), Met::Nothing);
        // Two writes may store the same.
        assert_eq!(note(&mut clocks, 0, Access::Write, 5), Met::Unknown);
    }

    #[test]
    fn what_copies_access_is_not_compared() {
        let mut clocks = crate::race::Races::default();
        clocks.reset(1, 1, 64);
        let mut races = ClusterRaces::default();
        let place = (0, 0, 4);
        assert_eq!(races.note(place, Access::Read, 1, None, &[]), Met::Nothing);
        assert_eq!(races.note(place, Access::Read, 2, Some(&mut clocks.open[0]), &[]), Met::Nothing);
        assert_eq!(races.note(place, Access::Write, 3, Some(&mut clocks.open[0]), &[]), Met::Unknown);
        let place = (0, 64, 4);
        assert_eq!(races.note(place, Access::Atomic, 1, None, &[]), Met::Nothing);
        assert_eq!(races.note(place, Access::Atomic, 1, None, &[]), Met::Nothing);
        assert_eq!(races.note(place, Access::Read, 2, Some(&mut clocks.open[0]), &[]), Met::Unknown);
    }

    #[test]
    fn copies_may_store_the_same_in_any_order() {
        let mut clocks = crate::race::Races::default();
        clocks.reset(1, 1, 64);
        let mut races = ClusterRaces::default();
        let place = (0, 0, 2);
        assert_eq!(races.note(place, Access::Write, 1, None, &[5, 6]), Met::Nothing);
        assert_eq!(races.note(place, Access::Write, 2, None, &[5, 6]), Met::Nothing);
        assert_eq!(races.note(place, Access::Write, 2, None, &[5, 7]), Met::Unknown);
        let place = (0, 64, 2);
        assert_eq!(races.note(place, Access::Write, 1, None, &[5, 6]), Met::Nothing);
        assert_eq!(races.note(place, Access::Read, 2, None, &[]), Met::Unknown);
        let place = (0, 128, 1);
        assert_eq!(races.note(place, Access::Read, 1, Some(&mut clocks.open[0]), &[]), Met::Nothing);
        assert_eq!(races.note(place, Access::Write, 2, None, &[5]), Met::Unknown);
        assert_eq!(races.note(place, Access::Write, 2, None, &[5]), Met::Unknown);
    }
}
