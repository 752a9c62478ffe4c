//! Machine code: what the assembler made of a kernel, and how often it ran.

use std::collections::BTreeMap;

/// One machine instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SassInstruction {
    /// The opcode with its modifiers, as `LDS.U.128`.
    pub opcode: String,
    /// The position in [`ptx::Kernel::instructions`] of the PTX instruction it came from.
    pub position: usize,
}

/// Instructions that are entered at the first and left at the last.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    instructions: std::ops::Range<usize>,
    /// Whether control reaches it.
    reachable: bool,
}

/// A jump back: the instructions from its target to itself.
type Loop = std::ops::Range<usize>;

/// A kernel's machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sass {
    /// In program order.
    pub instructions: Vec<SassInstruction>,
    blocks: Vec<Block>,
    loops: Vec<Loop>,
}

/// How many instructions of each opcode, by name; widths of memory accesses are kept, other modifiers are not.
pub type Histogram = BTreeMap<String, u32>;

impl Sass {
    /// Reads what `nvdisasm -g -c` prints of a cubin with one kernel whose source lines are instruction positions counted from 1.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut instructions: Vec<SassInstruction> = Vec::new();
        let mut labels = BTreeMap::new();
        let mut jumps = Vec::new();
        let mut ends = Vec::new();
        let mut position = None;
        for line in text.lines().map(str::trim) {
            if let Some(rest) = line.strip_prefix("//##") {
                // An inlined place would end in "inlined at": positions are not inlined.
                let number = rest.rsplit("line ").next().and_then(|number| number.split_whitespace().next());
                position = Some(
                    number.and_then(|n| n.parse::<usize>().ok()).ok_or_else(|| format!("a line number in `{line}`"))?,
                );
            } else if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L_")) {
                labels.insert(label.to_owned(), instructions.len());
            } else if let Some(code) = code_of(line) {
                let mut words = code.split_whitespace();
                let first = words.next().ok_or("an opcode")?;
                let (guarded, opcode) =
                    if first.starts_with('@') { (true, words.next().ok_or("an opcode")?) } else { (false, first) };
                let base = opcode.split('.').next().unwrap_or(opcode);
                let jump = matches!(base, "BRA" | "JMP");
                if jump && let Some((before, label)) = code.split_once("`(") {
                    // `BRA.DIV` leaves for code that only lanes of a diverged warp need.
                    if !opcode.contains(".DIV") {
                        jumps.push((instructions.len(), label.split(')').next().unwrap_or(label).to_owned()));
                    }
                    let conditional = guarded || !before.trim_end().ends_with(opcode);
                    ends.push((instructions.len(), conditional));
                } else if jump || matches!(base, "EXIT" | "RET") {
                    ends.push((instructions.len(), guarded));
                }
                let position = position.and_then(|line| line.checked_sub(1)).unwrap_or(0);
                instructions.push(SassInstruction { opcode: opcode.trim_end_matches(';').to_owned(), position });
            }
        }
        if instructions.is_empty() {
            return Err("machine instructions".into());
        }
        let count = instructions.len();
        let mut targets = Vec::new();
        for (from, label) in jumps {
            targets.push((from, *labels.get(&label).ok_or_else(|| format!("the label `{label}`"))?));
        }
        let mut starts: Vec<usize> =
            [0].into_iter().chain(targets.iter().map(|t| t.1)).chain(ends.iter().map(|e| e.0 + 1)).collect();
        starts.retain(|&start| start < count);
        starts.sort_unstable();
        starts.dedup();
        let bounds: Vec<usize> = starts.iter().copied().chain([count]).collect();
        let mut blocks: Vec<_> =
            bounds.windows(2).map(|bound| Block { instructions: bound[0]..bound[1], reachable: false }).collect();
        // What follows an unconditional end is reached only by a jump from code that is reached itself.
        let mut open = vec![0];
        while let Some(index) = open.pop() {
            if std::mem::replace(&mut blocks[index].reachable, true) {
                continue;
            }
            let last = blocks[index].instructions.end - 1;
            let falls = ends.iter().find(|end| end.0 == last).is_none_or(|end| end.1);
            if falls && index + 1 < blocks.len() {
                open.push(index + 1);
            }
            open.extend(targets.iter().filter(|t| t.0 == last).filter_map(|t| starts.binary_search(&t.1).ok()));
        }
        let loops = targets.iter().filter(|(from, to)| to < from).map(|&(from, to)| to..from + 1).collect();
        Ok(Self { instructions, blocks, loops })
    }

    /// How often each machine instruction was executed, when `executions` says how often each PTX instruction was.
    ///
    /// A block of machine code runs as often as most of its instructions' origins did: the assembler moves some instructions
    /// out of loops, and those do not speak for the block they end up in.
    pub fn executions(&self, executions: &[u64]) -> Vec<u64> {
        let mut all = vec![0; self.instructions.len()];
        for block in self.blocks.iter().filter(|block| block.reachable) {
            let mut votes = BTreeMap::<u64, usize>::new();
            for instruction in &self.instructions[block.instructions.clone()] {
                *votes.entry(executions.get(instruction.position).copied().unwrap_or(0)).or_default() += 1;
            }
            let most = votes.into_iter().max_by_key(|&(_, votes)| votes).map_or(0, |(executions, _)| executions);
            all[block.instructions.clone()].fill(most);
        }
        all
    }

    /// The warp instructions that the machine executes, from those of the PTX.
    pub fn warp_instructions(&self, executions: &[u64]) -> u64 {
        self.executions(executions).iter().sum()
    }

    /// The opcodes of the main loop: the one whose start runs most often; of several, the longest. `None` without a loop.
    pub fn main_loop(&self, executions: &[u64]) -> Option<Histogram> {
        let times = self.executions(executions);
        let hottest = self.loops.iter().max_by_key(|range| (times[range.start], range.len()))?;
        Some(self.histogram(hottest.clone().filter(|&index| times[index] > 0)))
    }

    /// The opcodes of the whole kernel.
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

    #[test]
    fn blocks_run_as_often_as_their_origins() {
        let sass = Sass::parse(TEXT).unwrap();
        assert_eq!(sass.instructions.len(), 7);
        let executions = [2, 10, 10, 2];
        assert_eq!(sass.executions(&executions), [2, 10, 10, 10, 2, 0, 0]);
        assert_eq!(sass.warp_instructions(&executions), 34);
        let main_loop: Vec<_> = sass.main_loop(&executions).unwrap().into_iter().collect();
        assert_eq!(main_loop, [("BRA".into(), 1), ("FFMA".into(), 1), ("LDS.128".into(), 1)]);
        assert_eq!(sass.whole().get("NOP"), None);
    }

    #[test]
    fn other_text_is_an_error() {
        assert_eq!(Sass::parse("").unwrap_err(), "machine instructions");
        assert!(Sass::parse("/*0000*/ BRA `(.L_x_9) ;").unwrap_err().contains(".L_x_9"));
    }
}
