//! The instruction table: every form an opcode may take, each said once.
//!
//! A row mirrors the manual's syntax line. The parser accepts what matches a row, the builder emits what matches a row,
//! the printer prints it, and liveness, register checks and the emulator learn from it which operands are written.
//!
//! # How a row reads
//!
//! Modifiers, separated by spaces, in the manual's order: `rn|rz` is a choice, a trailing `?` makes it optional,
//! `$name` is a class from `class`. Operands, separated by spaces:
//!
//! | token | meaning |
//! |---|---|
//! | `d`, `a` | a register written; a register or constant read: of the instruction's first type |
//! | `a2` | read, of the second type (`cvt.f32.s32`: `d` is f32, `a2` is s32) |
//! | `dw`, `aw` | of twice the first type's width (`mul.wide`) |
//! | `d:b32`, `a:u32` | of that type whatever the instruction's is |
//! | `dv`, `av` | as `d`, `a`; a vector when the opcode has `.v2`, `.v4`, `.x2` or `.x4` |
//! | `dv:b32`, `av:b32` | the same, of that type |
//! | `dm`, `am` | as `d`, `a`, and also a vector that is packed or unpacked (`mov`), or an address |
//! | `d*4:f32`, `a*2:b32`, `x*2:f32` | a vector of that many registers: written; read; read and written |
//! | `d*n/2:f32` | the same, half as many as the shape has columns |
//! | `d*2x:b32` | the same, twice as many as `.x1`, `.x2`, ... says |
//! | `a*:b16` | the same, however many |
//! | `d\|p` | a register and, optionally, a predicate written together |
//! | `d&p` | a register and a predicate written together |
//! | `p`, `p\|q` | a predicate written; one and optionally its complement |
//! | `c` | a predicate read, possibly negated |
//! | `a\|c:u32` | read, of that type; or a predicate |
//! | `m` | a memory operand |
//! | `t` | an element of a tensor: the address of its map, and coordinates |
//! | `_` | nothing: the place of a result that this form does not have |
//! | `l`, `ll` | a label; labels |
//! | `f` | a function |
//! | `d()`, `a()` | what a call gets back; what it hands over |
//! | `i` | an integer constant |
//!
//! A trailing `?` makes the operand optional. `sm` and `ptx` at the end of a row say what the form needs, `on` the targets that
//! have it where later ones need not.

use std::sync::LazyLock;

use arch::Target;

use crate::{Modifier, Operand, Type, Version, instruction};

/// Whether an operand is written, read, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Written.
    Def,
    /// Read.
    Use,
    /// Read and written: an accumulator.
    Both,
}

impl Role {
    /// Whether the instruction writes it.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Use)
    }

    /// Whether the instruction reads it.
    pub const fn reads(self) -> bool {
        !matches!(self, Self::Def)
    }
}

/// How many registers a vector has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// So many.
    Exactly(u16),
    /// The columns of the instruction's shape divided by this.
    Columns(u16),
    /// So many times the `.x1`, `.x2`, ... of the instruction.
    Repeats(u16),
    /// At least one.
    Any,
}

/// How an operand's type follows from the opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeRule {
    /// The first type among the modifiers.
    First,
    /// The second.
    Second,
    /// The first, at twice the width.
    Wide,
    /// Always this one.
    Fixed(Type),
}

/// What may stand in an operand's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A register, or for a source a constant.
    Value(TypeRule),
    /// As `Value`; a vector when the opcode has `.v2`, `.v4`, `.x2` or `.x4`.
    Vector(TypeRule),
    /// As `Value`; also a vector, an address or a special register.
    Movable(TypeRule),
    /// So many registers in braces.
    Registers(TypeRule, Count),
    /// A register, or a register and a predicate; both of them where that is so.
    ValueAndPredicate(TypeRule, bool),
    /// As `Value`; or a predicate, possibly negated (`cp.async`: how many bytes are read, or whether none is).
    ValueOrPredicate(TypeRule),
    /// A predicate.
    Predicate,
    /// One predicate or two.
    PredicatePair,
    /// `[address]`.
    Memory,
    /// `[address, {coordinates}]`.
    Tensor,
    /// `_`.
    Sink,
    /// A branch target.
    Label,
    /// Branch targets.
    Labels,
    /// A function.
    Function,
    /// Values in parentheses; none of them where nothing stands.
    Arguments,
    /// An integer constant.
    Integer,
}

/// One operand place of a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Written or read.
    pub role: Role,
    /// What may stand here.
    pub kind: Kind,
    /// Whether it may be left out.
    pub optional: bool,
}

/// One row of the table.
#[derive(Debug)]
pub struct Form {
    /// The opcode this is a form of.
    pub opcode: Opcode,
    /// The modifiers as the table writes them, for messages.
    pub syntax: &'static str,
    modifiers: Vec<(Vec<Modifier>, bool)>,
    /// The operand places, in order.
    pub slots: Vec<Slot>,
    /// The lowest compute capability that has the form, times ten.
    pub min_sm: u32,
    /// Where later architectures need not have the form: the targets that do, and include those that do too.
    pub targets: Vec<Target>,
    /// The lowest PTX version that has the form.
    pub min_ptx: Version,
}

impl Form {
    /// The form of `opcode` whose modifiers these are and whose places hold these operands, and its place in the table. Where none
    /// does: the first that takes as many operands.
    pub(crate) fn find(opcode: Opcode, modifiers: &[Modifier], operands: &[Operand]) -> Option<FormId> {
        let rows = TABLE.by_opcode[opcode as usize].clone();
        let mut takes =
            rows.map(FormId).filter(|row| row.get().accepts(modifiers) && row.get().arity().contains(&operands.len()));
        let first = takes.next()?;
        let holds = |row: &FormId| instruction::misplaced(row.get(), modifiers, operands).is_none();
        if holds(&first) { Some(first) } else { takes.find(holds).or(Some(first)) }
    }

    /// Whether code for a target may use this form.
    pub fn is_on(&self, target: Target) -> bool {
        u32::from(target.sm().number()) >= self.min_sm
            && (self.targets.is_empty() || self.targets.iter().any(|&has| target.includes(has)))
    }

    /// The forms of an opcode.
    pub fn of(opcode: Opcode) -> &'static [Self] {
        let rows = TABLE.by_opcode[opcode as usize].clone();
        &TABLE.forms[usize::from(rows.start)..usize::from(rows.end)]
    }

    /// Whether this form may carry exactly these modifiers.
    pub fn accepts(&self, modifiers: &[Modifier]) -> bool {
        let mut rest = modifiers;
        for (choices, optional) in &self.modifiers {
            match rest.split_first() {
                Some((first, tail)) if choices.contains(first) => rest = tail,
                _ if *optional => {}
                _ => return false,
            }
        }
        rest.is_empty()
    }

    /// The modifiers in order: what may stand in each place, and whether the place may be left empty.
    pub fn modifiers(&self) -> impl Iterator<Item = (&[Modifier], bool)> {
        self.modifiers.iter().map(|(choices, optional)| (choices.as_slice(), *optional))
    }

    /// Every form of every opcode.
    pub fn all() -> &'static [Self] {
        &TABLE.forms
    }

    fn arity(&self) -> std::ops::RangeInclusive<usize> {
        self.slots.iter().filter(|slot| !slot.optional).count()..=self.slots.len()
    }

    /// The operand places that `count` operands fill: where optional places are left out, the first are filled first.
    pub(crate) fn places(&self, count: usize) -> impl Iterator<Item = Slot> + '_ {
        let mut spare = count.saturating_sub(*self.arity().start());
        self.slots.iter().copied().filter(move |slot| {
            let taken = !slot.optional || spare > 0;
            if slot.optional && taken {
                spare -= 1;
            }
            taken
        })
    }
}

/// A row's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FormId(u16);

impl FormId {
    pub(crate) fn get(self) -> &'static Form {
        &TABLE.forms[usize::from(self.0)]
    }
}

struct Table {
    forms: Vec<Form>,
    by_opcode: Vec<std::ops::Range<u16>>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table = Table { forms: Vec::new(), by_opcode: Vec::new() };
    for (opcode, rows) in ROWS {
        let start = table.forms.len() as u16;
        table.forms.extend(rows.iter().map(|row| row.form(*opcode)));
        table.by_opcode.push(start..table.forms.len() as u16);
    }
    table
});

struct Row {
    modifiers: &'static str,
    operands: &'static str,
    min_sm: u32,
    targets: &'static str,
    min_ptx: (u8, u8),
}

impl Row {
    fn form(&self, opcode: Opcode) -> Form {
        Form {
            opcode,
            syntax: self.modifiers,
            modifiers: self.modifiers.split_whitespace().map(choices).collect(),
            slots: self.operands.split_whitespace().map(slot).collect(),
            min_sm: self.min_sm,
            targets: self.targets.split_whitespace().map(target).collect(),
            min_ptx: Version { major: self.min_ptx.0, minor: self.min_ptx.1 },
        }
    }
}

fn target(name: &'static str) -> Target {
    name.parse().unwrap_or_else(|_| unreachable!("the table names a target `{name}` that does not exist"))
}

/// The shapes of `wgmma` of one depth (PTX ISA 9.7.15.5.2): 64 rows, 8 to 256 columns.
macro_rules! warpgroup_shapes {
    ($depth:literal: $first:literal $($columns:literal)*) => {
        concat!("m64n", $first, "k", $depth $(, "|m64n", $columns, "k", $depth)*)
    };
    ($depth:literal) => {
        warpgroup_shapes!($depth: 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168 176 184 192 200 208
            216 224 232 240 248 256)
    };
    (integer $depth:literal) => {
        warpgroup_shapes!($depth: 8 16 24 32 48 64 80 96 112 128 144 160 176 192 208 224 240 256)
    };
}

/// Named sets of modifiers that several forms share.
fn class(name: &str) -> &'static str {
    match name {
        "rnd" => "rn|rz|rm|rp",
        "irnd" => "rni|rzi|rmi|rpi",
        "icmp" => "eq|ne|lt|le|gt|ge",
        "fcmp" => "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan",
        "bool" => "and|or|xor",
        "int" => "u16|u32|u64|s16|s32|s64",
        "integer" => "u8|u16|u32|u64|s8|s16|s32|s64",
        "bits" => "b16|b32|b64",
        "memory" => "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64",
        "value" => "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64",
        "where" => "global|shared",
        "sharedx" => "shared::cta|shared::cluster",
        "wg8" => warpgroup_shapes!(8),
        "wg16" => warpgroup_shapes!(16),
        "wg32" => warpgroup_shapes!(32),
        "wgint" => warpgroup_shapes!(integer 32),
        "wgbit" => warpgroup_shapes!(integer 256),
        "fp8" => "e4m3|e5m2",
        "dim" => "1d|2d|3d|4d|5d",
        "dim3" => "3d|4d|5d",
        "scopes" => "cta|cluster|gpu|sys",
        "wide" => "b32|b64|u32|u64|s32|s64|f32|f64",
        "atomic" => "relaxed|acquire|release|acq_rel",
        "scope" => "cta|gpu|sys",
        "l1" => "L1::evict_first|L1::evict_last|L1::evict_normal|L1::evict_unchanged|L1::no_allocate",
        "l2" => "L2::evict_last|L2::evict_normal|L2::evict_first",
        "prefetch" => "L2::64B|L2::128B",
        "prefetch256" => "L2::64B|L2::128B|L2::256B",
        "vec" => "v2|v4",
        "shared" => "shared|shared::cta",
        other => unreachable!("the table names a class `{other}` that `class` does not have"),
    }
}

fn choices(token: &'static str) -> (Vec<Modifier>, bool) {
    let (token, optional) = token.strip_suffix('?').map_or((token, false), |token| (token, true));
    let names = token.split('|').flat_map(|name| name.strip_prefix('$').map_or(name, class).split('|'));
    let modifier = |name| {
        Modifier::from_name(name)
            .unwrap_or_else(|| unreachable!("the table names a modifier `{name}` that does not exist"))
    };
    (names.map(modifier).collect(), optional)
}

fn slot(token: &'static str) -> Slot {
    let (token, optional) = token.strip_suffix('?').map_or((token, false), |token| (token, true));
    let role = match token.as_bytes() {
        [b'd' | b'p', ..] => Role::Def,
        [b'x', ..] => Role::Both,
        _ => Role::Use,
    };
    let kind = match token {
        "d" | "a" => Kind::Value(TypeRule::First),
        "a2" => Kind::Value(TypeRule::Second),
        "dw" | "aw" => Kind::Value(TypeRule::Wide),
        "dv" | "av" => Kind::Vector(TypeRule::First),
        "dm" | "am" => Kind::Movable(TypeRule::First),
        "d|p" => Kind::ValueAndPredicate(TypeRule::First, false),
        "d&p" => Kind::ValueAndPredicate(TypeRule::First, true),
        "p" | "c" => Kind::Predicate,
        "p|q" => Kind::PredicatePair,
        "m" => Kind::Memory,
        "t" => Kind::Tensor,
        "_" => Kind::Sink,
        "l" => Kind::Label,
        "ll" => Kind::Labels,
        "f" => Kind::Function,
        "d()" | "a()" => Kind::Arguments,
        "i" => Kind::Integer,
        other => typed(other).unwrap_or_else(|| unreachable!("the table has an operand `{other}` that means nothing")),
    };
    Slot { role, kind, optional }
}

/// The operands that say their type.
fn typed(token: &'static str) -> Option<Kind> {
    let (place, name) = token.split_once(':')?;
    let rule = TypeRule::Fixed(Type::from_name(name)?);
    Some(match place {
        "d" | "a" | "x" => Kind::Value(rule),
        "dv" | "av" => Kind::Vector(rule),
        "dm" | "am" => Kind::Movable(rule),
        "a|c" => Kind::ValueOrPredicate(rule),
        "d|p" => Kind::ValueAndPredicate(rule, false),
        "d&p" => Kind::ValueAndPredicate(rule, true),
        _ => {
            let (_, count) = place.split_once('*')?;
            let count = if count.is_empty() {
                Count::Any
            } else if let Some(divisor) = count.strip_prefix("n/") {
                Count::Columns(divisor.parse().ok()?)
            } else if let Some(factor) = count.strip_suffix('x') {
                Count::Repeats(if factor.is_empty() { 1 } else { factor.parse().ok()? })
            } else {
                Count::Exactly(count.parse().ok()?)
            };
            Kind::Registers(rule, count)
        }
    })
}

macro_rules! forms {
    ($($opcode:ident $name:literal { $($modifiers:literal => $operands:literal $(sm $sm:literal $(on $targets:literal)? ptx $major:literal . $minor:literal)?;)+ })+) => {
        /// The name of an instruction: the opcode up to its first dot.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the variants are the manual's instructions, under its own names")]
        pub enum Opcode { $($opcode),+ }

        impl Opcode {
            /// The name as PTX writes it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$opcode => $name),+ }
            }

            /// The opcode with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$opcode),)+ _ => None }
            }
        }

        const ROWS: &[(Opcode, &[Row])] = &[$((Opcode::$opcode, &[$(forms!(@row $modifiers $operands $($sm $(on $targets)? ptx $major $minor)?)),+])),+];
    };
    (@row $modifiers:literal $operands:literal) => { forms!(@row $modifiers $operands 50 ptx 6 0) };
    (@row $modifiers:literal $operands:literal $sm:literal ptx $major:literal $minor:literal) => {
        forms!(@row $modifiers $operands $sm on "" ptx $major $minor)
    };
    (@row $modifiers:literal $operands:literal $sm:literal on $targets:literal ptx $major:literal $minor:literal) => {
        Row { modifiers: $modifiers, operands: $operands, min_sm: $sm, targets: $targets, min_ptx: ($major, $minor) }
    };
}

forms! {
    // Integer and floating-point arithmetic (PTX ISA 9.7.1 to 9.7.5).
    Add "add" {
        "sat s32" => "d a a";
        "$int" => "d a a";
        "cc u32|s32|u64|s64" => "d a a";
        "$rnd? ftz? sat? f32" => "d a a";
        "$rnd? f64" => "d a a";
        "rn? ftz? sat? f16|f16x2" => "d a a" sm 53 ptx 6 . 0;
        "rn? bf16|bf16x2" => "d a a" sm 90 ptx 7 . 8;
        "u16x2|s16x2" => "d a a" sm 90 ptx 8 . 0;
        "$rnd? ftz? f32x2" => "d a a" sm 100 ptx 8 . 6;
        "$rnd? sat? f32 f16|bf16" => "d a2 a" sm 100 ptx 8 . 6;
    }
    Sub "sub" {
        "sat s32" => "d a a";
        "$int" => "d a a";
        "cc u32|s32|u64|s64" => "d a a";
        "$rnd? ftz? sat? f32" => "d a a";
        "$rnd? f64" => "d a a";
        "rn? ftz? sat? f16|f16x2" => "d a a" sm 53 ptx 6 . 0;
        "rn? bf16|bf16x2" => "d a a" sm 90 ptx 7 . 8;
        "$rnd? ftz? f32x2" => "d a a" sm 100 ptx 8 . 6;
        "$rnd? sat? f32 f16|bf16" => "d a2 a" sm 100 ptx 8 . 6;
    }
    Addc "addc" { "cc? u32|s32|u64|s64" => "d a a"; }
    Subc "subc" { "cc? u32|s32|u64|s64" => "d a a"; }
    Mul "mul" {
        "wide u16|s16|u32|s32" => "dw a a";
        "lo|hi $int" => "d a a";
        "$rnd? ftz? sat? f32" => "d a a";
        "$rnd? f64" => "d a a";
        "$rnd? ftz? f32x2" => "d a a" sm 100 ptx 8 . 6;
        "rn? ftz? sat? f16|f16x2" => "d a a" sm 53 ptx 6 . 0;
        "rn? bf16|bf16x2" => "d a a" sm 90 ptx 7 . 8;
    }
    Mad "mad" {
        "wide u16|s16|u32|s32" => "dw a a aw";
        "lo|hi cc u32|s32|u64|s64" => "d a a a";
        "hi sat s32" => "d a a a";
        "lo|hi $int" => "d a a a";
        "$rnd ftz? sat? f32" => "d a a a";
        "$rnd f64" => "d a a a";
    }
    Madc "madc" { "lo|hi cc? u32|s32|u64|s64" => "d a a a"; }
    Mul24 "mul24" { "lo|hi u32|s32" => "d a a"; }
    Mad24 "mad24" { "lo|hi u32|s32" => "d a a a"; "hi sat s32" => "d a a a"; }
    Sad "sad" { "$int" => "d a a a"; }
    Dp4a "dp4a" { "u32|s32 u32|s32" => "d:b32 a a2 a:b32" sm 61 ptx 6 . 0; }
    Dp2a "dp2a" { "lo|hi u32|s32 u32|s32" => "d:b32 a a2 a:b32" sm 61 ptx 6 . 0; }
    Fma "fma" {
        "$rnd ftz? sat? f32" => "d a a a";
        "$rnd f64" => "d a a a";
        "rn ftz? sat? f16|f16x2" => "d a a a" sm 53 ptx 6 . 0;
        "rn ftz? relu f16|f16x2" => "d a a a" sm 80 ptx 7 . 0;
        "rn relu? bf16|bf16x2" => "d a a a" sm 80 ptx 7 . 0;
        "rn oob relu? f16|f16x2|bf16|bf16x2" => "d a a a" sm 90 ptx 8 . 1;
        "$rnd ftz? f32x2" => "d a a a" sm 100 ptx 8 . 6;
        "$rnd sat? f32 f16|bf16" => "d a2 a2 a" sm 100 ptx 8 . 6;
    }
    Div "div" {
        "$int" => "d a a";
        "approx|full ftz? f32" => "d a a";
        "$rnd ftz? f32" => "d a a";
        "$rnd f64" => "d a a";
    }
    Rem "rem" { "$int" => "d a a"; }
    Abs "abs" {
        "s16|s32|s64" => "d a";
        "ftz? f32" => "d a";
        "f64" => "d a";
        "ftz? f16|f16x2" => "d a" sm 53 ptx 6 . 5;
        "bf16|bf16x2" => "d a" sm 80 ptx 7 . 0;
    }
    Neg "neg" {
        "s16|s32|s64" => "d a";
        "ftz? f32" => "d a";
        "f64" => "d a";
        "ftz? f16|f16x2" => "d a" sm 53 ptx 6 . 0;
        "bf16|bf16x2" => "d a" sm 80 ptx 7 . 0;
    }
    Min "min" {
        "$int" => "d a a";
        "relu s32" => "d a a" sm 90 ptx 8 . 0;
        "relu? s16x2" => "d a a" sm 90 ptx 8 . 0;
        "u16x2" => "d a a" sm 90 ptx 8 . 0;
        "ftz? f32" => "d a a";
        "ftz? NaN f32" => "d a a" sm 80 ptx 7 . 0;
        "ftz? NaN? xorsign abs f32" => "d a a" sm 86 ptx 7 . 2;
        "ftz? NaN? abs? f32" => "d a a a" sm 100 ptx 8 . 8;
        "f64" => "d a a";
        "ftz? NaN? f16|f16x2" => "d a a" sm 80 ptx 7 . 0;
        "ftz? NaN? xorsign abs f16|f16x2" => "d a a" sm 86 ptx 7 . 2;
        "NaN? bf16|bf16x2" => "d a a" sm 80 ptx 7 . 0;
        "NaN? xorsign abs bf16|bf16x2" => "d a a" sm 86 ptx 7 . 2;
    }
    Max "max" {
        "$int" => "d a a";
        "relu s32" => "d a a" sm 90 ptx 8 . 0;
        "relu? s16x2" => "d a a" sm 90 ptx 8 . 0;
        "u16x2" => "d a a" sm 90 ptx 8 . 0;
        "ftz? f32" => "d a a";
        "ftz? NaN f32" => "d a a" sm 80 ptx 7 . 0;
        "ftz? NaN? xorsign abs f32" => "d a a" sm 86 ptx 7 . 2;
        "ftz? NaN? abs? f32" => "d a a a" sm 100 ptx 8 . 8;
        "f64" => "d a a";
        "ftz? NaN? f16|f16x2" => "d a a" sm 80 ptx 7 . 0;
        "ftz? NaN? xorsign abs f16|f16x2" => "d a a" sm 86 ptx 7 . 2;
        "NaN? bf16|bf16x2" => "d a a" sm 80 ptx 7 . 0;
        "NaN? xorsign abs bf16|bf16x2" => "d a a" sm 86 ptx 7 . 2;
    }
    Rcp "rcp" {
        "approx ftz? f32" => "d a";
        "$rnd ftz? f32" => "d a";
        "$rnd f64" => "d a";
        "approx ftz f64" => "d a";
    }
    Sqrt "sqrt" { "approx ftz? f32" => "d a"; "$rnd ftz? f32" => "d a"; "$rnd f64" => "d a"; }
    Rsqrt "rsqrt" { "approx ftz? f32" => "d a"; "approx f64" => "d a"; "approx ftz f64" => "d a"; }
    Sin "sin" { "approx ftz? f32" => "d a"; }
    Cos "cos" { "approx ftz? f32" => "d a"; }
    Lg2 "lg2" { "approx ftz? f32" => "d a"; }
    Ex2 "ex2" {
        "approx ftz? f32" => "d a";
        "approx f16|f16x2" => "d a" sm 75 ptx 7 . 0;
        "approx ftz bf16|bf16x2" => "d a" sm 90 ptx 7 . 8;
    }
    Tanh "tanh" {
        "approx f32|f16|f16x2" => "d a" sm 75 ptx 7 . 0;
        "approx bf16|bf16x2" => "d a" sm 90 ptx 7 . 8;
    }
    Copysign "copysign" { "f32|f64" => "d a a"; }
    Testp "testp" { "finite|infinite|number|notanumber|normal|subnormal f32|f64" => "p a"; }

    // Bits (9.7.1, 9.7.8).
    And "and" { "pred" => "p c c"; "$bits" => "d a a"; }
    Or "or" { "pred" => "p c c"; "$bits" => "d a a"; }
    Xor "xor" { "pred" => "p c c"; "$bits" => "d a a"; }
    Not "not" { "pred" => "p c"; "$bits" => "d a"; }
    Shl "shl" { "$bits" => "d a a:u32"; }
    Shr "shr" { "b16|b32|b64|u16|u32|u64|s16|s32|s64" => "d a a:u32"; }
    Shf "shf" { "l|r wrap|clamp b32" => "d a a a:u32"; }
    Lop3 "lop3" { "b32" => "d a a a i"; "and|or b32" => "d&p a a a i c" sm 70 ptx 8 . 2; }
    Bfe "bfe" { "u32|u64|s32|s64" => "d a a:u32 a:u32"; }
    Bfi "bfi" { "b32|b64" => "d a a a:u32 a:u32"; }
    Bfind "bfind" { "shiftamt? u32|u64|s32|s64" => "d:u32 a"; }
    Brev "brev" { "b32|b64" => "d a"; }
    Clz "clz" { "b32|b64" => "d:u32 a"; }
    Popc "popc" { "b32|b64" => "d:u32 a"; }
    Fns "fns" { "b32" => "d a a:b32 a:s32" sm 30 ptx 6 . 0; }
    Bmsk "bmsk" { "clamp|wrap b32" => "d a:u32 a:u32" sm 70 ptx 7 . 6; }
    Szext "szext" { "clamp|wrap u32|s32" => "d a a:u32" sm 70 ptx 7 . 6; }
    Prmt "prmt" { "b32" => "d a a a"; "b32 f4e|b4e|rc8|ecl|ecr|rc16" => "d a a a"; }

    // Comparison and selection (9.7.6, 9.7.7).
    Setp "setp" {
        "eq|ne $bits" => "p|q a a";
        "eq|ne $bool $bits" => "p|q a a c";
        "$icmp $int" => "p|q a a";
        "$icmp $bool $int" => "p|q a a c";
        "lo|ls|hi|hs u16|u32|u64" => "p|q a a";
        "lo|ls|hi|hs $bool u16|u32|u64" => "p|q a a c";
        "$fcmp ftz? f32" => "p|q a a";
        "$fcmp $bool ftz? f32" => "p|q a a c";
        "$fcmp f64" => "p|q a a";
        "$fcmp $bool f64" => "p|q a a c";
        "$fcmp ftz? f16|f16x2" => "p|q a a" sm 53 ptx 6 . 0;
        "$fcmp $bool ftz? f16|f16x2" => "p|q a a c" sm 53 ptx 6 . 0;
        "$fcmp bf16|bf16x2" => "p|q a a" sm 90 ptx 7 . 8;
        "$fcmp $bool bf16|bf16x2" => "p|q a a c" sm 90 ptx 7 . 8;
    }
    Set "set" {
        "eq|ne u32|s32|f32 $bits" => "d a2 a2";
        "$icmp u32|s32|f32 $int" => "d a2 a2";
        "$fcmp ftz? u32|s32|f32 f32" => "d a2 a2";
        "$fcmp u32|s32|f32 f64" => "d a2 a2";
        "$fcmp ftz? f16 f16" => "d a2 a2" sm 53 ptx 6 . 0;
        "$fcmp ftz? u16|s16|u32|s32 f16" => "d a2 a2" sm 53 ptx 6 . 5;
        "$fcmp ftz? f16x2 f16x2" => "d a2 a2" sm 53 ptx 6 . 0;
    }
    Slct "slct" { "b16|b32|b64|$int|f32|f64 s32" => "d a a a2"; "ftz? b16|b32|b64|$int|f32|f64 f32" => "d a a a2"; }
    Selp "selp" { "$value" => "d a a c"; }

    // Movement and conversion (9.7.9).
    Mov "mov" {
        "pred" => "p c";
        "b128" => "dm am" sm 70 ptx 8 . 3;
        "$value" => "dm am";
    }
    Cvt "cvt" {
        "$integer $integer" => "d a2";
        "sat u8|s8|u16|s16 u32|s32|u64|s64" => "d a2";
        "sat u32|s32 u64|s64" => "d a2";
        "$irnd ftz? sat? $integer f32" => "d a2";
        "$irnd sat? $integer f16|f64" => "d a2";
        "$rnd sat? f16|f32|f64 $integer" => "d a2";
        "$rnd ftz? sat? f16 f32" => "d a2";
        "$rnd sat? f16 f64" => "d a2";
        "$rnd ftz? sat? f32 f64" => "d a2";
        "ftz? sat? f32 f16" => "d a2";
        "ftz? sat? f64 f32" => "d a2";
        "sat? f64 f16" => "d a2";
        "$irnd? ftz? sat? f32 f32" => "d a2";
        "$irnd? sat? f64 f64" => "d a2";
        "$irnd? sat? f16 f16" => "d a2";
        "rn|rz relu? f16 f32" => "d a2" sm 80 ptx 7 . 0;
        "rn|rz relu? bf16 f32" => "d a2" sm 80 ptx 7 . 0;
        "rn|rz relu? f16x2|bf16x2 f32" => "d a2 a2" sm 80 ptx 7 . 0;
        "rn|rz relu? satfinite f16|bf16 f32" => "d a2" sm 80 ptx 8 . 1;
        "rn|rz relu? satfinite f16x2|bf16x2 f32" => "d a2 a2" sm 80 ptx 8 . 1;
        "rs relu? satfinite? f16x2|bf16x2 f32" => "d a2 a2 a:b32" sm 100 on "sm_100a sm_103a" ptx 8 . 7;
        "rna tf32 f32" => "d a2" sm 80 ptx 7 . 0;
        "rna satfinite tf32 f32" => "d a2" sm 80 ptx 8 . 1;
        "rn|rz relu? tf32 f32" => "d a2" sm 90 ptx 7 . 8;
        "rn|rz relu? satfinite tf32 f32" => "d a2" sm 100 ptx 8 . 6;
        "f32 bf16" => "d a2" sm 80 ptx 7 . 1;
        "bf16 f16" => "d a2" sm 90 ptx 7 . 8;
        "rn relu? bf16x2 e4m3x2|e5m2x2" => "d a2" sm 100 on "sm_100a sm_103a" ptx 9 . 2;
        "rn satfinite relu? e4m3x2|e5m2x2 bf16x2" => "d a2" sm 100 on "sm_100a sm_103a" ptx 9 . 1;
        "f64 bf16" => "d a2" sm 90 ptx 7 . 8;
        "$irnd $int bf16" => "d a2" sm 90 ptx 7 . 8;
        "$rnd bf16 $int" => "d a2" sm 90 ptx 7 . 8;
        "$rnd bf16 f16|f32|f64" => "d a2" sm 90 ptx 7 . 8;
        "$irnd? bf16 bf16" => "d a2" sm 90 ptx 7 . 8;
        "f16 bf16" => "d a2" sm 90 ptx 7 . 8;
        "$rnd f16 bf16" => "d a2" sm 90 ptx 7 . 8;
        "rn satfinite relu? e4m3x2|e5m2x2 f32" => "d a2 a2" sm 89 ptx 8 . 1;
        "rn satfinite relu? e4m3x2|e5m2x2 f16x2" => "d a2" sm 89 ptx 8 . 1;
        "rn relu? f16x2 e4m3x2|e5m2x2" => "d a2" sm 89 ptx 8 . 1;
        "rn satfinite relu? e2m3x2|e3m2x2 f32" => "d a2 a2" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "rn relu? f16x2 e2m3x2|e3m2x2" => "d a2" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "rz|rp satfinite? ue8m0x2 f32" => "d a2 a2" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "rz|rp satfinite? ue8m0x2 bf16x2" => "d a2" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "rn bf16x2 ue8m0x2" => "d a2" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "pack sat u16|s16 s32" => "d:b32 a2 a2" sm 72 ptx 6 . 5;
        "pack sat u8|s8 s32 b32" => "d:b32 a2 a2 a:b32" sm 72 ptx 6 . 5;
        "pack sat u4|s4|u2|s2 s32 b32" => "d:b32 a2 a2 a:b32" sm 75 ptx 6 . 5;
    }
    Cvta "cvta" {
        "to? global|shared|local|const u64" => "d am";
        "to? shared::cta u64" => "d am" sm 50 ptx 7 . 8;
        "to? shared::cluster u64" => "d am" sm 90 ptx 7 . 8;
        "to? param u64" => "d am" sm 70 ptx 7 . 7;
    }
    Ld "ld" {
        "weak? global|shared|local|const|param? ca|cg|cs|lu|cv? $vec? $memory" => "dv m";
        "weak? shared::cta $vec? $memory" => "dv m" sm 50 ptx 7 . 8;
        "weak? shared::cluster $vec? $memory" => "dv m" sm 90 ptx 7 . 8;
        "weak? param::entry $vec? $memory" => "dv m" sm 50 ptx 8 . 3;
        "weak? param::func $vec? $memory" => "dv m" sm 50 ptx 8 . 3;
        "volatile global|shared? $vec? $memory" => "dv m";
        "volatile local $vec? $memory" => "dv m" sm 50 ptx 9 . 1;
        "volatile shared::cta $vec? $memory" => "dv m" sm 50 ptx 7 . 8;
        "volatile shared::cluster $vec? $memory" => "dv m" sm 90 ptx 7 . 8;
        "relaxed|acquire $scope global|shared? $vec? $memory" => "dv m" sm 70 ptx 6 . 0;
        "relaxed|acquire $scope shared::cta $vec? $memory" => "dv m" sm 70 ptx 7 . 8;
        "relaxed|acquire cluster global|shared|$sharedx? $vec? $memory" => "dv m" sm 90 ptx 7 . 8;
        "relaxed|acquire $scope shared::cluster $vec? $memory" => "dv m" sm 90 ptx 7 . 8;
        "relaxed|acquire $scope global $l1? $prefetch? $vec? $memory" => "dv m" sm 75 ptx 7 . 4;
        "relaxed|acquire $scope global $l1? $prefetch256? $vec? $memory" => "dv m" sm 80 ptx 7 . 4;
        "relaxed|acquire $scope global $l1? L2::cache_hint $prefetch256? $vec? $memory" => "dv m a:b64" sm 80 ptx 7 . 4;
        "mmio relaxed sys global? $memory" => "dv m" sm 70 ptx 8 . 2;
        "global ca|cg|cs? nc $vec? $memory" => "dv m";
        "global nc? $l1? $prefetch? $vec? $memory" => "dv m" sm 75 ptx 7 . 4;
        "global nc? $l1? $prefetch256? $vec? $memory" => "dv m" sm 80 ptx 7 . 4;
        "global nc? $l1? L2::cache_hint $prefetch256? $vec? $memory" => "dv m a:b64" sm 80 ptx 7 . 4;
        "global ca|cg|cs|lu|cv nc? $prefetch256 $vec? $memory" => "dv m" sm 80 ptx 7 . 4;
        "global ca|cg|cs|lu|cv nc? L2::cache_hint $prefetch256? $vec? $memory" => "dv m a:b64" sm 80 ptx 7 . 4;
        "weak? global nc? $l1? $prefetch256? v8 b32|u32|s32|f32" => "dv m" sm 100 ptx 8 . 8;
        "weak? global nc? $l1? L2::cache_hint $prefetch256? v8 b32|u32|s32|f32" => "dv m a:b64" sm 100 ptx 8 . 8;
        "weak? global nc? $l1? $l2 $prefetch256? v8 b32|u32|s32|f32" => "dv m" sm 100 ptx 8 . 8;
        "weak? global nc? $l1? $l2 $prefetch256? v4 b64|u64|s64|f64" => "dv m" sm 100 ptx 8 . 8;
        "weak? global|shared|local|const|param? b128" => "dv m" sm 70 ptx 8 . 3;
    }
    St "st" {
        "weak? global|shared|local? wb|cg|cs|wt? $vec? $memory" => "m av";
        "weak? param $vec? $memory" => "m av";
        "weak? shared::cta $vec? $memory" => "m av" sm 50 ptx 7 . 8;
        "weak? shared::cluster $vec? $memory" => "m av" sm 90 ptx 7 . 8;
        "weak? param::func $vec? $memory" => "m av" sm 50 ptx 8 . 3;
        "volatile global|shared? $vec? $memory" => "m av";
        "volatile local $vec? $memory" => "m av" sm 50 ptx 9 . 1;
        "volatile shared::cta $vec? $memory" => "m av" sm 50 ptx 7 . 8;
        "volatile shared::cluster $vec? $memory" => "m av" sm 90 ptx 7 . 8;
        "relaxed|release $scope global|shared? $vec? $memory" => "m av" sm 70 ptx 6 . 0;
        "relaxed|release $scope shared::cta $vec? $memory" => "m av" sm 70 ptx 7 . 8;
        "relaxed|release cluster global|shared|$sharedx? $vec? $memory" => "m av" sm 90 ptx 7 . 8;
        "relaxed|release $scope shared::cluster $vec? $memory" => "m av" sm 90 ptx 7 . 8;
        "relaxed|release $scope global $l1 $vec? $memory" => "m av" sm 75 ptx 7 . 4;
        "relaxed|release $scope global $l1? L2::cache_hint $vec? $memory" => "m av a:b64" sm 80 ptx 7 . 4;
        "mmio relaxed sys global? $memory" => "m av" sm 70 ptx 8 . 2;
        "global $l1? $vec? $memory" => "m av" sm 75 ptx 7 . 4;
        "global $l1? L2::cache_hint $vec? $memory" => "m av a:b64" sm 80 ptx 7 . 4;
        "global wb|cg|cs|wt L2::cache_hint $vec? $memory" => "m av a:b64" sm 80 ptx 7 . 4;
        "weak? global $l1? v8 b32|u32|s32|f32" => "m av" sm 100 ptx 8 . 8;
        "weak? global $l1? L2::cache_hint v8 b32|u32|s32|f32" => "m av a:b64" sm 100 ptx 8 . 8;
        "weak? global $l1? $l2 v8 b32|u32|s32|f32" => "m av" sm 100 ptx 8 . 8;
        "weak? global $l1? $l2 v4 b64|u64|s64|f64" => "m av" sm 100 ptx 8 . 8;
        "async weak? shared::cluster? mbarrier::complete_tx::bytes $wide" => "m a m" sm 90 ptx 8 . 1;
        "async weak? shared::cluster? mbarrier::complete_tx::bytes $vec $wide" => "m av m" sm 90 ptx 8 . 1;
        "bulk weak? shared::cta?" => "m a:b64 i" sm 100 ptx 8 . 6;
        "weak? global|shared|local? b128" => "m av" sm 70 ptx 8 . 3;
    }
    Prefetch "prefetch" {
        "global|local? L1|L2" => "m";
        "global L2::evict_last|L2::evict_normal" => "m" sm 80 ptx 7 . 4;
        "const|param? tensormap" => "m" sm 90 ptx 8 . 0;
    }
    Prefetchu "prefetchu" { "L1" => "m"; }
    Discard "discard" { "global? L2" => "m i" sm 80 ptx 7 . 4; }
    Applypriority "applypriority" { "global? L2::evict_normal" => "m i" sm 80 ptx 7 . 4; }
    Createpolicy "createpolicy" {
        "fractional L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged L2::evict_first|L2::evict_unchanged? b64"
            => "d a:f32?" sm 80 ptx 7 . 4;
        "range global? L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged L2::evict_first|L2::evict_unchanged? b64"
            => "d m a:b32 a:b32" sm 80 ptx 7 . 4;
        "cvt L2 b64" => "d a" sm 80 ptx 7 . 4;
    }
    Isspacep "isspacep" {
        "global|shared|local|const" => "p a:b64";
        "shared::cta" => "p a:b64" sm 50 ptx 7 . 8;
        "shared::cluster" => "p a:b64" sm 90 ptx 7 . 8;
        "param" => "p a:b64" sm 70 ptx 7 . 7;
        "param::entry" => "p a:b64" sm 70 ptx 8 . 3;
    }
    Mapa "mapa" { "shared::cluster? u32|u64" => "d am a:u32" sm 90 ptx 7 . 8; }
    Getctarank "getctarank" { "shared::cluster? u32|u64" => "d:u32 am" sm 90 ptx 7 . 8; }

    // Atomics and reductions (9.7.13).
    Atom "atom" {
        "$atomic? $scope? $where? add u32|s32|u64|f32|f64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? min|max u32|s32|u64|s64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? inc|dec u32" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? and|or|xor b32|b64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? exch b32|b64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? cas b32|b64" => "d m a a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? cas b16" => "d m a a" sm 70 ptx 6 . 3;
        "$atomic? $scope? $where? add noftz f16|f16x2" => "d m a" sm 70 ptx 6 . 3;
        "$atomic? $scope? $where? add noftz bf16|bf16x2" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scope? shared::cta add u32|s32|u64|f32|f64" => "d m a" sm 60 ptx 7 . 8;
        "$atomic? $scope? shared::cta min|max u32|s32|u64|s64" => "d m a" sm 60 ptx 7 . 8;
        "$atomic? $scope? shared::cta inc|dec u32" => "d m a" sm 60 ptx 7 . 8;
        "$atomic? $scope? shared::cta and|or|xor b32|b64" => "d m a" sm 60 ptx 7 . 8;
        "$atomic? $scope? shared::cta exch b32|b64" => "d m a" sm 60 ptx 7 . 8;
        "$atomic? $scope? shared::cta cas b32|b64" => "d m a a" sm 60 ptx 7 . 8;
        "$atomic? $scope? shared::cta cas b16" => "d m a a" sm 70 ptx 7 . 8;
        "$atomic? $scope? shared::cta add noftz f16|f16x2" => "d m a" sm 70 ptx 7 . 8;
        "$atomic? $scope? shared::cta add noftz bf16|bf16x2" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? add u32|s32|u64|f32|f64" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? min|max u32|s32|u64|s64" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? inc|dec u32" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? and|or|xor b32|b64" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? exch b32|b64" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? cas b32|b64" => "d m a a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? cas b16" => "d m a a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? add noftz f16|f16x2" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scopes? global|shared|$sharedx? add noftz bf16|bf16x2" => "d m a" sm 90 ptx 7 . 8;
        "$atomic? $scope? global? add L2::cache_hint u32|s32|u64|f32|f64" => "d m a a:b64" sm 80 ptx 7 . 4;
        "$atomic? $scope? global? min|max L2::cache_hint u32|s32|u64|s64" => "d m a a:b64" sm 80 ptx 7 . 4;
        "$atomic? $scope? global? inc|dec L2::cache_hint u32" => "d m a a:b64" sm 80 ptx 7 . 4;
        "$atomic? $scope? global? and|or|xor L2::cache_hint b32|b64" => "d m a a:b64" sm 80 ptx 7 . 4;
        "$atomic? $scope? global? exch L2::cache_hint b32|b64" => "d m a a:b64" sm 80 ptx 7 . 4;
        "$atomic? $scope? global? add noftz L2::cache_hint f16|f16x2" => "d m a a:b64" sm 80 ptx 7 . 4;
        "$atomic? $scope? global? add noftz L2::cache_hint bf16|bf16x2" => "d m a a:b64" sm 90 ptx 7 . 8;
        "$atomic? cta|cluster|gpu? global|shared|$sharedx? exch b128" => "d m a" sm 90 ptx 8 . 3;
        "$atomic? sys global|shared|$sharedx? exch b128" => "d m a" sm 90 ptx 8 . 4;
        "$atomic? cta|cluster|gpu? global|shared|$sharedx? cas b128" => "d m a a" sm 90 ptx 8 . 3;
        "$atomic? sys global|shared|$sharedx? cas b128" => "d m a a" sm 90 ptx 8 . 4;
        "$atomic? $scopes? global? add v2|v4 f32" => "dv m av" sm 90 ptx 8 . 1;
        "$atomic? $scopes? global? add|min|max noftz v2|v4|v8 f16|bf16" => "dv m av" sm 90 ptx 8 . 1;
        "$atomic? $scopes? global? add|min|max noftz v2|v4 f16x2|bf16x2" => "dv m av" sm 90 ptx 8 . 1;
        "$atomic? $scopes? global? add L2::cache_hint v2|v4 f32" => "dv m av a:b64" sm 90 ptx 8 . 1;
        "$atomic? $scopes? global? add|min|max noftz L2::cache_hint v2|v4|v8 f16|bf16" => "dv m av a:b64" sm 90 ptx 8 . 1;
        "$atomic? $scopes? global? add|min|max noftz L2::cache_hint v2|v4 f16x2|bf16x2" => "dv m av a:b64" sm 90 ptx 8 . 1;
    }
    Red "red" {
        "relaxed|release? $scope? $where? add u32|s32|u64|f32|f64" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? min|max u32|s32|u64|s64" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? inc|dec u32" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? and|or|xor b32|b64" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? add noftz f16|f16x2" => "m a" sm 70 ptx 6 . 3;
        "relaxed|release? $scope? $where? add noftz bf16|bf16x2" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scope? shared::cta add u32|s32|u64|f32|f64" => "m a" sm 60 ptx 7 . 8;
        "relaxed|release? $scope? shared::cta min|max u32|s32|u64|s64" => "m a" sm 60 ptx 7 . 8;
        "relaxed|release? $scope? shared::cta inc|dec u32" => "m a" sm 60 ptx 7 . 8;
        "relaxed|release? $scope? shared::cta and|or|xor b32|b64" => "m a" sm 60 ptx 7 . 8;
        "relaxed|release? $scope? shared::cta add noftz f16|f16x2" => "m a" sm 70 ptx 7 . 8;
        "relaxed|release? $scope? shared::cta add noftz bf16|bf16x2" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global|shared|$sharedx? add u32|s32|u64|f32|f64" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global|shared|$sharedx? min|max u32|s32|u64|s64" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global|shared|$sharedx? inc|dec u32" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global|shared|$sharedx? and|or|xor b32|b64" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global|shared|$sharedx? add noftz f16|f16x2" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global|shared|$sharedx? add noftz bf16|bf16x2" => "m a" sm 90 ptx 7 . 8;
        "relaxed|release? $scope? global? add L2::cache_hint u32|s32|u64|f32|f64" => "m a a:b64" sm 80 ptx 7 . 4;
        "relaxed|release? $scope? global? min|max L2::cache_hint u32|s32|u64|s64" => "m a a:b64" sm 80 ptx 7 . 4;
        "relaxed|release? $scope? global? inc|dec L2::cache_hint u32" => "m a a:b64" sm 80 ptx 7 . 4;
        "relaxed|release? $scope? global? and|or|xor L2::cache_hint b32|b64" => "m a a:b64" sm 80 ptx 7 . 4;
        "relaxed|release? $scope? global? add noftz L2::cache_hint f16|f16x2" => "m a a:b64" sm 80 ptx 7 . 4;
        "relaxed|release? $scope? global? add noftz L2::cache_hint bf16|bf16x2" => "m a a:b64" sm 90 ptx 7 . 8;
        "relaxed|release? $scopes? global? add v2|v4 f32" => "m av" sm 90 ptx 8 . 1;
        "relaxed|release? $scopes? global? add|min|max noftz v2|v4|v8 f16|bf16" => "m av" sm 90 ptx 8 . 1;
        "relaxed|release? $scopes? global? add|min|max noftz v2|v4 f16x2|bf16x2" => "m av" sm 90 ptx 8 . 1;
        "relaxed|release? $scopes? global? add L2::cache_hint v2|v4 f32" => "m av a:b64" sm 90 ptx 8 . 1;
        "relaxed|release? $scopes? global? add|min|max noftz L2::cache_hint v2|v4|v8 f16|bf16" => "m av a:b64" sm 90 ptx 8 . 1;
        "relaxed|release? $scopes? global? add|min|max noftz L2::cache_hint v2|v4 f16x2|bf16x2" => "m av a:b64" sm 90 ptx 8 . 1;
        "async relaxed cluster shared::cluster? mbarrier::complete_tx::bytes inc|dec u32" => "m a m" sm 90 ptx 8 . 1;
        "async relaxed cluster shared::cluster? mbarrier::complete_tx::bytes min|max u32|s32" => "m a m" sm 90 ptx 8 . 1;
        "async relaxed cluster shared::cluster? mbarrier::complete_tx::bytes and|or|xor b32" => "m a m" sm 90 ptx 8 . 1;
        "async relaxed cluster shared::cluster? mbarrier::complete_tx::bytes add u32|s32|u64" => "m a m" sm 90 ptx 8 . 1;
    }

    // Exchange within a warp (9.7.9.6, 9.7.13).
    Shfl "shfl" { "sync up|down|bfly|idx b32" => "d|p a a:u32 a:u32 a:u32"; }
    Vote "vote" {
        "sync all|any|uni pred" => "p c a:u32";
        "sync ballot b32" => "d c a:u32";
    }
    Redux "redux" {
        "sync add|min|max u32|s32" => "d a a:u32" sm 80 ptx 7 . 0;
        "sync and|or|xor b32" => "d a a:u32" sm 80 ptx 7 . 0;
        "sync min|max abs? NaN? f32" => "d a a:u32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
    }
    Match "match" { "any sync b32|b64" => "d:b32 a a:u32" sm 70 ptx 6 . 0; "all sync b32|b64" => "d|p:b32 a a:u32" sm 70 ptx 6 . 0; }
    Elect "elect" { "sync" => "d&p:b32 a:u32" sm 90 ptx 8 . 0; }
    Activemask "activemask" { "b32" => "d" sm 50 ptx 6 . 2; }

    // Matrices between shared memory and the registers of a warp (9.7.14.5).
    Ldmatrix "ldmatrix" {
        "sync aligned m8n8 x1|x2|x4 trans? shared? b16" => "dv:b32 m" sm 75 ptx 6 . 5;
        "sync aligned m8n8 x1|x2|x4 trans? shared::cta b16" => "dv:b32 m" sm 75 ptx 7 . 8;
        "sync aligned m16n16 x1|x2 trans shared|shared::cta? b8" => "d*2x:b32 m" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "sync aligned m16n16 x1|x2 trans shared|shared::cta? b8x16 b6x16_p32|b4x16_p64" => "d*2x:b32 m" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "sync aligned m8n16 x1|x2|x4 shared|shared::cta? b8x16 b6x16_p32|b4x16_p64" => "d*x:b32 m" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
    }
    Stmatrix "stmatrix" {
        "sync aligned m8n8 x1|x2|x4 trans? shared|shared::cta? b16" => "m av:b32" sm 90 ptx 7 . 8;
        "sync aligned m16n8 x1|x2|x4 trans shared|shared::cta? b8" => "m a*x:b32" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
    }
    Movmatrix "movmatrix" { "sync aligned m8n8 trans b16" => "d:b32 a:b32" sm 75 ptx 7 . 8; }

    // Products of matrices in the registers of a warp (9.7.14.5).
    Mma "mma" {
        "sync aligned m8n8k4 row|col row|col f16 f16 f16 f16" => "d*4:b32 a*2:b32 a*2:b32 a*4:b32" sm 70 ptx 6 . 4;
        "sync aligned m8n8k4 row|col row|col f32 f16 f16 f32" => "d*8:f32 a*2:b32 a*2:b32 a*8:f32" sm 70 ptx 6 . 4;
        "sync aligned m8n8k4 row|col row|col f32 f16 f16 f16" => "d*8:f32 a*2:b32 a*2:b32 a*4:b32" sm 70 ptx 6 . 4;
        "sync aligned m16n8k8 row col f16 f16 f16 f16" => "d*2:b32 a*2:b32 a*1:b32 a*2:b32" sm 75 ptx 6 . 5;
        "sync aligned m16n8k8 row col f32 f16 f16 f32" => "d*4:f32 a*2:b32 a*1:b32 a*4:f32" sm 75 ptx 6 . 5;
        "sync aligned m16n8k16 row col f16 f16 f16 f16" => "d*2:b32 a*4:b32 a*2:b32 a*2:b32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k16 row col f32 f16 f16 f32" => "d*4:f32 a*4:b32 a*2:b32 a*4:f32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k8 row col f32 bf16 bf16 f32" => "d*4:f32 a*2:b32 a*1:b32 a*4:f32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k16 row col f32 bf16 bf16 f32" => "d*4:f32 a*4:b32 a*2:b32 a*4:f32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k4 row col f32 tf32 tf32 f32" => "d*4:f32 a*2:b32 a*1:b32 a*4:f32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k8 row col f32 tf32 tf32 f32" => "d*4:f32 a*4:b32 a*2:b32 a*4:f32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k32 row col f32 $fp8 $fp8 f32" => "d*4:f32 a*4:b32 a*2:b32 a*4:f32" sm 89 ptx 8 . 4;
        "sync aligned m16n8k16 row col f32 $fp8 $fp8 f32" => "d*4:f32 a*2:b32 a*1:b32 a*4:f32" sm 89 ptx 8 . 7;
        "sync aligned m16n8k32 row col f16 $fp8 $fp8 f16" => "d*2:b32 a*4:b32 a*2:b32 a*2:b32" sm 89 ptx 8 . 7;
        "sync aligned m16n8k16 row col f16 $fp8 $fp8 f16" => "d*2:b32 a*2:b32 a*1:b32 a*2:b32" sm 89 ptx 8 . 7;
        "sync aligned m8n8k16 row col satfinite? s32 u8|s8 u8|s8 s32" => "d*2:s32 a*1:b32 a*1:b32 a*2:s32" sm 75 ptx 6 . 5;
        "sync aligned m16n8k16 row col satfinite? s32 u8|s8 u8|s8 s32" => "d*4:s32 a*2:b32 a*1:b32 a*4:s32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k32 row col satfinite? s32 u8|s8 u8|s8 s32" => "d*4:s32 a*4:b32 a*2:b32 a*4:s32" sm 80 ptx 7 . 0;
        "sync aligned m8n8k32 row col satfinite? s32 u4|s4 u4|s4 s32" => "d*2:s32 a*1:b32 a*1:b32 a*2:s32" sm 75 ptx 6 . 5;
        "sync aligned m16n8k32 row col satfinite? s32 u4|s4 u4|s4 s32" => "d*4:s32 a*2:b32 a*1:b32 a*4:s32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k64 row col satfinite? s32 u4|s4 u4|s4 s32" => "d*4:s32 a*4:b32 a*2:b32 a*4:s32" sm 80 ptx 7 . 0;
        "sync aligned m8n8k128 row col s32 b1 b1 s32 xor popc" => "d*2:s32 a*1:b32 a*1:b32 a*2:s32" sm 75 ptx 7 . 0;
        "sync aligned m16n8k128 row col s32 b1 b1 s32 xor popc" => "d*4:s32 a*2:b32 a*1:b32 a*4:s32" sm 80 ptx 7 . 0;
        "sync aligned m16n8k256 row col s32 b1 b1 s32 xor popc" => "d*4:s32 a*4:b32 a*2:b32 a*4:s32" sm 80 ptx 7 . 0;
        "sync aligned m8n8k128 row col s32 b1 b1 s32 and popc" => "d*2:s32 a*1:b32 a*1:b32 a*2:s32" sm 80 ptx 7 . 1;
        "sync aligned m16n8k128 row col s32 b1 b1 s32 and popc" => "d*4:s32 a*2:b32 a*1:b32 a*4:s32" sm 80 ptx 7 . 1;
        "sync aligned m16n8k256 row col s32 b1 b1 s32 and popc" => "d*4:s32 a*4:b32 a*2:b32 a*4:s32" sm 80 ptx 7 . 1;
        "sync aligned m8n8k4 row col f64 f64 f64 f64" => "d*2:f64 a*1:f64 a*1:f64 a*2:f64" sm 80 ptx 7 . 0;
        "sync aligned m16n8k4 row col f64 f64 f64 f64" => "d*4:f64 a*2:f64 a*1:f64 a*4:f64" sm 90 ptx 7 . 8;
        "sync aligned m16n8k8 row col f64 f64 f64 f64" => "d*4:f64 a*4:f64 a*2:f64 a*4:f64" sm 90 ptx 7 . 8;
        "sync aligned m16n8k16 row col f64 f64 f64 f64" => "d*4:f64 a*8:f64 a*4:f64 a*4:f64" sm 90 ptx 7 . 8;
    }

    // Products of matrices in shared memory, by a warpgroup, asynchronously (9.7.15).
    Wgmma "wgmma" {
        "mma_async sync aligned $wg16 f16 f16 f16" => "x*n/4:b32 a:b64 a:b64 c i i i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg16 f16 f16 f16" => "x*n/4:b32 a*4:b32 a:b64 c i i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg16 f32 f16 f16" => "x*n/2:f32 a:b64 a:b64 c i i i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg16 f32 f16 f16" => "x*n/2:f32 a*4:b32 a:b64 c i i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg16 f32 bf16 bf16" => "x*n/2:f32 a:b64 a:b64 c i i i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg16 f32 bf16 bf16" => "x*n/2:f32 a*4:b32 a:b64 c i i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg8 f32 tf32 tf32" => "x*n/2:f32 a:b64 a:b64 c i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg8 f32 tf32 tf32" => "x*n/2:f32 a*4:b32 a:b64 c i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg32 f16 $fp8 $fp8" => "x*n/4:b32 a:b64 a:b64 c i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg32 f16 $fp8 $fp8" => "x*n/4:b32 a*4:b32 a:b64 c i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg32 f32 $fp8 $fp8" => "x*n/2:f32 a:b64 a:b64 c i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wg32 f32 $fp8 $fp8" => "x*n/2:f32 a*4:b32 a:b64 c i i" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wgint satfinite? s32 u8 u8" => "x*n/2:s32 a:b64 a:b64 c" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wgint satfinite? s32 s8 s8" => "x*n/2:s32 a:b64 a:b64 c" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wgint satfinite? s32 u8|s8 u8|s8" => "x*n/2:s32 a:b64 a:b64 c" sm 90 on "sm_90a" ptx 8 . 4;
        "mma_async sync aligned $wgint satfinite? s32 u8 u8" => "x*n/2:s32 a*4:b32 a:b64 c" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wgint satfinite? s32 s8 s8" => "x*n/2:s32 a*4:b32 a:b64 c" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wgint satfinite? s32 u8|s8 u8|s8" => "x*n/2:s32 a*4:b32 a:b64 c" sm 90 on "sm_90a" ptx 8 . 4;
        "mma_async sync aligned $wgbit s32 b1 b1 and popc" => "x*n/2:s32 a:b64 a:b64 c" sm 90 on "sm_90a" ptx 8 . 0;
        "mma_async sync aligned $wgbit s32 b1 b1 and popc" => "x*n/2:s32 a*4:b32 a:b64 c" sm 90 on "sm_90a" ptx 8 . 0;
        "fence sync aligned" => "" sm 90 on "sm_90a" ptx 8 . 0;
        "commit_group sync aligned" => "" sm 90 on "sm_90a" ptx 8 . 0;
        "wait_group sync aligned" => "i" sm 90 on "sm_90a" ptx 8 . 0;
    }

    // Synchronisation (9.7.13).
    Bar "bar" {
        "sync" => "a:u32 a:u32?";
        "arrive" => "a:u32 a:u32";
        "red popc u32" => "d a:u32 a:u32? c";
        "red and|or pred" => "p a:u32 a:u32? c";
        "cta sync" => "a:u32 a:u32?" sm 50 ptx 7 . 8;
        "cta arrive" => "a:u32 a:u32" sm 50 ptx 7 . 8;
        "cta red popc u32" => "d a:u32 a:u32? c" sm 50 ptx 7 . 8;
        "cta red and|or pred" => "p a:u32 a:u32? c" sm 50 ptx 7 . 8;
        "warp sync" => "a:u32" sm 50 ptx 6 . 0;
    }
    Barrier "barrier" {
        "sync aligned?" => "a:u32 a:u32?" sm 50 ptx 6 . 0;
        "arrive aligned?" => "a:u32 a:u32" sm 50 ptx 6 . 0;
        "red popc aligned? u32" => "d a:u32 a:u32? c" sm 50 ptx 6 . 0;
        "red and|or aligned? pred" => "p a:u32 a:u32? c" sm 50 ptx 6 . 0;
        "cta sync aligned?" => "a:u32 a:u32?" sm 50 ptx 7 . 8;
        "cta arrive aligned?" => "a:u32 a:u32" sm 50 ptx 7 . 8;
        "cta red popc aligned? u32" => "d a:u32 a:u32? c" sm 50 ptx 7 . 8;
        "cta red and|or aligned? pred" => "p a:u32 a:u32? c" sm 50 ptx 7 . 8;
        "cluster arrive aligned?" => "" sm 90 ptx 7 . 8;
        "cluster arrive release|relaxed aligned?" => "" sm 90 ptx 8 . 0;
        "cluster wait aligned?" => "" sm 90 ptx 7 . 8;
        "cluster wait acquire aligned?" => "" sm 90 ptx 8 . 0;
    }
    Membar "membar" { "cta|gl|sys" => ""; "proxy alias" => "" sm 70 ptx 7 . 5; "proxy async" => "" sm 90 ptx 8 . 0; }
    Fence "fence" {
        "sc|acq_rel? $scope" => "" sm 70 ptx 6 . 0;
        "sc|acq_rel? cluster" => "" sm 90 ptx 7 . 8;
        "acquire|release $scopes" => "" sm 90 ptx 8 . 6;
        "acquire sync_restrict::shared::cluster cluster" => "" sm 90 ptx 8 . 6;
        "release sync_restrict::shared::cta cluster" => "" sm 90 ptx 8 . 6;
        "mbarrier_init release cluster" => "" sm 90 ptx 8 . 0;
        "proxy alias" => "" sm 70 ptx 7 . 5;
        "proxy async global|$sharedx?" => "" sm 90 ptx 8 . 0;
        "proxy tensormap::generic release $scopes" => "" sm 90 ptx 8 . 3;
        "proxy tensormap::generic acquire $scopes" => "m i" sm 90 ptx 8 . 3;
        "proxy async::generic acquire sync_restrict::shared::cluster cluster" => "" sm 90 ptx 8 . 6;
        "proxy async::generic release sync_restrict::shared::cta cluster" => "" sm 90 ptx 8 . 6;
    }
    Mbarrier "mbarrier" {
        "init shared? b64" => "m a:u32" sm 80 ptx 7 . 0;
        "init shared::cta b64" => "m a:u32" sm 80 ptx 7 . 8;
        "inval shared? b64" => "m" sm 80 ptx 7 . 0;
        "inval shared::cta b64" => "m" sm 80 ptx 7 . 8;
        "expect_tx shared|$sharedx? b64" => "m a:u32" sm 90 ptx 8 . 0;
        "expect_tx relaxed cta|cluster shared|$sharedx? b64" => "m a:u32" sm 90 ptx 8 . 0;
        "complete_tx shared|$sharedx? b64" => "m a:u32" sm 90 ptx 8 . 0;
        "complete_tx relaxed cta|cluster shared|$sharedx? b64" => "m a:u32" sm 90 ptx 8 . 0;
        "arrive shared? b64" => "d m" sm 80 ptx 7 . 0;
        "arrive noComplete shared? b64" => "d m a:u32" sm 80 ptx 7 . 0;
        "arrive shared::cta b64" => "d m" sm 80 ptx 7 . 8;
        "arrive noComplete shared::cta b64" => "d m a:u32" sm 80 ptx 7 . 8;
        "arrive shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 7 . 8;
        "arrive release cta|cluster shared|shared::cta? b64" => "d m a:u32?" sm 90 ptx 8 . 0;
        "arrive relaxed cta|cluster shared|shared::cta? b64" => "d m a:u32?" sm 90 ptx 8 . 6;
        "arrive shared::cluster b64" => "_ m a:u32?" sm 90 ptx 8 . 0;
        "arrive release cta|cluster shared::cluster b64" => "_ m a:u32?" sm 90 ptx 8 . 0;
        "arrive relaxed cta|cluster shared::cluster b64" => "_ m a:u32?" sm 90 ptx 8 . 6;
        "arrive expect_tx shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 8 . 0;
        "arrive expect_tx release cta|cluster shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 8 . 0;
        "arrive expect_tx relaxed cta|cluster shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 8 . 6;
        "arrive expect_tx shared::cluster b64" => "_ m a:u32" sm 90 ptx 8 . 0;
        "arrive expect_tx release cta|cluster shared::cluster b64" => "_ m a:u32" sm 90 ptx 8 . 0;
        "arrive expect_tx relaxed cta|cluster shared::cluster b64" => "_ m a:u32" sm 90 ptx 8 . 6;
        "arrive_drop shared? b64" => "d m" sm 80 ptx 7 . 0;
        "arrive_drop noComplete shared? b64" => "d m a:u32" sm 80 ptx 7 . 0;
        "arrive_drop shared::cta b64" => "d m" sm 80 ptx 7 . 8;
        "arrive_drop noComplete shared::cta b64" => "d m a:u32" sm 80 ptx 7 . 8;
        "arrive_drop shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 7 . 8;
        "arrive_drop release cta|cluster shared|shared::cta? b64" => "d m a:u32?" sm 90 ptx 8 . 0;
        "arrive_drop relaxed cta|cluster shared|shared::cta? b64" => "d m a:u32?" sm 90 ptx 8 . 6;
        "arrive_drop shared::cluster b64" => "_ m a:u32?" sm 90 ptx 8 . 0;
        "arrive_drop release cta|cluster shared::cluster b64" => "_ m a:u32?" sm 90 ptx 8 . 0;
        "arrive_drop relaxed cta|cluster shared::cluster b64" => "_ m a:u32?" sm 90 ptx 8 . 6;
        "arrive_drop expect_tx shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 8 . 0;
        "arrive_drop expect_tx release cta|cluster shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 8 . 0;
        "arrive_drop expect_tx relaxed cta|cluster shared|shared::cta? b64" => "d m a:u32" sm 90 ptx 8 . 6;
        "arrive_drop expect_tx shared::cluster b64" => "_ m a:u32" sm 90 ptx 8 . 0;
        "arrive_drop expect_tx release cta|cluster shared::cluster b64" => "_ m a:u32" sm 90 ptx 8 . 0;
        "arrive_drop expect_tx relaxed cta|cluster shared::cluster b64" => "_ m a:u32" sm 90 ptx 8 . 6;
        "test_wait shared? b64" => "p m a:b64" sm 80 ptx 7 . 0;
        "test_wait shared::cta b64" => "p m a:b64" sm 80 ptx 7 . 8;
        "test_wait acquire cta|cluster shared|shared::cta? b64" => "p m a:b64" sm 90 ptx 8 . 0;
        "test_wait relaxed cta|cluster shared|shared::cta? b64" => "p m a:b64" sm 90 ptx 8 . 6;
        "test_wait parity shared? b64" => "p m a:u32" sm 80 ptx 7 . 1;
        "test_wait parity shared::cta b64" => "p m a:u32" sm 80 ptx 7 . 8;
        "test_wait parity acquire cta|cluster shared|shared::cta? b64" => "p m a:u32" sm 90 ptx 8 . 0;
        "test_wait parity relaxed cta|cluster shared|shared::cta? b64" => "p m a:u32" sm 90 ptx 8 . 6;
        "try_wait shared|shared::cta? b64" => "p m a:b64 a:u32?" sm 90 ptx 7 . 8;
        "try_wait acquire cta|cluster shared|shared::cta? b64" => "p m a:b64 a:u32?" sm 90 ptx 8 . 0;
        "try_wait relaxed cta|cluster shared|shared::cta? b64" => "p m a:b64 a:u32?" sm 90 ptx 8 . 6;
        "try_wait parity shared|shared::cta? b64" => "p m a:u32 a:u32?" sm 90 ptx 7 . 8;
        "try_wait parity acquire cta|cluster shared|shared::cta? b64" => "p m a:u32 a:u32?" sm 90 ptx 8 . 0;
        "try_wait parity relaxed cta|cluster shared|shared::cta? b64" => "p m a:u32 a:u32?" sm 90 ptx 8 . 6;
        "pending_count b64" => "d:u32 a:b64" sm 80 ptx 7 . 0;
    }

    // Asynchronous copies (9.7.9.25 to 9.7.9.28).
    CpAsync "cp" {
        "async ca|cg $shared global" => "m m i a|c:u32?" sm 80 ptx 7 . 0;
        "async ca|cg $shared global $prefetch256" => "m m i a|c:u32?" sm 80 ptx 7 . 4;
        "async ca|cg $shared global L2::cache_hint $prefetch256?" => "m m i a|c:u32? a:b64" sm 80 ptx 7 . 4;
        "async commit_group" => "" sm 80 ptx 7 . 0;
        "async wait_group" => "i" sm 80 ptx 7 . 0;
        "async wait_all" => "" sm 80 ptx 7 . 0;
        "async mbarrier arrive noinc? shared? b64" => "m" sm 80 ptx 7 . 0;
        "async mbarrier arrive noinc? shared::cta b64" => "m" sm 80 ptx 7 . 8;
        "async bulk shared::cluster global mbarrier::complete_tx::bytes" => "m m a:u32 m" sm 90 ptx 8 . 0;
        "async bulk shared::cluster global mbarrier::complete_tx::bytes multicast::cluster" => "m m a:u32 m a:u16" sm 90 ptx 8 . 0;
        "async bulk shared::cta global mbarrier::complete_tx::bytes" => "m m a:u32 m" sm 90 ptx 8 . 6;
        "async bulk global shared::cta bulk_group" => "m m a:u32" sm 90 ptx 8 . 0;
        "async bulk global shared::cta bulk_group cp_mask" => "m m a:u32 a:u16" sm 100 ptx 8 . 6;
        "async bulk prefetch L2 global" => "m a:u32" sm 90 ptx 8 . 0;
        "async bulk shared::cluster global mbarrier::complete_tx::bytes L2::cache_hint" => "m m a:u32 m a:b64" sm 90 ptx 8 . 0;
        "async bulk shared::cluster global mbarrier::complete_tx::bytes multicast::cluster L2::cache_hint" => "m m a:u32 m a:u16 a:b64" sm 90 ptx 8 . 0;
        "async bulk shared::cta global mbarrier::complete_tx::bytes L2::cache_hint" => "m m a:u32 m a:b64" sm 90 ptx 8 . 6;
        "async bulk global shared::cta bulk_group L2::cache_hint" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "async bulk global shared::cta bulk_group L2::cache_hint cp_mask" => "m m a:u32 a:b64 a:u16" sm 100 ptx 8 . 6;
        "async bulk prefetch L2 global L2::cache_hint" => "m a:u32 a:b64" sm 90 ptx 8 . 0;
        "async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes" => "m m a:u32 m" sm 90 ptx 8 . 0;
        "async bulk commit_group" => "" sm 90 ptx 8 . 0;
        "async bulk wait_group read?" => "i" sm 90 ptx 8 . 0;
        "reduce async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes and|or|xor b32" => "m m a:u32 m" sm 90 ptx 8 . 0;
        "reduce async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes add|inc|dec|min|max u32" => "m m a:u32 m" sm 90 ptx 8 . 0;
        "reduce async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes add|min|max s32" => "m m a:u32 m" sm 90 ptx 8 . 0;
        "reduce async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes add u64" => "m m a:u32 m" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group and|or|xor b32|b64" => "m m a:u32" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group add|inc|dec|min|max u32" => "m m a:u32" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group add|min|max s32|u64" => "m m a:u32" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group min|max s64|f16|bf16" => "m m a:u32" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group add f32|f64" => "m m a:u32" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group add noftz f16|bf16" => "m m a:u32" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group L2::cache_hint and|or|xor b32|b64" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group L2::cache_hint add|inc|dec|min|max u32" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group L2::cache_hint add|min|max s32|u64" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group L2::cache_hint min|max s64|f16|bf16" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group L2::cache_hint add f32|f64" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "reduce async bulk global shared::cta bulk_group L2::cache_hint add noftz f16|bf16" => "m m a:u32 a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes" => "m t m" sm 90 ptx 8 . 0;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes cta_group::1|cta_group::2" => "m t m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes L2::cache_hint" => "m t m a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes cta_group::1|cta_group::2 L2::cache_hint" => "m t m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes multicast::cluster" => "m t m a:u16" sm 90 ptx 8 . 0;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes multicast::cluster cta_group::1|cta_group::2" => "m t m a:u16" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes multicast::cluster L2::cache_hint" => "m t m a:u16 a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor $dim shared::cluster global tile? mbarrier::complete_tx::bytes multicast::cluster cta_group::1|cta_group::2 L2::cache_hint" => "m t m a:u16 a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes" => "m t m a*:b16" sm 90 ptx 8 . 0;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes cta_group::1|cta_group::2" => "m t m a*:b16" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes L2::cache_hint" => "m t m a*:b16 a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes cta_group::1|cta_group::2 L2::cache_hint" => "m t m a*:b16 a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes multicast::cluster" => "m t m a*:b16 a:u16" sm 90 ptx 8 . 0;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes multicast::cluster cta_group::1|cta_group::2" => "m t m a*:b16 a:u16" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes multicast::cluster L2::cache_hint" => "m t m a*:b16 a:u16 a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor $dim3 shared::cluster global im2col mbarrier::complete_tx::bytes multicast::cluster cta_group::1|cta_group::2 L2::cache_hint" => "m t m a*:b16 a:u16 a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor 2d shared::cluster global tile::gather4 mbarrier::complete_tx::bytes cta_group::1|cta_group::2?" => "m t m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor 2d shared::cluster global tile::gather4 mbarrier::complete_tx::bytes cta_group::1|cta_group::2? L2::cache_hint" => "m t m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor 2d shared::cluster global tile::gather4 mbarrier::complete_tx::bytes multicast::cluster cta_group::1|cta_group::2?" => "m t m a:u16" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor 2d shared::cluster global tile::gather4 mbarrier::complete_tx::bytes multicast::cluster cta_group::1|cta_group::2? L2::cache_hint" => "m t m a:u16 a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim shared::cta global tile? mbarrier::complete_tx::bytes" => "m t m" sm 90 ptx 8 . 6;
        "async bulk tensor $dim shared::cta global tile? mbarrier::complete_tx::bytes cta_group::1|cta_group::2" => "m t m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim shared::cta global tile? mbarrier::complete_tx::bytes L2::cache_hint" => "m t m a:b64" sm 90 ptx 8 . 6;
        "async bulk tensor $dim shared::cta global tile? mbarrier::complete_tx::bytes cta_group::1|cta_group::2 L2::cache_hint" => "m t m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim3 shared::cta global im2col mbarrier::complete_tx::bytes" => "m t m a*:b16" sm 90 ptx 8 . 6;
        "async bulk tensor $dim3 shared::cta global im2col mbarrier::complete_tx::bytes cta_group::1|cta_group::2" => "m t m a*:b16" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim3 shared::cta global im2col mbarrier::complete_tx::bytes L2::cache_hint" => "m t m a*:b16 a:b64" sm 90 ptx 8 . 6;
        "async bulk tensor $dim3 shared::cta global im2col mbarrier::complete_tx::bytes cta_group::1|cta_group::2 L2::cache_hint" => "m t m a*:b16 a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor 2d shared::cta global tile::gather4 mbarrier::complete_tx::bytes cta_group::1|cta_group::2?" => "m t m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor 2d shared::cta global tile::gather4 mbarrier::complete_tx::bytes cta_group::1|cta_group::2? L2::cache_hint" => "m t m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim global shared::cta tile? bulk_group" => "t m" sm 90 ptx 8 . 0;
        "async bulk tensor $dim3 global shared::cta im2col_no_offs bulk_group" => "t m" sm 90 ptx 8 . 0;
        "async bulk tensor 2d global shared::cta tile::scatter4 bulk_group" => "t m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "reduce async bulk tensor $dim global shared::cta add|min|max|inc|dec|and|or|xor tile? bulk_group" => "t m" sm 90 ptx 8 . 0;
        "reduce async bulk tensor $dim3 global shared::cta add|min|max|inc|dec|and|or|xor im2col_no_offs bulk_group" => "t m" sm 90 ptx 8 . 0;
        "async bulk prefetch tensor $dim L2 global tile?" => "t" sm 90 ptx 8 . 0;
        "async bulk prefetch tensor $dim3 L2 global im2col" => "t a*:b16" sm 90 ptx 8 . 0;
        "async bulk prefetch tensor 2d L2 global tile::gather4" => "t" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "async bulk tensor $dim global shared::cta tile? bulk_group L2::cache_hint" => "t m a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor $dim3 global shared::cta im2col_no_offs bulk_group L2::cache_hint" => "t m a:b64" sm 90 ptx 8 . 0;
        "async bulk tensor 2d global shared::cta tile::scatter4 bulk_group L2::cache_hint" => "t m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "reduce async bulk tensor $dim global shared::cta add|min|max|inc|dec|and|or|xor tile? bulk_group L2::cache_hint" => "t m a:b64" sm 90 ptx 8 . 0;
        "reduce async bulk tensor $dim3 global shared::cta add|min|max|inc|dec|and|or|xor im2col_no_offs bulk_group L2::cache_hint" => "t m a:b64" sm 90 ptx 8 . 0;
        "async bulk prefetch tensor $dim L2 global tile? L2::cache_hint" => "t a:b64" sm 90 ptx 8 . 0;
        "async bulk prefetch tensor $dim3 L2 global im2col L2::cache_hint" => "t a*:b16 a:b64" sm 90 ptx 8 . 0;
        "async bulk prefetch tensor 2d L2 global tile::gather4 L2::cache_hint" => "t a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
    }
    Tensormap "tensormap" {
        "replace tile global_address global|shared::cta? b1024 b64" => "m a" sm 90 on "sm_90a sm_100a sm_103a sm_120a sm_121a" ptx 8 . 3;
        "replace tile rank global|shared::cta? b1024 b32" => "m a" sm 90 on "sm_90a sm_100a sm_103a sm_120a sm_121a" ptx 8 . 3;
        "replace tile box_dim|global_dim|element_stride global|shared::cta? b1024 b32" => "m i a" sm 90 on "sm_90a sm_100a sm_103a sm_120a sm_121a" ptx 8 . 3;
        "replace tile global_stride global|shared::cta? b1024 b64" => "m i a" sm 90 on "sm_90a sm_100a sm_103a sm_120a sm_121a" ptx 8 . 3;
        "replace tile elemtype|interleave_layout|swizzle_mode|fill_mode global|shared::cta? b1024 b32" => "m i" sm 90 on "sm_90a sm_100a sm_103a sm_120a sm_121a" ptx 8 . 3;
        "cp_fenceproxy global shared::cta tensormap::generic release $scopes sync aligned" => "m m i" sm 90 ptx 8 . 3;
    }

    // The tensor core of sm_100 and its memory (9.7.16).
    Tcgen05 "tcgen05" {
        "alloc cta_group::1|cta_group::2 sync aligned shared::cta? b32" => "m a:u32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "dealloc cta_group::1|cta_group::2 sync aligned b32" => "a a:u32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "relinquish_alloc_permit cta_group::1|cta_group::2 sync aligned" => "" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "ld sync aligned 16x64b|32x32b x1|x2|x4|x8|x16|x32|x64|x128 pack::16b? b32" => "d*x:b32 m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "st sync aligned 16x64b|32x32b x1|x2|x4|x8|x16|x32|x64|x128 unpack::16b? b32" => "m a*x:b32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "ld sync aligned 16x128b x1|x2|x4|x8|x16|x32|x64 pack::16b? b32" => "d*2x:b32 m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "st sync aligned 16x128b x1|x2|x4|x8|x16|x32|x64 unpack::16b? b32" => "m a*2x:b32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "ld sync aligned 16x256b x1|x2|x4|x8|x16|x32 pack::16b? b32" => "d*4x:b32 m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "st sync aligned 16x256b x1|x2|x4|x8|x16|x32 unpack::16b? b32" => "m a*4x:b32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "ld sync aligned 16x32bx2 x1|x2|x4|x8|x16|x32|x64|x128 pack::16b? b32" => "d*x:b32 m i" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "st sync aligned 16x32bx2 x1|x2|x4|x8|x16|x32|x64|x128 unpack::16b? b32" => "m i a*x:b32" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "wait::ld|wait::st sync aligned" => "" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "cp cta_group::1|cta_group::2 128x256b|4x256b|128x128b" => "m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "cp cta_group::1|cta_group::2 128x256b|4x256b|128x128b b8x16 b6x16_p32|b4x16_p64" => "m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "cp cta_group::1|cta_group::2 64x128b warpx2::02_13|warpx2::01_23" => "m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "cp cta_group::1|cta_group::2 64x128b warpx2::02_13|warpx2::01_23 b8x16 b6x16_p32|b4x16_p64" => "m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "cp cta_group::1|cta_group::2 32x128b warpx4" => "m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "cp cta_group::1|cta_group::2 32x128b warpx4 b8x16 b6x16_p32|b4x16_p64" => "m a:b64" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "shift cta_group::1|cta_group::2 down" => "m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "commit cta_group::1|cta_group::2 mbarrier::arrive::one shared::cluster? b64" => "m" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "commit cta_group::1|cta_group::2 mbarrier::arrive::one shared::cluster? multicast::cluster b64" => "m a:u16" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "fence::before_thread_sync|fence::after_thread_sync" => "" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 a*4:b32 c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::2 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 a*8:b32 c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::f16|kind::tf32 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 c i" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::mxf8f6f4 block_scale scale_vec::1X? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::mxf4 block_scale scale_vec::2X? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::mxf8f6f4|kind::mxf4 block_scale block32 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 8;
        "mma cta_group::1|cta_group::2 kind::mxf4nvf4 block_scale scale_vec::2X|scale_vec::4X collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 7;
        "mma cta_group::1|cta_group::2 kind::mxf4nvf4 block_scale block16|block32 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m a:b64 a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 8;
        "mma ws cta_group::1 kind::f16|kind::tf32|kind::f8f6f4|kind::i8" => "m a:b64 a:b64 a:b32 c a:b64?" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 ashift? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 ashift? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 a*4:b32 c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::2 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 ashift? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 a*8:b32 c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::f16|kind::tf32 ashift? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 c i" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::mxf8f6f4 block_scale scale_vec::1X? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::mxf4 block_scale scale_vec::2X? collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
        "mma cta_group::1|cta_group::2 kind::mxf8f6f4|kind::mxf4 block_scale block32 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 8;
        "mma cta_group::1|cta_group::2 kind::mxf4nvf4 block_scale scale_vec::2X|scale_vec::4X collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 7;
        "mma cta_group::1|cta_group::2 kind::mxf4nvf4 block_scale block16|block32 collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?" => "m m a:b64 a:b32 m m c" sm 100 on "sm_100a sm_103a" ptx 8 . 8;
        "mma ws cta_group::1 kind::f16|kind::tf32|kind::f8f6f4|kind::i8" => "m m a:b64 a:b32 c a:b64?" sm 100 on "sm_100a sm_103a" ptx 8 . 6;
    }
    Clusterlaunchcontrol "clusterlaunchcontrol" {
        "try_cancel async shared::cta? mbarrier::complete_tx::bytes b128" => "m m" sm 100 ptx 8 . 6;
        "try_cancel async shared::cta? mbarrier::complete_tx::bytes multicast::cluster::all b128" => "m m" sm 100 on "sm_100a sm_103a sm_120a sm_121a" ptx 8 . 6;
        "query_cancel is_canceled pred b128" => "p a2" sm 100 ptx 8 . 6;
        "query_cancel get_first_ctaid::x|get_first_ctaid::y|get_first_ctaid::z b32 b128" => "d a2" sm 100 ptx 8 . 6;
        "query_cancel get_first_ctaid v4 b32 b128" => "dv a2" sm 100 ptx 8 . 6;
    }

    // Control flow (9.7.12).
    Bra "bra" { "uni?" => "l"; }
    Brx "brx" { "idx uni?" => "a:u32 ll" sm 50 ptx 6 . 0; }
    Call "call" { "uni?" => "d() f a()"; }
    Ret "ret" { "uni?" => ""; }
    Exit "exit" { "" => ""; }
    Trap "trap" { "" => ""; }
    Nanosleep "nanosleep" { "u32" => "a" sm 70 ptx 6 . 3; }
    Brkpt "brkpt" { "" => ""; }
    Pmevent "pmevent" { "mask?" => "i"; }
    Setmaxnreg "setmaxnreg" { "inc|dec sync aligned u32" => "i" sm 90 on "sm_90a sm_100a sm_103a sm_120a sm_121a" ptx 8 . 0; }
    Griddepcontrol "griddepcontrol" { "launch_dependents|wait" => "" sm 90 ptx 7 . 8; }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_reads() {
        for (opcode, rows) in ROWS {
            assert_eq!(Form::of(*opcode).len(), rows.len());
            assert_eq!(Opcode::from_name(opcode.name()), Some(*opcode));
        }
    }

    #[test]
    fn a_form_is_found_by_its_modifiers_and_arity() {
        let names = |text: &str| text.split('.').filter_map(Modifier::from_name).collect::<Vec<_>>();
        let found = |opcode, text, operands| {
            let register = Operand::Register(crate::Register { bank: 0, index: 0 });
            Form::find(opcode, &names(text), &vec![register; operands]).map(|id| id.get().syntax)
        };
        assert_eq!(found(Opcode::Mul, "wide.u32", 3), Some("wide u16|s16|u32|s32"));
        assert_eq!(found(Opcode::Fma, "rn.f32", 4), Some("$rnd ftz? sat? f32"));
        assert_eq!(found(Opcode::Fma, "f32", 4), None);
        assert_eq!(found(Opcode::Fma, "rn.f32", 3), None);
        assert_eq!(found(Opcode::Ld, "global.v4.b32", 2), found(Opcode::Ld, "shared.f32", 2));
    }
}
