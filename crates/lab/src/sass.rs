//! Machine code: what the assembler made of a kernel, and how often it ran.

mod frequency;

use std::collections::BTreeMap;
use std::ops::Range;

use emulator::{Access, Counters, InstructionCounters, Level, Report};
use ptx::{Instruction, Kernel, Modifier};

use frequency::{Unrolled, is_mute};

/// One machine instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SassInstruction {
    /// The opcode with its modifiers, as `LDS.U.128`.
    pub opcode: String,
    /// The position in [`ptx::Kernel::instructions`] of the PTX instruction it came from.
    pub position: usize,
    /// Whether a predicate decides if it does anything.
    pub guarded: bool,
    /// Whether the predicate holds for no lane (`@!PT`): the assembler puts loads that do nothing before some barriers and fences.
    pub idle: bool,
    /// Of an access whose predicate in the PTX has become a branch around it: how many lanes that the predicate admits a warp has at
    /// least if it comes here.
    admitted: Option<u64>,
}

impl SassInstruction {
    /// The opcode without modifiers.
    fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or(&self.opcode)
    }

    /// Whether it accesses memory or a barrier in it: what an assembler does not do unless the PTX says so.
    fn is_access(&self) -> bool {
        const ACCESSES: [&str; 16] = [
            "LD", "LDG", "LDS", "LDSM", "LDGSTS", "ST", "STG", "STS", "STSM", "ATOM", "ATOMG", "ATOMS", "RED", "REDG",
            "SYNCS", "UTMALDG",
        ];
        !self.idle && ACCESSES.contains(&self.base())
    }

    /// Whether it waits for a phase of an mbarrier.
    fn is_wait(&self) -> bool {
        self.base() == "SYNCS" && self.opcode.contains("TRYWAIT")
    }
}

/// Instructions that are entered at the first and left at the last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Block {
    instructions: Range<usize>,
    /// Those that may follow.
    successors: Vec<usize>,
    /// Whether a warp may end here.
    ends: bool,
    /// The function that its last instruction calls, by its first block.
    callee: Option<usize>,
    /// Whether it is taken to run never: it calls the slow path of an operation (what a division does for operands near the ends of the
    /// range of exponents), or tries a wait again that the hardware has already waited for.
    slow: bool,
    /// Whether control reaches it without a slow path.
    reachable: bool,
    /// Whether it belongs to a function that is called.
    called: bool,
}

/// A jump back: the instructions from its target to itself.
type Loop = Range<usize>;

/// Sectors that `tensormap.cp_fenceproxy` writes: the 128 bytes of a tensor map.
const SECTORS_OF_A_MAP: u64 = 4;

/// A kernel's machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sass {
    /// In program order.
    pub instructions: Vec<SassInstruction>,
    blocks: Vec<Block>,
    loops: Vec<Loop>,
    unrolled: Vec<Unrolled>,
}

/// A count of warp instructions with what it may be off: where PTX executions leave open how often machine code ran, as in the
/// copies of an unrolled loop whose warps do not all iterate equally often, `least` and `most` are what they allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarpInstructions {
    /// The best guess.
    pub likely: u64,
    /// The smallest that agrees with the executions.
    pub least: u64,
    /// The largest.
    pub most: u64,
}

/// How many instructions of each opcode, by name; widths of memory accesses are kept, other modifiers are not.
pub type Histogram = BTreeMap<String, u32>;

/// Where control goes at the end of a block.
struct End {
    /// The last instruction.
    at: usize,
    targets: Vec<String>,
    /// Whether it may also go on to the next instruction.
    falls: bool,
    kind: EndKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum EndKind {
    Jump,
    /// To code that only lanes of a diverged warp need.
    JumpOfDiverged,
    Call,
    Exit,
    Return,
}

/// The names between `` `( `` and `)`, and those of a table of branch targets.
fn targets(code: &str) -> Vec<String> {
    let direct = code.split("`(").skip(1).filter_map(|rest| rest.split(')').next());
    let table = code.split_once("BRANCH_TARGETS").map_or("", |(_, rest)| rest);
    let listed = table.split(|c: char| !(c.is_alphanumeric() || "._$".contains(c))).filter(|t| t.starts_with(".L_"));
    direct.chain(listed).map(str::to_owned).collect()
}

impl End {
    fn of(at: usize, guarded: bool, opcode: &str, code: &str) -> Option<Self> {
        let kind = match opcode.split('.').next().unwrap_or(opcode) {
            "BRA" | "BRX" | "JMP" | "JMX" if opcode.contains(".DIV") => EndKind::JumpOfDiverged,
            "BRA" | "BRX" | "JMP" | "JMX" => EndKind::Jump,
            "CALL" => EndKind::Call,
            "EXIT" => EndKind::Exit,
            "RET" => EndKind::Return,
            _ => return None,
        };
        // A branch may take a second predicate: `@P0 BRA !P1, ...`, `BRA.U UP0, ...`.
        let operands = code.split_once(opcode).map_or("", |(_, rest)| rest).trim_start();
        let conditional = guarded || kind == EndKind::Jump && operands.starts_with(['!', 'P', 'U']);
        let falls = conditional || matches!(kind, EndKind::JumpOfDiverged | EndKind::Call);
        Some(Self { at, targets: targets(code), falls, kind })
    }
}

impl Sass {
    /// Reads what `nvdisasm -g -c` prints of a cubin with one kernel whose source lines are positions of `kernel`'s instructions,
    /// counted from 1.
    pub(crate) fn parse(text: &str, kernel: &Kernel) -> Result<Self, String> {
        let mut instructions: Vec<SassInstruction> = Vec::new();
        let mut labels = BTreeMap::new();
        let mut ends = Vec::new();
        let mut position = None;
        let origins: Vec<&Instruction> = kernel.instructions().collect();
        for line in text.lines().map(str::trim) {
            if let Some(rest) = line.strip_prefix("//##") {
                // An inlined place would end in "inlined at": positions are not inlined.
                let number = rest.rsplit("line ").next().and_then(|number| number.split_whitespace().next());
                position = Some(
                    number.and_then(|n| n.parse::<usize>().ok()).ok_or_else(|| format!("a line number in `{line}`"))?,
                );
            } else if let Some(label) = line.strip_suffix(':') {
                labels.insert(label.to_owned(), instructions.len());
            } else if let Some(code) = code_of(line) {
                let mut words = code.split_whitespace();
                let first = words.next().ok_or("an opcode")?;
                let guarded = first.starts_with('@');
                let opcode = if guarded { words.next().ok_or("an opcode")? } else { first };
                let opcode = opcode.trim_end_matches(';');
                ends.extend(End::of(instructions.len(), guarded, opcode, code));
                let position = position.and_then(|line| line.checked_sub(1)).unwrap_or(0);
                let idle = first == "@!PT";
                let mut instruction =
                    SassInstruction { opcode: opcode.to_owned(), position, guarded, idle, admitted: None };
                if let Some(origin) = origins.get(position)
                    && !guarded
                    && origin.guard.is_some()
                    && instruction.is_access()
                {
                    instruction.admitted = Some(if origin.has(Modifier::Aligned) { 32 } else { 1 });
                }
                instructions.push(instruction);
            }
        }
        if instructions.is_empty() {
            return Err("machine instructions".into());
        }
        let mut blocks = blocks(instructions.len(), &labels, &ends)?;
        mark_retries(&mut blocks, &instructions);
        reach(&mut blocks);
        let mut loops = Vec::new();
        for block in blocks.iter().filter(|block| block.reachable && !block.called) {
            let starts = block.successors.iter().map(|&next| blocks[next].instructions.start);
            loops.extend(
                starts.filter(|&start| start < block.instructions.end).map(|start| start..block.instructions.end),
            );
        }
        let unrolled = frequency::unrolled(kernel, &instructions, &blocks, &loops);
        Ok(Self { instructions, blocks, loops, unrolled })
    }

    /// How often each machine instruction was executed, when `counted` says what the kernel's PTX instructions did.
    pub fn executions(&self, counted: &[InstructionCounters]) -> Vec<u64> {
        let mut all = vec![0; self.instructions.len()];
        for (block, times) in self.blocks.iter().zip(self.frequencies(counted)) {
            all[block.instructions.clone()].fill(times.likely);
        }
        all
    }

    /// The warp instructions that the machine executes, when `counted` says what the kernel's PTX instructions did.
    pub fn warp_instructions(&self, counted: &[InstructionCounters]) -> WarpInstructions {
        let mut sum = WarpInstructions::default();
        for (block, times) in self.blocks.iter().zip(self.frequencies(counted)) {
            let length = block.instructions.len() as u64;
            sum.likely += length * times.likely;
            sum.least += length * times.least;
            sum.most += length * times.most;
        }
        sum
    }

    /// Totals of the CTAs that were run as the machine code makes the accesses: `merged` ones, but fewer where the assembler has moved
    /// one to where fewer warps come, and more where an instruction without accesses in PTX, such as `tensormap.replace`, has some.
    /// Threads are not known.
    pub fn counters(&self, kernel: &Kernel, report: &Report) -> Counters {
        let times = self.executions(&report.ptx);
        let mut made = vec![None; report.merged.len()];
        let mut added = Counters::default();
        let origins: Vec<&Instruction> = kernel.instructions().collect();
        for (instruction, &times) in self.instructions.iter().zip(&times).filter(|(one, _)| one.is_access()) {
            let Some(origin) = origins.get(instruction.position) else { continue };
            if Access::of(origin).is_some() {
                *made[instruction.position].get_or_insert(0) += times;
                continue;
            }
            let lanes = if origin.has(Modifier::Aligned) { 32 } else { 1 };
            let requests = times.min(report.ptx[instruction.position].active_lanes / lanes);
            match instruction.base() {
                "LDS" => {
                    added.shared_load_instructions += requests;
                    added.shared_load_wavefronts += requests;
                    added.shared_load_wavefronts_ideal += requests;
                }
                "STS" => {
                    added.shared_store_instructions += requests;
                    added.shared_store_wavefronts += requests;
                    added.shared_store_wavefronts_ideal += requests;
                }
                "ATOMG" => {
                    added.global_atomic_requests += requests;
                    added.global_atomic_sectors += requests * SECTORS_OF_A_MAP;
                }
                _ => {}
            }
        }
        let fewer = |(position, counted): (usize, &InstructionCounters)| match made[position] {
            // How the iterations of an unrolled loop fall to its copies may be a guess.
            Some(made) if made < counted.requests && self.unrolled_at(position).is_none() => counted.of_requests(made),
            _ => *counted,
        };
        let merged = report.merged.iter().enumerate().map(fewer).collect();
        let report = Report { merged, ..report.clone() };
        let mut counters = report.counters(kernel, Level::Merged);
        counters += added;
        counters.warp_instructions = self.warp_instructions(&report.ptx).likely;
        counters.thread_instructions = 0;
        counters
    }

    /// The opcodes of the main loop: the one whose start runs most often; of several, the longest. `None` without a loop.
    pub fn main_loop(&self, counted: &[InstructionCounters]) -> Option<Histogram> {
        let times = self.executions(counted);
        let hottest = self.loops.iter().max_by_key(|range| (times[range.start], range.len()))?;
        Some(self.histogram(hottest.clone().filter(|&index| times[index] > 0)))
    }

    /// The opcodes of the whole kernel, without slow paths of operations.
    pub fn whole(&self) -> Histogram {
        let reachable = self.blocks.iter().filter(|block| block.reachable);
        self.histogram(reachable.flat_map(|block| block.instructions.clone()))
    }

    fn histogram(&self, which: impl Iterator<Item = usize>) -> Histogram {
        let mut histogram = Histogram::new();
        for index in which {
            *histogram.entry(short(&self.instructions[index].opcode)).or_default() += 1;
        }
        histogram
    }
}

/// The blocks of so many instructions, with what follows what.
fn blocks(count: usize, labels: &BTreeMap<String, usize>, ends: &[End]) -> Result<Vec<Block>, String> {
    let place = |label: &String| labels.get(label).copied().ok_or_else(|| format!("the label `{label}`"));
    let mut starts = vec![0];
    for end in ends {
        starts.push(end.at + 1);
        match end.kind {
            EndKind::Jump => starts.extend(end.targets.iter().map(place).collect::<Result<Vec<_>, _>>()?),
            // A function of another module has no label here.
            EndKind::Call => starts.extend(end.targets.iter().filter_map(|label| labels.get(label))),
            EndKind::JumpOfDiverged | EndKind::Exit | EndKind::Return => {}
        }
    }
    starts.retain(|&start| start < count);
    starts.sort_unstable();
    starts.dedup();
    let block_at = |start: usize| starts.binary_search(&start).ok();
    let bounds: Vec<usize> = starts.iter().copied().chain([count]).collect();
    let mut blocks = Vec::new();
    for bound in bounds.windows(2) {
        let mut block = Block { instructions: bound[0]..bound[1], ..Block::default() };
        let end = ends.iter().find(|end| end.at + 1 == bound[1]);
        if end.is_none_or(|end| end.falls) {
            block.successors.extend(block_at(bound[1]));
        }
        if let Some(end) = end {
            block.ends = matches!(end.kind, EndKind::Exit | EndKind::Return);
            for label in &end.targets {
                match end.kind {
                    EndKind::Jump => block.successors.extend(block_at(place(label)?)),
                    EndKind::Call => {
                        block.callee = labels.get(label).and_then(|&start| block_at(start));
                        block.slow = label.contains("slowpath");
                    }
                    EndKind::JumpOfDiverged | EndKind::Exit | EndKind::Return => {}
                }
            }
        }
        blocks.push(block);
    }
    Ok(blocks)
}

/// Marks the loops that try a wait again. `try_wait` suspends the warp until the phase is over or a time limit of the system has
/// passed [PTX ISA, mbarrier.try_wait], and the assembler puts the first try before the loop, under the position of this instruction or
/// of the one before it.
fn mark_retries(blocks: &mut [Block], code: &[SassInstruction]) {
    let waits = |block: &Block| code[block.instructions.clone()].iter().any(SassInstruction::is_wait);
    for index in 0..blocks.len() {
        let block = &blocks[index];
        let nothing_else = code[block.instructions.clone()].iter().all(|one| one.is_wait() || is_mute(one));
        let tries_again = block.successors.contains(&index) && waits(block) && nothing_else;
        let mut before =
            blocks.iter().enumerate().filter(|(at, other)| *at != index && other.successors.contains(&index));
        let retries = tries_again && before.all(|(_, other)| waits(other));
        blocks[index].slow |= retries;
    }
}

/// Marks what control reaches from the first block, other than by slow paths.
fn reach(blocks: &mut [Block]) {
    let mut open = vec![(0, false)];
    while let Some((index, called)) = open.pop() {
        let block = &mut blocks[index];
        if block.slow || block.reachable {
            continue;
        }
        (block.reachable, block.called) = (true, called);
        open.extend(block.successors.iter().map(|&next| (next, called)));
        open.extend(block.callee.map(|callee| (callee, true)));
    }
}

/// The instruction of a line `/*0010*/  @P0 LDS.128 R4, [R8] ;`.
fn code_of(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("/*")?;
    let (address, code) = rest.split_once("*/")?;
    let code = code.trim();
    (address.len() >= 4 && address.bytes().all(|b| b.is_ascii_hexdigit()) && !code.is_empty()).then_some(code)
}

/// An opcode without modifiers, but with the width of a memory access.
fn short(opcode: &str) -> String {
    let mut parts = opcode.split('.');
    let base = parts.next().unwrap_or(opcode);
    if !base.starts_with("LD") && !base.starts_with("ST") {
        return base.to_owned();
    }
    let width = parts.find(|part| matches!(*part, "U8" | "S8" | "U16" | "S16" | "64" | "128" | "256"));
    width.map_or_else(|| base.to_owned(), |width| format!("{base}.{width}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
.text.k:
	//## File "kernel.ptx", line 1
        /*0000*/                   MOV R1, c[0x0][0x28] ;
	//## File "kernel.ptx", line 2
.L_x_1:
        /*0010*/                   LDS.U.128 R4, [R8] ;
	//## File "kernel.ptx", line 3
        /*0020*/                   FFMA R0, R4, R5, R0 ;
        /*0030*/              @P0  BRA `(.L_x_1) ;
	//## File "kernel.ptx", line 4
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
        /*0060*/                   NOP;
"#;

    fn kernel() -> Kernel {
        let text = ".version 8.0\n.target sm_75\n.address_size 64\n.entry k() {\n.reg .pred %p;\n.reg .b32 %r<3>;\n\
                    mov.u32 %r0, 0;\n$L0:\nadd.u32 %r0, %r0, 1;\nsetp.lt.u32 %p, %r0, 5;\n@%p bra $L0;\nret;\n}";
        ptx::parse(text).unwrap().remove(0)
    }

    fn counted(executions: &[u64]) -> Vec<InstructionCounters> {
        executions.iter().map(|&executions| InstructionCounters { executions, ..Default::default() }).collect()
    }

    #[test]
    fn blocks_run_as_often_as_their_origins() {
        let sass = Sass::parse(TEXT, &kernel()).unwrap();
        assert_eq!(sass.instructions.len(), 7);
        let counted = counted(&[2, 10, 10, 2]);
        assert_eq!(sass.executions(&counted), [2, 10, 10, 10, 2, 0, 0]);
        assert_eq!(sass.warp_instructions(&counted), WarpInstructions { likely: 34, least: 34, most: 34 });
        let main_loop: Vec<_> = sass.main_loop(&counted).unwrap().into_iter().collect();
        assert_eq!(main_loop, [("BRA".into(), 1), ("FFMA".into(), 1), ("LDS.128".into(), 1)]);
        assert_eq!(sass.whole().get("NOP"), None);
    }

    /// A shared load that the assembler moves past the end of the warps whose guarded store does nothing, and a wait.
    #[test]
    fn accesses_are_made_where_the_machine_code_has_them() {
        let text = ".version 8.0\n.target sm_90\n.address_size 64\n.entry k(.param .u64 p) {\n.shared .b64 s;\n.reg .pred %p<2>;\n.reg .b32 %r<3>;\n\
                    .reg .b64 %rd<1>;\nld.param.u64 %rd0, [p];\n$L0:\nmbarrier.try_wait.parity.shared.b64 %p0, [s], 0;\n@!%p0 bra $L0;\n\
                    ld.shared.u32 %r0, [s];\n@%p1 st.global.u32 [%rd0], %r0;\nret;\n}";
        let code = r#"
	//## File "kernel.ptx", line 2
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], RZ ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
	//## File "kernel.ptx", line 1
        /*0020*/                   MOV R2, R3 ;
	//## File "kernel.ptx", line 5
        /*0030*/              @!P1 EXIT ;
	//## File "kernel.ptx", line 4
        /*0040*/                   LDS R0, [UR4] ;
	//## File "kernel.ptx", line 5
        /*0050*/                   STG.E [R2], R0 ;
	//## File "kernel.ptx", line 6
        /*0060*/                   EXIT ;
.L_x_1:
	//## File "kernel.ptx", line 2
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], RZ ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/                   BRA `(.L_x_2) ;
"#;
        let kernel = ptx::parse(text).unwrap().remove(0);
        let sass = Sass::parse(code, &kernel).unwrap();
        let mut counters = counted(&[4, 12, 12, 4, 4, 4]);
        (counters[3].requests, counters[3].wavefronts, counters[3].wavefronts_ideal) = (4, 4, 4);
        (counters[4].requests, counters[4].sectors) = (1, 1);
        // The wait is polled three times, and one warp stores.
        assert_eq!(sass.executions(&counters), [4, 4, 4, 4, 1, 1, 1, 0, 0, 0]);
        let report = Report {
            ptx: counters.clone(),
            merged: counters,
            traffic: Default::default(),
            ctas_run: 1,
            ctas_total: 1,
            live_registers: 0,
            watched: Vec::new(),
            races_complete: true,
        };
        let made = sass.counters(&kernel, &report);
        assert_eq!((made.warp_instructions, made.shared_load_instructions, made.shared_load_wavefronts), (19, 1, 1));
        assert_eq!((made.global_store_requests, made.shared_store_instructions), (1, 0));
    }

    #[test]
    fn other_text_is_an_error() {
        assert_eq!(Sass::parse("", &kernel()).unwrap_err(), "machine instructions");
        assert!(Sass::parse("/*0000*/ BRA `(.L_x_9) ;", &kernel()).unwrap_err().contains(".L_x_9"));
    }
}
