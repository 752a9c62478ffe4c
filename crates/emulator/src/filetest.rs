//! Tests that are one `.ptx` file each: the source, its launches, and what must come of them.
//!
//! `docs/filetests.md` describes the format. A file is read by [`FileTest::parse`]; [`FileTest::check`] hands each
//! [`Run`] to a back end, which is a function: [`emulate`], or one that launches on a chip.

mod expression;
mod map;

use std::collections::HashMap;
use std::fmt;

use arch::Sm;
use ptx::{Argument, Kernel, Launch, TensorMap, Type};
use thiserror::Error;

use crate::{Counters, Level, Memory, MemoryError, Options, Policy, RunError, run};
use expression::{Expression, Reader, Scope, Value};

/// Elements that a buffer of a test may have.
const MAX_ELEMENTS: u64 = 1 << 24;

/// A test file.
#[derive(Debug)]
pub struct FileTest {
    kernels: Vec<Kernel>,
    runs: Vec<Run>,
    /// The lines with the mark `// HERE`.
    marked: Vec<u32>,
}

/// One launch of a file and what must come of it.
#[derive(Clone, Debug)]
pub struct Run {
    /// Where the file asks for it, counted from 1.
    pub line: u32,
    /// The architecture whose rules apply, and the lowest it may run on.
    pub sm: Sm,
    /// How asynchronous work completes where that can be chosen.
    pub policy: Policy,
    /// The kind of fault it must end in (see [`RunError::kind`]); on a chip such a run is not made.
    pub fault: Option<String>,
    kernel: usize,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    dynamic_shared: u32,
    budget: Option<u64>,
    global_races: bool,
    lane_races: bool,
    stale_copies: bool,
    arguments: Vec<NamedArgument>,
    expectations: Vec<Expectation>,
    counts: Vec<Count>,
}

#[derive(Clone, Debug)]
struct NamedArgument {
    name: String,
    ty: Type,
    /// `None` for a scalar.
    elements: Option<u64>,
    /// `None` for a buffer nothing has written.
    contents: Option<Contents>,
    /// A tensor map: the buffer it is of, and the map with an address from the buffer's start.
    map: Option<(String, TensorMap)>,
    line: u32,
}

#[derive(Clone, Debug)]
enum Contents {
    List(Vec<Expression>),
    Each(Expression),
}

#[derive(Clone, Debug)]
struct Expectation {
    name: String,
    range: Option<(u64, u64)>,
    /// Absolute; without it the bits must be equal, save that a NaN is as good as another.
    tolerance: Option<f64>,
    contents: Contents,
    line: u32,
}

#[derive(Clone, Debug)]
struct Count {
    name: String,
    level: Level,
    value: u64,
    line: u32,
}

/// Why a file is not a test.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {message}")]
pub struct FileTestError {
    /// Counted from 1.
    pub line: u32,
    /// What is wrong.
    pub message: String,
}

/// What came of a run that must not have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Disagreement(
    /// One message for each expectation that failed, with its line.
    pub Vec<String>,
);

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

/// What a back end is asked to do.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The run it belongs to.
    pub run: &'a Run,
    /// One for each parameter.
    pub arguments: Vec<CallArgument>,
}

/// An argument of a [`Call`].
#[derive(Clone, Debug)]
pub enum CallArgument {
    /// A pointer to so many bytes of global memory.
    Buffer {
        /// What it holds; zeros where it is not `written`.
        bytes: Vec<u8>,
        /// Whether anything wrote it before the launch.
        written: bool,
    },
    /// A value.
    Value(Argument),
    /// A tensor map.
    Map {
        /// Which of the buffers it is of, counted from 0.
        buffer: usize,
        /// The map; its address counts from the buffer's start.
        map: TensorMap,
    },
}

/// What came of a [`Call`].
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The buffers afterwards, in the order of the arguments.
    pub buffers: Vec<Vec<u8>>,
    /// What was counted as the PTX states it and after the merge; without it the counts of the file are not checked.
    pub counters: Option<[Counters; 2]>,
}

/// How a [`Call`] ended when not in an [`Outcome`].
#[derive(Clone, Debug)]
pub struct Stop {
    /// The kind of fault or error, as [`RunError::kind`] names it.
    pub kind: &'static str,
    /// The line of the file it happened on, when that is known.
    pub line: Option<u32>,
    /// For people.
    pub message: String,
}

impl From<RunError> for Stop {
    fn from(error: RunError) -> Self {
        let line = match &error {
            RunError::Fault(fault) => fault.place.as_ref().map(|(_, line)| *line),
            _ => None,
        };
        Self { kind: error.kind(), line, message: error.to_string() }
    }
}

impl From<MemoryError> for Stop {
    fn from(error: MemoryError) -> Self {
        Self { kind: "memory", line: None, message: error.to_string() }
    }
}

impl Call<'_> {
    /// The launch, once a back end has put the buffers at these addresses (in order).
    pub fn launch(&self, addresses: &[u64]) -> Launch<'_> {
        let mut next = addresses.iter().copied();
        let argument = |argument: &CallArgument| match argument {
            CallArgument::Buffer { .. } => Argument::Pointer(next.next().unwrap_or_default()),
            CallArgument::Value(value) => value.clone(),
            CallArgument::Map { buffer, map } => {
                let base = addresses.get(*buffer).copied().unwrap_or_default();
                Argument::TensorMap(Box::new(TensorMap { address: base.wrapping_add(map.address), ..map.clone() }))
            }
        };
        Launch {
            kernel: self.kernel,
            grid: self.run.grid,
            block: self.run.block,
            cluster: self.run.cluster,
            dynamic_shared: self.run.dynamic_shared,
            arguments: self.arguments.iter().map(argument).collect(),
        }
    }
}

/// A call's buffers in emulated memory.
#[derive(Debug)]
pub struct Placed {
    /// The memory, with the variables of the kernel's module.
    pub memory: Memory,
    /// Where each buffer is, in the order of the arguments.
    pub addresses: Vec<u64>,
    sizes: Vec<u64>,
}

impl Placed {
    /// Places the buffers of a call.
    ///
    /// # Errors
    /// When there is no room.
    pub fn new(call: &Call<'_>) -> Result<Self, MemoryError> {
        let mut placed = Self { memory: Memory::new(), addresses: Vec::new(), sizes: Vec::new() };
        for argument in &call.arguments {
            if let CallArgument::Buffer { bytes, written } = argument {
                let size = bytes.len() as u64;
                let address = if *written { placed.memory.alloc_bytes(bytes)? } else { placed.memory.alloc(size)? };
                placed.addresses.push(address);
                placed.sizes.push(size);
            }
        }
        placed.memory.load(call.kernel)?;
        Ok(placed)
    }

    /// What the buffers hold.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn buffers(&self) -> Result<Vec<Vec<u8>>, MemoryError> {
        self.addresses.iter().zip(&self.sizes).map(|(&address, &bytes)| self.memory.read(address, bytes)).collect()
    }
}

/// Makes a call on the emulator.
///
/// # Errors
/// As [`run`].
pub fn emulate(call: &Call<'_>) -> Result<Outcome, Stop> {
    let placed = Placed::new(call)?;
    let mut options = Options::new(call.run.sm);
    options.policy = call.run.policy;
    options.budget_per_cta = call.run.budget.unwrap_or(options.budget_per_cta);
    options.global_races = call.run.global_races;
    options.lane_races = call.run.lane_races;
    options.stale_copies = call.run.stale_copies;
    let report = run(&placed.memory, &call.launch(&placed.addresses), &options)?;
    let counters = [Level::Ptx, Level::Merged].map(|level| report.counters(call.kernel, level));
    Ok(Outcome { buffers: placed.buffers()?, counters: Some(counters) })
}

impl FileTest {
    /// Reads a file. Its instructions are located in it under `file_name` where it has no `.loc`.
    ///
    /// # Errors
    /// The first thing in it that is wrong.
    pub fn parse(text: &str, file_name: &str) -> Result<Self, FileTestError> {
        let kernels = ptx::parse_file(text, file_name)
            .map_err(|error| FileTestError { line: error.line as u32, message: error.message })?;
        let mut test = Self { kernels, runs: Vec::new(), marked: Vec::new() };
        // What stands before the first run is of every run.
        let mut common = Run {
            line: 1,
            sm: Sm::Sm75,
            policy: Policy::default(),
            fault: None,
            kernel: 0,
            grid: [1; 3],
            block: [32, 1, 1],
            cluster: [1; 3],
            dynamic_shared: 0,
            budget: None,
            global_races: false,
            lane_races: false,
            stale_copies: false,
            arguments: Vec::new(),
            expectations: Vec::new(),
            counts: Vec::new(),
        };
        for (line, content) in (1u32..).zip(text.lines()) {
            if content.trim_end().ends_with("// HERE") {
                test.marked.push(line);
            }
            let Some((directive, rest)) = content.trim().strip_prefix("// ").and_then(|c| c.split_once(':')) else {
                continue;
            };
            let fail = |message| FileTestError { line, message };
            let rest = rest.trim();
            if directive == "RUN" {
                let run = Run { line, ..common.clone() };
                test.runs.push(test.launch(run, rest).map_err(fail)?);
                continue;
            }
            let run = test.runs.last_mut().unwrap_or(&mut common);
            match directive {
                "MAP" => run.arguments.push(map::argument(rest, line).map_err(fail)?),
                "ARG" => run.arguments.push(argument(rest, line).map_err(fail)?),
                "EXPECT" => run.expectations.push(expectation(rest, line).map_err(fail)?),
                "COUNT" => run.counts.push(count(rest, line).map_err(fail)?),
                "FAULT" => run.fault = Some(rest.to_owned()),
                other if other.bytes().all(|byte| byte.is_ascii_uppercase()) => {
                    let known = "RUN, ARG, MAP, EXPECT, COUNT and FAULT";
                    return Err(fail(format!("there is no directive `{other}`; there are {known}")));
                }
                _ => {}
            }
        }
        if test.runs.is_empty() {
            return Err(FileTestError { line: 1, message: "there is no `// RUN:`".into() });
        }
        Ok(test)
    }

    /// The launches the file asks for.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    fn launch(&self, mut run: Run, text: &str) -> Result<Run, String> {
        let mut kernel = None;
        for setting in text.split_whitespace() {
            let (key, value) = setting.split_once('=').ok_or_else(|| format!("`{setting}` is no `key=value`"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{key} is `{value}`; it must be a number"));
            match key {
                "sm" => run.sm = value.parse().map_err(|error: arch::UnknownSm| error.to_string())?,
                "grid" => {
                    run.grid =
                        triple(value).ok_or_else(|| format!("grid is `{value}`; one is written as 4 or 2x3x4"))?
                }
                "block" => {
                    run.block =
                        triple(value).ok_or_else(|| format!("block is `{value}`; one is written as 32 or 8x4"))?
                }
                "cluster" => {
                    run.cluster =
                        triple(value).ok_or_else(|| format!("cluster is `{value}`; one is written as 2 or 2x2"))?
                }
                "shared" => run.dynamic_shared = number()? as u32,
                "races" if value == "global" => run.global_races = true,
                "races" if value == "lanes" => run.lane_races = true,
                "copies" if value == "stale" => run.stale_copies = true,
                "budget" => run.budget = Some(number()?),
                "policy" => {
                    run.policy = match value.split_once(':') {
                        None if value == "eager" => Policy::Eager,
                        None if value == "lazy" => Policy::Lazy,
                        Some(("random", seed)) => {
                            Policy::Random(seed.parse().map_err(|_| format!("the seed `{seed}` is no number"))?)
                        }
                        _ => return Err(format!("policy is `{value}`; policies are eager, lazy and random:SEED")),
                    }
                }
                "kernel" => kernel = Some(value),
                _ => {
                    return Err(format!(
                        "there is no setting `{key}`; there are sm, grid, block, cluster, shared, policy, budget, races=global, races=lanes, copies=stale and kernel"
                    ));
                }
            }
        }
        run.kernel = match kernel {
            Some(name) => self
                .kernels
                .iter()
                .position(|kernel| kernel.name == name)
                .ok_or_else(|| format!("there is no kernel `{name}`"))?,
            None if self.kernels.len() == 1 => 0,
            None => {
                return Err(format!("the file has {} kernels; the run must name one: kernel=NAME", self.kernels.len()));
            }
        };
        Ok(run)
    }

    /// Makes a run and compares what comes of it with what the file expects.
    ///
    /// # Errors
    /// Everything that is not as expected.
    pub fn check(
        &self,
        run: &Run,
        backend: impl FnOnce(&Call<'_>) -> Result<Outcome, Stop>,
    ) -> Result<(), Disagreement> {
        let one = |line: u32, message: String| Disagreement(vec![format!("line {line}: {message}")]);
        let mut scope = HashMap::new();
        let mut initial = HashMap::new();
        let mut arguments = Vec::new();
        for argument in &run.arguments {
            if let Some((of, map)) = &argument.map {
                let buffers = run.arguments.iter().filter(|other| other.elements.is_some());
                let buffer = buffers.map(|other| &other.name).position(|name| name == of);
                let buffer = buffer.ok_or_else(|| one(argument.line, format!("there is no buffer `{of}`")))?;
                arguments.push(CallArgument::Map { buffer, map: map.clone() });
                continue;
            }
            let made = argument.make(&mut scope, &mut initial).map_err(|message| one(argument.line, message))?;
            arguments.push(made);
        }
        let call = Call { kernel: &self.kernels[run.kernel], run, arguments };
        let outcome = match (backend(&call), &run.fault) {
            (Ok(_), Some(kind)) => {
                return Err(one(run.line, format!("it ended well where the fault `{kind}` was expected")));
            }
            (Err(stop), None) => return Err(one(run.line, stop.message)),
            (Err(stop), Some(kind)) => {
                let place = stop.line.is_none_or(|line| self.marked.is_empty() || self.marked.contains(&line));
                return match stop.kind == kind && place {
                    true => Ok(()),
                    false => Err(one(
                        run.line,
                        format!(
                            "expected `{kind}` on line(s) {:?}, found `{}`: {}",
                            self.marked, stop.kind, stop.message
                        ),
                    )),
                };
            }
            (Ok(outcome), None) => outcome,
        };
        let mut wrong = Vec::new();
        for expectation in &run.expectations {
            if let Err(message) = expectation.check(run, &outcome, &scope, &initial) {
                wrong.push(format!("line {}: {message}", expectation.line));
            }
        }
        for count in outcome.counters.iter().flat_map(|counters| run.counts.iter().map(move |count| (counters, count)))
        {
            let (counters, count) = count;
            let at = match count.level {
                Level::Ptx => counters[0],
                Level::Merged => counters[1],
            };
            match at.named().into_iter().find(|(name, _)| *name == count.name) {
                Some((_, found)) if found == count.value => {}
                Some((_, found)) => {
                    wrong.push(format!("line {}: {} is {found}, expected {}", count.line, count.name, count.value))
                }
                None => wrong.push(format!("line {}: there is no counter `{}`", count.line, count.name)),
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(Disagreement(wrong)) }
    }
}

/// `4`, `4x2` or `4x2x1`; what is left out is 1.
fn triple(text: &str) -> Option<[u32; 3]> {
    let mut triple = [1; 3];
    for (index, part) in text.split('x').enumerate() {
        *triple.get_mut(index)? = part.parse().ok()?;
    }
    Some(triple)
}

fn contents(reader: &mut Reader<'_>) -> Result<Contents, String> {
    if !reader.accept("[") {
        return Ok(Contents::Each(reader.expression()?));
    }
    let mut list = vec![reader.expression()?];
    while reader.accept(",") {
        list.push(reader.expression()?);
    }
    reader.expect("]")?;
    Ok(Contents::List(list))
}

/// A constant expression.
fn constant(reader: &mut Reader<'_>) -> Result<Value, String> {
    reader.expression()?.evaluate(&mut Scope { numbers: HashMap::new(), buffers: &HashMap::new() })
}

/// `x: f32[64] = i`, `y: f32[64]` or `n: u32 = 7`
fn argument(text: &str, line: u32) -> Result<NamedArgument, String> {
    let mut reader = Reader::new(text);
    let name = reader.name()?.to_owned();
    reader.expect(":")?;
    let ty = reader.name()?;
    let ty =
        Type::from_name(ty).filter(|ty| *ty != Type::Pred).ok_or_else(|| format!("`{ty}` is no type of a number"))?;
    let elements = if reader.accept("[") {
        let elements = constant(&mut reader)?.integer();
        reader.expect("]")?;
        let allowed = u64::try_from(elements).ok().filter(|elements| *elements <= MAX_ELEMENTS);
        Some(allowed.ok_or_else(|| format!("`{name}` has {elements} elements; allowed are 0 to {MAX_ELEMENTS}"))?)
    } else {
        None
    };
    let contents = if reader.accept("=") { Some(contents(&mut reader)?) } else { None };
    reader.end()?;
    if elements.is_none() && contents.is_none() {
        return Err(format!("the scalar `{name}` needs a value"));
    }
    Ok(NamedArgument { name, ty, elements, contents, map: None, line })
}

/// `y = x[i] + 1`, `y[0..4] = [1, 2, 3, 4]` or `y ~ 1e-6 = exp2(x[i])`
fn expectation(text: &str, line: u32) -> Result<Expectation, String> {
    let mut reader = Reader::new(text);
    let name = reader.name()?.to_owned();
    let mut range = None;
    if reader.accept("[") {
        // The bounds stand alone: `0..4` would read as a number.
        let rest = text.split_once('[').map_or("", |(_, rest)| rest);
        let (bounds, rest) = rest.split_once(']').ok_or("the range has no `]`")?;
        let (from, to) =
            bounds.split_once("..").ok_or_else(|| format!("`{bounds}` is no range; one is written as 0..4"))?;
        let bound = |text: &str| text.trim().parse().map_err(|_| format!("`{text}` is no number"));
        range = Some((bound(from)?, bound(to)?));
        reader = Reader::new(rest);
    }
    let tolerance = if reader.accept("~") { Some(constant(&mut reader)?.through(Type::F64)) } else { None };
    reader.expect("=")?;
    let contents = contents(&mut reader)?;
    reader.end()?;
    let tolerance = tolerance.map(|value| if let Value::Float(value) = value { value } else { 0.0 });
    Ok(Expectation { name, range, tolerance, contents, line })
}

/// `shared_load_wavefronts merged = 8`
fn count(text: &str, line: u32) -> Result<Count, String> {
    let mut reader = Reader::new(text);
    let name = reader.name()?.to_owned();
    let level = match reader.name()? {
        "ptx" => Level::Ptx,
        "merged" => Level::Merged,
        other => return Err(format!("`{other}` is no level; levels are ptx and merged")),
    };
    reader.expect("=")?;
    let value = constant(&mut reader)?.integer() as u64;
    reader.end()?;
    Ok(Count { name, level, value, line })
}

type Scalars = HashMap<String, Value>;
type Buffers = HashMap<String, Vec<Value>>;

impl Contents {
    /// The elements `range` of a buffer.
    fn values(&self, range: std::ops::Range<u64>, scalars: &Scalars, buffers: &Buffers) -> Result<Vec<Value>, String> {
        let numbers = scalars.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let mut scope = Scope { numbers, buffers };
        match self {
            Self::List(list) if list.len() as u64 == range.end - range.start => {
                list.iter().map(|expression| expression.evaluate(&mut scope)).collect()
            }
            Self::List(list) => {
                Err(format!("{} values are given for {} elements", list.len(), range.end - range.start))
            }
            Self::Each(expression) => range
                .map(|index| {
                    scope.numbers.insert("i", Value::Integer(index as i64));
                    expression.evaluate(&mut scope)
                })
                .collect(),
        }
    }
}

impl NamedArgument {
    fn make(&self, scalars: &mut Scalars, buffers: &mut Buffers) -> Result<CallArgument, String> {
        let count = self.elements.unwrap_or(1);
        let Some(contents) = &self.contents else {
            return Ok(CallArgument::Buffer {
                bytes: vec![0; (count * u64::from(self.ty.bytes())) as usize],
                written: false,
            });
        };
        let values = contents.values(0..count, scalars, buffers)?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.encode(self.ty)).collect();
        let values: Vec<Value> = values.into_iter().map(|value| value.through(self.ty)).collect();
        if self.elements.is_some() {
            buffers.insert(self.name.clone(), values);
            return Ok(CallArgument::Buffer { bytes, written: true });
        }
        scalars.insert(self.name.clone(), values[0]);
        Ok(CallArgument::Value(Argument::Bytes(bytes)))
    }
}

impl Expectation {
    fn check(&self, run: &Run, outcome: &Outcome, scalars: &Scalars, buffers: &Buffers) -> Result<(), String> {
        let mut named = run.arguments.iter().filter(|argument| argument.elements.is_some()).zip(&outcome.buffers);
        let (argument, bytes) = named
            .find(|(argument, _)| argument.name == self.name)
            .ok_or_else(|| format!("there is no buffer `{}`", self.name))?;
        let elements = argument.elements.unwrap_or_default();
        let (from, to) = self.range.unwrap_or((0, elements));
        if from > to || to > elements {
            return Err(format!("`{}` has {elements} elements; {from}..{to} is outside", self.name));
        }
        let width = argument.ty.bytes() as usize;
        let expected = self.contents.values(from..to, scalars, buffers)?;
        let mut wrong = Vec::new();
        for ((index, expected), found) in (from..).zip(&expected).zip(bytes.chunks(width).skip(from as usize)) {
            let (expected, found) = (expected.through(argument.ty), Value::decode(found, argument.ty));
            if !self.agrees(expected, found) {
                wrong.push(format!("{}[{index}] is {found}, expected {expected}", self.name));
            }
        }
        // The first few say enough.
        let shown = wrong.len().min(4);
        match wrong.len() {
            0 => Ok(()),
            count if count > shown => Err(format!("{} and {} more", wrong[..shown].join(", "), count - shown)),
            _ => Err(wrong.join(", ")),
        }
    }

    fn agrees(&self, expected: Value, found: Value) -> bool {
        match (expected, found, self.tolerance) {
            (Value::Float(a), Value::Float(b), _) if a.is_nan() || b.is_nan() => a.is_nan() && b.is_nan(),
            (Value::Float(a), Value::Float(b), Some(tolerance)) => a == b || (a - b).abs() <= tolerance,
            (Value::Float(a), Value::Float(b), None) => a.to_bits() == b.to_bits(),
            _ => expected == found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
// ARG: x: f32[4] = 2 * i
// ARG: y: f32[4]
// ARG: n: u32 = 3
// RUN: sm=75 block=4
// EXPECT: y = x[i] + n
// COUNT: global_load_requests ptx = 1
.version 8.0
.target sm_75
.address_size 64
.entry k(.param .u64 x, .param .u64 y, .param .u32 n) {
    .reg .b64 %d<4>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [x];
    ld.param.u64 %d1, [y];
    ld.param.u32 %r0, [n];
    cvt.rn.f32.u32 %r0, %r0;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d0, %d0, %d2;
    add.u64 %d1, %d1, %d2;
    ld.global.f32 %r2, [%d0]; // HERE
    add.f32 %r2, %r2, %r0;
    st.global.f32 [%d1], %r2;
    ret;
}
";

    fn disagreement(from: &str, to: &str) -> String {
        let test = FileTest::parse(&SOURCE.replace(from, to), "k.ptx").unwrap();
        let mut messages = String::new();
        for run in test.runs() {
            messages += &test.check(run, emulate).err().map_or(String::new(), |wrong| wrong.to_string());
        }
        messages
    }

    #[test]
    fn expectations_are_checked() {
        assert_eq!(disagreement("", ""), "");
        assert_eq!(
            disagreement("x[i] + n", "x[i] + 4"),
            "line 5: y[0] is 3, expected 4, y[1] is 5, expected 6, y[2] is 7, expected 8, y[3] is 9, expected 10"
        );
        assert_eq!(disagreement("EXPECT: y =", "EXPECT: y ~ 1 = 1 +"), "");
        assert_eq!(disagreement("EXPECT: y =", "EXPECT: y[1..3] ="), "");
        assert_eq!(disagreement("x[i] + n", "[3, 5, 7, 9]"), "");
        assert_eq!(disagreement("x[i] + n", "[3, 5]"), "line 5: 2 values are given for 4 elements");
        assert_eq!(disagreement("ptx = 1", "ptx = 2"), "line 6: global_load_requests is 1, expected 2");
        assert_eq!(disagreement("global_load_requests", "loads"), "line 6: there is no counter `loads`");
        assert_eq!(disagreement("y = x", "z = x"), "line 5: there is no buffer `z`");
        assert!(disagreement("block=4", "block=5").starts_with("line 4: 4 bytes at global address"));
        assert_eq!(disagreement("block=4", "block=5\n// FAULT: out_of_bounds"), "");
        assert!(
            disagreement("block=4", "block=5\n// FAULT: race")
                .starts_with("line 4: expected `race` on line(s) [21], found `out_of_bounds`: 4 bytes")
        );
        assert!(
            disagreement("block=4", "block=4\n// FAULT: race")
                .contains("it ended well where the fault `race` was expected")
        );
    }

    #[test]
    fn mistakes_in_files_are_named() {
        for (from, to, message) in [
            ("// RUN: sm=75 block=4\n", "", "line 1: there is no `// RUN:`"),
            ("sm=75", "sm=1", "line 4: "),
            ("block=4", "block=4x4x4x4", "line 4: block is `4x4x4x4`; one is written as 32 or 8x4"),
            ("block=4", "color=4", "line 4: there is no setting `color`"),
            ("// COUNT", "// COUNTS", "line 6: there is no directive `COUNTS`"),
            ("f32[4] = 2 * i", "f99[4]", "line 1: `f99` is no type of a number"),
            ("= 2 * i", "= 2 * ", "line 1: expected a name before ``"),
            ("u32 = 3", "u32", "line 3: the scalar `n` needs a value"),
            ("f32[4]", "f32[1 << 30]", "line 1: `x` has 1073741824 elements; allowed are 0 to 16777216"),
            ("add.f32", "sum.f32", "line 21: unknown form `sum.f32`"),
        ] {
            let error = FileTest::parse(&SOURCE.replacen(from, to, 1), "k.ptx").unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn expressions() {
        for (text, value) in [
            ("1 + 2 * 3", Value::Integer(7)),
            ("-(1 << 4) >> 1 | 3", Value::Integer(-5)),
            ("7 / 2 + 7 % 4", Value::Integer(6)),
            ("7 / 2.0", Value::Float(3.5)),
            ("1 < 2 && 2 <= 2 && 3 != 4 ? 10 : 20", Value::Integer(10)),
            ("sum(j, 5, j * j)", Value::Integer(30)),
            ("u8(-1) + s8(255)", Value::Integer(254)),
            ("f16(0.1)", Value::Float(0.0999755859375)),
            ("max(abs(-3), 2)", Value::Integer(3)),
            ("popc(0xff) + exp2(3)", Value::Float(16.0)),
        ] {
            assert_eq!(constant(&mut Reader::new(text)), Ok(value), "{text}");
        }
        for text in ["1 / 0", "x", "f(1)", "1 +", "(1", "1.5 << 2"] {
            assert!(constant(&mut Reader::new(text)).is_err(), "{text}");
        }
        assert!(constant(&mut Reader::new(&"(".repeat(100_000))).is_err());
        assert!(constant(&mut Reader::new(&"-".repeat(100_000))).is_err());
    }
}
