//! PTX as data: instructions, a typed builder, a printer and a parser.
//!
//! A [`Kernel`] is a value: declarations (register banks, parameters, variables, labels) and a body of [`Statement`]s.
//! Each [`Instruction`] is a row of one table (the module [`form`]) with its modifiers and operands filled in; that row says
//! what the operands mean, so printer, parser, register checks, liveness and emulator agree by construction.
//!
//! Kernels come from the typed [`KernelBuilder`] or, for foreign PTX, from the parser; [`Kernel::validate`] stands between
//! them and the back ends. `Display` prints a module the driver compiles.

mod backend;
pub mod build;
mod cfg;
pub mod form;
mod instruction;
mod kernel;
mod launch;
mod lexer;
mod live;
mod modifier;
mod operand;
mod parse;
mod print;
mod tensor_map;
mod types;

pub use arch::Target;
pub use backend::Backend;
pub use build::tensor::{Along, TensorMapParam};
pub use build::{
    B16, B32, B64, Bf16, Bf16x2, Compare, Condition, E4m3x2, F16, F16x2, F32, F64, Global, KernelBuilder, Local,
    Pointer, Pred, Reg, S16, S32, S64, Scalar, Shared, SharedCluster, Src, StateSpace, U16, U32, U64, Word,
};
pub use cfg::{Block, Cfg};
pub use form::{Count, Form, Kind, Opcode, Role, Slot, TypeRule};
pub use instruction::{Guard, Instruction, InstructionError, LocationId};
pub use kernel::{
    Bank, Formal, Function, Kernel, KernelError, Location, ParameterDecl, Pointee, Space, Statement, VariableDecl,
    Version,
};
pub use launch::{Argument, Launch};
pub use live::{LiveRanges, live_registers};
pub use modifier::Modifier;
pub use operand::{Address, Base, FunctionId, Label, Operand, Parameter, Register, Special, Variable};
pub use parse::{ParseError, parse, parse_file};
pub use tensor_map::{Element, L2Promotion, OutOfBounds, Swizzle, TensorMap, TensorMapError};
pub use types::Type;
