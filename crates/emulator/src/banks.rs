//! Shared-memory banks: how many passes a warp's access takes.
//!
//! 32 banks of 4 bytes, `bank = (byte / 4) mod 32`. An access is served in phases: 4 bytes or less per lane in one phase of
//! 32 lanes, 8 bytes in two of 16, 16 bytes in four of 8. In a phase lanes that touch the same word share it, and the phase
//! takes as many wavefronts as the fullest bank has distinct words.
//!
//! A *load* of 8 or 16 bytes whose active lanes `n` and `n ^ 1` (or `n` and `n ^ 2`) all read the same place counts as one of
//! half as many lanes: the return packs two for one. With it the model gives the wavefronts that an RTX 2070 (sm_75) and an
//! H200 (sm_90) counted on the same three generations of attention exactly; without it they are 18 to 43 % too many. Stores
//! are not packed (33,792 on the H200, counted and modelled). See `docs/ptxas.md`.

use arch::Sm;

/// Lanes of a warp.
const LANES: usize = 32;
/// Banks, each 4 bytes wide.
const BANKS: usize = 32;
/// Words of the widest access.
const MOST_WORDS: usize = 4;

/// How an architecture serves shared-memory accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BankRule {
    /// Phase by phase: all stores.
    Phases,
    /// As `Phases`, wide accesses packed two for one where neighbouring lanes agree: loads.
    Packed,
}

impl BankRule {
    /// The rule for loads of an architecture. Counted on sm_75 and sm_90, taken to hold between and after them.
    pub const fn loads(_sm: Sm) -> Self {
        Self::Packed
    }

    /// The rule for stores of an architecture.
    pub const fn stores(_sm: Sm) -> Self {
        Self::Phases
    }
}

/// Passes through the banks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wavefronts {
    /// Passes taken.
    pub count: u32,
    /// Passes that the width alone demands: one per phase with an active lane.
    pub ideal: u32,
}

/// The passes one warp access takes.
///
/// `addresses` are the lanes' byte addresses, `active` has a bit per lane that takes part, `bytes_per_lane` is the access
/// width in bytes: 1, 2, 4, 8 or 16 (anything wider is counted as 16).
pub fn wavefronts(addresses: &[u32; LANES], active: u32, bytes_per_lane: u32, rule: BankRule) -> Wavefronts {
    let words = words(bytes_per_lane);
    let (lanes, count) = lanes(addresses, active, words, rule);

    let mut total = Wavefronts::default();
    for phase in lanes[..count].chunks(LANES / words) {
        let mut seen = [0u32; LANES];
        let mut distinct = 0;
        let mut filled = [0u32; BANKS];
        for &lane in phase.iter().filter(|&&lane| active >> lane & 1 == 1) {
            for word in 0..words as u32 {
                let word = (addresses[lane] / 4).wrapping_add(word);
                if !seen[..distinct].contains(&word) {
                    seen[distinct] = word;
                    distinct += 1;
                    filled[word as usize % BANKS] += 1;
                }
            }
        }
        let fullest = filled.into_iter().max().unwrap_or(0);
        total.count += fullest;
        total.ideal += u32::from(fullest > 0);
    }
    total
}

/// The lanes that each phase of an access serves, in order; those that do not take part, and those for which a packed neighbour
/// stands, left out. The arguments are those of [`wavefronts`].
pub fn phases(addresses: &[u32; LANES], active: u32, bytes_per_lane: u32, rule: BankRule) -> Vec<Vec<usize>> {
    let words = words(bytes_per_lane);
    let (lanes, count) = lanes(addresses, active, words, rule);
    let phases = lanes[..count].chunks(LANES / words);
    let taking_part = |phase: &[usize]| phase.iter().copied().filter(|&lane| active >> lane & 1 == 1).collect();
    phases.map(taking_part).filter(|phase: &Vec<usize>| !phase.is_empty()).collect()
}

/// Words per lane of an access.
fn words(bytes_per_lane: u32) -> usize {
    (bytes_per_lane as usize).div_ceil(4).clamp(1, MOST_WORDS)
}

/// The lanes in the order in which phases take them, and how many there are: all 32, or half where two are packed for one.
fn lanes(addresses: &[u32; LANES], active: u32, words: usize, rule: BankRule) -> ([usize; LANES], usize) {
    let is_active = |lane: usize| active >> lane & 1 == 1;
    let agree = |distance: usize| {
        (0..LANES).all(|lane| {
            let other = lane ^ distance;
            !is_active(lane) || !is_active(other) || addresses[lane] == addresses[other]
        })
    };
    let packed = if rule == BankRule::Packed && words > 1 { [1, 2].into_iter().find(|&d| agree(d)) } else { None };

    let mut order = [0; LANES];
    let mut count = 0;
    for lane in 0..LANES {
        match packed {
            Some(distance) if lane & distance != 0 => {}
            // The pair's active lane stands for both.
            Some(distance) => {
                order[count] = if is_active(lane) { lane } else { lane ^ distance };
                count += 1;
            }
            None => {
                order[count] = lane;
                count += 1;
            }
        }
    }
    (order, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u32 = u32::MAX;

    fn passes(bytes: u32, rule: BankRule, address: impl Fn(u32) -> u32) -> (u32, u32) {
        let addresses = std::array::from_fn(|lane| address(lane as u32));
        let Wavefronts { count, ideal } = wavefronts(&addresses, ALL, bytes, rule);
        (count, ideal)
    }

    #[test]
    fn a_narrow_access_takes_the_fullest_bank() {
        for rule in [BankRule::Phases, BankRule::Packed] {
            assert_eq!(passes(4, rule, |lane| 4 * lane), (1, 1));
            assert_eq!(passes(4, rule, |_| 64), (1, 1), "a broadcast");
            assert_eq!(passes(4, rule, |lane| 128 * lane), (32, 1), "a column of a row-major tile");
            assert_eq!(passes(4, rule, |lane| 8 * lane), (2, 1));
            assert_eq!(passes(4, rule, |lane| 132 * lane), (1, 1), "padded by a word");
            assert_eq!(passes(2, rule, |lane| 2 * lane), (1, 1), "two lanes share a word");
            assert_eq!(passes(1, rule, |lane| 128 * (lane / 4) + lane % 4), (8, 1));
        }
    }

    #[test]
    fn a_wide_access_takes_a_phase_per_half_or_quarter_warp() {
        assert_eq!(passes(8, BankRule::Packed, |lane| 8 * lane), (2, 2));
        assert_eq!(passes(16, BankRule::Packed, |lane| 16 * lane), (4, 4));
        assert_eq!(passes(16, BankRule::Packed, |lane| 128 * lane), (32, 4), "K read down a column by v2");
    }

    #[test]
    fn neighbours_that_agree_are_packed_in_loads_only() {
        for place in [|lane| lane / 2, |lane| lane / 4 * 2 + lane % 2] {
            assert_eq!(passes(16, BankRule::Packed, |lane| 16 * place(lane)), (2, 2));
            assert_eq!(passes(16, BankRule::Phases, |lane| 16 * place(lane)), (4, 4));
        }
        assert_eq!(passes(16, BankRule::Packed, |lane| 16 * (lane & !1)), (4, 2), "packed lanes can meet in a bank");
        assert_eq!(passes(8, BankRule::Packed, |lane| 8 * (lane / 2)), (1, 1));
        assert_eq!(passes(16, BankRule::Packed, |lane| 16 * (lane % 4)), (4, 4), "lanes 4 apart are not packed");
        assert_eq!(passes(16, BankRule::Packed, |_| 0), (2, 2), "a broadcast");
    }

    #[test]
    fn lanes_that_do_not_take_part_cost_nothing() {
        let addresses = std::array::from_fn(|lane| 128 * lane as u32);
        let count = |active, bytes| wavefronts(&addresses, active, bytes, BankRule::Packed);
        assert_eq!(count(0, 16), Wavefronts::default());
        assert_eq!(count(0x0000_00ff, 16), Wavefronts { count: 8, ideal: 1 });
        assert_eq!(count(0x8000_0001, 4), Wavefronts { count: 2, ideal: 1 });
        // No two neighbours are active, so every other lane stands for a pair.
        assert_eq!(count(0x5555_5555, 16), Wavefronts { count: 16, ideal: 2 });
        assert_eq!(count(0xaaaa_aaaa, 16), Wavefronts { count: 16, ideal: 2 });
    }
}
