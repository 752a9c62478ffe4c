//! Calls of functions (PTX ISA 7.1; 9.7.12, `call` and `ret`).
//!
//! A function's code is there once. Each lane keeps which call it came by, in a register of the function; that suffices because
//! nothing here recurses.

use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::interpret::File;
use crate::lanes::WARP;
use crate::pattern::lanes_of;
use crate::program::Op;
use crate::warp::Warp;

/// Where a value is taken from or put.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Register((u32, bool)),
    /// An address in local memory, where variables in parameter space lie.
    Memory(u64),
}

/// An argument or a result on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub from: Place,
    pub to: Place,
    pub bytes: u32,
}

/// A call.
#[derive(Clone, Debug)]
pub(crate) struct CallOp {
    /// Of the call itself.
    pub position: usize,
    pub function: String,
    /// The function's first instruction; `None` where its code is not here.
    pub target: Option<usize>,
    pub arguments: Vec<Move>,
    pub results: Vec<Move>,
}

/// Executes a call: [`Op::aux`] is its number, which goes to the register [`Op::d`].
#[inline(never)]
pub(crate) fn call(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    let call = &worker.program.calls[op.aux as usize];
    if mask == 0 {
        warp.pc += 1;
        return Ok(());
    }
    let Some(target) = call.target else {
        let kind = FaultKind::ExternalFunction { function: call.function.clone() };
        return Err(Box::new((kind, warp.pc, warp.index, mask.trailing_zeros())));
    };
    hand_over(worker, warp, &call.arguments, mask);
    File::of(warp).set_narrow(op.d, [op.aux; WARP], mask);
    warp.branch(mask, target);
    Ok(())
}

/// Executes a `ret` of a function: the lanes go on behind the calls whose numbers the register [`Op::a`] holds.
#[inline(never)]
pub(crate) fn ret(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) {
    let calls = worker.program.calls.as_slice();
    let numbers = File::of(warp).narrow(op.a);
    let mut rest = mask;
    while rest != 0 {
        let number = numbers[rest.trailing_zeros() as usize];
        let lanes = lanes_of(rest).filter(|&lane| numbers[lane] == number).fold(0, |lanes, lane| lanes | 1 << lane);
        let call = &calls[number as usize];
        hand_over(worker, warp, &call.results, lanes);
        if lanes == mask {
            return warp.branch(mask, call.position + 1);
        }
        rest &= !lanes;
    }
    warp.scatter(mask, |lane| calls[numbers[lane] as usize].position + 1);
}

fn hand_over(worker: &mut Worker<'_>, warp: &mut Warp, moves: &[Move], mask: u32) {
    let size = worker.program.local_bytes as usize;
    let first = warp.index * WARP;
    let at = |lane: usize, address: u64| (first + lane) * size + address as usize;
    for &Move { from, to, bytes } in moves {
        let bytes = bytes as usize;
        let mut file = File::of(warp);
        match (from, to) {
            (Place::Register(from), Place::Register(to)) => {
                let values = file.full(from);
                file.set(to, values, mask);
            }
            (Place::Register(from), Place::Memory(to)) => {
                let values = file.full(from);
                for lane in lanes_of(mask) {
                    let start = at(lane, to);
                    worker.local[start..start + bytes].copy_from_slice(&values[lane].to_le_bytes()[..bytes]);
                }
            }
            (Place::Memory(from), Place::Register(to)) => {
                let mut values = [0; WARP];
                for lane in lanes_of(mask) {
                    let start = at(lane, from);
                    let held = worker.local[start..start + bytes].iter().rev();
                    values[lane] = held.fold(0, |value, byte| value << 8 | u64::from(*byte));
                }
                file.set(to, values, mask);
            }
            (Place::Memory(from), Place::Memory(to)) => {
                for lane in lanes_of(mask) {
                    let start = at(lane, from);
                    worker.local.copy_within(start..start + bytes, at(lane, to));
                }
            }
        }
    }
}
