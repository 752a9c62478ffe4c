//! Which place of the register file each register of a kernel takes.
//!
//! Compilers emit a fresh register per value, thousands of them; a warp's file of all would fall out of the cache. Registers
//! that are never live together share a place (linear scan over live ranges, Poletto and Sarkar 1999).

use std::collections::HashMap;

use ptx::{Cfg, Formal, Instruction, Kernel, Register, Type};

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

/// Live sets above this many bits are not computed: every register then gets a place of its own.
const LIVENESS_LIMIT: usize = 1 << 27;
/// Rounds over the graph after which liveness is given up: as many as nested loops need, and more.
const ROUNDS: usize = 64;

/// Places for every register a validated kernel uses; an error names a register too wide to hold.
pub(crate) fn allocate(kernel: &Kernel, cfg: &Cfg) -> Result<Allocation, String> {
    let mut ids = HashMap::new();
    let mut registers = Vec::new();
    for instruction in kernel.instructions() {
        let mut note = |register: Register| {
            ids.entry(register).or_insert_with(|| {
                registers.push(register);
                registers.len() - 1
            });
        };
        instruction.for_each_use(&mut note);
        instruction.for_each_def(&mut note);
    }
    let widths = registers
        .iter()
        .map(|&r| {
            let ty = kernel.register_type(r).unwrap_or(Type::B32);
            Width::of(ty).ok_or_else(|| {
                format!("register `{}` is {} bits wide", kernel.register_name(r).unwrap_or_default(), ty.bits())
            })
        })
        .collect::<Result<Vec<_>, _>>()?;

    let small = cfg.blocks.len().saturating_mul(registers.len()) <= LIVENESS_LIMIT;
    let liveness = small.then(|| liveness(kernel, cfg, &ids, &widths)).flatten();
    let (mut ranges, live) =
        liveness.unwrap_or_else(|| (vec![(0, usize::MAX); registers.len()], widths.iter().map(|&w| cost(w)).sum()));

    // What functions take and give back is written and read by their calls.
    for formal in kernel.functions.iter().flat_map(|function| function.params.iter().chain(&function.results)) {
        if let Formal::Register(register) = formal
            && let Some(&id) = ids.get(register)
        {
            ranges[id] = (0, usize::MAX);
        }
    }

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

fn cost(width: Width) -> u32 {
    match width {
        Width::Predicate => 0,
        Width::Narrow => 1,
        Width::Wide => 2,
        Width::Double => 4,
    }
}

/// For each register the first and last position where it holds a value somebody reads, loops included; and the most 32-bit
/// registers that do so at once. `None` when the graph is too tangled to find out.
fn liveness(
    kernel: &Kernel,
    cfg: &Cfg,
    ids: &HashMap<Register, usize>,
    widths: &[Width],
) -> Option<(Vec<(usize, usize)>, u32)> {
    let instructions: Vec<_> = kernel.instructions().collect();
    let words = ids.len().div_ceil(64);
    let blocks = cfg.blocks.len();
    let (mut gen_, mut kill) = (vec![0u64; blocks * words], vec![0u64; blocks * words]);
    for (index, block) in cfg.blocks.iter().enumerate() {
        let at = index * words;
        for position in block.instructions.clone() {
            let instruction = instructions[position];
            instruction.for_each_use(|r| {
                let id = ids[&r];
                if kill[at + id / 64] >> (id % 64) & 1 == 0 {
                    gen_[at + id / 64] |= 1 << (id % 64);
                }
            });
            instruction.for_each_def(|r| {
                let id = ids[&r];
                // A guarded write leaves the other lanes' value in place: it reads as much as it writes.
                if instruction.guard.is_none() {
                    kill[at + id / 64] |= 1 << (id % 64);
                } else if kill[at + id / 64] >> (id % 64) & 1 == 0 {
                    gen_[at + id / 64] |= 1 << (id % 64);
                }
            });
        }
    }
    let (mut live_in, mut live_out) = (gen_.clone(), vec![0u64; blocks * words]);
    let mut changed = true;
    for _ in 0..ROUNDS {
        if !changed {
            break;
        }
        changed = false;
        for (index, block) in cfg.blocks.iter().enumerate().rev() {
            for word in 0..words {
                let at = index * words + word;
                let out = block.successors.iter().fold(live_out[at], |out, &next| out | live_in[next * words + word]);
                let into = gen_[at] | out & !kill[at];
                changed |= out != live_out[at] || into != live_in[at];
                live_out[at] = out;
                live_in[at] = into;
            }
        }
    }
    if changed {
        return None;
    }
    Some((
        ranges_of(cfg, &instructions, ids, &live_in, &live_out),
        most_live(cfg, &instructions, ids, widths, &live_out),
    ))
}

/// The first and last position where each register is live.
fn ranges_of(
    cfg: &Cfg,
    instructions: &[&Instruction],
    ids: &HashMap<Register, usize>,
    live_in: &[u64],
    live_out: &[u64],
) -> Vec<(usize, usize)> {
    let words = ids.len().div_ceil(64);
    let mut ranges = vec![(usize::MAX, 0); ids.len()];
    let mut extend = |id: usize, position: usize| {
        let range: &mut (usize, usize) = &mut ranges[id];
        range.0 = range.0.min(position);
        range.1 = range.1.max(position);
    };
    for (index, block) in cfg.blocks.iter().enumerate() {
        let (first, last) = (block.instructions.start, block.instructions.end - 1);
        for word in 0..words {
            let at = index * words + word;
            for (set, position) in [(live_in[at], first), (live_out[at], last)] {
                let mut rest = set;
                while rest != 0 {
                    extend(word * 64 + rest.trailing_zeros() as usize, position);
                    rest &= rest - 1;
                }
            }
        }
        for position in block.instructions.clone() {
            instructions[position].for_each_use(|r| extend(ids[&r], position));
            instructions[position].for_each_def(|r| extend(ids[&r], position));
        }
    }
    ranges
}

/// The most 32-bit registers that hold values at once, at any instruction.
fn most_live(
    cfg: &Cfg,
    instructions: &[&Instruction],
    ids: &HashMap<Register, usize>,
    widths: &[Width],
    live_out: &[u64],
) -> u32 {
    let words = ids.len().div_ceil(64);
    let mut most = 0;
    for (index, block) in cfg.blocks.iter().enumerate() {
        let mut live = live_out[index * words..(index + 1) * words].to_vec();
        let held = |live: &[u64], id: usize| live[id / 64] >> (id % 64) & 1 == 1;
        let mut count: u32 = (0..ids.len()).filter(|&id| held(&live, id)).map(|id| cost(widths[id])).sum();
        for position in block.instructions.clone().rev() {
            let instruction = instructions[position];
            // What is written takes a register even if nobody reads it.
            let mut written = 0;
            instruction.for_each_def(|r| written += if held(&live, ids[&r]) { 0 } else { cost(widths[ids[&r]]) });
            most = most.max(count + written);
            if instruction.guard.is_none() {
                instruction.for_each_def(|r| {
                    let id = ids[&r];
                    if held(&live, id) {
                        live[id / 64] &= !(1 << (id % 64));
                        count -= cost(widths[id]);
                    }
                });
            }
            instruction.for_each_use(|r| {
                let id = ids[&r];
                if !held(&live, id) {
                    live[id / 64] |= 1 << (id % 64);
                    count += cost(widths[id]);
                }
            });
            most = most.max(count);
        }
    }
    most
}
