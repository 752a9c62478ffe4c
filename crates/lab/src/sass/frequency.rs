//! How often blocks of machine code run, from how often PTX instructions did.
//!
//! Each instruction votes with the executions of the PTX instruction it came from. Accesses to memory and barriers stay where they are
//! and decide, where they agree; else most votes win: the assembler moves some instructions out of loops or branches, and those do not
//! speak for the block they end up in. Some things votes cannot know:
//!
//! - Slow paths of operations carry the position of the operation, and are taken to run never.
//! - The copies of an unrolled loop share its iterations. A warp that iterates n times goes through the copies in program order,
//!   each as often as its share of n allows; blocks between them run once for each entry of the loop.
//! - An atomic on 16 bits is a loop of compare and swap, and runs as often as lanes of a warp share a word.
//! - Where a predicate of the PTX has become a branch around an access, only warps with lanes that it admits come to the access.
//! - A block runs no more often than the blocks before it together, nor than those after it. Not equally often: a warp that
//!   diverges runs both sides of a branch.

use std::collections::BTreeMap;
use std::ops::Range;

use emulator::InstructionCounters;
use ptx::{Cfg, Instruction, Kernel, Modifier, Opcode, Type};

use super::{Block, Loop, Sass, SassInstruction, WarpInstructions};

/// A loop of the PTX of which the machine code has more than one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unrolled {
    /// Positions of its PTX instructions.
    body: Range<usize>,
    /// An instruction that all its lanes execute, once for each iteration.
    once: usize,
    /// The branch back to its start.
    back: usize,
    /// The blocks with copies, in program order.
    copies: Vec<Copies>,
    /// Whether each of them holds whole copies, so that how many are executed follows from the iterations.
    whole: bool,
}

/// Straight code with copies of an unrolled loop.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Copies {
    /// One block, or more where branches around an access part them.
    blocks: Vec<usize>,
    /// How many iterations it stands for.
    count: u64,
    /// The loop of the machine code that repeats it.
    around: Option<Loop>,
}

/// The machine instruction, of one kind, that a PTX instruction becomes exactly one of.
fn sole_opcode(instruction: &Instruction) -> Option<&'static str> {
    let f32 = instruction.ty() == Some(Type::F32);
    let narrow = instruction.ty().is_some_and(|ty| instruction.vector_length() as u32 * ty.bits() <= 128);
    match instruction.opcode() {
        Opcode::Ld if instruction.has(Modifier::Global) && narrow => Some("LDG"),
        Opcode::St if instruction.has(Modifier::Global) && narrow => Some("STG"),
        Opcode::Fma if f32 => Some("FFMA"),
        Opcode::Add | Opcode::Sub if f32 => Some("FADD"),
        Opcode::Mul if f32 => Some("FMUL"),
        Opcode::Max | Opcode::Min if f32 => Some("FMNMX"),
        Opcode::Ex2 if f32 => Some("MUFU"),
        Opcode::Shfl => Some("SHFL"),
        Opcode::Ldmatrix => Some("LDSM"),
        Opcode::Bar => Some("BAR").filter(|_| !instruction.has(Modifier::Warp)),
        Opcode::CpAsync if instruction.has(Modifier::Global) && !instruction.has(Modifier::Bulk) => Some("LDGSTS"),
        _ => None,
    }
}

/// The innermost loops of `kernel` of which the machine code has several copies.
pub(super) fn unrolled(kernel: &Kernel, code: &[SassInstruction], blocks: &[Block], loops: &[Loop]) -> Vec<Unrolled> {
    let cfg = Cfg::of(kernel);
    let ptx: Vec<_> = kernel.instructions().collect();
    let jumps = ptx.iter().enumerate().filter_map(|(back, instruction)| {
        let start = *cfg.label_positions.get(instruction.target()?.0 as usize)?;
        (start <= back).then_some((start, back))
    });
    let jumps: Vec<(usize, usize)> = jumps.collect();
    let straights = straights(blocks);
    let innermost =
        jumps.iter().filter(|(start, back)| jumps.iter().filter(|(s, b)| start <= s && b <= back).count() == 1);
    innermost
        .filter_map(|&(start, back)| {
            let body = start..back + 1;
            let header = cfg.blocks.iter().find(|block| block.instructions.start == start)?;
            let once = header.instructions.clone().find(|&position| ptx[position].guard.is_none())?;
            let anchors: Vec<(usize, &str)> =
                body.clone().filter_map(|position| Some((position, sole_opcode(ptx[position])?))).collect();
            let mut whole = true;
            let mut copies = Vec::new();
            for Straight { blocks: straight, aside } in &straights {
                let instructions = || straight.iter().flat_map(|&index| &code[blocks[index].instructions.clone()]);
                let mut counts: Vec<u64> = anchors
                    .iter()
                    .map(|&(position, opcode)| {
                        let copies = instructions().filter(|one| {
                            one.position == position
                                && one.base() == opcode
                                // A predicate that the PTX does not have: it stands for a branch around it.
                                && (!one.guarded || ptx[position].guard.is_some())
                        });
                        copies.count() as u64
                    })
                    .collect();
                counts.sort_unstable();
                let (Some(&least), Some(&most)) = (counts.first(), counts.last()) else { continue };
                let count = counts[counts.len() / 2];
                whole &= least == most || count == 0;
                if count > 0 {
                    let within = |around: &Loop, index: usize| {
                        let block = &blocks[index].instructions;
                        around.start <= block.start && block.end <= around.end
                    };
                    let around = loops.iter().filter(|around| straight.iter().all(|&index| within(around, index)));
                    // A loop of the machine code that holds more than this loop is one around it.
                    let around = around.min_by_key(|around| around.len()).filter(|around| {
                        let inside = code[(*around).clone()].iter().filter(|one| body.contains(&one.position)).count();
                        2 * inside > around.len()
                    });
                    // Of code that is in no loop, a block around which a branch leads runs by itself; the others run equally often.
                    let anchored = |index: &usize| {
                        // Not the position alone: a test between two copies may carry that of the last instruction of one.
                        let anchor = |one: &SassInstruction| {
                            anchors.iter().any(|&(position, opcode)| one.position == position && one.base() == opcode)
                        };
                        code[blocks[*index].instructions.clone()].iter().any(anchor)
                    };
                    let ahead = straight.iter().any(|index| !aside.contains(index) && anchored(index));
                    let own = straight
                        .iter()
                        .copied()
                        .filter(|index| around.is_some() || anchored(index) || ahead && !aside.contains(index));
                    copies.push(Copies { blocks: own.collect(), count, around: around.cloned() });
                }
            }
            (copies.iter().map(|copies| copies.count).sum::<u64>() > 1).then_some(Unrolled {
                body,
                once,
                back,
                copies,
                whole,
            })
        })
        .collect()
}

/// Blocks that follow one another, in program order.
#[derive(Default)]
struct Straight {
    blocks: Vec<usize>,
    /// Those of them that a branch leads around.
    aside: Vec<usize>,
}

/// The blocks that control reaches, in groups of those that follow one another; a block that a branch leads around goes with those
/// beside it.
fn straights(blocks: &[Block]) -> Vec<Straight> {
    let before = before(blocks);
    let mut group: Vec<usize> = (0..blocks.len()).collect();
    let mut around = vec![false; blocks.len()];
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| block.reachable && !block.ends) {
        let successors: Vec<usize> = block.successors.iter().copied().filter(|&next| blocks[next].reachable).collect();
        let goes_around = |aside: usize, next: usize| {
            let beside = &blocks[aside];
            !beside.ends && beside.successors == [next] && before[aside] == [index] && before[next] == [index, aside]
        };
        match successors[..] {
            [next] if next > index && before[next] == [index] => group[next] = group[index],
            [aside, next] if next > aside && aside > index && goes_around(aside, next) => {
                group[aside] = group[index];
                group[next] = group[index];
                around[aside] = true;
            }
            _ => {}
        }
    }
    let mut straights = BTreeMap::<usize, Straight>::new();
    for (index, _) in blocks.iter().enumerate().filter(|(_, block)| block.reachable) {
        let straight = straights.entry(group[index]).or_default();
        straight.blocks.push(index);
        straight.aside.extend(Some(index).filter(|&index| around[index]));
    }
    straights.into_values().collect()
}

/// The blocks that each block may follow, of those that control reaches.
fn before(blocks: &[Block]) -> Vec<Vec<usize>> {
    let mut before = vec![Vec::new(); blocks.len()];
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| block.reachable) {
        block.successors.iter().for_each(|&next| before[next].push(index));
    }
    before
}

/// Executions of an unrolled loop's blocks.
struct Shares {
    /// How often the loop is entered, where known.
    entries: Option<u64>,
    /// Of each of [`Unrolled::copies`].
    copies: Vec<WarpInstructions>,
}

impl Unrolled {
    fn shares(&self, counted: &[InstructionCounters]) -> Shares {
        let at = |position: usize| counted.get(position).copied().unwrap_or_default();
        let (once, back) = (at(self.once), at(self.back));
        let iterations = once.executions;
        // Lanes that come to the start of the loop without having jumped back.
        let entering = once.active_lanes.saturating_sub(back.active_lanes);
        let all: u64 = self.copies.iter().map(|copies| copies.count).sum();
        let unknown = |copies: &Copies| WarpInstructions {
            likely: iterations / all,
            least: 0,
            most: iterations / if copies.around.is_some() { copies.count } else { 1 },
        };
        let open = Shares { entries: None, copies: self.copies.iter().map(unknown).collect() };
        if entering == 0 || !self.whole {
            return open;
        }
        // Lanes that iterate once more than the others, where the quotient has a remainder.
        let (trips, more) = (once.active_lanes / entering, once.active_lanes % entering);
        let entries = (u128::from(iterations) * u128::from(entering) / u128::from(once.active_lanes)) as u64;
        let longer = (u128::from(entries) * u128::from(more) / u128::from(entering)) as u64;
        let mut likely = vec![0; self.copies.len()];
        for (entries, trips) in [(entries - longer, trips), (longer, trips + 1)] {
            let mut left = trips;
            for (copies, likely) in self.copies.iter().zip(&mut likely) {
                let times = (left / copies.count).min(if copies.around.is_some() { u64::MAX } else { 1 });
                left -= times * copies.count;
                *likely += entries * times;
            }
            if entries > 0 && left > 0 {
                return open;
            }
        }
        let unsure = |(open, likely): (&WarpInstructions, u64)| WarpInstructions { likely, ..*open };
        let copies = match more {
            0 => likely.into_iter().map(exactly).collect(),
            _ => open.copies.iter().zip(likely).map(unsure).collect(),
        };
        Shares { entries: Some(entries), copies }
    }

    /// How often a block with instructions of this loop runs, and whether that is more than a bound.
    fn times(&self, block: usize, instructions: &Range<usize>, shares: &Shares) -> Option<(WarpInstructions, bool)> {
        let mut copies = self.copies.iter().zip(&shares.copies);
        let own = copies.clone().find(|(copies, _)| copies.blocks.contains(&block));
        let beside = || {
            copies.find(|(copies, _)| {
                copies
                    .around
                    .as_ref()
                    .is_some_and(|around| around.start <= instructions.start && instructions.end <= around.end)
            })
        };
        let entered = || shares.entries.map(|entries| (exactly(entries), false));
        own.or_else(beside).map(|(_, times)| (*times, true)).or_else(entered)
    }
}

fn exactly(times: u64) -> WarpInstructions {
    WarpInstructions { likely: times, least: times, most: times }
}

/// Whether an instruction's position says little: it joins or ends what the PTX does not have, or is a wait, which the emulator may
/// try more often than the hardware. Only blocks of nothing else hear it.
pub(super) fn is_mute(instruction: &SassInstruction) -> bool {
    let base = instruction.base();
    matches!(base, "BRA" | "BSSY" | "BSYNC" | "BRX" | "NOP" | "WARPSYNC" | "CALL" | "RET") || instruction.is_wait()
}

/// Whether an assembler leaves an instruction where it is, in or out of loops and branches.
fn stays(instruction: &SassInstruction) -> bool {
    instruction.is_access() && !instruction.is_wait() || instruction.base() == "BAR"
}

/// What a block's instructions say of it.
struct Poll {
    /// With their votes, most first.
    candidates: Vec<(WarpInstructions, usize)>,
    /// What those that stay where they are all say.
    staying: Option<WarpInstructions>,
    voters: usize,
    /// How many of them know no more than a bound.
    unsure: usize,
    /// What accesses say that the block runs at most.
    most: u64,
}

impl Poll {
    /// What those say that stay where they are, or more than half are sure of.
    fn majority(&self) -> Option<WarpInstructions> {
        let most = self.candidates.first().filter(|(_, votes)| 2 * votes > self.voters + 2 * self.unsure);
        self.staying.or(most.map(|(times, _)| *times)).filter(|times| times.likely <= self.most)
    }

    /// What agrees with a bound: what most say, between the extremes of all that do.
    fn within(&self, bound: u64) -> WarpInstructions {
        let bound = bound.min(self.most);
        let mut fitting = self.candidates.iter().map(|(times, _)| times).filter(|times| times.likely <= bound);
        let Some(&first) = fitting.next() else {
            return WarpInstructions { likely: bound, least: 0, most: bound };
        };
        fitting.fold(first, |all, times| WarpInstructions {
            least: all.least.min(times.least),
            most: all.most.max(times.most.min(bound)),
            ..all
        })
    }
}

impl Sass {
    /// How often each block ran.
    pub(super) fn frequencies(&self, counted: &[InstructionCounters]) -> Vec<WarpInstructions> {
        let shares: Vec<Shares> = self.unrolled.iter().map(|unrolled| unrolled.shares(counted)).collect();
        let mut times = vec![WarpInstructions::default(); self.blocks.len()];
        let mut open = Vec::new();
        for (index, block) in self.blocks.iter().enumerate().filter(|(_, block)| block.reachable && !block.called) {
            let poll = self.poll(index, block, counted, &shares);
            match poll.majority() {
                Some(majority) => times[index] = majority,
                None => {
                    times[index] = poll.within(u64::MAX);
                    open.push((index, poll));
                }
            }
        }
        let before = before(&self.blocks);
        // Bounds only fall, so that this comes to rest after as many rounds as there are open blocks.
        for _ in 0..open.len() {
            let mut changed = false;
            for (index, poll) in &open {
                let others = |blocks: &[usize]| {
                    let others = blocks.iter().filter(|&block| block != index);
                    others.fold(0u64, |sum, &block| sum.saturating_add(times[block].likely))
                };
                let block = &self.blocks[*index];
                let entering = if *index == 0 { u64::MAX } else { others(&before[*index]) };
                let leaving = if block.ends { u64::MAX } else { others(&block.successors) };
                let found = poll.within(entering.min(leaving));
                changed |= std::mem::replace(&mut times[*index], found) != found;
            }
            if !changed {
                break;
            }
        }
        // A bound that nothing gave: a loop that does nothing.
        times.iter_mut().filter(|times| times.likely == u64::MAX).for_each(|times| *times = exactly(0));
        self.call(&mut times);
        times
    }

    /// The unrolled loop that a PTX instruction is in.
    pub(super) fn unrolled_at(&self, position: usize) -> Option<usize> {
        self.unrolled.iter().position(|unrolled| unrolled.body.contains(&position))
    }

    fn poll(&self, index: usize, block: &Block, counted: &[InstructionCounters], shares: &[Shares]) -> Poll {
        let mut poll = Poll { candidates: Vec::new(), staying: None, voters: 0, unsure: 0, most: u64::MAX };
        let mut staying = Vec::new();
        let code = &self.instructions[block.instructions.clone()];
        let mute = code.iter().all(is_mute);
        let swaps = |one: &SassInstruction| one.base() == "ATOMG" && one.opcode.contains("CAS");
        let swaps_again = block.successors.contains(&index) && code.iter().any(swaps);
        for instruction in code.iter().filter(|one| mute || !is_mute(one)) {
            let position = instruction.position;
            let counted = counted.get(position).copied().unwrap_or_default();
            let rounds = Some(counted.wavefronts).filter(|&rounds| swaps_again && rounds > 0);
            let mut likely = rounds.unwrap_or(counted.executions);
            if let Some(lanes) = instruction.admitted.filter(|_| rounds.is_none()) {
                let warps = if counted.requests > 0 { counted.requests } else { counted.active_lanes / lanes };
                likely = likely.min(warps);
                poll.most = poll.most.min(likely);
            }
            let unrolled = self.unrolled_at(position);
            let (times, sure) = unrolled
                .and_then(|at| self.unrolled[at].times(index, &block.instructions, &shares[at]))
                .unwrap_or((exactly(likely), true));
            if stays(instruction) && unrolled.is_none() {
                staying.push(times);
            }
            poll.voters += 1;
            poll.unsure += usize::from(mute || !sure);
            match poll.candidates.iter_mut().find(|(candidate, _)| *candidate == times) {
                Some((_, votes)) => *votes += 1,
                None => poll.candidates.push((times, 1)),
            }
        }
        poll.candidates.sort_by_key(|&(times, votes)| std::cmp::Reverse((votes, times.likely)));
        poll.staying = staying.first().copied().filter(|first| staying.iter().all(|times| times == first));
        poll
    }

    /// Functions run as often as they are called; which way through one, the PTX does not say.
    fn call(&self, times: &mut [WarpInstructions]) {
        for (caller, block) in self.blocks.iter().enumerate().filter(|(_, block)| block.reachable && !block.called) {
            let (Some(callee), calls) = (block.callee, times[caller]) else { continue };
            let (mut open, mut seen) = (vec![callee], vec![false; self.blocks.len()]);
            while let Some(index) = open.pop() {
                if std::mem::replace(&mut seen[index], true) || !self.blocks[index].called {
                    continue;
                }
                times[index].likely += calls.likely;
                times[index].least += if index == callee { calls.least } else { 0 };
                times[index].most += calls.most;
                open.extend(&self.blocks[index].successors);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loop of one load, and what an assembler may make of it: two iterations at a time, then the last by itself.
    const PTX: &str = ".version 8.0\n.target sm_75\n.address_size 64\n.entry k(.param .u64 p) {\n.reg .pred %p<2>;\n.reg .b32 %r<3>;\n\
        .reg .b64 %rd<1>;\nld.param.u64 %rd0, [p];\nmov.u32 %r0, 0;\n$L0:\nld.global.u32 %r1, [%rd0];\nadd.u32 %r0, %r0, %r1;\n\
        setp.lt.u32 %p0, %r0, 5;\n@%p0 bra $L0;\nst.global.u32 [%rd0], %r0;\nret;\n}";
    const SASS: &str = "
        //## File \"kernel.ptx\", line 2
        /*0000*/ MOV R1, R0 ;
        //## File \"kernel.ptx\", line 5
        /*0010*/ @P1 BRA `(.L_x_2) ;
        /*0020*/ ISETP P0, R1 ;
        .L_x_1:
        //## File \"kernel.ptx\", line 3
        /*0030*/ LDG R1, [R2] ;
        /*0040*/ LDG R1, [R2] ;
        //## File \"kernel.ptx\", line 6
        /*0050*/ @P0 BRA `(.L_x_1) ;
        .L_x_2:
        /*0060*/ @P1 BRA `(.L_x_3) ;
        //## File \"kernel.ptx\", line 3
        /*0070*/ LDG R1, [R2] ;
        .L_x_3:
        //## File \"kernel.ptx\", line 7
        /*0080*/ STG [R2], R1 ;
        /*0090*/ FCHK P0, R1, R2 ;
        /*00a0*/ @!P0 BRA `(.L_x_4) ;
        /*00b0*/ CALL.REL.NOINC `($__internal_0_$__cuda_div_slowpath) ;
        .L_x_4:
        /*00c0*/ CALL.REL.NOINC `($__internal_1_$__cuda_div_u64) ;
        /*00d0*/ EXIT ;
        $__internal_0_$__cuda_div_slowpath:
        /*00e0*/ MOV R1, R2 ;
        /*00f0*/ RET.REL.NODEC R24 `(k) ;
        $__internal_1_$__cuda_div_u64:
        /*0100*/ MOV R1, R2 ;
        /*0110*/ RET.REL.NODEC R24 `(k) ;";

    /// What each instruction of `SASS` did when `warps` warps of one lane iterate so often in all.
    fn executions(warps: u64, iterations: u64) -> (Vec<u64>, WarpInstructions) {
        let kernel = ptx::parse(PTX).unwrap().remove(0);
        let sass = Sass::parse(SASS, &kernel).unwrap();
        let counted = |executions, active_lanes| InstructionCounters { executions, active_lanes, ..Default::default() };
        let (outside, inside) = (counted(warps, warps), counted(iterations, iterations));
        let back = counted(iterations, iterations - warps);
        let all = [outside, outside, inside, inside, inside, back, outside, outside];
        (sass.executions(&all), sass.warp_instructions(&all))
    }

    #[test]
    fn copies_of_an_unrolled_loop_share_its_iterations() {
        let (times, sum) = executions(10, 50);
        assert_eq!(times, [10, 10, 10, 20, 20, 20, 10, 10, 10, 10, 10, 0, 10, 10, 0, 0, 10, 10]);
        assert_eq!(sum, WarpInstructions { likely: 180, least: 180, most: 180 });
        // Never through the copy of two.
        let (times, _) = executions(10, 10);
        assert_eq!(times[2..8], [0, 0, 0, 0, 10, 10]);
    }

    /// Two iterations of a loop whose guarded load has become a branch around it.
    #[test]
    fn branches_around_accesses_part_no_copy() {
        let ptx = PTX.replace("ld.global", "@%p1 ld.global");
        let sass = "
            //## File \"kernel.ptx\", line 2
            /*0000*/ MOV R1, R0 ;
            .L_x_1:
            //## File \"kernel.ptx\", line 3
            /*0010*/ @P1 BRA `(.L_x_2) ;
            /*0020*/ LDG R1, [R2] ;
            .L_x_2:
            /*0030*/ @P1 BRA `(.L_x_3) ;
            /*0040*/ LDG R1, [R2] ;
            .L_x_3:
            //## File \"kernel.ptx\", line 6
            /*0050*/ @P0 BRA `(.L_x_1) ;
            //## File \"kernel.ptx\", line 8
            /*0060*/ EXIT ;";
        let kernel = ptx::parse(&ptx).unwrap().remove(0);
        let sass = Sass::parse(sass, &kernel).unwrap();
        let counted = |executions, active_lanes, requests| InstructionCounters {
            executions,
            active_lanes,
            requests,
            ..Default::default()
        };
        let load = counted(40, 40, 40);
        let inside = counted(40, 40, 0);
        let all = [
            counted(10, 10, 0),
            counted(10, 10, 0),
            load,
            inside,
            inside,
            counted(40, 30, 0),
            counted(10, 10, 10),
            counted(10, 10, 0),
        ];
        assert_eq!(sass.executions(&all), [10, 20, 20, 20, 20, 20, 10]);
    }

    /// Four iterations at a time, then two, then one; the test behind the copy of two carries the position of the load.
    #[test]
    fn tests_between_copies_run_whatever_copies_do() {
        let sass = "
            //## File \"kernel.ptx\", line 2
            /*0000*/ MOV R1, R0 ;
            .L_x_1:
            //## File \"kernel.ptx\", line 3
            /*0010*/ LDG R1, [R2] ;
            /*0020*/ LDG R1, [R2] ;
            /*0030*/ LDG R1, [R2] ;
            /*0040*/ LDG R1, [R2] ;
            //## File \"kernel.ptx\", line 6
            /*0050*/ @P0 BRA `(.L_x_1) ;
            //## File \"kernel.ptx\", line 5
            /*0060*/ ISETP P1, R1 ;
            //## File \"kernel.ptx\", line 6
            /*0070*/ @P1 BRA `(.L_x_2) ;
            //## File \"kernel.ptx\", line 3
            /*0080*/ LDG R1, [R2] ;
            /*0090*/ LDG R1, [R2] ;
            .L_x_2:
            /*00a0*/ ISETP P1, R1 ;
            //## File \"kernel.ptx\", line 6
            /*00b0*/ @P1 BRA `(.L_x_3) ;
            //## File \"kernel.ptx\", line 3
            /*00c0*/ LDG R1, [R2] ;
            .L_x_3:
            //## File \"kernel.ptx\", line 7
            /*00d0*/ STG [R2], R1 ;
            //## File \"kernel.ptx\", line 8
            /*00e0*/ EXIT ;";
        let kernel = ptx::parse(PTX).unwrap().remove(0);
        let sass = Sass::parse(sass, &kernel).unwrap();
        let counted = |executions, active_lanes| InstructionCounters { executions, active_lanes, ..Default::default() };
        let executions = |iterations: u64| {
            let (outside, inside) = (counted(10, 10), counted(10 * iterations, 10 * iterations));
            let back = counted(10 * iterations, 10 * (iterations - 1));
            sass.executions(&[outside, outside, inside, inside, inside, back, outside, outside])
        };
        assert_eq!(executions(4), [10, 10, 10, 10, 10, 10, 10, 10, 0, 0, 10, 10, 0, 10, 10]);
        assert_eq!(executions(11), [10, 20, 20, 20, 20, 20, 10, 10, 10, 10, 10, 10, 10, 10, 10]);
    }

    /// Two iterations at a time, then the last, whose first block has no access, for a branch leads around the load.
    #[test]
    fn all_of_a_parted_copy_runs_as_often() {
        let load = "ld.global.u32 %r1, [%rd0];\n";
        let ptx = PTX.replace(load, &format!("@%p1 {load}st.global.u32 [%rd0], %r1;\n"));
        let sass = "
            //## File \"kernel.ptx\", line 2
            /*0000*/ MOV R1, R0 ;
            .L_x_1:
            //## File \"kernel.ptx\", line 3
            /*0010*/ @P1 LDG R1, [R2] ;
            //## File \"kernel.ptx\", line 4
            /*0020*/ STG [R2], R1 ;
            //## File \"kernel.ptx\", line 3
            /*0030*/ @P1 LDG R1, [R2] ;
            //## File \"kernel.ptx\", line 4
            /*0040*/ STG [R2], R1 ;
            //## File \"kernel.ptx\", line 7
            /*0050*/ @P0 BRA `(.L_x_1) ;
            //## File \"kernel.ptx\", line 6
            /*0060*/ ISETP P0, R1 ;
            /*0070*/ @!P0 EXIT ;
            //## File \"kernel.ptx\", line 5
            /*0080*/ IADD R1, R1 ;
            /*0090*/ IADD R1, R1 ;
            //## File \"kernel.ptx\", line 3
            /*00a0*/ @!P1 BRA `(.L_x_2) ;
            /*00b0*/ LDG R1, [R2] ;
            .L_x_2:
            //## File \"kernel.ptx\", line 4
            /*00c0*/ STG [R2], R1 ;
            //## File \"kernel.ptx\", line 9
            /*00d0*/ EXIT ;";
        let kernel = ptx::parse(&ptx).unwrap().remove(0);
        let sass = Sass::parse(sass, &kernel).unwrap();
        let counted = |executions, active_lanes| InstructionCounters { executions, active_lanes, ..Default::default() };
        let executions = |iterations: u64| {
            let (outside, inside) = (counted(10, 10), counted(10 * iterations, 10 * iterations));
            let access = InstructionCounters { requests: 10 * iterations, ..inside };
            let back = counted(10 * iterations, 10 * (iterations - 1));
            sass.executions(&[outside, outside, access, access, inside, inside, back, outside, outside])
        };
        assert_eq!(executions(2), [10, 10, 10, 10, 10, 10, 10, 10, 0, 0, 0, 0, 0, 0]);
        assert_eq!(executions(3), [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]);
    }

    #[test]
    fn warps_that_iterate_differently_leave_it_open() {
        let (times, sum) = executions(10, 55);
        // Five warps iterate five times and five six times, say.
        assert_eq!(times[3..8], [25, 25, 25, 10, 5]);
        assert!(sum.least < sum.likely && sum.likely < sum.most, "{sum:?}");
    }
}
