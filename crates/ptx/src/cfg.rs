//! Basic blocks and how they follow each other.

use std::ops::Range;

use crate::{Kernel, Opcode, Statement};

/// Instructions that are entered at the first and left at the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Positions in the order of [`Kernel::instructions`].
    pub instructions: Range<usize>,
    /// The blocks that may follow, indices into [`Cfg::blocks`].
    pub successors: Vec<usize>,
}

/// The control-flow graph of a kernel that [`Kernel::validate`] accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cfg {
    /// In program order; the first is the entry. Empty for a kernel without instructions.
    pub blocks: Vec<Block>,
    /// For each label, the position of the instruction it stands before; the number of instructions for one at the end.
    pub label_positions: Vec<usize>,
}

impl Cfg {
    /// The graph of a kernel.
    pub fn of(kernel: &Kernel) -> Self {
        let instructions: Vec<_> = kernel.instructions().collect();
        let count = instructions.len();
        let mut label_positions = vec![count; kernel.labels.len()];
        let mut position = 0;
        for statement in &kernel.body {
            match statement {
                Statement::Label(label) => {
                    if let Some(place) = label_positions.get_mut(label.0 as usize) {
                        *place = position;
                    }
                }
                Statement::Instruction(_) => position += 1,
            }
        }

        let target = |index: usize| {
            instructions[index]
                .target()
                .and_then(|label| label_positions.get(label.0 as usize).copied())
                .unwrap_or(count)
        };
        let mut starts = vec![false; count + 1];
        starts[0] = true;
        for (index, instruction) in instructions.iter().enumerate() {
            if instruction.ends_block() {
                starts[index + 1] = true;
                if instruction.opcode() == Opcode::Bra {
                    starts[target(index)] = true;
                }
            }
        }
        let bounds: Vec<usize> = (0..count).filter(|&index| starts[index]).chain([count]).collect();
        let mut block_at = vec![usize::MAX; count + 1];
        for (block, start) in bounds.iter().take(bounds.len() - 1).enumerate() {
            block_at[*start] = block;
        }
        let blocks = bounds
            .windows(2)
            .map(|bound| {
                let last = bound[1] - 1;
                let instruction = instructions[last];
                let mut successors = Vec::new();
                if !instruction.ends_block() || instruction.guard.is_some() {
                    successors.push(bound[1]);
                }
                if instruction.opcode() == Opcode::Bra {
                    successors.push(target(last));
                }
                successors.retain(|&start| start < count);
                Block {
                    instructions: bound[0]..bound[1],
                    successors: successors.into_iter().map(|start| block_at[start]).collect(),
                }
            })
            .collect();
        Self { blocks, label_positions }
    }
}
