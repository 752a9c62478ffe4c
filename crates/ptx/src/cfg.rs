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

/// The control-flow graph of a kernel that [`Kernel::validate`] accepts, its functions included: a call goes to the function, and the
/// function's `ret` to wherever one of its calls goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cfg {
    /// In program order; the first is the entry. Empty for a kernel without instructions.
    pub blocks: Vec<Block>,
    /// For each label, the position of the instruction it stands before; the number of instructions for one at the end.
    pub label_positions: Vec<usize>,
    /// For each function, the position of its first instruction; the number of instructions for one without code here.
    pub function_positions: Vec<usize>,
}

impl Cfg {
    /// The graph of a kernel.
    pub fn of(kernel: &Kernel) -> Self {
        let instructions: Vec<_> = kernel.instructions().collect();
        let count = instructions.len();
        let mut label_positions = vec![count; kernel.labels.len()];
        let mut position = 0;
        let mut function_starts = Vec::new();
        let mut function_of = Vec::with_capacity(count);
        for (body, function) in bodies(kernel) {
            if let Some(function) = function {
                function_starts.resize(function + 1, count);
                function_starts[function] = position;
            }
            for statement in body {
                match statement {
                    Statement::Label(label) => {
                        if let Some(place) = label_positions.get_mut(label.0 as usize) {
                            *place = position;
                        }
                    }
                    Statement::Instruction(_) => {
                        function_of.push(function);
                        position += 1;
                    }
                    Statement::Pragma(_) => {}
                }
            }
        }
        function_starts.resize(kernel.functions.len(), count);
        // Where the calls of each function go on.
        let mut returns = vec![Vec::new(); kernel.functions.len()];
        for (index, instruction) in instructions.iter().enumerate() {
            if let Some(to) = instruction.callee().and_then(|function| returns.get_mut(function.0 as usize)) {
                to.push(index + 1);
            }
        }
        // The positions a control instruction may go to other than the next.
        let targets = |index: usize| -> Vec<usize> {
            let instruction = instructions[index];
            let labels = instruction.targets().iter();
            let mut targets: Vec<_> =
                labels.filter_map(|label| label_positions.get(label.0 as usize).copied()).collect();
            match (instruction.callee(), instruction.opcode(), function_of[index]) {
                (Some(function), ..) => {
                    let start = function_starts.get(function.0 as usize).copied().unwrap_or(count);
                    // What has no code here comes back at once.
                    targets.push(if start == count { index + 1 } else { start });
                }
                (_, Opcode::Ret, Some(function)) => targets.extend(&returns[function]),
                _ => {}
            }
            targets
        };
        let mut starts = vec![false; count + 1];
        starts[0] = true;
        for start in &function_starts {
            starts[*start] = true;
        }
        for (index, instruction) in instructions.iter().enumerate() {
            if instruction.ends_block() {
                starts[index + 1] = true;
                targets(index).into_iter().for_each(|target| starts[target] = true);
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
                successors.extend(targets(last));
                successors.retain(|&start| start < count);
                successors.dedup();
                Block {
                    instructions: bound[0]..bound[1],
                    successors: successors.into_iter().map(|start| block_at[start]).collect(),
                }
            })
            .collect();
        Self { blocks, label_positions, function_positions: function_starts }
    }
}

/// The kernel's body and those of its functions, with the function's index.
fn bodies(kernel: &Kernel) -> impl Iterator<Item = (&[Statement], Option<usize>)> {
    let functions = kernel.functions.iter().enumerate();
    let functions = functions.filter_map(|(index, function)| Some((function.body.as_deref()?, Some(index))));
    std::iter::once((kernel.body.as_slice(), None)).chain(functions)
}
