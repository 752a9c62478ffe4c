//! The merge of narrow accesses that `ptxas` performs, predicted from the PTX alone.
//!
//! What was found by disassembling, kernel by kernel, is in `docs/ptxas.md`; the rules in short:
//!
//! - A load is taken apart into words (4 bytes; 8 for 64-bit elements; 1 or 2 for single narrow ones). Words nobody uses
//!   are dropped, a word that was already loaded and not written since is not loaded again.
//! - Words of one aligned 16-byte piece of *shared* memory become one access: three or four of them a 128-bit load, an aligned
//!   pair a 64-bit load. The alignment must follow from the address arithmetic (`merge/address.rs`). Order does not matter, and
//!   distance neither: only that the first load dominates the others and no write to shared memory, barrier or fence lies
//!   between. Writes to global memory do not matter.
//! - Of stores, only those that follow each other without another access to shared memory between are merged, in aligned
//!   pairs, twice.
//! - Accesses with a guard and volatile ones stay as they are. Global memory is never merged; unused words of its loads go.

use std::collections::{BTreeMap, HashMap, HashSet};

use ptx::{Cfg, Instruction, Kernel, Modifier, Opcode, Operand, Register};

use self::address::{Addresses, Place};
use self::flow::Flow;

mod address;
mod flow;

/// One access of the compiled kernel, and the PTX instructions it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeGroup {
    /// The instruction whose executions are those of the access, a position in [`Kernel::instructions`].
    pub leader: usize,
    /// In bytes, from the leader's address to that of the access, in every lane.
    pub delta: i32,
    /// The width of the access.
    pub bytes_per_lane: u32,
    /// The instructions served, the leader among them, in program order.
    pub members: Vec<usize>,
}

/// The widest access, in bytes.
const WIDEST: u32 = 16;

/// Basic blocks that a kernel may have to be analysed: beyond what any compiler emits, and few enough for a hostile one to end.
const MOST_BLOCKS: usize = 1 << 14;

/// Loads of one place that none of them dominates, and that a later one may still join.
const MOST_OPEN: usize = 16;

/// Whether [`groups`] says what becomes of an instruction: loads and stores of shared memory, and global and generic loads.
/// Other accesses stay as they are.
pub fn covers(instruction: &Instruction) -> bool {
    match instruction.opcode() {
        Opcode::Ld => in_shared(instruction) || from_global(instruction),
        Opcode::St => in_shared(instruction),
        _ => false,
    }
}

/// The accesses to shared memory that a kernel is predicted to be left with, by their names in machine code (`LDS.128`, `STS`).
pub fn shared_accesses(kernel: &Kernel) -> BTreeMap<String, u32> {
    let instructions: Vec<_> = kernel.instructions().collect();
    let mut accesses = BTreeMap::new();
    for group in groups(kernel) {
        let leader = instructions[group.leader];
        if leader.has(Modifier::Shared) || leader.has(Modifier::SharedCta) {
            let name = if leader.opcode() == Opcode::Ld { "LDS" } else { "STS" };
            let width = match group.bytes_per_lane {
                16 => ".128",
                8 => ".64",
                2 => "16",
                1 => "8",
                _ => "",
            };
            *accesses.entry(format!("{name}{width}")).or_default() += 1;
        }
    }
    accesses
}

/// The accesses of the compiled kernel that its covered instructions become.
///
/// A covered instruction leads as many groups as it becomes accesses: usually one; several where unused words split it; none
/// where another instruction's access serves it or nobody uses what it loads.
pub fn groups(kernel: &Kernel) -> Vec<MergeGroup> {
    let instructions: Vec<&Instruction> = kernel.instructions().collect();
    let cfg = Cfg::of(kernel);
    if cfg.blocks.len() > MOST_BLOCKS {
        let covered = instructions.iter().enumerate().filter(|(_, instruction)| covers(instruction));
        return covered
            .filter_map(|(position, instruction)| Some(alone(position, Words::of(instruction)?.bytes())))
            .collect();
    }
    let wanted = wanted_registers(&instructions);
    let addresses = Addresses::of(kernel, &instructions, &cfg);
    let flow = Flow::of(&instructions, &cfg);
    let mut groups = Vec::new();
    // A load that says which bytes it needs keeps its width and merges with nothing.
    let kept: HashSet<usize> = kernel.used_bytes().into_iter().map(|(position, _)| position).collect();
    shared_loads(&instructions, &wanted, &kept, &addresses, &flow, &mut groups);
    shared_stores(&instructions, &addresses, &flow, &mut groups);
    global_loads(&instructions, &wanted, &kept, &mut groups);
    groups.sort_by_key(|group| (group.leader, group.delta));
    groups
}

/// Whether an access names shared memory.
fn in_shared(instruction: &Instruction) -> bool {
    [Modifier::Shared, Modifier::SharedCta, Modifier::SharedCluster].iter().any(|&space| instruction.has(space))
}

/// Whether a load is from global memory, or generic.
fn from_global(instruction: &Instruction) -> bool {
    let elsewhere = [Modifier::Param, Modifier::ParamEntry, Modifier::ParamFunc, Modifier::Const, Modifier::Local];
    !in_shared(instruction) && !elsewhere.iter().any(|&space| instruction.has(space))
}

/// Whether an access may not be changed.
fn stays(instruction: &Instruction) -> bool {
    instruction.guard.is_some() || instruction.has(Modifier::Volatile) || instruction.has(Modifier::Mmio)
}

/// The registers whose values reach something that can be seen outside: stores, branches, barriers, and what these need.
///
/// By register, not by definition: one that is reused counts as used by all of its readers.
fn wanted_registers(instructions: &[&Instruction]) -> HashSet<Register> {
    let mut definitions = HashMap::<Register, Vec<usize>>::new();
    let mut open = Vec::new();
    for (position, instruction) in instructions.iter().enumerate() {
        let mut defines = false;
        instruction.for_each_def(|register| {
            defines = true;
            definitions.entry(register).or_default().push(position);
        });
        if !defines
            || matches!(instruction.opcode(), Opcode::Atom | Opcode::Bar)
            || instruction.has(Modifier::Volatile)
            || instruction.has(Modifier::Mmio)
        {
            open.push(position);
        }
    }
    let mut visited = vec![false; instructions.len()];
    let mut wanted = HashSet::new();
    while let Some(position) = open.pop() {
        if std::mem::replace(&mut visited[position], true) {
            continue;
        }
        instructions[position].for_each_use(|register| {
            if wanted.insert(register) {
                open.extend(definitions.get(&register).into_iter().flatten());
            }
        });
    }
    wanted
}

/// How a load or store falls into words.
struct Words<'a> {
    /// Bytes of a word: what is used, dropped and merged as a whole.
    unit: u32,
    /// Bytes of an element.
    element: u32,
    elements: &'a [Operand],
}

impl<'a> Words<'a> {
    fn of(instruction: &'a Instruction) -> Option<Self> {
        let data = match instruction.opcode() {
            Opcode::Ld => instruction.operands().first()?,
            Opcode::St => instruction.operands().get(1)?,
            _ => return None,
        };
        let elements = match data {
            Operand::Vector(elements) => elements.as_slice(),
            single => std::slice::from_ref(single),
        };
        let element = instruction.ty()?.bytes();
        // Narrow elements of a vector are loaded by the word.
        let unit = if elements.len() > 1 { element.max(4.min(element * elements.len() as u32)) } else { element };
        Some(Self { unit, element, elements })
    }

    fn bytes(&self) -> u32 {
        self.element * self.elements.len() as u32
    }

    /// The offsets of the words that hold a wanted element.
    fn wanted<'w>(&'w self, wanted: &'w HashSet<Register>) -> impl Iterator<Item = u32> + 'w {
        (0..self.bytes() / self.unit).map(|word| word * self.unit).filter(move |start| {
            let first = (start / self.element) as usize;
            let count = (self.unit / self.element) as usize;
            self.elements[first..first + count]
                .iter()
                .any(|element| matches!(element, Operand::Register(register) if wanted.contains(register)))
        })
    }
}

/// The loaded words of 16 aligned bytes, or of as many as are known to be aligned.
#[derive(Default)]
struct Piece {
    /// Where the piece starts, from its root.
    start: u32,
    /// The block of the first load.
    block: usize,
    /// For each word's offset in the piece, the loads that want it.
    words: std::collections::BTreeMap<u32, Vec<usize>>,
    unit: u32,
    bytes: u32,
}

impl Piece {
    /// The accesses that load its words: offset, width and the instructions served.
    fn accesses(&self) -> Vec<(u32, u32, Vec<usize>)> {
        let served = |from: u32, bytes: u32| {
            let mut served: Vec<usize> =
                self.words.range(from..from + bytes).flat_map(|(_, loads)| loads).copied().collect();
            served.sort_unstable();
            served.dedup();
            (from, bytes, served)
        };
        let loaded = self.words.len() as u32 * self.unit;
        if self.unit >= 4 && self.bytes == WIDEST && loaded * 4 >= WIDEST * 3 {
            return vec![served(0, WIDEST)];
        }
        let mut accesses = Vec::new();
        let mut next = 0;
        for &word in self.words.keys() {
            if word < next {
                continue;
            }
            let pair = self.unit == 4 && self.bytes >= 8 && word % 8 == 0 && self.words.contains_key(&(word + 4));
            let bytes = if pair { 8 } else { self.unit };
            accesses.push(served(word, bytes));
            next = word + bytes;
        }
        accesses
    }
}

fn shared_loads(
    instructions: &[&Instruction],
    wanted: &HashSet<Register>,
    kept: &HashSet<usize>,
    addresses: &Addresses,
    flow: &Flow,
    groups: &mut Vec<MergeGroup>,
) {
    let mut pieces = Vec::<Piece>::new();
    let mut by_key = HashMap::<_, Vec<usize>>::new();
    for (position, instruction) in instructions.iter().enumerate() {
        if instruction.opcode() != Opcode::Ld || !in_shared(instruction) {
            continue;
        }
        let (Some(words), Some(place)) = (Words::of(instruction), addresses.place(position)) else { continue };
        if stays(instruction) || kept.contains(&position) {
            groups.push(alone(position, words.bytes()));
            continue;
        }
        let (aligned, residue) = addresses.alignment(place, words.bytes());
        let bytes = if words.unit >= 4 { aligned.min(WIDEST).max(words.unit) } else { words.unit };
        let block = flow.block_of(position);
        for offset in words.wanted(wanted) {
            let from_aligned = place.offset.wrapping_add(offset).wrapping_add(residue);
            let key = (flow.version(position), place.root, words.unit, bytes, from_aligned / bytes);
            let candidates = by_key.entry(key).or_default();
            let found = candidates
                .iter()
                .rev()
                .take(MOST_OPEN)
                .copied()
                .find(|&piece| flow.dominates(pieces[piece].block, block));
            let piece = found.unwrap_or_else(|| {
                let start = (from_aligned / bytes * bytes).wrapping_sub(residue);
                pieces.push(Piece { start, block, unit: words.unit, bytes, ..Piece::default() });
                candidates.push(pieces.len() - 1);
                pieces.len() - 1
            });
            pieces[piece].words.entry(from_aligned % bytes).or_default().push(position);
        }
    }
    for piece in &pieces {
        for (offset, bytes_per_lane, members) in piece.accesses() {
            let leader = members[0];
            let own = addresses.place(leader).map_or(0, |place| place.offset);
            let delta = piece.start.wrapping_add(offset).wrapping_sub(own) as i32;
            groups.push(MergeGroup { leader, delta, bytes_per_lane, members });
        }
    }
}

fn alone(position: usize, bytes_per_lane: u32) -> MergeGroup {
    MergeGroup { leader: position, delta: 0, bytes_per_lane, members: vec![position] }
}

/// A store, or several merged.
struct Stored {
    place: Place,
    /// Of a word, as the PTX has them.
    unit: u32,
    bytes: u32,
    members: Vec<usize>,
}

fn shared_stores(instructions: &[&Instruction], addresses: &Addresses, flow: &Flow, groups: &mut Vec<MergeGroup>) {
    let mut run = Vec::<Stored>::new();
    let mut finish = |run: &mut Vec<Stored>| {
        for store in merge_stores(std::mem::take(run), addresses) {
            let leader = store.members.iter().copied().min().unwrap_or_default();
            let own = addresses.place(leader).map_or(0, |place| place.offset);
            let delta = store.place.offset.wrapping_sub(own) as i32;
            groups.push(MergeGroup { leader, delta, bytes_per_lane: store.bytes, members: store.members });
        }
    };
    let mut block = usize::MAX;
    for (position, instruction) in instructions.iter().enumerate() {
        if flow.block_of(position) != block {
            block = flow.block_of(position);
            finish(&mut run);
        }
        if instruction.opcode() == Opcode::St && in_shared(instruction) {
            let (Some(words), Some(place)) = (Words::of(instruction), addresses.place(position)) else { continue };
            let bytes = words.bytes();
            let near = |first: &Stored| {
                let (aligned, residue) = addresses.alignment(place, bytes);
                let piece = |place: Place| place.offset.wrapping_add(residue) / aligned.max(WIDEST);
                first.place.root == place.root && piece(first.place) == piece(place)
            };
            if stays(instruction) || !run.first().is_none_or(near) {
                finish(&mut run);
            }
            run.push(Stored { place, unit: words.unit, bytes, members: vec![position] });
            if stays(instruction) {
                finish(&mut run);
            }
        } else if flow::may_touch_shared(instruction) {
            finish(&mut run);
        }
    }
    finish(&mut run);
}

/// Stores that follow each other: those to the same place become the last, then aligned neighbours of one width are paired,
/// and the pairs once more.
fn merge_stores(run: Vec<Stored>, addresses: &Addresses) -> Vec<Stored> {
    let mut stores = Vec::<Stored>::new();
    for store in run {
        match stores.iter_mut().find(|s| s.place == store.place && s.bytes == store.bytes) {
            Some(same) => same.members.extend(store.members),
            None => stores.push(store),
        }
    }
    for _ in 0..2 {
        let mut merged = Vec::<Stored>::new();
        for store in stores {
            let bytes = store.bytes;
            let (aligned, residue) = addresses.alignment(store.place, bytes);
            let in_pair = store.place.offset.wrapping_add(residue) % (2 * bytes);
            let fits = (2..WIDEST).contains(&bytes) && aligned >= 2 * bytes;
            let partner = if in_pair == 0 {
                store.place.offset.wrapping_add(bytes)
            } else {
                store.place.offset.wrapping_sub(bytes)
            };
            let other = merged.iter_mut().find(|other| {
                fits && other.unit == store.unit
                    && other.bytes == bytes
                    && other.place == Place { root: store.place.root, offset: partner }
            });
            match other {
                Some(other) => {
                    other.bytes = 2 * bytes;
                    other.place.offset = if in_pair == 0 { store.place.offset } else { partner };
                    other.members.extend(store.members);
                    other.members.sort_unstable();
                }
                None => merged.push(store),
            }
        }
        stores = merged;
    }
    stores
}

fn global_loads(
    instructions: &[&Instruction],
    wanted: &HashSet<Register>,
    kept: &HashSet<usize>,
    groups: &mut Vec<MergeGroup>,
) {
    for (position, instruction) in instructions.iter().enumerate() {
        if instruction.opcode() != Opcode::Ld || !from_global(instruction) {
            continue;
        }
        let Some(words) = Words::of(instruction) else { continue };
        if stays(instruction) || kept.contains(&position) || words.bytes() > WIDEST {
            groups.push(alone(position, words.bytes()));
            continue;
        }
        let mut piece = Piece { unit: words.unit, bytes: words.bytes(), ..Piece::default() };
        for offset in words.wanted(wanted) {
            piece.words.insert(offset, vec![position]);
        }
        for (offset, bytes_per_lane, members) in piece.accesses() {
            groups.push(MergeGroup { leader: position, delta: offset as i32, bytes_per_lane, members });
        }
    }
}
