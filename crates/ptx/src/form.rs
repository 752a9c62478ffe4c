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
//! | `d\|p` | a register and, optionally, a predicate written together |
//! | `p`, `p\|q` | a predicate written; one and optionally its complement |
//! | `c` | a predicate read, possibly negated |
//! | `m` | a memory operand |
//! | `l` | a label |
//! | `i` | an integer constant |
//!
//! A trailing `?` makes the operand optional. `sm` and `ptx` at the end of a row say what the form needs.

use std::sync::LazyLock;

use crate::{Modifier, Type, Version};

/// Whether an operand is written, read, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Written.
    Def,
    /// Read.
    Use,
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
    /// A register, or a register and a predicate.
    ValueAndPredicate(TypeRule),
    /// A predicate.
    Predicate,
    /// One predicate or two.
    PredicatePair,
    /// `[address]`.
    Memory,
    /// A branch target.
    Label,
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
    /// The lowest PTX version that has the form.
    pub min_ptx: Version,
}

impl Form {
    /// The form of `opcode` whose modifiers these are and which takes `operands` operands, and its place in the table.
    pub(crate) fn find(opcode: Opcode, modifiers: &[Modifier], operands: usize) -> Option<FormId> {
        let rows = TABLE.by_opcode[opcode as usize].clone();
        rows.map(FormId).find(|row| row.get().accepts(modifiers) && row.get().arity().contains(&operands))
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
            min_ptx: Version { major: self.min_ptx.0, minor: self.min_ptx.1 },
        }
    }
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
        "atomic" => "relaxed|acquire|release|acq_rel",
        "scope" => "cta|gpu|sys",
        "l1" => "L1::evict_first|L1::evict_last|L1::evict_normal|L1::evict_unchanged|L1::no_allocate",
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
    let role = if token.starts_with(['d', 'p']) { Role::Def } else { Role::Use };
    let kind = match token {
        "d" | "a" => Kind::Value(TypeRule::First),
        "a2" => Kind::Value(TypeRule::Second),
        "dw" | "aw" => Kind::Value(TypeRule::Wide),
        "dv" | "av" => Kind::Vector(TypeRule::First),
        "dm" | "am" => Kind::Movable(TypeRule::First),
        "d|p" => Kind::ValueAndPredicate(TypeRule::First),
        "p" | "c" => Kind::Predicate,
        "p|q" => Kind::PredicatePair,
        "m" => Kind::Memory,
        "l" => Kind::Label,
        "i" => Kind::Integer,
        other => match other.split_once(':').and_then(|(place, name)| Some((place, Type::from_name(name)?))) {
            Some(("dv" | "av", ty)) => Kind::Vector(TypeRule::Fixed(ty)),
            Some((_, ty)) => Kind::Value(TypeRule::Fixed(ty)),
            None => unreachable!("the table has an operand `{other}` that means nothing"),
        },
    };
    Slot { role, kind, optional }
}

macro_rules! forms {
    ($($opcode:ident $name:literal { $($modifiers:literal => $operands:literal $(sm $sm:literal ptx $major:literal . $minor:literal)?;)+ })+) => {
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

        const ROWS: &[(Opcode, &[Row])] = &[$((Opcode::$opcode, &[$(forms!(@row $modifiers $operands $($sm $major $minor)?)),+])),+];
    };
    (@row $modifiers:literal $operands:literal) => { forms!(@row $modifiers $operands 50 6 0) };
    (@row $modifiers:literal $operands:literal $sm:literal $major:literal $minor:literal) => {
        Row { modifiers: $modifiers, operands: $operands, min_sm: $sm, min_ptx: ($major, $minor) }
    };
}

forms! {
    // Integer and floating-point arithmetic (PTX ISA 9.7.1 to 9.7.5).
    Add "add" {
        "sat s32" => "d a a";
        "$int" => "d a a";
        "$rnd? ftz? sat? f32" => "d a a";
        "$rnd? f64" => "d a a";
        "rn? ftz? sat? f16|f16x2" => "d a a" sm 53 ptx 6 . 0;
        "rn? bf16|bf16x2" => "d a a" sm 90 ptx 7 . 8;
    }
    Sub "sub" {
        "sat s32" => "d a a";
        "$int" => "d a a";
        "$rnd? ftz? sat? f32" => "d a a";
        "$rnd? f64" => "d a a";
        "rn? ftz? sat? f16|f16x2" => "d a a" sm 53 ptx 6 . 0;
        "rn? bf16|bf16x2" => "d a a" sm 90 ptx 7 . 8;
    }
    Mul "mul" {
        "wide u16|s16|u32|s32" => "dw a a";
        "lo|hi $int" => "d a a";
        "$rnd? ftz? sat? f32" => "d a a";
        "$rnd? f64" => "d a a";
        "rn? ftz? sat? f16|f16x2" => "d a a" sm 53 ptx 6 . 0;
        "rn? bf16|bf16x2" => "d a a" sm 90 ptx 7 . 8;
    }
    Mad "mad" {
        "wide u16|s16|u32|s32" => "dw a a aw";
        "hi sat s32" => "d a a a";
        "lo|hi $int" => "d a a a";
        "$rnd ftz? sat? f32" => "d a a a";
        "$rnd f64" => "d a a a";
    }
    Fma "fma" {
        "$rnd ftz? sat? f32" => "d a a a";
        "$rnd f64" => "d a a a";
        "rn ftz? sat? f16|f16x2" => "d a a a" sm 53 ptx 6 . 0;
        "rn ftz? relu f16|f16x2" => "d a a a" sm 80 ptx 7 . 0;
        "rn relu? bf16|bf16x2" => "d a a a" sm 80 ptx 7 . 0;
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
        "ftz? f32" => "d a a";
        "ftz? NaN f32" => "d a a" sm 80 ptx 7 . 0;
        "f64" => "d a a";
        "ftz? NaN? f16|f16x2" => "d a a" sm 80 ptx 7 . 0;
        "NaN? bf16|bf16x2" => "d a a" sm 80 ptx 7 . 0;
    }
    Max "max" {
        "$int" => "d a a";
        "ftz? f32" => "d a a";
        "ftz? NaN f32" => "d a a" sm 80 ptx 7 . 0;
        "f64" => "d a a";
        "ftz? NaN? f16|f16x2" => "d a a" sm 80 ptx 7 . 0;
        "NaN? bf16|bf16x2" => "d a a" sm 80 ptx 7 . 0;
    }
    Rcp "rcp" { "approx ftz? f32" => "d a"; "$rnd ftz? f32" => "d a"; "$rnd f64" => "d a"; }
    Sqrt "sqrt" { "approx ftz? f32" => "d a"; "$rnd ftz? f32" => "d a"; "$rnd f64" => "d a"; }
    Rsqrt "rsqrt" { "approx ftz? f32" => "d a"; }
    Sin "sin" { "approx ftz? f32" => "d a"; }
    Cos "cos" { "approx ftz? f32" => "d a"; }
    Lg2 "lg2" { "approx ftz? f32" => "d a"; }
    Ex2 "ex2" { "approx ftz? f32" => "d a"; }
    Tanh "tanh" { "approx f32" => "d a" sm 75 ptx 7 . 0; }
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
    Lop3 "lop3" { "b32" => "d a a a i"; }
    Bfe "bfe" { "u32|u64|s32|s64" => "d a a:u32 a:u32"; }
    Bfi "bfi" { "b32|b64" => "d a a a:u32 a:u32"; }
    Bfind "bfind" { "shiftamt? u32|u64|s32|s64" => "d:u32 a"; }
    Brev "brev" { "b32|b64" => "d a"; }
    Clz "clz" { "b32|b64" => "d:u32 a"; }
    Popc "popc" { "b32|b64" => "d:u32 a"; }
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
        "$fcmp bf16|bf16x2" => "p|q a a" sm 90 ptx 7 . 8;
    }
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
        "rna tf32 f32" => "d a2" sm 80 ptx 7 . 0;
        "f32 bf16" => "d a2" sm 80 ptx 7 . 1;
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
        "volatile global|shared? $vec? $memory" => "dv m";
        "relaxed|acquire $scope global|shared? $vec? $memory" => "dv m" sm 70 ptx 6 . 0;
        "relaxed|acquire cluster global|shared? $vec? $memory" => "dv m" sm 90 ptx 7 . 8;
        "mmio relaxed sys global? $memory" => "dv m" sm 70 ptx 8 . 2;
        "global ca|cg|cs? nc $vec? $memory" => "dv m";
        "global nc? $l1? $prefetch? $vec? $memory" => "dv m" sm 75 ptx 7 . 4;
        "global nc? $l1? $prefetch256? $vec? $memory" => "dv m" sm 80 ptx 7 . 4;
        "global nc? $l1? L2::cache_hint $prefetch256? $vec? $memory" => "dv m a:b64" sm 80 ptx 7 . 4;
        "weak? global|shared|local|const|param? b128" => "dv m" sm 70 ptx 8 . 3;
    }
    St "st" {
        "weak? global|shared|local? wb|cg|cs|wt? $vec? $memory" => "m av";
        "weak? shared::cta $vec? $memory" => "m av" sm 50 ptx 7 . 8;
        "weak? shared::cluster $vec? $memory" => "m av" sm 90 ptx 7 . 8;
        "volatile global|shared? $vec? $memory" => "m av";
        "relaxed|release $scope global|shared? $vec? $memory" => "m av" sm 70 ptx 6 . 0;
        "relaxed|release cluster global|shared? $vec? $memory" => "m av" sm 90 ptx 7 . 8;
        "mmio relaxed sys global? $memory" => "m av" sm 70 ptx 8 . 2;
        "global $l1? $vec? $memory" => "m av" sm 75 ptx 7 . 4;
        "global $l1? L2::cache_hint $vec? $memory" => "m av a:b64" sm 80 ptx 7 . 4;
        "weak? global|shared|local? b128" => "m av" sm 70 ptx 8 . 3;
    }
    Prefetch "prefetch" {
        "global|local? L1|L2" => "m";
        "global L2::evict_last|L2::evict_normal" => "m" sm 80 ptx 7 . 4;
    }

    // Atomics and reductions (9.7.13).
    Atom "atom" {
        "$atomic? $scope? $where? add u32|s32|u64|f32|f64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? min|max u32|s32|u64|s64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? inc|dec u32" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? exch|and|or|xor b32|b64" => "d m a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? cas b32|b64" => "d m a a" sm 60 ptx 6 . 0;
        "$atomic? $scope? $where? cas b16" => "d m a a" sm 70 ptx 6 . 3;
        "$atomic? $scope? $where? add noftz f16|f16x2" => "d m a" sm 70 ptx 6 . 3;
        "$atomic? $scope? $where? add noftz bf16|bf16x2" => "d m a" sm 90 ptx 7 . 8;
    }
    Red "red" {
        "relaxed|release? $scope? $where? add u32|s32|u64|f32|f64" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? min|max u32|s32|u64|s64" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? inc|dec u32" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? and|or|xor b32|b64" => "m a" sm 60 ptx 6 . 0;
        "relaxed|release? $scope? $where? add noftz f16|f16x2" => "m a" sm 70 ptx 6 . 3;
        "relaxed|release? $scope? $where? add noftz bf16|bf16x2" => "m a" sm 90 ptx 7 . 8;
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
    }
    Activemask "activemask" { "b32" => "d" sm 50 ptx 6 . 2; }

    // Matrices of eight rows of 16 bytes, between shared memory and the registers of a warp (9.7.14).
    Ldmatrix "ldmatrix" {
        "sync aligned m8n8 x1|x2|x4 trans? shared? b16" => "dv:b32 m" sm 75 ptx 6 . 5;
        "sync aligned m8n8 x1|x2|x4 trans? shared::cta b16" => "dv:b32 m" sm 75 ptx 7 . 8;
    }
    Stmatrix "stmatrix" { "sync aligned m8n8 x1|x2|x4 trans? shared|shared::cta? b16" => "m av:b32" sm 90 ptx 7 . 8; }

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
        "cta sync aligned?" => "a:u32 a:u32?" sm 50 ptx 7 . 8;
        "cta arrive aligned?" => "a:u32 a:u32" sm 50 ptx 7 . 8;
    }
    Membar "membar" { "cta|gl|sys" => ""; }
    Fence "fence" {
        "sc|acq_rel? $scope" => "" sm 70 ptx 6 . 0;
        "sc|acq_rel? cluster" => "" sm 90 ptx 7 . 8;
    }

    // Asynchronous copies to shared memory (9.7.9.25).
    CpAsync "cp" {
        "async ca|cg $shared global" => "m m i a:u32?" sm 80 ptx 7 . 0;
        "async ca|cg $shared global $prefetch256" => "m m i a:u32?" sm 80 ptx 7 . 4;
        "async ca|cg $shared global L2::cache_hint $prefetch256?" => "m m i a:u32? a:b64" sm 80 ptx 7 . 4;
        "async commit_group" => "" sm 80 ptx 7 . 0;
        "async wait_group" => "i" sm 80 ptx 7 . 0;
        "async wait_all" => "" sm 80 ptx 7 . 0;
    }

    // Control flow (9.7.12).
    Bra "bra" { "uni?" => "l"; }
    Ret "ret" { "uni?" => ""; }
    Exit "exit" { "" => ""; }
    Trap "trap" { "" => ""; }
    Nanosleep "nanosleep" { "u32" => "a" sm 70 ptx 6 . 3; }
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
        let found = |opcode, text, operands| Form::find(opcode, &names(text), operands).map(|id| id.get().syntax);
        assert_eq!(found(Opcode::Mul, "wide.u32", 3), Some("wide u16|s16|u32|s32"));
        assert_eq!(found(Opcode::Fma, "rn.f32", 4), Some("$rnd ftz? sat? f32"));
        assert_eq!(found(Opcode::Fma, "f32", 4), None);
        assert_eq!(found(Opcode::Fma, "rn.f32", 3), None);
        assert_eq!(found(Opcode::Ld, "global.v4.b32", 2), found(Opcode::Ld, "shared.f32", 2));
    }
}
