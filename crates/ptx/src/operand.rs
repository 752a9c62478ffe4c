//! What an instruction works on.

use crate::Type;

/// A register: the `index`th of a declared bank, as `%r17` of `.reg .b32 %r<32>;`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register {
    /// Which declaration of the kernel, an index into [`Kernel::banks`](crate::Kernel::banks).
    pub bank: u32,
    /// Which register of that declaration.
    pub index: u32,
}

/// A position in the code, an index into [`Kernel::labels`](crate::Kernel::labels).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Label(pub u32);

/// A variable in some state space, an index into [`Kernel::variables`](crate::Kernel::variables).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variable(pub u32);

/// A function the kernel calls, an index into [`Kernel::functions`](crate::Kernel::functions).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FunctionId(pub u32);

/// A kernel parameter, an index into [`Kernel::params`](crate::Kernel::params).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Parameter(pub u32);

macro_rules! special_registers {
    ($($variant:ident $text:literal $ty:ident),+ $(,)?) => {
        /// A read-only register of the machine (PTX ISA, section 10).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the variants are the manual's special registers, under its own names")]
        pub enum Special { $($variant),+ }

        impl Special {
            /// The name with its percent sign, as `%tid.x`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The special register with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$variant),)+ _ => None }
            }

            /// The type it reads as.
            pub const fn ty(self) -> Type {
                match self { $(Self::$variant => Type::$ty),+ }
            }
        }
    };
}

special_registers! {
    TidX "%tid.x" U32, TidY "%tid.y" U32, TidZ "%tid.z" U32,
    NtidX "%ntid.x" U32, NtidY "%ntid.y" U32, NtidZ "%ntid.z" U32,
    CtaidX "%ctaid.x" U32, CtaidY "%ctaid.y" U32, CtaidZ "%ctaid.z" U32,
    NctaidX "%nctaid.x" U32, NctaidY "%nctaid.y" U32, NctaidZ "%nctaid.z" U32,
    Laneid "%laneid" U32, Warpid "%warpid" U32, Nwarpid "%nwarpid" U32,
    LanemaskEq "%lanemask_eq" U32, LanemaskLt "%lanemask_lt" U32, LanemaskLe "%lanemask_le" U32,
    LanemaskGt "%lanemask_gt" U32, LanemaskGe "%lanemask_ge" U32,
    ClusteridX "%clusterid.x" U32, ClusteridY "%clusterid.y" U32, ClusteridZ "%clusterid.z" U32,
    NclusteridX "%nclusterid.x" U32, NclusteridY "%nclusterid.y" U32, NclusteridZ "%nclusterid.z" U32,
    ClusterCtaidX "%cluster_ctaid.x" U32, ClusterCtaidY "%cluster_ctaid.y" U32, ClusterCtaidZ "%cluster_ctaid.z" U32,
    ClusterNctaidX "%cluster_nctaid.x" U32, ClusterNctaidY "%cluster_nctaid.y" U32, ClusterNctaidZ "%cluster_nctaid.z" U32,
    ClusterCtarank "%cluster_ctarank" U32, ClusterNctarank "%cluster_nctarank" U32,
    IsExplicitCluster "%is_explicit_cluster" Pred,
    Gridid "%gridid" U64,
    Smid "%smid" U32, Nsmid "%nsmid" U32,
    DynamicSmemSize "%dynamic_smem_size" U32, TotalSmemSize "%total_smem_size" U32,
    Clock "%clock" U32, ClockHi "%clock_hi" U32, Clock64 "%clock64" U64, Globaltimer "%globaltimer" U64,
    GlobaltimerLo "%globaltimer_lo" U32, GlobaltimerHi "%globaltimer_hi" U32,
    AggrSmemSize "%aggr_smem_size" U32, CurrentGraphExec "%current_graph_exec" U64,
    ReservedSmemOffsetBegin "%reserved_smem_offset_begin" B32, ReservedSmemOffsetEnd "%reserved_smem_offset_end" B32,
    ReservedSmemOffsetCap "%reserved_smem_offset_cap" B32,
}

/// What an address counts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Base {
    /// The value of a register.
    Register(Register),
    /// The start of a variable.
    Variable(Variable),
    /// The start of a kernel parameter.
    Parameter(Parameter),
    /// Nothing: the offset is the address.
    Absolute,
}

/// A memory operand, `[base + offset]` with the offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// What the offset is added to.
    pub base: Base,
    /// In bytes.
    pub offset: i64,
}

/// One operand of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A register, read or written.
    Register(Register),
    /// A predicate register read as its complement, `!%p1`.
    NotPredicate(Register),
    /// Two results written at once, `%p1|%p2` (PTX ISA 9.7.7, `setp`; also `shfl.sync`); `None` is `_`.
    RegisterPair(Option<Register>, Option<Register>),
    /// A special register.
    Special(Special),
    /// An integer constant: 64 bits, read in the width and sign the instruction's type asks for.
    Integer(i64),
    /// A single-precision constant by its bits, `0f3F800000`.
    F32(u32),
    /// A double-precision constant by its bits, `0d3FF0000000000000`.
    F64(u64),
    /// The address of a variable plus an offset in bytes, as a value.
    VariableAddress(Variable, i64),
    /// The address of a kernel parameter plus an offset in bytes, as a value.
    ParameterAddress(Parameter, i64),
    /// A memory operand.
    Memory(Address),
    /// An element of a tensor, `[%rd1, {%r1, %r2}]`: the address of the tensor map, and the coordinates from the innermost on.
    Tensor(Address, Vec<Operand>),
    /// Several registers or constants as one, `{%r1, %r2}`.
    Vector(Vec<Operand>),
    /// A branch target.
    Label(Label),
    /// The targets of `brx.idx`, by their index.
    Labels(Vec<Label>),
    /// What is called.
    Function(FunctionId),
    /// What a call hands over or gets back, `(%r1, param0)`: registers, constants, and variables in parameter space.
    Arguments(Vec<Operand>),
    /// `_`: a result nobody wants.
    Sink,
}

impl From<Register> for Operand {
    fn from(register: Register) -> Self {
        Self::Register(register)
    }
}

impl Operand {
    /// Calls `visit` with every register in the operand, those of addresses included.
    pub fn for_each_register(&self, visit: &mut impl FnMut(Register)) {
        match self {
            Self::Register(r) | Self::NotPredicate(r) => visit(*r),
            Self::RegisterPair(a, b) => a.iter().chain(b).for_each(|r| visit(*r)),
            Self::Memory(Address { base: Base::Register(r), .. }) => visit(*r),
            Self::Tensor(Address { base, .. }, coordinates) => {
                if let Base::Register(r) = base {
                    visit(*r);
                }
                coordinates.iter().for_each(|coordinate| coordinate.for_each_register(visit));
            }
            Self::Vector(elements) | Self::Arguments(elements) => {
                elements.iter().for_each(|element| element.for_each_register(visit))
            }
            _ => {}
        }
    }
}
