//! What is changed: one synchronisation, copy or phase of a kernel at a time.

use std::fmt;

use emulator::Access;
use ptx::{Bank, Instruction, Kernel, Modifier, Opcode, Operand, Register, Statement, Type};

/// What an instruction does for the order of memory accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the variants are the manual's instructions")]
pub enum Role {
    CopyAsync,
    CopyCommit,
    CopyWait,
    BulkCopy,
    BulkCommit,
    BulkWait,
    MbarrierInit,
    MbarrierArrive,
    MbarrierExpect,
    MbarrierWait,
    Barrier,
    WarpBarrier,
    ClusterBarrier,
    Fence,
    ProxyFence,
    MapFence,
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait,
}

impl Role {
    /// The role of an instruction that has one.
    pub fn of(instruction: &Instruction) -> Option<Self> {
        let has = |modifier| instruction.has(modifier);
        Some(match instruction.opcode() {
            Opcode::CpAsync if has(Modifier::Prefetch) => return None,
            Opcode::CpAsync if has(Modifier::Mbarrier) => Self::MbarrierArrive,
            Opcode::CpAsync => match (has(Modifier::Bulk), has(Modifier::CommitGroup)) {
                (true, true) => Self::BulkCommit,
                (false, true) => Self::CopyCommit,
                (true, _) if has(Modifier::WaitGroup) => Self::BulkWait,
                (true, _) => Self::BulkCopy,
                _ if has(Modifier::WaitGroup) || has(Modifier::WaitAll) => Self::CopyWait,
                _ => Self::CopyAsync,
            },
            Opcode::Mbarrier if has(Modifier::Init) => Self::MbarrierInit,
            Opcode::Mbarrier if has(Modifier::ExpectTx) => Self::MbarrierExpect,
            Opcode::Mbarrier if has(Modifier::Arrive) || has(Modifier::ArriveDrop) => Self::MbarrierArrive,
            Opcode::Mbarrier if has(Modifier::TryWait) || has(Modifier::TestWait) => Self::MbarrierWait,
            Opcode::Bar if has(Modifier::Warp) => Self::WarpBarrier,
            Opcode::Barrier if has(Modifier::Cluster) => Self::ClusterBarrier,
            Opcode::Bar | Opcode::Barrier => Self::Barrier,
            Opcode::Fence | Opcode::Membar if has(Modifier::Alias) => return None,
            Opcode::Fence | Opcode::Membar if has(Modifier::TensormapGeneric) => Self::MapFence,
            Opcode::Fence | Opcode::Membar if has(Modifier::Proxy) => Self::ProxyFence,
            Opcode::Fence | Opcode::Membar => Self::Fence,
            Opcode::Wgmma if has(Modifier::Fence) => Self::WgmmaFence,
            Opcode::Wgmma if has(Modifier::CommitGroup) => Self::WgmmaCommit,
            Opcode::Wgmma if has(Modifier::WaitGroup) => Self::WgmmaWait,
            _ => return None,
        })
    }

    /// As tables name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CopyAsync => "cp.async",
            Self::CopyCommit => "cp.async.commit_group",
            Self::CopyWait => "cp.async.wait_group",
            Self::BulkCopy => "cp.async.bulk",
            Self::BulkCommit => "cp.async.bulk.commit_group",
            Self::BulkWait => "cp.async.bulk.wait_group",
            Self::MbarrierInit => "mbarrier.init",
            Self::MbarrierArrive => "mbarrier.arrive",
            Self::MbarrierExpect => "mbarrier.expect_tx",
            Self::MbarrierWait => "mbarrier.try_wait",
            Self::Barrier => "bar",
            Self::WarpBarrier => "bar.warp.sync",
            Self::ClusterBarrier => "barrier.cluster",
            Self::Fence => "fence",
            Self::ProxyFence => "fence.proxy.async",
            Self::MapFence => "fence.proxy.tensormap",
            Self::WgmmaFence => "wgmma.fence",
            Self::WgmmaCommit => "wgmma.commit_group",
            Self::WgmmaWait => "wgmma.wait_group",
        }
    }

    /// The ways in which an instruction of this role is changed.
    fn changes(self) -> &'static [Change] {
        use Change::{Drop, Earlier, Expect, Later, OtherPhase, Shrink, WaitForLess};
        match self {
            Self::CopyAsync | Self::BulkCopy => &[Shrink],
            Self::CopyCommit | Self::BulkCommit | Self::WgmmaCommit => &[Drop, Earlier],
            Self::CopyWait | Self::BulkWait | Self::WgmmaWait => &[Drop, WaitForLess, Later],
            Self::MbarrierInit => &[Drop],
            Self::MbarrierArrive => &[Drop, Earlier],
            Self::MbarrierExpect => &[Drop, Expect(-16), Expect(16)],
            Self::MbarrierWait => &[Drop, OtherPhase],
            Self::Barrier | Self::WarpBarrier | Self::ClusterBarrier | Self::Fence => &[Drop, Later, Earlier],
            Self::ProxyFence => &[Drop, Earlier],
            Self::MapFence | Self::WgmmaFence => &[Drop, Later],
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How one instruction is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// It does nothing. A wait on an mbarrier finds its phase complete at once.
    Drop,
    /// It lets one group more stay in flight.
    WaitForLess,
    /// It waits for the phase of the other parity.
    OtherPhase,
    /// It stands behind the next access to memory, or the next `wgmma`.
    Later,
    /// It stands before the last access to memory, or the last `wgmma`.
    Earlier,
    /// It copies less: half the bytes (`cp.async`), 16 bytes less (bulk copies).
    Shrink,
    /// It announces so many bytes more.
    Expect(i64),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop => f.pad("dropped"),
            Self::WaitForLess => f.pad("waits for less"),
            Self::OtherPhase => f.pad("other phase"),
            Self::Later => f.pad("moved later"),
            Self::Earlier => f.pad("moved earlier"),
            Self::Shrink => f.pad("shrunk"),
            Self::Expect(bytes) => f.pad(&format!("expects {bytes:+} bytes")),
        }
    }
}

/// One change of one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// The instruction's position in [`Kernel::instructions`].
    pub position: usize,
    /// Its role.
    pub role: Role,
    /// What is done to it.
    pub change: Change,
}

/// A changed kernel.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The kernel.
    pub kernel: Kernel,
    /// For each of its positions, the one in the kernel that it was made from.
    origins: Vec<usize>,
    /// Where an instruction was moved: the access in the original kernel that it moved past.
    pub(super) passed: Option<usize>,
}

impl Mutant {
    /// The position in the original kernel of one in this.
    pub fn origin(&self, position: usize) -> usize {
        self.origins.get(position).copied().unwrap_or(position)
    }
}

/// Whether an instruction accesses memory or starts a product: what moved instructions are moved past.
fn is_access(instruction: &Instruction) -> bool {
    Access::of(instruction).is_some() || instruction.has(Modifier::MmaAsync)
}

/// Every mutation of a kernel, in the order of its instructions. Code of functions that it calls is left as it is.
pub fn mutations(kernel: &Kernel) -> Vec<Mutation> {
    let own = kernel.body.iter().filter(|statement| matches!(statement, Statement::Instruction(_))).count();
    let roles = kernel.instructions().take(own).enumerate();
    let roles = roles.filter_map(|(position, instruction)| Some((position, Role::of(instruction)?)));
    roles
        .flat_map(|(position, role)| role.changes().iter().map(move |&change| Mutation { position, role, change }))
        .filter(|mutation| mutation.apply(kernel).is_some())
        .collect()
}

impl Mutation {
    /// The changed kernel; `None` where there is nothing of this kind to change.
    pub fn apply(&self, kernel: &Kernel) -> Option<Mutant> {
        let mut kernel = kernel.clone();
        let count = kernel.instructions().count();
        let mut origins: Vec<usize> = (0..count).collect();
        let at = kernel
            .body
            .iter()
            .enumerate()
            .filter(|(_, statement)| matches!(statement, Statement::Instruction(_)))
            .nth(self.position)?
            .0;
        let Statement::Instruction(instruction) = kernel.body.get(at)?.clone() else { return None };
        let operands = instruction.operands();
        let replaced = match self.change {
            Change::Drop if self.role == Role::MbarrierWait => {
                let zero = Operand::Integer(0);
                let complete = operands.first()?.clone();
                remade(
                    &instruction,
                    Opcode::Setp,
                    &[Modifier::Eq, Type::U32.into()],
                    vec![complete, zero.clone(), zero],
                )?
            }
            Change::Drop => remade(&instruction, Opcode::Nanosleep, &[Type::U32.into()], vec![Operand::Integer(0)])?,
            Change::WaitForLess => {
                let mut operands = operands.to_vec();
                match operands.first_mut() {
                    Some(Operand::Integer(groups)) => *groups += 1,
                    // `wait_all` waits for what is in no group too.
                    _ => return None,
                }
                remade(&instruction, instruction.opcode(), instruction.modifiers(), operands)?
            }
            Change::Shrink if self.role == Role::CopyAsync => {
                let mut operands = operands.to_vec();
                match operands.get_mut(2) {
                    Some(Operand::Integer(bytes)) if *bytes > 4 => *bytes /= 2,
                    _ => return None,
                }
                // `.cg` copies 16 bytes alone.
                let all = instruction.modifiers().iter();
                let modifiers: Vec<_> = all.map(|&m| if m == Modifier::Cg { Modifier::Ca } else { m }).collect();
                remade(&instruction, Opcode::CpAsync, &modifiers, operands)?
            }
            Change::OtherPhase if !instruction.has(Modifier::Parity) => return None,
            Change::OtherPhase => {
                return with_operand(kernel, origins, (at, self.position), 2, Opcode::Xor, 1);
            }
            // The box of a tensor copy stands in its map.
            Change::Shrink if instruction.has(Modifier::Tensor) => return None,
            Change::Shrink => return with_operand(kernel, origins, (at, self.position), 2, Opcode::Add, -16),
            Change::Expect(bytes) => {
                let last = operands.len() - 1;
                return with_operand(kernel, origins, (at, self.position), last, Opcode::Add, bytes);
            }
            Change::Later | Change::Earlier => {
                let later = self.change == Change::Later;
                let steps = distance(&kernel, at, later)?;
                let statement = kernel.body.remove(at);
                let to = if later { at + steps.statements } else { at - steps.statements };
                kernel.body.insert(to, statement);
                let origin = origins.remove(self.position);
                let to = if later { self.position + steps.instructions } else { self.position - steps.instructions };
                origins.insert(to, origin);
                return Some(Mutant { kernel, origins, passed: Some(to) });
            }
        };
        kernel.body[at] = Statement::Instruction(replaced);
        Some(Mutant { kernel, origins, passed: None })
    }
}

/// Another instruction under the guard and at the source line of one.
fn remade(
    instruction: &Instruction,
    opcode: Opcode,
    modifiers: &[Modifier],
    operands: Vec<Operand>,
) -> Option<Instruction> {
    let mut new = Instruction::new(opcode, modifiers.to_vec(), operands).ok()?;
    new.guard = instruction.guard;
    new.location = instruction.location;
    Some(new)
}

/// The kernel with an integer operand changed by `operation` with a constant: at once, or in a register of its own.
fn with_operand(
    mut kernel: Kernel,
    mut origins: Vec<usize>,
    (at, position): (usize, usize),
    operand: usize,
    operation: Opcode,
    by: i64,
) -> Option<Mutant> {
    let Statement::Instruction(instruction) = kernel.body.get(at)?.clone() else { return None };
    let mut operands = instruction.operands().to_vec();
    let place = operands.get_mut(operand)?;
    let mut before = None;
    if let Operand::Integer(value) = place {
        *value = if operation == Opcode::Xor { *value ^ by } else { *value + by };
    } else {
        let new = Register { bank: kernel.banks.len() as u32, index: 0 };
        let old = std::mem::replace(place, new.into());
        let ty = if operation == Opcode::Xor { Type::B32 } else { Type::U32 };
        kernel.banks.push(Bank { prefix: "%mutated".into(), ty: Type::B32, count: Some(1) });
        let mut computed = remade(&instruction, operation, &[ty.into()], vec![new.into(), old, Operand::Integer(by)])?;
        computed.guard = None;
        before = Some(Statement::Instruction(computed));
    }
    let changed = remade(&instruction, instruction.opcode(), instruction.modifiers(), operands)?;
    kernel.body[at] = Statement::Instruction(changed);
    if let Some(before) = before {
        kernel.body.insert(at, before);
        origins.insert(position, position);
    }
    Some(Mutant { kernel, origins, passed: None })
}

/// How far an instruction moves.
struct Steps {
    statements: usize,
    instructions: usize,
}

/// The way to behind the next access, or before the last one, if straight code leads there and no register on it depends.
fn distance(kernel: &Kernel, at: usize, later: bool) -> Option<Steps> {
    let Statement::Instruction(moved) = &kernel.body[at] else { return None };
    let (mut read, mut written) = (Vec::new(), Vec::new());
    moved.for_each_use(|register| read.push(register));
    moved.for_each_def(|register| written.push(register));
    let way: Box<dyn Iterator<Item = &Statement>> =
        if later { Box::new(kernel.body[at + 1..].iter()) } else { Box::new(kernel.body[..at].iter().rev()) };
    let mut steps = Steps { statements: 0, instructions: 0 };
    for statement in way {
        steps.statements += 1;
        let instruction = match statement {
            Statement::Label(_) => return None,
            Statement::Pragma(_) => continue,
            Statement::Instruction(instruction) => instruction,
        };
        let mut depends = instruction.ends_block();
        instruction.for_each_def(|register| depends |= read.contains(&register) || written.contains(&register));
        instruction.for_each_use(|register| depends |= written.contains(&register));
        if depends {
            return None;
        }
        steps.instructions += 1;
        if is_access(instruction) {
            return Some(steps);
        }
    }
    None
}
