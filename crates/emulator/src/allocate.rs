//! Which place of the register file each register of a kernel takes.
//!
//! Compilers emit a fresh register per value, thousands of them; a warp's file of all would fall out of the cache. Registers
//! that are never live together share a place (linear scan over live ranges, Poletto and Sarkar 1999).

use std::collections::HashMap;

use ptx::{Cfg, Kernel, LiveRanges, Register, Type};

/// What a register needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Width {
    Predicate,
    Narrow,
    Wide,
    /// Two wide places, one after the other.
    Double,
}

impl Width {
    pub(crate) fn of(ty: Type) -> Option<Self> {
        match ty.bits() {
            1 => Some(Self::Predicate),
            8 | 16 | 32 => Some(Self::Narrow),
            64 => Some(Self::Wide),
            128 => Some(Self::Double),
            _ => None,
        }
    }
}

/// The places of a kernel's registers.
pub(crate) struct Allocation {
    pub places: HashMap<Register, (Width, u32)>,
    /// Places of each width: predicates, narrow, wide.
    pub predicates: u32,
    pub narrow: u32,
    pub wide: u32,
    /// 32-bit registers live at once, at most.
    pub live: u32,
}

/// Places for every register a validated kernel uses; an error names a register too wide to hold.
pub(crate) fn allocate(kernel: &Kernel, cfg: &Cfg) -> Result<Allocation, String> {
    let LiveRanges { registers, ranges, most: live } = LiveRanges::of(kernel, cfg);
    let widths = registers
        .iter()
        .map(|&r| {
            let ty = kernel.register_type(r).unwrap_or(Type::B32);
            Width::of(ty).ok_or_else(|| {
                format!("register `{}` is {} bits wide", kernel.register_name(r).unwrap_or_default(), ty.bits())
            })
        })
        .collect::<Result<Vec<_>, _>>()?;

    let mut order: Vec<usize> = (0..registers.len()).collect();
    order.sort_by_key(|&id| ranges[id].0);
    let mut allocation =
        Allocation { places: HashMap::with_capacity(registers.len()), predicates: 0, narrow: 0, wide: 0, live };
    let mut free: [Vec<u32>; 4] = Default::default();
    // Live registers by the end of their range, the soonest on top.
    let mut active = std::collections::BinaryHeap::new();
    for id in order {
        let (start, end) = ranges[id];
        while let Some(&std::cmp::Reverse((ended, other))) = active.peek()
            && ended < start
        {
            active.pop();
            let (width, place) = allocation.places[&registers[other]];
            free[width as usize].push(place);
        }
        let width = widths[id];
        let (count, taken) = match width {
            Width::Predicate => (&mut allocation.predicates, 1),
            Width::Narrow => (&mut allocation.narrow, 1),
            Width::Wide => (&mut allocation.wide, 1),
            Width::Double => (&mut allocation.wide, 2),
        };
        let place = free[width as usize].pop().unwrap_or_else(|| {
            *count += taken;
            *count - taken
        });
        allocation.places.insert(registers[id], (width, place));
        active.push(std::cmp::Reverse((end, id)));
    }
    Ok(allocation)
}
