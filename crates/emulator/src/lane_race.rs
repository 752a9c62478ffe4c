//! Races between the lanes of a warp on shared memory, which are looked for when
//! [`Options::lane_races`](crate::Options::lane_races) asks.
//!
//! Lanes need not run in step (PTX ISA 3.1): what one writes another may read only after a barrier of both, of which
//! `bar.warp.sync` is the cheapest (9.7.13.2). Who touched each byte since the warp's last synchronisation is remembered. Lanes
//! that write one byte by the same instruction count as one writer, and two writes are not compared: a race may be missed, and
//! none is made up.

use std::collections::HashMap;

use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::lanes::WARP;
use crate::pattern::lanes_of;
use crate::warp::PendingCopy;

/// The lanes that touched a byte since their warp last synchronised, and an instruction by which they did.
#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    writers: u32,
    readers: u32,
    write: usize,
    read: usize,
}

/// By agent (warp of a CTA of the cluster), the bytes its lanes touched.
#[derive(Debug, Default)]
pub(crate) struct LaneRaces(Vec<HashMap<u32, Byte>>);

/// An access of a warp's lanes.
pub(crate) struct LaneAccess<'a> {
    pub addresses: &'a [u32; WARP],
    pub mask: u32,
    /// Bytes of each lane.
    pub bytes: u32,
    pub write: bool,
    /// Every lane gets, or gives, a part of what each lane's address names (`ldmatrix`, `stmatrix`).
    pub shared_out: bool,
    pub position: usize,
}

impl LaneRaces {
    /// For clusters of so many warps.
    pub(crate) fn reset(&mut self, warps: usize) {
        self.0.clear();
        self.0.resize_with(warps, HashMap::new);
    }

    /// Notes an access. The address, the lane, and the lane and instruction that it races with, if it does.
    fn note(&mut self, agent: usize, access: &LaneAccess<'_>) -> Option<(u32, u32, u32, usize)> {
        let bytes = self.0.get_mut(agent)?;
        let mut found = None;
        for lane in lanes_of(access.mask) {
            let own = if access.shared_out { u32::MAX } else { 1 << lane };
            for address in access.addresses[lane]..access.addresses[lane] + access.bytes {
                let byte = bytes.entry(address).or_default();
                let (others, other) = match access.write {
                    // What a lane reads it must have written itself, if any lane has.
                    false if byte.writers & own == own => (0, 0),
                    false => (byte.writers, byte.write),
                    true => (byte.readers & !own, byte.read),
                };
                if others != 0 && found.is_none() {
                    let another = others & !(1 << lane);
                    let another = if another == 0 { others } else { another };
                    found = Some((address, lane as u32, another.trailing_zeros(), other));
                }
                if !access.write {
                    byte.readers |= own;
                    byte.read = access.position;
                }
            }
        }
        // Lanes that write together are one writer.
        if access.write {
            for lane in lanes_of(access.mask) {
                let own = if access.shared_out { u32::MAX } else { 1 << lane };
                for address in access.addresses[lane]..access.addresses[lane] + access.bytes {
                    let byte = bytes.entry(address).or_default();
                    if byte.write != access.position {
                        byte.writers = 0;
                    }
                    byte.writers |= own;
                    byte.write = access.position;
                }
            }
        }
        found
    }
}

impl Worker<'_> {
    /// Notes an access to shared memory by a warp's lanes, where such races are looked for.
    #[cold]
    pub(crate) fn note_between_lanes(&mut self, warp: usize, access: &LaneAccess<'_>) -> Result<(), Fail> {
        let agent = self.rank * self.job.warps() + warp;
        let Some((address, lane, other_lane, other)) = self.lane_races.as_mut().and_then(|r| r.note(agent, access))
        else {
            return Ok(());
        };
        let kind = FaultKind::Race {
            address: address.into(),
            first: format!("lane {other_lane}"),
            second: format!("lane {lane} of warp {warp}"),
            other: self.job.instruction(other),
        };
        Err(Box::new((kind, access.position, warp, lane)))
    }

    /// Notes what a lane's `cp.async` has written.
    #[cold]
    pub(crate) fn note_copied(&mut self, warp: usize, copy: &PendingCopy) {
        let agent = self.rank * self.job.warps() + warp;
        let (addresses, mask, bytes) = ([copy.to as u32; WARP], 1 << copy.lane, copy.bytes.len() as u32);
        let position = copy.position;
        let access = LaneAccess { addresses: &addresses, mask, bytes, write: true, shared_out: false, position };
        if let Some(races) = &mut self.lane_races {
            races.note(agent, &access);
        }
    }

    /// A warp's lanes have synchronised.
    pub(crate) fn lanes_meet(&mut self, warp: usize) {
        let agent = self.rank * self.job.warps() + warp;
        if let Some(bytes) = self.lane_races.as_mut().and_then(|races| races.0.get_mut(agent)) {
            bytes.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(addresses: &[u32; WARP], mask: u32, write: bool, position: usize) -> LaneAccess<'_> {
        LaneAccess { addresses, mask, bytes: 4, write, shared_out: false, position }
    }

    fn races() -> LaneRaces {
        let mut races = LaneRaces::default();
        races.reset(1);
        races
    }

    #[test]
    fn a_lane_may_read_what_it_wrote() {
        let own = std::array::from_fn(|lane| 4 * lane as u32);
        let mut races = races();
        assert_eq!(races.note(0, &access(&own, u32::MAX, true, 1)), None);
        assert_eq!(races.note(0, &access(&own, u32::MAX, false, 2)), None);
        assert_eq!(races.note(0, &access(&own, u32::MAX, true, 3)), None);
        // And what all of them wrote.
        races.reset(1);
        assert_eq!(races.note(0, &access(&[0; WARP], u32::MAX, true, 4)), None);
        assert_eq!(races.note(0, &access(&[0; WARP], u32::MAX, false, 5)), None);
    }

    #[test]
    fn a_lane_must_not_read_what_another_wrote_or_write_what_another_read() {
        let own = std::array::from_fn(|lane| 4 * lane as u32);
        let next = std::array::from_fn(|lane| 4 * (lane as u32 ^ 1));
        let mut races = races();
        races.note(0, &access(&own, u32::MAX, true, 1));
        assert_eq!(races.note(0, &access(&next, u32::MAX, false, 2)), Some((4, 0, 1, 1)));
        races.reset(1);
        races.note(0, &access(&own, u32::MAX, false, 1));
        assert_eq!(races.note(0, &access(&next, 1, true, 2)), Some((4, 0, 1, 1)));
    }
}
