//! The arithmetic in which file tests say what buffers hold: integers of 64 bits, wrapping, and doubles.

use std::collections::HashMap;
use std::fmt;

use half::{bf16, f16};
use ptx::Type;

/// A number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    Integer(i64),
    Float(f64),
}

use Value::{Float, Integer};

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Integer(value) => value.fmt(f),
            Float(value) => value.fmt(f),
        }
    }
}

impl Value {
    fn float(self) -> f64 {
        match self {
            Integer(value) => value as f64,
            Float(value) => value,
        }
    }

    pub fn integer(self) -> i64 {
        match self {
            Integer(value) => value,
            Float(value) => value as i64,
        }
    }

    /// The bytes of the number in a type: integers wrap, floating-point types round to nearest even.
    pub fn encode(self, ty: Type) -> Vec<u8> {
        match ty {
            Type::F16 => f16::from_f64(self.float()).to_le_bytes().to_vec(),
            Type::Bf16 => bf16::from_f64(self.float()).to_le_bytes().to_vec(),
            Type::F32 => (self.float() as f32).to_le_bytes().to_vec(),
            Type::F64 => self.float().to_le_bytes().to_vec(),
            _ => self.integer().to_le_bytes()[..(ty.bytes() as usize).min(8)].to_vec(),
        }
    }

    /// The number that bytes of a type hold.
    pub fn decode(bytes: &[u8], ty: Type) -> Self {
        let bits = crate::lanes::number(bytes);
        match ty {
            Type::F16 => Float(f16::from_bits(bits as u16).to_f64()),
            Type::Bf16 => Float(bf16::from_bits(bits as u16).to_f64()),
            Type::F32 => Float(f32::from_bits(bits as u32).into()),
            Type::F64 => Float(f64::from_bits(bits)),
            _ if ty.is_signed() => Integer((bits << (64 - ty.bits())) as i64 >> (64 - ty.bits())),
            _ => Integer(bits as i64),
        }
    }

    /// The number after a round trip through a type.
    pub fn through(self, ty: Type) -> Self {
        Self::decode(&self.encode(ty), ty)
    }
}

/// What names mean while an expression is evaluated.
pub(crate) struct Scope<'a> {
    /// `i`, scalar arguments, and the variables of sums.
    pub numbers: HashMap<&'a str, Value>,
    /// The initial contents of buffer arguments.
    pub buffers: &'a HashMap<String, Vec<Value>>,
}

/// An expression.
#[derive(Clone, Debug)]
pub(crate) enum Expression {
    Number(Value),
    Name(String),
    Element(String, Box<Expression>),
    Unary(char, Box<Expression>),
    Binary(&'static str, Box<Expression>, Box<Expression>),
    Choice(Box<[Expression; 3]>),
    Call(&'static str, Vec<Expression>),
    Convert(Type, Box<Expression>),
    /// `sum(j, n, e)`: of `e` for `j` from 0 to `n - 1`.
    Sum(String, Box<Expression>, Box<Expression>),
}

/// Binary operators by how tightly they bind.
const OPERATORS: &[&[&str]] = &[
    &["||"],
    &["&&"],
    &["|"],
    &["^"],
    &["&"],
    &["==", "!="],
    &["<=", ">=", "<", ">"],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "%"],
];
const FUNCTIONS: &[(&str, usize)] = &[
    ("min", 2),
    ("max", 2),
    ("abs", 1),
    ("sqrt", 1),
    ("exp", 1),
    ("exp2", 1),
    ("log2", 1),
    ("floor", 1),
    ("ceil", 1),
    ("round", 1),
    ("trunc", 1),
    ("popc", 1),
    ("float", 1),
];
const MAX_DEPTH: u32 = 64;

type Read<T> = Result<T, String>;

pub(crate) struct Reader<'t> {
    rest: &'t str,
    depth: u32,
}

impl<'t> Reader<'t> {
    pub fn new(text: &'t str) -> Self {
        Self { rest: text.trim_start(), depth: 0 }
    }

    pub fn accept(&mut self, token: &str) -> bool {
        let found = self.rest.strip_prefix(token);
        self.rest = found.unwrap_or(self.rest).trim_start();
        found.is_some()
    }

    pub fn expect(&mut self, token: &str) -> Read<()> {
        if self.accept(token) { Ok(()) } else { Err(format!("expected `{token}` before `{}`", self.rest)) }
    }

    pub fn end(&self) -> Read<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(format!("`{}` is left over", self.rest)) }
    }

    pub fn name(&mut self) -> Read<&'t str> {
        let length = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(self.rest.len());
        if length == 0 || self.rest.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(format!("expected a name before `{}`", self.rest));
        }
        let (name, rest) = self.rest.split_at(length);
        self.rest = rest.trim_start();
        Ok(name)
    }

    pub fn expression(&mut self) -> Read<Expression> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("an expression is nested more than {MAX_DEPTH} deep"));
        }
        let condition = self.binary(0)?;
        let expression = if self.accept("?") {
            let yes = self.expression()?;
            self.expect(":")?;
            Expression::Choice(Box::new([condition, yes, self.expression()?]))
        } else {
            condition
        };
        self.depth -= 1;
        Ok(expression)
    }

    fn binary(&mut self, level: usize) -> Read<Expression> {
        let Some(operators) = OPERATORS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some(operator) = operators.iter().copied().find(|operator| {
            // `|` is not the beginning of `||`, `<` not that of `<<`.
            let next = self.rest.strip_prefix(operator).and_then(|rest| rest.chars().next());
            self.rest.starts_with(operator) && !(operator.len() == 1 && next == operator.chars().next())
        }) {
            self.accept(operator);
            left = Expression::Binary(operator, Box::new(left), Box::new(self.binary(level + 1)?));
        }
        Ok(left)
    }

    fn unary(&mut self) -> Read<Expression> {
        for sign in ['-', '~', '!'] {
            if self.accept(sign.encode_utf8(&mut [0; 4])) {
                self.depth += 1;
                if self.depth > MAX_DEPTH {
                    return Err(format!("an expression is nested more than {MAX_DEPTH} deep"));
                }
                let operand = self.unary()?;
                self.depth -= 1;
                return Ok(Expression::Unary(sign, Box::new(operand)));
            }
        }
        if self.accept("(") {
            let inner = self.expression()?;
            self.expect(")")?;
            return Ok(inner);
        }
        if self.rest.starts_with(|c: char| c.is_ascii_digit()) {
            return self.number();
        }
        let name = self.name()?;
        if self.accept("[") {
            let index = self.expression()?;
            self.expect("]")?;
            return Ok(Expression::Element(name.into(), Box::new(index)));
        }
        if !self.accept("(") {
            return Ok(match name {
                "nan" => Expression::Number(Float(f64::NAN)),
                "inf" => Expression::Number(Float(f64::INFINITY)),
                _ => Expression::Name(name.into()),
            });
        }
        if name == "sum" {
            let variable = self.name()?.to_owned();
            self.expect(",")?;
            let count = self.expression()?;
            self.expect(",")?;
            let summand = self.expression()?;
            self.expect(")")?;
            return Ok(Expression::Sum(variable, Box::new(count), Box::new(summand)));
        }
        let mut arguments = vec![self.expression()?];
        while self.accept(",") {
            arguments.push(self.expression()?);
        }
        self.expect(")")?;
        if let (Some(ty), 1) = (Type::from_name(name), arguments.len()) {
            return Ok(Expression::Convert(ty, Box::new(arguments.remove(0))));
        }
        match FUNCTIONS.iter().find(|function| **function == (name, arguments.len())) {
            Some((name, _)) => Ok(Expression::Call(name, arguments)),
            None => Err(format!("there is no function `{name}` of {} argument(s)", arguments.len())),
        }
    }

    fn number(&mut self) -> Read<Expression> {
        let mut length = 0;
        let bytes = self.rest.as_bytes();
        let hexadecimal = self.rest.starts_with("0x");
        while bytes.get(length).is_some_and(|byte| {
            let exponent = !hexadecimal && matches!(bytes[length.saturating_sub(1)], b'e');
            byte.is_ascii_alphanumeric() || *byte == b'.' || (exponent && matches!(byte, b'+' | b'-'))
        }) {
            length += 1;
        }
        let (text, rest) = self.rest.split_at(length);
        self.rest = rest.trim_start();
        let integer = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        let value = integer.map(|value| Integer(value as i64)).or_else(|| text.parse().ok().map(Float));
        value.map(Expression::Number).ok_or_else(|| format!("`{text}` is no number"))
    }
}

impl Expression {
    /// The expression's value.
    ///
    /// # Errors
    /// A name that means nothing, an index outside its buffer, or an integer divided by zero.
    pub fn evaluate(&self, scope: &mut Scope<'_>) -> Read<Value> {
        match self {
            Self::Number(value) => Ok(*value),
            Self::Name(name) => {
                scope.numbers.get(name.as_str()).copied().ok_or_else(|| format!("`{name}` is no scalar"))
            }
            Self::Element(name, index) => {
                let index = index.evaluate(scope)?.integer();
                let buffer = scope.buffers.get(name).ok_or_else(|| format!("`{name}` is no initialised buffer"))?;
                let element = usize::try_from(index).ok().and_then(|index| buffer.get(index).copied());
                element.ok_or_else(|| format!("`{name}[{index}]` is outside its {} elements", buffer.len()))
            }
            Self::Unary(sign, operand) => Ok(match (sign, operand.evaluate(scope)?) {
                ('-', Integer(value)) => Integer(value.wrapping_neg()),
                ('-', Float(value)) => Float(-value),
                ('~', value) => Integer(!value.integer()),
                (_, value) => Integer(i64::from(value.float() == 0.0)),
            }),
            Self::Choice(parts) => {
                let [condition, yes, no] = &**parts;
                let chosen = if condition.evaluate(scope)?.float() != 0.0 { yes } else { no };
                chosen.evaluate(scope)
            }
            Self::Convert(ty, operand) => Ok(operand.evaluate(scope)?.through(*ty)),
            Self::Binary(operator, left, right) => binary(operator, left.evaluate(scope)?, right.evaluate(scope)?),
            Self::Call(name, arguments) => {
                let values = arguments.iter().map(|a| a.evaluate(scope)).collect::<Read<Vec<_>>>()?;
                call(name, &values)
            }
            Self::Sum(variable, count, summand) => {
                let count = count.evaluate(scope)?.integer();
                let mut inner = Scope { numbers: scope.numbers.clone(), buffers: scope.buffers };
                let mut total = Integer(0);
                for index in 0..count {
                    inner.numbers.insert(variable, Integer(index));
                    total = binary("+", total, summand.evaluate(&mut inner)?)?;
                }
                Ok(total)
            }
        }
    }
}

fn binary(operator: &str, left: Value, right: Value) -> Read<Value> {
    let truth = |truth: bool| Integer(i64::from(truth));
    if let (Integer(a), Integer(b)) = (left, right) {
        let value = match operator {
            "+" => Some(a.wrapping_add(b)),
            "-" => Some(a.wrapping_sub(b)),
            "*" => Some(a.wrapping_mul(b)),
            "/" => (b != 0).then(|| a.wrapping_div(b)),
            "%" => (b != 0).then(|| a.wrapping_rem(b)),
            "<<" => Some(a.wrapping_shl(b as u32)),
            ">>" => Some(a.wrapping_shr(b as u32)),
            "|" => Some(a | b),
            "^" => Some(a ^ b),
            "&" => Some(a & b),
            "==" => Some(i64::from(a == b)),
            "!=" => Some(i64::from(a != b)),
            "<" => Some(i64::from(a < b)),
            "<=" => Some(i64::from(a <= b)),
            ">" => Some(i64::from(a > b)),
            ">=" => Some(i64::from(a >= b)),
            "&&" => Some(i64::from(a != 0 && b != 0)),
            _ => Some(i64::from(a != 0 || b != 0)),
        };
        return value.map(Integer).ok_or_else(|| "an integer is divided by zero".into());
    }
    let (a, b) = (left.float(), right.float());
    Ok(match operator {
        "+" => Float(a + b),
        "-" => Float(a - b),
        "*" => Float(a * b),
        "/" => Float(a / b),
        "%" => Float(a % b),
        "==" => truth(a == b),
        "!=" => truth(a != b),
        "<" => truth(a < b),
        "<=" => truth(a <= b),
        ">" => truth(a > b),
        ">=" => truth(a >= b),
        "&&" => truth(a != 0.0 && b != 0.0),
        "||" => truth(a != 0.0 || b != 0.0),
        _ => return Err(format!("`{operator}` works on integers only")),
    })
}

fn call(name: &str, values: &[Value]) -> Read<Value> {
    Ok(match (name, values) {
        ("min", [Integer(a), Integer(b)]) => Integer(*a.min(b)),
        ("max", [Integer(a), Integer(b)]) => Integer(*a.max(b)),
        ("min", [a, b]) => Float(a.float().min(b.float())),
        ("max", [a, b]) => Float(a.float().max(b.float())),
        ("abs", [Integer(a)]) => Integer(a.wrapping_abs()),
        ("popc", [a]) => Integer(a.integer().count_ones().into()),
        (_, [a]) => Float(match name {
            "abs" => a.float().abs(),
            "sqrt" => a.float().sqrt(),
            "exp" => a.float().exp(),
            "exp2" => a.float().exp2(),
            "log2" => a.float().log2(),
            "floor" => a.float().floor(),
            "ceil" => a.float().ceil(),
            "round" => a.float().round_ties_even(),
            "trunc" => a.float().trunc(),
            _ => a.float(),
        }),
        _ => return Err(format!("`{name}` has other arguments")),
    })
}
