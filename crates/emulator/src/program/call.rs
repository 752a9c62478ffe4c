//! Decoding of calls.

use ptx::{Cfg, Formal, Instruction, Kernel, Operand};

use super::{Code, Decoded, Decoder, Op};
use crate::allocate::Width;
use crate::call::{CallOp, Move, Place};

/// The functions of a kernel.
pub(super) struct Functions {
    /// The position of the first instruction of those that have code, ascending, and which function it is.
    starts: Vec<(usize, usize)>,
    /// For each function, how many calls deep it is at most; `None` for those that recursion reaches.
    depths: Vec<Option<u32>>,
    /// For each function, the register that holds which call a lane came by.
    callers: Vec<u32>,
}

impl Functions {
    /// The registers that hold callers are the narrow ones from `free` on.
    pub(super) fn of(kernel: &Kernel, cfg: &Cfg, free: u32) -> Self {
        let with_code = kernel.functions.iter().enumerate().filter(|(_, function)| function.body.is_some());
        let starts = with_code.map(|(function, _)| (cfg.function_positions[function], function)).collect();
        let count = kernel.functions.len() as u32;
        let mut functions = Self { starts, depths: Vec::new(), callers: (free..free + count).collect() };
        functions.depths = functions.depths_of(kernel);
        functions
    }

    /// The function that the instruction at a position is of; `None` for the kernel's own.
    pub(super) fn at(&self, position: usize) -> Option<usize> {
        let behind = self.starts.partition_point(|&(start, _)| start <= position);
        behind.checked_sub(1).map(|index| self.starts[index].1)
    }

    /// Where a function's code starts, if it is here. Code stands in the order of the functions.
    fn start(&self, function: usize) -> Option<usize> {
        let index = self.starts.binary_search_by_key(&function, |&(_, function)| function).ok()?;
        Some(self.starts[index].0)
    }

    /// Where each function starts, and its depth.
    pub(super) fn starts(&self) -> impl Iterator<Item = (usize, u32)> {
        self.starts.iter().map(|&(start, function)| (start, self.depths[function].unwrap_or_default()))
    }

    /// Callers come before what they call (Kahn 1962): what is left is called in circles, or by such.
    fn depths_of(&self, kernel: &Kernel) -> Vec<Option<u32>> {
        let count = kernel.functions.len();
        let mut callees = vec![Vec::new(); count];
        let mut depths = vec![None; count];
        let mut waiting = vec![0usize; count];
        for (position, instruction) in kernel.instructions().enumerate() {
            let Some(callee) = instruction.callee().map(|function| function.0 as usize) else { continue };
            match self.at(position) {
                Some(caller) => {
                    callees[caller].push(callee);
                    waiting[callee] += 1;
                }
                None => depths[callee] = Some(1),
            }
        }
        let mut ready: Vec<usize> = (0..count).filter(|&function| waiting[function] == 0).collect();
        let mut settled = vec![false; count];
        while let Some(function) = ready.pop() {
            settled[function] = true;
            let depth = depths[function].unwrap_or(1);
            depths[function] = Some(depth);
            for &callee in &callees[function] {
                depths[callee] = depths[callee].max(Some(depth + 1));
                waiting[callee] -= 1;
                if waiting[callee] == 0 {
                    ready.push(callee);
                }
            }
        }
        depths.into_iter().zip(settled).map(|(depth, settled)| depth.filter(|_| settled)).collect()
    }
}

impl Decoder<'_> {
    /// `ret`: of the kernel it ends the thread.
    pub(super) fn ret(&self, op: &mut Op) {
        match self.functions.at(self.position) {
            Some(function) => (op.code, op.a) = (Code::Return, self.functions.callers[function]),
            None => op.code = Code::Exit,
        }
    }

    pub(super) fn call(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let kernel = self.kernel;
        let id = instruction.callee().ok_or("a call without a function")?.0 as usize;
        let function = &kernel.functions[id];
        if self.functions.depths[id].is_none() {
            return Err(format!("`{}` is called recursively, and there is no stack here", function.name));
        }
        let lists = instruction.operands().iter().filter_map(|operand| match operand {
            Operand::Arguments(values) => Some(values.as_slice()),
            _ => None,
        });
        let [results, arguments] = lists.collect::<Vec<_>>()[..] else { return Err("a call has two lists".into()) };
        let mut call = CallOp {
            position: self.position,
            function: function.name.clone(),
            target: self.functions.start(id),
            arguments: Vec::new(),
            results: Vec::new(),
        };
        if call.target.is_some() {
            for (value, formal) in arguments.iter().zip(&function.params) {
                let Some((to, bytes)) = self.formal(*formal)? else { continue };
                let from = self.actual(value, *formal, bytes, false)?;
                call.arguments.push(Move { from, to, bytes });
            }
            for (value, formal) in results.iter().zip(&function.results) {
                let Some((from, bytes)) = self.formal(*formal)? else { continue };
                let to = self.actual(value, *formal, bytes, true)?;
                call.results.push(Move { from, to, bytes });
            }
        }
        op.code = Code::Call;
        op.d = self.functions.callers[id];
        op.aux = self.program.calls.len() as u32;
        self.program.calls.push(call);
        Ok(())
    }

    /// Where a function has a parameter or result, and its size; `None` for a register that it does not touch.
    fn formal(&self, formal: Formal) -> Decoded<Option<(Place, u32)>> {
        match formal {
            Formal::Variable(variable) => {
                let at = variable.0 as usize;
                let bytes = u32::try_from(self.kernel.variables[at].bytes()).map_err(|_| "a parameter is too large")?;
                Ok(Some((Place::Memory(self.variables[at]), bytes)))
            }
            Formal::Register(register) => {
                let ty = self.kernel.register_type(register).ok_or("a parameter's register is not declared")?;
                if !self.places.contains_key(&register) {
                    return Ok(None);
                }
                let (place, width) = self.register(register)?;
                match width {
                    Width::Predicate => Err("predicates are not handed to functions".into()),
                    _ => Ok(Some((Place::Register((place, width == Width::Wide)), ty.bytes()))),
                }
            }
        }
    }

    /// Where a call takes an argument from or puts a result.
    fn actual(&mut self, value: &Operand, formal: Formal, bytes: u32, written: bool) -> Decoded<Place> {
        if let Operand::VariableAddress(variable, 0) = value
            && let declared = &self.kernel.variables[variable.0 as usize]
            && declared.space == ptx::Space::Param
        {
            if declared.bytes() != u64::from(bytes) {
                return Err(format!(
                    "`{}` has {} bytes where the function has {bytes}",
                    declared.name,
                    declared.bytes()
                ));
            }
            return Ok(Place::Memory(self.variables[variable.0 as usize]));
        }
        let ty = match formal {
            Formal::Variable(variable) => self.kernel.variables[variable.0 as usize].ty,
            Formal::Register(register) => self.kernel.register_type(register).unwrap_or(ptx::Type::B32),
        };
        if ty.bytes() != bytes {
            return Err("an array is handed over by a variable in parameter space".into());
        }
        let (place, width) = if written { self.destination(value, ty)? } else { self.source(value, ty)? };
        match width {
            Width::Predicate => Err("predicates are not handed to functions".into()),
            _ => Ok(Place::Register((place, width == Width::Wide))),
        }
    }
}
