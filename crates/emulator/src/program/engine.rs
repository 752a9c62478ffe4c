//! Decoding of what is asynchronous or between CTAs.

use std::collections::HashSet;

use ptx::{Address, Base, Instruction, Kernel, Modifier, Opcode, Operand, Type};

use super::{Code, Decoded, Decoder, Op, PARAM_WINDOW};
use crate::allocate::Width;
use crate::reduce::Reduce;

/// A register: its place, and whether it is wide.
pub(crate) type Register = (u32, bool);

/// What an address is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    /// Shared memory of the CTA or of its cluster.
    Shared,
    Global,
    Generic,
}

/// Where an address comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub base: Option<Register>,
    pub offset: i64,
    pub region: Region,
}

/// A copy: from where to where, what it tells, and of what.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copied {
    pub to: Option<Place>,
    pub from: Option<Place>,
    /// The tensor map and the coordinates of the box in global memory.
    pub tensor: Option<(Place, Vec<Register>)>,
    pub size: Option<Register>,
    pub barrier: Option<Place>,
    pub multicast: Option<Register>,
    /// Of bulk copies; of tensor copies the type is the map's.
    pub reduce: Option<Reduce>,
    pub operation: Option<Modifier>,
    /// `st.async`, `red.async`: what is stored, and the bytes of each value.
    pub values: Vec<Register>,
    pub value_bytes: u32,
}

/// An instruction that [`Worker::engine`](crate::cta::Worker::engine) executes.
#[derive(Clone, Debug)]
pub(crate) enum EngineOp {
    Init {
        barrier: Place,
        count: Register,
    },
    Invalidate {
        barrier: Place,
    },
    Arrive {
        barrier: Place,
        count: Option<Register>,
        expect: Option<Register>,
        drop: bool,
        state: Option<Register>,
        releases: bool,
    },
    Announce {
        barrier: Place,
        bytes: Register,
        completes: bool,
    },
    /// `test_wait` and `try_wait`.
    Test {
        barrier: Place,
        asked: Register,
        parity: bool,
        complete: u32,
        acquires: bool,
    },
    Pending {
        state: Register,
        count: Register,
    },
    /// `cp.async.mbarrier.arrive`; `counted` is `.noinc`.
    CopiesArrive {
        barrier: Place,
        counted: bool,
    },
    Copy(Box<Copied>),
    BulkCommit,
    BulkWait {
        remaining: usize,
        read: bool,
    },
    Fence,
    ProxyFence,
    MapFence {
        map: Option<Place>,
    },
    MapReplace {
        map: Place,
        field: Modifier,
        dimension: usize,
        new: Register,
    },
    MapPublish {
        to: Place,
        from: Place,
    },
    /// `mapa`.
    MapAddress {
        to: Register,
        address: Register,
        rank: Register,
        generic: bool,
    },
    /// `getctarank`.
    RankOf {
        to: Register,
        address: Register,
        generic: bool,
    },
    ClusterArrive {
        releases: bool,
        aligned: bool,
    },
    ClusterWait {
        acquires: bool,
        aligned: bool,
    },
}

/// The fields of a tensor map that `tensormap.replace` names.
const FIELDS: [Modifier; 10] = [
    Modifier::GlobalAddress,
    Modifier::Rank,
    Modifier::BoxDim,
    Modifier::GlobalDim,
    Modifier::GlobalStride,
    Modifier::ElementStride,
    Modifier::Elemtype,
    Modifier::InterleaveLayout,
    Modifier::SwizzleMode,
    Modifier::FillMode,
];

const REDUCTIONS: [Modifier; 8] = [
    Modifier::Add,
    Modifier::Min,
    Modifier::Max,
    Modifier::Inc,
    Modifier::Dec,
    Modifier::And,
    Modifier::Or,
    Modifier::Xor,
];

/// What an instruction means for the order of memory accesses (PTX ISA 8.3 to 8.5).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Order {
    /// It does not race with others that are.
    pub strong: bool,
    pub releases: bool,
    pub acquires: bool,
    /// Of a strong one: others may learn by it what came before. They do not by a relaxed atomic whose result nobody uses, in a kernel
    /// without fences.
    pub hands_on: bool,
}

/// By instruction, whether others may learn by it what the thread did before: whether the order of such accesses is one that threads
/// make, and not one that follows from how fast they are.
pub fn hands_on(kernel: &Kernel) -> Vec<bool> {
    let accesses = |i: &Instruction| matches!(i.opcode(), Opcode::Ld | Opcode::St | Opcode::Atom | Opcode::Red);
    let all = kernel.instructions().zip(Order::all(kernel));
    all.map(|(instruction, order)| accesses(instruction) && order.strong && order.hands_on).collect()
}

impl Order {
    /// Of each instruction, and of the end of the code.
    pub(super) fn all(kernel: &Kernel) -> Vec<Self> {
        let is_fence =
            |i: &Instruction| matches!(i.opcode(), Opcode::Fence | Opcode::Membar) && !i.has(Modifier::Proxy);
        let fences = kernel.instructions().any(is_fence);
        let mut used = HashSet::new();
        kernel.instructions().for_each(|instruction| {
            instruction.for_each_use(|register| {
                used.insert(register);
            });
        });
        let of = |instruction: &Instruction| {
            let mut adds = matches!(instruction.opcode(), Opcode::Atom | Opcode::Red);
            instruction.for_each_def(|register| adds &= !used.contains(&register));
            Self::of(instruction, fences || !adds)
        };
        kernel.instructions().map(of).chain([Self::default()]).collect()
    }

    fn of(instruction: &Instruction, otherwise: bool) -> Self {
        let any = |names: &[Modifier]| names.iter().any(|name| instruction.has(*name));
        let is_atomic = matches!(instruction.opcode(), Opcode::Atom | Opcode::Red);
        let acquires = any(&[Modifier::Acquire, Modifier::AcqRel]);
        let releases = any(&[Modifier::Release, Modifier::AcqRel]);
        let named = any(&[Modifier::Volatile, Modifier::Relaxed, Modifier::Mmio]);
        let hands_on = otherwise || releases || acquires;
        Self { strong: is_atomic || acquires || releases || named, releases, acquires, hands_on }
    }
}

/// Whether an instruction is decoded here.
pub(super) fn covers(instruction: &Instruction) -> bool {
    let has = |modifier| instruction.has(modifier);
    match instruction.opcode() {
        Opcode::Mbarrier | Opcode::Mapa | Opcode::Getctarank | Opcode::Tensormap | Opcode::Fence | Opcode::Membar => {
            true
        }
        Opcode::CpAsync => has(Modifier::Bulk) || has(Modifier::Mbarrier),
        Opcode::St | Opcode::Red => has(Modifier::Async),
        Opcode::Barrier => has(Modifier::Cluster),
        Opcode::Prefetch => has(Modifier::Tensormap),
        _ => false,
    }
}

/// Whether an instruction makes an asynchronous engine read shared memory.
pub(super) fn reads_by_proxy(instruction: &Instruction) -> bool {
    let has = |modifier| instruction.has(modifier);
    match instruction.opcode() {
        Opcode::CpAsync => has(Modifier::Bulk) && !has(Modifier::Prefetch),
        Opcode::Wgmma => has(Modifier::MmaAsync),
        _ => false,
    }
}

impl Decoder<'_> {
    pub(super) fn engine(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let Some(engine) = self.engine_op(instruction)? else { return Ok(()) };
        op.code = Code::Engine;
        op.aux = self.program.engine.len() as u32;
        self.program.engine.push(engine);
        Ok(())
    }

    /// `None` for what does nothing here.
    fn engine_op(&mut self, instruction: &Instruction) -> Decoded<Option<EngineOp>> {
        let has = |modifier| instruction.has(modifier);
        let operands = instruction.operands();
        let releases = !has(Modifier::Relaxed);
        Ok(Some(match instruction.opcode() {
            Opcode::Mbarrier => return self.mbarrier_op(instruction).map(Some),
            Opcode::CpAsync | Opcode::St | Opcode::Red => return self.bulk(instruction),
            Opcode::Prefetch => return Ok(None),
            Opcode::Barrier if has(Modifier::Arrive) => {
                EngineOp::ClusterArrive { releases, aligned: has(Modifier::Aligned) }
            }
            Opcode::Barrier => EngineOp::ClusterWait { acquires: releases, aligned: has(Modifier::Aligned) },
            Opcode::Membar if !has(Modifier::Proxy) => EngineOp::Fence,
            Opcode::Fence | Opcode::Membar => match () {
                () if has(Modifier::Proxy) && has(Modifier::TensormapGeneric) => {
                    let map = match operands.first() {
                        Some(operand) if has(Modifier::Acquire) => Some(self.place(operand, Region::Generic)?),
                        _ => None,
                    };
                    EngineOp::MapFence { map }
                }
                () if has(Modifier::Proxy) && (has(Modifier::Async) || has(Modifier::AsyncGeneric)) => {
                    EngineOp::ProxyFence
                }
                () if has(Modifier::Proxy) => return Ok(None),
                () => EngineOp::Fence,
            },
            Opcode::Mapa | Opcode::Getctarank => {
                let ty = instruction.ty().ok_or("an address without a type")?;
                let generic = !has(Modifier::SharedCluster);
                let address = self.value(&operands[1], ty)?;
                if instruction.opcode() == Opcode::Mapa {
                    let rank = self.value(&operands[2], Type::U32)?;
                    EngineOp::MapAddress { to: self.result(&operands[0], ty)?, address, rank, generic }
                } else {
                    EngineOp::RankOf { to: self.result(&operands[0], Type::U32)?, address, generic }
                }
            }
            Opcode::Tensormap if has(Modifier::Replace) => {
                let field = FIELDS.into_iter().find(|field| has(*field)).ok_or("this field is not executable yet")?;
                let region = if has(Modifier::SharedCta) { Region::Shared } else { Region::Generic };
                let map = self.place(&operands[0], region)?;
                let (dimension, new) = match operands {
                    [_, Operand::Integer(dimension), new] => (usize::try_from(*dimension).unwrap_or(usize::MAX), new),
                    [_, new] => (0, new),
                    _ => return Err("tensormap.replace takes a dimension and a value".into()),
                };
                let ty = if has(Modifier::Type(Type::B64)) { Type::B64 } else { Type::B32 };
                EngineOp::MapReplace { map, field, dimension, new: self.value(new, ty)? }
            }
            Opcode::Tensormap => EngineOp::MapPublish {
                to: self.place(&operands[0], Region::Global)?,
                from: self.place(&operands[1], Region::Shared)?,
            },
            _ => return Err("it has no code here".into()),
        }))
    }

    fn mbarrier_op(&mut self, instruction: &Instruction) -> Decoded<EngineOp> {
        let has = |modifier| instruction.has(modifier);
        let shared = [Modifier::Shared, Modifier::SharedCta, Modifier::SharedCluster].into_iter().any(has);
        let region = if shared { Region::Shared } else { Region::Generic };
        let operands = instruction.operands();
        let releases = !has(Modifier::Relaxed);
        let arrives = has(Modifier::Arrive) || has(Modifier::ArriveDrop);
        Ok(match () {
            () if has(Modifier::Init) => EngineOp::Init {
                barrier: self.place(&operands[0], region)?,
                count: self.value(&operands[1], Type::U32)?,
            },
            () if has(Modifier::Inval) => EngineOp::Invalidate { barrier: self.place(&operands[0], region)? },
            () if arrives => {
                let state = match &operands[0] {
                    Operand::Sink => None,
                    operand => Some(self.result(operand, Type::B64)?),
                };
                let barrier = self.place(&operands[1], region)?;
                let last = operands.get(2).map(|operand| self.value(operand, Type::U32)).transpose()?;
                let (count, expect) = if has(Modifier::ExpectTx) { (None, last) } else { (last, None) };
                EngineOp::Arrive { barrier, count, expect, drop: has(Modifier::ArriveDrop), state, releases }
            }
            () if has(Modifier::ExpectTx) || has(Modifier::CompleteTx) => EngineOp::Announce {
                barrier: self.place(&operands[0], region)?,
                bytes: self.value(&operands[1], Type::U32)?,
                completes: has(Modifier::CompleteTx),
            },
            () if has(Modifier::TestWait) || has(Modifier::TryWait) => {
                let parity = has(Modifier::Parity);
                EngineOp::Test {
                    complete: self.destination_predicate(&operands[0])?,
                    barrier: self.place(&operands[1], region)?,
                    asked: self.value(&operands[2], if parity { Type::U32 } else { Type::B64 })?,
                    parity,
                    acquires: releases,
                }
            }
            () if has(Modifier::PendingCount) => EngineOp::Pending {
                count: self.result(&operands[0], Type::U32)?,
                state: self.value(&operands[1], Type::B64)?,
            },
            () => return Err("it has no code here".into()),
        })
    }

    fn bulk(&mut self, instruction: &Instruction) -> Decoded<Option<EngineOp>> {
        let has = |modifier| instruction.has(modifier);
        let operands = instruction.operands();
        if has(Modifier::CommitGroup) {
            return Ok(Some(EngineOp::BulkCommit));
        }
        if has(Modifier::WaitGroup) {
            let Some(Operand::Integer(groups)) = operands.first() else { return Err("it waits for a number".into()) };
            let remaining = usize::try_from(*groups).map_err(|_| "a negative number of groups")?;
            return Ok(Some(EngineOp::BulkWait { remaining, read: has(Modifier::Read) }));
        }
        if instruction.opcode() == Opcode::CpAsync && has(Modifier::Mbarrier) {
            let shared = has(Modifier::Shared) || has(Modifier::SharedCta);
            let region = if shared { Region::Shared } else { Region::Generic };
            let barrier = self.place(&operands[0], region)?;
            return Ok(Some(EngineOp::CopiesArrive { barrier, counted: has(Modifier::Noinc) }));
        }
        let unknown = [
            Modifier::Im2col,
            Modifier::Im2colNoOffs,
            Modifier::Im2colW,
            Modifier::Im2colW128,
            Modifier::TileGather4,
            Modifier::TileScatter4,
            Modifier::CtaGroup1,
            Modifier::CtaGroup2,
            Modifier::CpMask,
            Modifier::MulticastClusterAll,
        ];
        if let Some(modifier) = unknown.into_iter().find(|modifier| has(*modifier)) {
            return Err(format!("copies with `{modifier}` have no code here"));
        }
        let mut copy = Copied::default();
        if has(Modifier::Reduce) || instruction.opcode() == Opcode::Red {
            let operation = REDUCTIONS.into_iter().find(|operation| has(*operation)).ok_or("an unknown reduction")?;
            copy.operation = Some(operation);
            if let Some(ty) = instruction.ty() {
                copy.reduce = Some(Reduce::new(operation, ty).ok_or_else(|| format!("no `{operation}` of {ty}"))?);
            }
        }
        let mut rest = operands.iter();
        let mut next = || rest.next().ok_or("an operand is missing");
        if instruction.opcode() != Opcode::CpAsync {
            let ty = instruction.ty().ok_or("a store without a type")?;
            let region = if has(Modifier::SharedCluster) { Region::Shared } else { Region::Generic };
            if !has(Modifier::CompleteTxBytes) {
                return Err("this asynchronous store has no code here".into());
            }
            copy.to = Some(self.place(next()?, region)?);
            let values = next()?;
            let values = match values {
                Operand::Vector(values) => values.as_slice(),
                single => std::slice::from_ref(single),
            };
            copy.values = values.iter().map(|operand| self.value(operand, ty)).collect::<Decoded<_>>()?;
            copy.value_bytes = ty.bytes();
            copy.barrier = Some(self.place(next()?, region)?);
            return Ok(Some(EngineOp::Copy(Box::new(copy))));
        }
        let tensor = has(Modifier::Tensor);
        if has(Modifier::Prefetch) {
            match next()? {
                operand @ Operand::Tensor(..) => copy.tensor = Some(self.tensor_element(operand)?),
                operand => {
                    copy.from = Some(self.place(operand, Region::Global)?);
                    copy.size = Some(self.value(next()?, Type::U32)?);
                }
            }
            return Ok(Some(EngineOp::Copy(Box::new(copy))));
        }
        // The first space named is the destination's.
        let spaces = [Modifier::Global, Modifier::SharedCta, Modifier::SharedCluster];
        let to_global = instruction.modifiers().iter().find(|m| spaces.contains(m)) == Some(&Modifier::Global);
        match (to_global, tensor) {
            (true, true) => {
                copy.tensor = Some(self.tensor_element(next()?)?);
                copy.from = Some(self.place(next()?, Region::Shared)?);
            }
            (false, true) => {
                copy.to = Some(self.place(next()?, Region::Shared)?);
                copy.tensor = Some(self.tensor_element(next()?)?);
                copy.barrier = Some(self.place(next()?, Region::Shared)?);
            }
            (true, false) => {
                copy.to = Some(self.place(next()?, Region::Global)?);
                copy.from = Some(self.place(next()?, Region::Shared)?);
                copy.size = Some(self.value(next()?, Type::U32)?);
            }
            (false, false) => {
                copy.to = Some(self.place(next()?, Region::Shared)?);
                let region = if has(Modifier::Global) { Region::Global } else { Region::Shared };
                copy.from = Some(self.place(next()?, region)?);
                copy.size = Some(self.value(next()?, Type::U32)?);
                copy.barrier = Some(self.place(next()?, Region::Shared)?);
            }
        }
        if has(Modifier::MulticastCluster) {
            copy.multicast = Some(self.value(next()?, Type::U16)?);
        }
        Ok(Some(EngineOp::Copy(Box::new(copy))))
    }

    fn tensor_element(&mut self, operand: &Operand) -> Decoded<(Place, Vec<Register>)> {
        let Operand::Tensor(address, coordinates) = operand else { return Err("a tensor was expected".into()) };
        let map = self.place_of(address, Region::Generic)?;
        let coordinates = coordinates.iter().map(|operand| self.value(operand, Type::S32)).collect::<Decoded<_>>()?;
        Ok((map, coordinates))
    }

    fn place(&mut self, operand: &Operand, region: Region) -> Decoded<Place> {
        match operand {
            Operand::Memory(address) => self.place_of(address, region),
            _ => Err("an address was expected".into()),
        }
    }

    fn place_of(&mut self, address: &Address, region: Region) -> Decoded<Place> {
        if let Base::Parameter(parameter) = address.base {
            let offset = (PARAM_WINDOW + self.param_offsets[parameter.0 as usize]) as i64;
            return Ok(Place { base: None, offset: offset.wrapping_add(address.offset), region });
        }
        let (base, offset) = self.address(&Operand::Memory(*address))?;
        Ok(Place { base, offset, region })
    }

    fn value(&mut self, operand: &Operand, ty: Type) -> Decoded<Register> {
        let (place, width) = self.source(operand, ty)?;
        Ok((place, width == Width::Wide))
    }

    fn result(&mut self, operand: &Operand, ty: Type) -> Decoded<Register> {
        let (place, width) = self.destination(operand, ty)?;
        Ok((place, width == Width::Wide))
    }
}
