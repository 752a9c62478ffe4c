//! Shared-memory banks. (Placeholder rule until the architecture's rules land.)

use arch::Sm;

/// How an architecture serves shared-memory accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BankRule;

impl BankRule {
    /// The rule of an architecture.
    pub fn of(_sm: Sm) -> Self {
        Self
    }
}

/// Passes through the banks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wavefronts {
    /// Passes taken.
    pub count: u32,
    /// Passes that the width alone demands.
    pub ideal: u32,
}

/// The passes one warp access takes.
pub fn wavefronts(addresses: &[u32; 32], active: u32, bytes_per_lane: u32, _rule: BankRule) -> Wavefronts {
    let lanes_per_phase = if bytes_per_lane <= 4 { 32 } else { 128 / bytes_per_lane as usize };
    let mut total = Wavefronts::default();
    for phase in 0..32 / lanes_per_phase {
        let lanes = phase * lanes_per_phase..(phase + 1) * lanes_per_phase;
        let mut words: Vec<u32> = lanes
            .filter(|lane| active >> lane & 1 == 1)
            .flat_map(|lane| (0..bytes_per_lane.div_ceil(4)).map(move |w| addresses[lane] / 4 + w))
            .collect();
        words.sort_unstable();
        words.dedup();
        let fullest = (0..32).map(|bank| words.iter().filter(|&&w| w % 32 == bank).count() as u32).max().unwrap_or(0);
        total.count += fullest;
        total.ideal += u32::from(fullest > 0);
    }
    total
}
