//! PTX text as kernels.
//!
//! The table of forms decides what an instruction is; here is only the syntax around it: declarations, scopes, operands.
//!
//! A kernel comes out self-contained: registers and labels of nested scopes are renamed where their names would meet, and
//! the module's variables that it names and the functions that it calls are copied into it. Left out are comments, `.section`,
//! linkage and the timestamps of `.file`. Calls through registers are refused.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;

use thiserror::Error;

use crate::kernel::goes_on;
use crate::lexer::{Token, TokenKind, tokens};
use crate::{
    Address, Bank, Base, Form, Formal, Function, FunctionId, Guard, Instruction, InstructionError, Kernel, Kind, Label,
    Location, LocationId, Modifier, Opcode, Operand, Parameter, ParameterDecl, Pointee, Register, Space, Special,
    Statement, Type, Variable, VariableDecl, Version,
};

/// How deep `{ }` may be nested in a kernel.
const MAX_SCOPES: usize = 64;
/// How many calls deep a location may be inlined.
const MAX_INLINED: u32 = 64;
/// Tokens of functions that are read for the kernels that call them, all together.
const MAX_FUNCTION_TOKENS: usize = 1 << 24;
/// The number of the parsed text itself among its files.
const THIS_FILE: u32 = u32::MAX;
/// How deep parentheses and signs may be nested in a constant.
const MAX_NESTING: u32 = 32;
/// Lanes of a warp, the value of `WARP_SZ`.
const WARP_SZ: i64 = 32;

/// Why a text is not PTX that can be used here, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Counted from 1.
    pub line: usize,
    /// In characters, counted from 1.
    pub column: usize,
    /// How many characters of that line are meant; 0 at the end of the text.
    pub length: usize,
    /// What is wrong.
    pub message: String,
}

impl ParseError {
    /// The message with the line it is about and the place marked, as compilers show it. `text` is what was parsed.
    pub fn render(&self, text: &str, file_name: &str) -> String {
        let Self { line, column, length, message } = self;
        let source = text.lines().nth(line - 1).unwrap_or_default();
        // A tab in the margin of the mark keeps it under its character.
        let margin: String = source.chars().take(column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let gutter = " ".repeat(line.to_string().len());
        let mark = "^".repeat((*length).max(1));
        format!(
            "error: {message}\n{gutter}--> {file_name}:{line}:{column}\n{gutter} |\n{line} | {source}\n{gutter} | {margin}{mark}\n"
        )
    }
}

/// A message about a range of bytes.
#[derive(Debug)]
pub(crate) struct Failure {
    span: Range<usize>,
    message: String,
}

impl Failure {
    pub(crate) fn new(span: Range<usize>, message: String) -> Self {
        Self { span, message }
    }

    fn at(self, text: &str) -> ParseError {
        let before = &text[..self.span.start];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let meant = text[self.span].lines().next().unwrap_or_default();
        ParseError {
            line: before.matches('\n').count() + 1,
            column: text[line_start..before.len()].chars().count() + 1,
            length: meant.chars().count(),
            message: self.message,
        }
    }
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// The kernels of a PTX module, in order. They are not validated: [`Kernel::validate`] does that.
///
/// # Errors
/// At the first thing that is not PTX, or that no [`Kernel`] can express; an instruction or operand that the table of
/// forms does not have is an "unknown form".
pub fn parse(text: &str) -> Result<Vec<Kernel>, ParseError> {
    read(text, None)
}

/// As [`parse`], and instructions that no `.loc` precedes get their place in this text, whose file has that name.
///
/// # Errors
/// As [`parse`].
pub fn parse_file(text: &str, file_name: &str) -> Result<Vec<Kernel>, ParseError> {
    read(text, Some(file_name))
}

fn read(text: &str, file_name: Option<&str>) -> Result<Vec<Kernel>, ParseError> {
    tokens(text).and_then(|tokens| Parser::new(text, tokens, file_name).module()).map_err(|failure| failure.at(text))
}

/// A name and what it was declared as, per nesting depth.
type Scoped<'t, T> = HashMap<&'t str, Vec<(usize, T)>>;

/// What a name other than a bank's prefix stands for.
#[derive(Clone, Copy)]
enum Named {
    Register(Register),
    Variable(Variable),
    Parameter(Parameter),
}

/// The names of one kernel while it is read.
#[derive(Default)]
struct Names<'t> {
    single: Scoped<'t, Named>,
    /// Bank prefixes with the bank and its count.
    banks: Scoped<'t, (u32, u32)>,
    /// What each open scope declared; the names above end with it.
    declared: Vec<(Vec<&'t str>, Vec<&'t str>)>,
    /// Labels by the token that opens their scope.
    labels: HashMap<(usize, &'t str), Label>,
    /// `.branchtargets` by the token that opens their scope.
    tables: HashMap<(usize, &'t str), Vec<&'t str>>,
    /// The tokens that opened the scopes we are in.
    open: Vec<usize>,
    unique: Unique,
}

/// Names that the printed kernel, which has one scope, already has.
#[derive(Default)]
struct Unique {
    singles: HashSet<String>,
    banks: HashMap<String, u32>,
    /// For each prefix that a name above extends by a number: the lowest such number.
    numbered: HashMap<String, u32>,
    renamed: u32,
}

/// `%r12` as the 12th of `%r`, the second of `%r1`: longest prefix first.
fn numbered_splits(name: &str) -> impl Iterator<Item = (&str, u32)> {
    let digits = name.bytes().rev().take(10).take_while(u8::is_ascii_digit).count();
    (1..=digits).filter_map(move |length| {
        let (prefix, number) = name.split_at(name.len() - length);
        let canonical = length == 1 || !number.starts_with('0');
        (canonical && !prefix.is_empty()).then(|| number.parse().ok().map(|number| (prefix, number))).flatten()
    })
}

impl Unique {
    /// `name`, or one made from it if `name` is taken; a bank's prefix when `count` is given.
    fn name(&mut self, name: &str, count: Option<u32>) -> String {
        let taken = |name: &str| match count {
            None => {
                self.singles.contains(name)
                    || numbered_splits(name).any(|(prefix, n)| self.banks.get(prefix).is_some_and(|&count| n < count))
            }
            Some(count) => {
                self.banks.contains_key(name)
                    || self.numbered.get(name).is_some_and(|&lowest| lowest < count)
                    || numbered_splits(name)
                        .any(|(prefix, n)| self.banks.get(prefix).is_some_and(|&c| n.saturating_mul(10) < c))
            }
        };
        let mut unique = name.to_owned();
        let mut renamed = self.renamed;
        while taken(&unique) {
            unique = format!("{name}_s{renamed}_");
            renamed += 1;
        }
        self.renamed = renamed;
        for (prefix, number) in numbered_splits(&unique) {
            let lowest = self.numbered.entry(prefix.to_owned()).or_insert(u32::MAX);
            *lowest = (*lowest).min(if count.is_some() { number.saturating_mul(10) } else { number });
        }
        match count {
            None => _ = self.singles.insert(unique.clone()),
            Some(count) => _ = self.banks.insert(unique.clone(), count),
        }
        unique
    }
}

impl<'t> Names<'t> {
    fn enter(&mut self, token: usize) {
        self.open.push(token);
        self.declared.push(Default::default());
    }

    fn leave(&mut self) {
        self.open.pop();
        let (singles, banks) = self.declared.pop().unwrap_or_default();
        singles.iter().for_each(|name| _ = self.single.get_mut(name).and_then(Vec::pop));
        banks.iter().for_each(|name| _ = self.banks.get_mut(name).and_then(Vec::pop));
    }

    /// Makes a name known in the current scope; false if that scope already has it.
    fn declare(&mut self, name: &'t str, named: Named) -> bool {
        let depth = self.declared.len();
        let meanings = self.single.entry(name).or_default();
        let new = meanings.last().is_none_or(|&(at, _)| at < depth);
        if let (true, Some((singles, _))) = (new, self.declared.last_mut()) {
            meanings.push((depth, named));
            singles.push(name);
        }
        new
    }

    fn declare_bank(&mut self, prefix: &'t str, bank: u32, count: u32) -> bool {
        let depth = self.declared.len();
        let meanings = self.banks.entry(prefix).or_default();
        let new = meanings.last().is_none_or(|&(at, _)| at < depth);
        if let (true, Some((_, banks))) = (new, self.declared.last_mut()) {
            meanings.push((depth, (bank, count)));
            banks.push(prefix);
        }
        new
    }

    /// What the innermost declaration of a name says.
    fn find(&self, name: &str) -> Option<Named> {
        let single = self.single.get(name).and_then(|meanings| meanings.last().copied());
        let numbered = numbered_splits(name).filter_map(|(prefix, index)| {
            let meanings = self.banks.get(prefix)?;
            let &(depth, (bank, _)) = meanings.iter().rev().find(|(_, (_, count))| index < *count)?;
            Some((depth, Named::Register(Register { bank, index })))
        });
        single
            .into_iter()
            .chain(numbered)
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
            .map(|(_, n)| n)
    }

    fn label(&self, name: &'t str) -> Option<Label> {
        self.open.iter().rev().find_map(|&scope| self.labels.get(&(scope, name)).copied())
    }

    fn table(&self, name: &'t str) -> Option<&[&'t str]> {
        self.open.iter().rev().find_map(|&scope| self.tables.get(&(scope, name)).map(Vec::as_slice))
    }
}

/// A kernel while it is read.
struct Entry<'t> {
    kernel: Kernel,
    names: Names<'t>,
    /// The functions called so far.
    functions: HashMap<&'t str, FunctionId>,
    called: Vec<&'t str>,
    /// The module's variables named so far.
    module_variables: HashMap<usize, Variable>,
    location_ids: HashMap<Location, LocationId>,
    /// The last location stated for each file, line and column, which is what a later `inlined_at` means, and how deep it is inlined.
    stated: HashMap<(u32, u32, u32), (LocationId, u32)>,
    current: Option<LocationId>,
}

impl Entry<'_> {
    fn locate(&mut self, location: Location, depth: u32) -> LocationId {
        let place = (location.file, location.line, location.column);
        let next = LocationId(self.kernel.locations.len() as u32);
        let id = *self.location_ids.entry(location.clone()).or_insert(next);
        if id == next {
            self.kernel.locations.push(location);
        }
        self.stated.insert(place, (id, depth));
        id
    }

    /// Keeps the locations that instructions are at, numbered in the order of their first use, callers first.
    fn number_locations(&mut self) {
        let locations = std::mem::take(&mut self.kernel.locations);
        let mut numbers: Vec<Option<LocationId>> = vec![None; locations.len()];
        let mut kept = Vec::new();
        for statement in self.kernel.statements_mut() {
            let Statement::Instruction(Instruction { location: Some(id), .. }) = statement else { continue };
            let mut new = Vec::new();
            let mut next = Some(*id);
            while let Some(LocationId(old)) = next.filter(|id| numbers[id.0 as usize].is_none()) {
                new.push(old as usize);
                next = locations[old as usize].inlined_at;
            }
            for old in new.into_iter().rev() {
                numbers[old] = Some(LocationId(kept.len() as u32));
                let inlined_at = locations[old].inlined_at.and_then(|caller| numbers[caller.0 as usize]);
                kept.push(Location { inlined_at, ..locations[old].clone() });
            }
            *id = numbers[id.0 as usize].unwrap_or(*id);
        }
        self.kernel.locations = kept;
    }
}

/// Where a function of the module stands.
#[derive(Clone, Copy)]
struct FunctionText {
    /// The token behind `.func`.
    signature: usize,
    /// The token that opens its body.
    body: Option<usize>,
    /// How many tokens the body has.
    length: usize,
}

struct Parser<'t> {
    text: &'t str,
    /// The text's own name, where instructions without a location are to have one.
    file_name: Option<&'t str>,
    /// A byte of the text, its line and its column.
    place: (usize, u32, u32),
    tokens: Vec<Token>,
    next: usize,
    version: Option<Version>,
    target: Option<arch::Target>,
    /// The module's variables by name and in order.
    variables: Vec<VariableDecl>,
    variable_names: HashMap<&'t str, usize>,
    /// File names in order, and the numbers the text gives them.
    files: Vec<String>,
    file_numbers: HashMap<u32, u32>,
    /// Where a file number was first used.
    files_used: HashMap<u32, Range<usize>>,
    entries: Vec<Entry<'t>>,
    functions: HashMap<&'t str, FunctionText>,
    aliases: HashMap<&'t str, &'t str>,
    pragmas: Vec<String>,
}

impl<'t> Parser<'t> {
    fn new(text: &'t str, tokens: Vec<Token>, file_name: Option<&'t str>) -> Self {
        Self {
            text,
            file_name,
            place: (0, 1, 1),
            tokens,
            next: 0,
            version: None,
            target: None,
            variables: Vec::new(),
            variable_names: HashMap::new(),
            files: Vec::new(),
            file_numbers: HashMap::new(),
            files_used: HashMap::new(),
            entries: Vec::new(),
            functions: HashMap::new(),
            aliases: HashMap::new(),
            pragmas: Vec::new(),
        }
    }

    // Tokens.

    fn peek(&self) -> Token {
        // The last token is `End` and is never passed.
        self.tokens[self.next.min(self.tokens.len() - 1)]
    }

    fn peek_second(&self) -> Token {
        self.tokens[(self.next + 1).min(self.tokens.len() - 1)]
    }

    fn advance(&mut self) -> Token {
        let token = self.peek();
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        token
    }

    fn str(&self, token: Token) -> &'t str {
        &self.text[token.span()]
    }

    fn at(&self, symbol: u8) -> bool {
        self.peek().kind == TokenKind::Symbol(symbol)
    }

    fn accept(&mut self, symbol: u8) -> bool {
        let found = self.at(symbol);
        if found {
            self.advance();
        }
        found
    }

    fn accept_directive(&mut self, name: &str) -> bool {
        let token = self.peek();
        let found = token.kind == TokenKind::Directive && self.str(token) == name;
        if found {
            self.advance();
        }
        found
    }

    fn expected<T>(&self, what: impl fmt::Display) -> Result<T> {
        let token = self.peek();
        let found = match token.kind {
            TokenKind::End => "the end of the text".to_owned(),
            _ => format!("`{}`", self.str(token)),
        };
        Err(Failure::new(token.span(), format!("expected {what}, found {found}")))
    }

    fn expect(&mut self, symbol: u8) -> Result<Token> {
        if self.at(symbol) { Ok(self.advance()) } else { self.expected(format_args!("`{}`", char::from(symbol))) }
    }

    fn expect_kind(&mut self, kind: TokenKind, what: &str) -> Result<Token> {
        if self.peek().kind == kind { Ok(self.advance()) } else { self.expected(what) }
    }

    fn name(&mut self, what: &str) -> Result<(&'t str, Range<usize>)> {
        let token = self.expect_kind(TokenKind::Word, what)?;
        Ok((self.str(token), token.span()))
    }

    /// From `start` to the last token read.
    fn since(&self, start: usize) -> Range<usize> {
        start..self.tokens[self.next.saturating_sub(1)].end.max(start as u32) as usize
    }

    // Numbers.

    fn unsigned<T: TryFrom<u64> + fmt::Display>(&mut self, what: &str, max: T) -> Result<T> {
        let token = self.expect_kind(TokenKind::Number, what)?;
        integer(self.str(token)).and_then(|value| T::try_from(value).ok()).ok_or_else(|| {
            Failure::new(token.span(), format!("{what} is `{}`; allowed is 0 to {max}", self.str(token)))
        })
    }

    fn number(&mut self, what: &str) -> Result<u32> {
        self.unsigned(what, u32::MAX)
    }

    fn align(&mut self) -> Result<u32> {
        let start = self.peek().span().start;
        let align = self.number("an alignment")?;
        if align.is_power_of_two() {
            return Ok(align);
        }
        Err(Failure::new(self.since(start), format!("an alignment is `{align}`; it must be a power of two")))
    }

    /// An integer constant expression (PTX ISA, section 4.5.4).
    fn constant(&mut self) -> Result<i64> {
        self.binary(0, 0)
    }

    fn binary(&mut self, lowest: u8, depth: u32) -> Result<i64> {
        let mut left = self.unary(depth)?;
        while let Some((operator, precedence)) = self.operator().filter(|(_, precedence)| *precedence >= lowest) {
            let start = self.peek().span().start;
            for _ in 0..operator.len() {
                self.advance();
            }
            let right = self.binary(precedence + 1, depth + 1)?;
            let shift = right as u32;
            let value = match operator {
                "|" => Some(left | right),
                "^" => Some(left ^ right),
                "&" => Some(left & right),
                "<<" => Some(left.wrapping_shl(shift)),
                ">>" => Some(left.wrapping_shr(shift)),
                "+" => Some(left.wrapping_add(right)),
                "-" => Some(left.wrapping_sub(right)),
                "*" => Some(left.wrapping_mul(right)),
                "/" => (right != 0).then(|| left.wrapping_div(right)),
                _ => (right != 0).then(|| left.wrapping_rem(right)),
            };
            left = value.ok_or_else(|| Failure::new(self.since(start), "this constant divides by zero".into()))?;
        }
        Ok(left)
    }

    fn operator(&self) -> Option<(&'static str, u8)> {
        let TokenKind::Symbol(first) = self.peek().kind else { return None };
        let second = self.peek_second();
        let doubled = second.kind == TokenKind::Symbol(first) && second.start == self.peek().end;
        match first {
            b'|' => Some(("|", 1)),
            b'^' => Some(("^", 2)),
            b'&' => Some(("&", 3)),
            b'<' if doubled => Some(("<<", 4)),
            b'>' if doubled => Some((">>", 4)),
            b'+' => Some(("+", 5)),
            b'-' => Some(("-", 5)),
            b'*' => Some(("*", 6)),
            b'/' => Some(("/", 6)),
            b'%' => Some(("%", 6)),
            _ => None,
        }
    }

    fn unary(&mut self, depth: u32) -> Result<i64> {
        let token = self.peek();
        if depth > MAX_NESTING {
            return Err(Failure::new(token.span(), format!("a constant is nested more than {MAX_NESTING} deep")));
        }
        match token.kind {
            TokenKind::Symbol(sign @ (b'-' | b'+' | b'~' | b'!')) => {
                self.advance();
                let value = self.unary(depth + 1)?;
                Ok(match sign {
                    b'-' => value.wrapping_neg(),
                    b'~' => !value,
                    b'!' => i64::from(value == 0),
                    _ => value,
                })
            }
            TokenKind::Symbol(b'(') => {
                self.advance();
                let value = self.binary(0, depth + 1)?;
                self.expect(b')')?;
                Ok(value)
            }
            TokenKind::Number => {
                self.advance();
                // 64 bits: what does not fit a signed number wraps.
                let value = integer(self.str(token)).map(|value| value as i64);
                value.ok_or_else(|| {
                    Failure::new(token.span(), format!("`{}` is no integer of 64 bits", self.str(token)))
                })
            }
            TokenKind::Word if self.str(token) == "WARP_SZ" => {
                self.advance();
                Ok(WARP_SZ)
            }
            _ => self.expected("a constant"),
        }
    }

    /// A floating-point constant, if one comes next.
    fn float(&mut self) -> Option<Operand> {
        let negative = self.at(b'-') && self.peek_second().kind == TokenKind::Number;
        let token = if negative { self.peek_second() } else { self.peek() };
        let float = (token.kind == TokenKind::Number).then(|| float(self.str(token))).flatten()?;
        self.next += 1 + usize::from(negative);
        Some(match float {
            Operand::F32(bits) if negative => Operand::F32(bits ^ 1 << 31),
            Operand::F64(bits) if negative => Operand::F64(bits ^ 1 << 63),
            other => other,
        })
    }

    // The module.

    fn module(mut self) -> Result<Vec<Kernel>> {
        while self.peek().kind != TokenKind::End {
            let token = self.peek();
            match self.str(token) {
                ".version" => self.version_directive()?,
                ".target" => self.target_directive()?,
                ".address_size" => {
                    self.advance();
                    let size = self.peek();
                    if self.number("the address size")? != 64 {
                        return Err(Failure::new(size.span(), "addresses have 64 bits here, no others".into()));
                    }
                }
                ".file" => self.file_directive()?,
                ".section" => self.skip_section()?,
                ".pragma" => {
                    let pragmas = self.pragma_directive()?;
                    self.pragmas.extend(pragmas);
                }
                ".alias" => {
                    self.advance();
                    let (alias, _) = self.name("the name of a function")?;
                    self.expect(b',')?;
                    let (function, _) = self.name("the name of a function")?;
                    self.expect(b';')?;
                    self.aliases.insert(alias, function);
                }
                ".visible" | ".extern" | ".weak" | ".common" | ".global" | ".const" | ".shared" | ".entry"
                | ".func" => self.module_declaration()?,
                ";" => _ = self.advance(),
                _ => return self.expected("a directive"),
            }
        }
        self.header()?;
        let mut entries = std::mem::take(&mut self.entries);
        let mut tokens = 0;
        for entry in &mut entries {
            self.called(entry, &mut tokens)?;
            entry.number_locations();
        }
        let mut kernels: Vec<_> = entries.into_iter().map(|entry| entry.kernel).collect();
        if let Some(name) = self.file_name.filter(|_| self.files_used.remove(&THIS_FILE).is_some()) {
            self.file_numbers.insert(THIS_FILE, self.files.len() as u32);
            self.files.push(name.to_owned());
        }
        let unknown = self.files_used.into_iter().filter(|(number, _)| !self.file_numbers.contains_key(number));
        if let Some((number, span)) = unknown.min_by_key(|(_, span)| span.start) {
            return Err(Failure::new(span, format!("no `.file` has the number {number}")));
        }
        for kernel in &mut kernels {
            kernel.files.clone_from(&self.files);
            for location in &mut kernel.locations {
                location.file = self.file_numbers[&location.file];
            }
        }
        Ok(kernels)
    }

    /// Reads the functions an entry calls, and those that they call.
    fn called(&mut self, entry: &mut Entry<'t>, tokens: &mut usize) -> Result<()> {
        if entry.functions.is_empty() {
            return Ok(());
        }
        end(&mut entry.kernel.body);
        let mut read = 0;
        while let Some(text) = entry.called.get(read).and_then(|name| self.functions.get(name).copied()) {
            *tokens += text.length;
            if *tokens > MAX_FUNCTION_TOKENS {
                let span = self.tokens[text.signature].span();
                return Err(Failure::new(span, "the kernels call more code than is read at once".into()));
            }
            self.function(entry, read, text)?;
            read += 1;
        }
        Ok(())
    }

    /// Notes where a function stands, and passes it by: only the kernels that call it read it.
    fn function_declaration(&mut self) -> Result<()> {
        let signature = self.next;
        if self.at(b'(') {
            self.pass_list()?;
        }
        let (name, span) = self.name("the name of a function")?;
        if self.at(b'(') {
            self.pass_list()?;
        }
        while matches!(self.peek().kind, TokenKind::Directive | TokenKind::Number | TokenKind::Text) {
            if self.str(self.peek()) == ".pragma" {
                self.pragma_directive()?;
            } else {
                self.advance();
            }
        }
        let body = self.at(b'{').then_some(self.next);
        let start = self.next;
        if body.is_some() {
            let mut depth = 0usize;
            loop {
                match self.peek().kind {
                    TokenKind::Symbol(b'{') => depth += 1,
                    TokenKind::Symbol(b'}') => depth -= 1,
                    TokenKind::End => {
                        let open = self.tokens[start].span();
                        return Err(Failure::new(open, "this body has no closing `}`".into()));
                    }
                    _ => {}
                }
                self.advance();
                if depth == 0 {
                    break;
                }
            }
        } else {
            self.expect(b';')?;
        }
        let text = FunctionText { signature, body, length: self.next - start };
        match self.functions.get_mut(name) {
            Some(known) if known.body.is_some() && body.is_some() => {
                return Err(Failure::new(span, format!("there is a second function `{name}`")));
            }
            Some(known) if known.body.is_some() => {}
            _ => _ = self.functions.insert(name, text),
        }
        Ok(())
    }

    /// Passes what stands in parentheses.
    fn pass_list(&mut self) -> Result<()> {
        while !self.accept(b')') {
            if self.peek().kind == TokenKind::End {
                return self.expected("`)`");
            }
            self.advance();
        }
        Ok(())
    }

    /// Reads a function for the entry that calls it.
    fn function(&mut self, entry: &mut Entry<'t>, index: usize, text: FunctionText) -> Result<()> {
        self.next = text.signature;
        let outer = std::mem::take(&mut entry.names);
        entry.names.unique = outer.unique;
        entry.names.enter(usize::MAX);
        entry.stated.clear();
        entry.current = None;
        let (first_bank, first_variable) = (entry.kernel.banks.len() as u32, entry.kernel.variables.len() as u32);
        let results = self.formals(entry)?;
        self.name("the name of a function")?;
        let params = self.formals(entry)?;
        let mut no_return = false;
        while self.peek().kind == TokenKind::Directive && !self.at(b'{') {
            let token = self.advance();
            no_return |= self.str(token) == ".noreturn";
        }
        let body = match text.body {
            None => None,
            Some(body) => {
                self.next = body;
                self.look_ahead(entry)?;
                let callers = std::mem::take(&mut entry.kernel.body);
                self.body(entry)?;
                let mut body = std::mem::replace(&mut entry.kernel.body, callers);
                end(&mut body);
                Some(body)
            }
        };
        let function = &mut entry.kernel.functions[index];
        (function.results, function.params, function.no_return) = (results, params, no_return);
        function.banks = first_bank..entry.kernel.banks.len() as u32;
        function.variables = first_variable..entry.kernel.variables.len() as u32;
        function.body = body;
        Ok(())
    }

    /// `(.param .b64 x, .reg .b32 %r1)`, or nothing.
    fn formals(&mut self, entry: &mut Entry<'t>) -> Result<Vec<Formal>> {
        let mut formals = Vec::new();
        if !self.accept(b'(') || self.accept(b')') {
            return Ok(formals);
        }
        loop {
            let (name, span, formal) = if self.accept_directive(".reg") {
                let (ty, _) = self.ty()?;
                let (name, span) = self.name("the name of a parameter")?;
                let register = Register { bank: entry.kernel.banks.len() as u32, index: 0 };
                let prefix = entry.names.unique.name(name, None);
                entry.kernel.banks.push(Bank { prefix, ty, count: None });
                (name, span, Named::Register(register))
            } else if self.str(self.peek()) == ".param" {
                let (name, span, mut variable) = self.parameter_variable()?;
                let id = Variable(entry.kernel.variables.len() as u32);
                variable.name = entry.names.unique.name(name, None);
                entry.kernel.variables.push(variable);
                (name, span, Named::Variable(id))
            } else {
                return self.expected("`.param` or `.reg`");
            };
            if name != "_" && !entry.names.declare(name, formal) {
                return Err(Failure::new(span, format!("there is a second parameter `{name}`")));
            }
            formals.push(match formal {
                Named::Register(register) => Formal::Register(register),
                Named::Variable(variable) => Formal::Variable(variable),
                Named::Parameter(_) => return self.expected("`.param` or `.reg`"),
            });
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b')')?;
        Ok(formals)
    }

    /// `.param .align 8 .b8 name[16]` of a function.
    fn parameter_variable(&mut self) -> Result<(&'t str, Range<usize>, VariableDecl)> {
        let declared = self.parameter_text()?;
        let ParameterDecl { name, ty, elements, align, .. } = declared.2;
        let variable = VariableDecl {
            name,
            space: Space::Param,
            ty,
            align: align.unwrap_or(ty.bytes()),
            elements: Some(elements.unwrap_or(1)),
            init: Vec::new(),
            external: false,
            module_level: false,
        };
        Ok((declared.0, declared.1, variable))
    }

    /// The version and target that the module must have stated by now.
    fn header(&self) -> Result<(Version, arch::Target)> {
        match (self.version, self.target) {
            (Some(version), Some(target)) => Ok((version, target)),
            (None, _) => Err(Failure::new(self.peek().span(), "`.version` is missing: PTX starts with it".into())),
            (_, None) => Err(Failure::new(self.peek().span(), "`.target` is missing: it follows `.version`".into())),
        }
    }

    fn version_directive(&mut self) -> Result<()> {
        self.advance();
        let token = self.expect_kind(TokenKind::Number, "a version such as 8.7")?;
        let version = self.str(token).split_once('.').and_then(|(major, minor)| {
            let part = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
            Some(Version { major: part(major)?, minor: part(minor)? })
        });
        match version {
            Some(version) => self.version = Some(version),
            None => {
                let message = format!("`{}` is no version; one is written as 8.7", self.str(token));
                return Err(Failure::new(token.span(), message));
            }
        }
        Ok(())
    }

    fn target_directive(&mut self) -> Result<()> {
        self.advance();
        loop {
            let (name, span) = self.name("a target such as sm_75")?;
            match name {
                "texmode_unified" | "texmode_independent" | "debug" | "map_f64_to_f32" => {}
                _ => {
                    self.target = Some(name.parse().map_err(|e: arch::TargetError| Failure::new(span, e.to_string()))?)
                }
            }
            if !self.accept(b',') {
                return Ok(());
            }
        }
    }

    fn file_directive(&mut self) -> Result<()> {
        self.advance();
        let start = self.peek();
        let number = self.unsigned("the number of a file", THIS_FILE - 1)?;
        let token = self.expect_kind(TokenKind::Text, "the name of a file in quotes")?;
        let name = unescape(self.str(token));
        for what in ["a timestamp", "a file size"] {
            if self.accept(b',') {
                self.unsigned(what, u64::MAX)?;
            }
        }
        match self.file_numbers.get(&number) {
            Some(&index) if self.files[index as usize] == name => {}
            Some(&index) => {
                let message = format!("file {number} is already \"{}\"", self.files[index as usize]);
                return Err(Failure::new(start.span(), message));
            }
            None => {
                self.file_numbers.insert(number, self.files.len() as u32);
                self.files.push(name);
            }
        }
        Ok(())
    }

    fn skip_section(&mut self) -> Result<()> {
        let start = self.advance();
        while !self.at(b'{') {
            if self.peek().kind == TokenKind::End {
                return self.expected("`{`");
            }
            self.advance();
        }
        while !self.accept(b'}') {
            if self.peek().kind == TokenKind::End {
                return Err(Failure::new(start.span(), "this section has no end".into()));
            }
            self.advance();
        }
        Ok(())
    }

    /// `.pragma "nounroll", "x";`
    fn pragma_directive(&mut self) -> Result<Vec<String>> {
        self.advance();
        let mut pragmas = Vec::new();
        loop {
            let token = self.expect_kind(TokenKind::Text, "a pragma in quotes")?;
            pragmas.push(unescape(self.str(token)));
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b';')?;
        Ok(pragmas)
    }

    fn module_declaration(&mut self) -> Result<()> {
        self.header()?;
        let external = self.linkage();
        if self.accept_directive(".entry") {
            return self.entry();
        }
        if self.accept_directive(".func") {
            return self.function_declaration();
        }
        for (name, span, mut variable) in self.variable_declarations()? {
            variable.external = external;
            variable.module_level = true;
            if self.variable_names.insert(name, self.variables.len()).is_some() {
                return Err(Failure::new(span, format!("`{name}` is declared twice")));
            }
            self.variables.push(variable);
        }
        Ok(())
    }

    /// Reads linkage; whether it is `.extern`.
    fn linkage(&mut self) -> bool {
        let mut external = false;
        loop {
            match self.str(self.peek()) {
                ".extern" => external = true,
                ".visible" | ".weak" | ".common" => {}
                _ => return external,
            }
            self.advance();
        }
    }

    // Declarations.

    fn ty(&mut self) -> Result<(Type, Range<usize>)> {
        let token = self.peek();
        match self.str(token).strip_prefix('.').and_then(Type::from_name) {
            Some(ty) => {
                self.advance();
                Ok((ty, token.span()))
            }
            None => self.expected("a type such as `.b32`"),
        }
    }

    /// `.shared .align 16 .b8 name[1024], other;`
    fn variable_declarations(&mut self) -> Result<Vec<(&'t str, Range<usize>, VariableDecl)>> {
        let Some(space) = Space::from_directive(self.str(self.peek())) else {
            return self.expected("a state space such as `.shared`");
        };
        self.advance();
        let mut align = None;
        let mut vector = 1;
        loop {
            if self.accept_directive(".align") {
                align = Some(self.align()?);
            } else if self.accept_directive(".v2") {
                vector = 2;
            } else if self.accept_directive(".v4") {
                vector = 4;
            } else {
                break;
            }
        }
        let (ty, span) = self.ty()?;
        if ty == Type::Pred {
            return Err(Failure::new(span, "predicates live in registers only".into()));
        }
        let mut found = Vec::new();
        loop {
            let (name, span) = self.name("the name of a variable")?;
            let dimensions = self.dimensions()?;
            let mut elements = dimensions.map_or(Some(Some(vector)), |dimensions| match dimensions {
                None => Some(None),
                Some(count) => count.checked_mul(vector).map(Some),
            });
            let mut init = Vec::new();
            if self.accept(b'=') {
                let start = self.peek().span().start;
                self.initialiser(ty, &mut init)?;
                let given = (init.len() / ty.bytes() as usize) as u64;
                match elements {
                    Some(None) => elements = Some(Some(given)),
                    Some(Some(count)) if given > count => {
                        let message = format!("`{name}` has {count} element(s) and is given {given}");
                        return Err(Failure::new(self.since(start), message));
                    }
                    _ => {}
                }
            }
            let Some(elements) = elements else {
                return Err(Failure::new(span, format!("`{name}` has more elements than 64 bits count")));
            };
            let align = align.unwrap_or(ty.bytes() * vector as u32);
            let variable = VariableDecl {
                name: name.to_owned(),
                space,
                ty,
                align,
                elements,
                init,
                external: false,
                module_level: false,
            };
            found.push((name, span, variable));
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b';')?;
        Ok(found)
    }

    /// `[2][3]` as 6, `[]` as `None`; `None` where there are no brackets.
    fn dimensions(&mut self) -> Result<Option<Option<u64>>> {
        let mut count = None;
        let start = self.peek().span().start;
        while self.accept(b'[') {
            if self.accept(b']') && count.is_none() {
                return Ok(Some(None));
            }
            let size = self.unsigned("the size of an array", u64::MAX)?;
            self.expect(b']')?;
            count = Some(count.unwrap_or(1u64).checked_mul(size).ok_or_else(|| {
                Failure::new(self.since(start), "this array has more elements than 64 bits count".into())
            })?);
        }
        Ok(count.map(Some))
    }

    /// A value or values in braces; of inner braces only the order of the values counts, so they must be complete.
    fn initialiser(&mut self, ty: Type, init: &mut Vec<u8>) -> Result<()> {
        let mut depth = 0u32;
        loop {
            while self.accept(b'{') {
                depth += 1;
            }
            let token = self.peek();
            if token.kind == TokenKind::Word && self.str(token) != "WARP_SZ" {
                let message = format!(
                    "`{}` as an initial value: addresses are known only once a module is loaded; numbers are allowed",
                    self.str(token)
                );
                return Err(Failure::new(token.span(), message));
            }
            let value = match self.float() {
                Some(Operand::F32(bits)) => u64::from(bits),
                Some(Operand::F64(bits)) if ty == Type::F32 => u64::from((f64::from_bits(bits) as f32).to_bits()),
                Some(Operand::F64(bits)) => bits,
                _ => self.constant()? as u64,
            };
            let bytes = value.to_le_bytes();
            let width = ty.bytes() as usize;
            init.extend_from_slice(&bytes[..width.min(8)]);
            init.extend(std::iter::repeat_n(0, width.saturating_sub(8)));
            while depth > 0 && self.accept(b'}') {
                depth -= 1;
            }
            if depth == 0 {
                return Ok(());
            }
            self.expect(b',')?;
        }
    }

    fn entry(&mut self) -> Result<()> {
        let (version, target) = self.header()?;
        let (name, span) = self.name("the name of an entry")?;
        if self.entries.iter().any(|entry| entry.kernel.name == name) {
            return Err(Failure::new(span, format!("there is a second entry `{name}`")));
        }
        let kernel = Kernel { pragmas: self.pragmas.clone(), ..Kernel::new(name, target, version) };
        let mut entry = Entry {
            kernel,
            names: Names::default(),
            functions: HashMap::new(),
            called: Vec::new(),
            module_variables: HashMap::new(),
            location_ids: HashMap::new(),
            stated: HashMap::new(),
            current: None,
        };
        // The module's variables and the parameters are outside the body's scope.
        entry.names.enter(usize::MAX);
        if self.accept(b'(') && !self.accept(b')') {
            loop {
                self.parameter(&mut entry)?;
                if !self.accept(b',') {
                    break;
                }
            }
            self.expect(b')')?;
        }
        self.entry_directives(&mut entry.kernel)?;
        if !self.at(b'{') {
            return self.expected("`{` or a directive of the entry");
        }
        self.look_ahead(&mut entry)?;
        self.body(&mut entry)?;
        self.entries.push(entry);
        Ok(())
    }

    fn parameter(&mut self, entry: &mut Entry<'t>) -> Result<()> {
        let (name, span, declared) = self.parameter_text()?;
        if !entry.names.declare(name, Named::Parameter(Parameter(entry.kernel.params.len() as u32))) {
            return Err(Failure::new(span, format!("there is a second parameter `{name}`")));
        }
        let name = entry.names.unique.name(name, None);
        entry.kernel.params.push(ParameterDecl { name, ..declared });
        Ok(())
    }

    /// `.param .align 8 .u64 .ptr .global .align 16 name[4]`
    fn parameter_text(&mut self) -> Result<(&'t str, Range<usize>, ParameterDecl)> {
        if !self.accept_directive(".param") {
            return self.expected("`.param`");
        }
        let align = if self.accept_directive(".align") { Some(self.align()?) } else { None };
        let (ty, _) = self.ty()?;
        let mut pointee = None;
        if self.accept_directive(".ptr") {
            let space = Space::from_directive(self.str(self.peek()));
            if space.is_some() {
                self.advance();
            }
            // Without an alignment it is 4 (PTX ISA, `.ptr`).
            let align = if self.accept_directive(".align") { self.align()? } else { 4 };
            pointee = Some(Pointee { space, align });
        }
        let (name, span) = self.name("the name of a parameter")?;
        let start = self.peek().span().start;
        let elements = match self.dimensions()? {
            None => None,
            Some(Some(count)) => Some(count),
            Some(None) => return Err(Failure::new(self.since(start), "a parameter has a size".into())),
        };
        Ok((name, span, ParameterDecl { name: name.to_owned(), ty, elements, align, pointee }))
    }

    fn entry_directives(&mut self, kernel: &mut Kernel) -> Result<()> {
        while self.peek().kind == TokenKind::Directive {
            let token = self.peek();
            if self.str(token) == ".pragma" {
                let pragmas = self.pragma_directive()?;
                kernel.pragmas.extend(pragmas);
                continue;
            }
            self.advance();
            match self.str(token) {
                ".reqntid" => kernel.required_block = Some(self.triple()?),
                ".maxntid" => kernel.max_block = Some(self.triple()?),
                ".reqnctapercluster" => kernel.required_cluster = Some(self.triple()?),
                ".minnctapersm" => kernel.min_ctas_per_sm = Some(self.number("a number of CTAs")?),
                ".maxnreg" => kernel.max_registers = Some(self.number("a number of registers")?),
                ".explicitcluster" => kernel.explicit_cluster = true,
                ".blocksareclusters" => kernel.blocks_are_clusters = true,
                ".maxclusterrank" => kernel.max_cluster_rank = Some(self.number("a number of CTAs")?),
                // A hint of no consequence for what the kernel computes, and deprecated.
                ".maxnctapersm" => _ = self.number("a number of CTAs")?,
                other => {
                    return Err(Failure::new(token.span(), format!("`{other}` of an entry is not supported")));
                }
            }
        }
        Ok(())
    }

    /// One to three numbers; those left out are 1.
    fn triple(&mut self) -> Result<[u32; 3]> {
        let mut triple = [1; 3];
        for (index, place) in triple.iter_mut().enumerate() {
            if index == 0 || self.accept(b',') {
                *place = self.number("a number of threads or CTAs")?;
            }
        }
        Ok(triple)
    }

    /// Finds the labels of a body, which branches may name before they stand, and the module's variables it names.
    fn look_ahead(&mut self, entry: &mut Entry<'t>) -> Result<()> {
        let mut open = Vec::new();
        let mut named = vec![false; self.variables.len()];
        for index in self.next..self.tokens.len() {
            let token = self.tokens[index];
            match token.kind {
                TokenKind::Symbol(b'{') => open.push(index),
                TokenKind::Symbol(b'}') => {
                    open.pop();
                    if open.is_empty() {
                        break;
                    }
                }
                TokenKind::Word => {
                    let name = self.str(token);
                    if let Some(&variable) = self.variable_names.get(name) {
                        named[variable] = true;
                    }
                    if self.tokens[index + 1].kind == TokenKind::Symbol(b':')
                        && self.tokens.get(index + 2).is_none_or(|token| self.str(*token) != ".branchtargets")
                    {
                        let label = Label(entry.kernel.labels.len() as u32);
                        let scope = open.last().copied().unwrap_or_default();
                        if entry.names.labels.insert((scope, name), label).is_some() {
                            return Err(Failure::new(token.span(), format!("label `{name}` stands twice")));
                        }
                        let unique = entry.names.unique.name(name, None);
                        entry.kernel.labels.push(unique);
                    }
                }
                _ => {}
            }
        }
        for (index, (variable, _)) in self.variables.iter().zip(named).enumerate().filter(|(_, (_, named))| *named) {
            let next = Variable(entry.kernel.variables.len() as u32);
            let id = entry.module_variables.get(&index).copied().unwrap_or(next);
            let name = self.variable_names.get_key_value(variable.name.as_str()).map(|(name, _)| *name);
            // A parameter of the same name hides it.
            if name.is_some_and(|name| entry.names.declare(name, Named::Variable(id))) && id == next {
                entry.module_variables.insert(index, id);
                let name = entry.names.unique.name(&variable.name, None);
                entry.kernel.variables.push(VariableDecl { name, ..variable.clone() });
            }
        }
        Ok(())
    }

    // The body.

    fn body(&mut self, entry: &mut Entry<'t>) -> Result<()> {
        let start = self.peek();
        loop {
            let token = self.peek();
            match token.kind {
                TokenKind::End => return Err(Failure::new(start.span(), "this body has no closing `}`".into())),
                TokenKind::Symbol(b'{') => {
                    if entry.names.open.len() > MAX_SCOPES {
                        return Err(Failure::new(
                            token.span(),
                            format!("scopes are nested more than {MAX_SCOPES} deep"),
                        ));
                    }
                    entry.names.enter(self.next);
                    self.advance();
                }
                TokenKind::Symbol(b'}') => {
                    self.advance();
                    entry.names.leave();
                    if entry.names.open.len() == 1 {
                        return Ok(());
                    }
                }
                TokenKind::Symbol(b';') => _ = self.advance(),
                TokenKind::Symbol(b'@') => {
                    self.advance();
                    let negated = self.accept(b'!');
                    let (name, span) = self.name("a predicate")?;
                    let guard = Guard { predicate: register(entry, name, span)?, negated };
                    self.instruction(entry, Some(guard))?;
                }
                TokenKind::Word if self.peek_second().kind == TokenKind::Symbol(b':') => {
                    self.next += 2;
                    if self.accept_directive(".branchtargets") {
                        let targets = self.branch_targets()?;
                        let scope = entry.names.open.last().copied().unwrap_or_default();
                        entry.names.tables.insert((scope, self.str(token)), targets);
                        continue;
                    }
                    if let Some(label) = entry.names.label(self.str(token)) {
                        entry.kernel.body.push(Statement::Label(label));
                    }
                }
                TokenKind::Word => self.instruction(entry, None)?,
                TokenKind::Directive => self.body_directive(entry)?,
                _ => return self.expected("an instruction, a label or a directive"),
            }
        }
    }

    fn body_directive(&mut self, entry: &mut Entry<'t>) -> Result<()> {
        match self.str(self.peek()) {
            ".loc" => self.loc_directive(entry),
            ".reg" => self.registers(entry),
            ".pragma" => {
                let pragmas = self.pragma_directive()?;
                entry.kernel.body.extend(pragmas.into_iter().map(Statement::Pragma));
                Ok(())
            }
            ".file" => self.file_directive(),
            ".shared" | ".local" | ".global" | ".const" | ".param" | ".extern" | ".visible" | ".weak" => {
                let external = self.linkage();
                for (name, span, mut variable) in self.variable_declarations()? {
                    let id = Variable(entry.kernel.variables.len() as u32);
                    if !entry.names.declare(name, Named::Variable(id)) {
                        return Err(Failure::new(span, format!("`{name}` is declared twice")));
                    }
                    variable.name = entry.names.unique.name(name, None);
                    variable.external = external;
                    entry.kernel.variables.push(variable);
                }
                Ok(())
            }
            _ => self.expected("a directive that may stand in a body"),
        }
    }

    /// `.loc 2 191 40, function_name $L__info_string0, inlined_at 1 32 33` (PTX ISA, section 11.5.2)
    fn loc_directive(&mut self, entry: &mut Entry<'t>) -> Result<()> {
        let start = self.advance().span().start;
        let (file, line, column) = self.place()?;
        let mut inlined_at = None;
        let mut depth = 0;
        if self.accept(b',') {
            self.keyword("function_name")?;
            self.name("the label of a function's name")?;
            if self.accept(b'+') {
                self.number("an offset")?;
            }
            self.expect(b',')?;
            self.keyword("inlined_at")?;
            let caller = self.place()?;
            // The caller's place must have been stated; the last time it was says where the caller itself was inlined.
            let (file, line, column) = caller;
            let (id, outer) = entry
                .stated
                .get(&caller)
                .copied()
                .unwrap_or_else(|| (entry.locate(Location { file, line, column, inlined_at: None }, 0), 0));
            depth = outer + 1;
            if depth > MAX_INLINED {
                return Err(Failure::new(self.since(start), format!("inlined more than {MAX_INLINED} calls deep")));
            }
            inlined_at = Some(id);
        }
        entry.current = Some(entry.locate(Location { file, line, column, inlined_at }, depth));
        Ok(())
    }

    fn keyword(&mut self, keyword: &str) -> Result<()> {
        if self.str(self.peek()) != keyword {
            return self.expected(format_args!("`{keyword}`"));
        }
        self.advance();
        Ok(())
    }

    fn place(&mut self) -> Result<(u32, u32, u32)> {
        let token = self.peek();
        let file = self.unsigned("the number of a file", THIS_FILE - 1)?;
        self.files_used.entry(file).or_insert(token.span());
        Ok((file, self.number("a line")?, self.number("a column")?))
    }

    /// `.reg .b32 %r<32>, sum;`
    fn registers(&mut self, entry: &mut Entry<'t>) -> Result<()> {
        self.advance();
        let (ty, _) = self.ty()?;
        loop {
            let (name, span) = self.name("the name of a register")?;
            let bank = entry.kernel.banks.len() as u32;
            let count = if self.accept(b'<') {
                let count = self.number("a number of registers")?;
                self.expect(b'>')?;
                Some(count)
            } else {
                None
            };
            let new = match count {
                Some(count) => entry.names.declare_bank(name, bank, count),
                None => entry.names.declare(name, Named::Register(Register { bank, index: 0 })),
            };
            if !new {
                return Err(Failure::new(span, format!("`{name}` is declared twice")));
            }
            let prefix = entry.names.unique.name(name, count);
            entry.kernel.banks.push(Bank { prefix, ty, count });
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b';')?;
        Ok(())
    }

    fn instruction(&mut self, entry: &mut Entry<'t>, guard: Option<Guard>) -> Result<()> {
        let (word, Range { start, .. }) = self.name("an instruction")?;
        let mut parts = word.split('.');
        let name = parts.next().unwrap_or_default();
        let mut parts: Vec<_> = parts.collect();
        // A dotted part may stand apart.
        while self.peek().kind == TokenKind::Directive {
            let part = self.advance();
            parts.push(&self.str(part)[1..]);
        }
        let span = self.since(start);
        let unknown =
            |why: String| Failure::new(span.clone(), format!("unknown form `{}`: {why}", &self.text[span.clone()]));
        let opcode = Opcode::from_name(name).ok_or_else(|| unknown(format!("there is no instruction `{name}`")))?;
        let mut modifiers = parts
            .iter()
            .map(|part| Modifier::from_name(part).ok_or_else(|| unknown(format!("`.{part}` means nothing"))))
            .collect::<Result<Vec<_>>>()?;
        if matches!(opcode, Opcode::Ld | Opcode::St | Opcode::Atom | Opcode::Red) {
            // ptxas takes these in any order, and compilers use that; the table has the manual's.
            let first = modifiers.iter().take_while(|modifier| rank(**modifier).is_some()).count();
            modifiers[..first].sort_by_key(|modifier| rank(*modifier));
        }
        if !Form::of(opcode).iter().any(|form| form.accepts(&modifiers)) {
            let forms: Vec<_> = Form::of(opcode).iter().map(|form| format!("`{}`", form.syntax)).collect();
            return Err(unknown(format!("after `{name}` may follow {}", forms.join(", "))));
        }
        let has = |kind| Form::of(opcode).iter().any(|form| form.slots.iter().any(|slot| slot.kind == kind));
        let branches = has(Kind::Label) || has(Kind::Labels);
        let mut operands = Vec::new();
        let mut spans = Vec::new();
        if has(Kind::Function) {
            operands = self.call(entry)?;
        } else if !self.at(b';') {
            loop {
                let start = self.peek().span().start;
                operands.push(self.operand(entry, branches)?);
                spans.push(self.since(start));
                if !self.accept(b',') {
                    break;
                }
            }
        }
        self.expect(b';')?;
        let mut instruction = Instruction::new(opcode, modifiers, operands).map_err(|error| {
            let place = match &error {
                InstructionError::Operand { position, .. } => spans.get(position - 1).cloned(),
                InstructionError::UnknownForm { .. } => None,
            };
            Failure::new(place.unwrap_or(span), format!("unknown form: {error}"))
        })?;
        instruction.round_constants();
        instruction.guard = guard;
        instruction.location = entry.current.or_else(|| self.own_location(entry, start));
        entry.kernel.body.push(Statement::Instruction(instruction));
        Ok(())
    }

    /// Where a byte of this text stands in it; quick while the bytes asked for ascend.
    fn own_location(&mut self, entry: &mut Entry<'t>, byte: usize) -> Option<LocationId> {
        self.file_name?;
        if byte < self.place.0 {
            self.place = (0, 1, 1);
        }
        let (from, mut line, mut column) = self.place;
        for character in self.text[from..byte].chars() {
            (line, column) = if character == '\n' { (line + 1, 1) } else { (line, column + 1) };
        }
        self.place = (byte, line, column);
        self.files_used.entry(THIS_FILE).or_insert(byte..byte);
        Some(entry.locate(Location { file: THIS_FILE, line, column, inlined_at: None }, 0))
    }

    /// The labels of a `.branchtargets`.
    fn branch_targets(&mut self) -> Result<Vec<&'t str>> {
        let mut targets = Vec::new();
        loop {
            targets.push(self.name("a label")?.0);
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b';')?;
        Ok(targets)
    }

    /// `(results), function, (arguments)`, of which only the function must be there.
    fn call(&mut self, entry: &mut Entry<'t>) -> Result<Vec<Operand>> {
        let mut results = Vec::new();
        if self.at(b'(') {
            results = self.arguments(entry)?;
            self.expect(b',')?;
        }
        let (written, span) = self.name("the name of a function")?;
        let name = self.aliases.get(written).copied().unwrap_or(written);
        if entry.names.find(name).is_some() {
            return Err(Failure::new(span, "calls through registers are not supported".into()));
        }
        if !self.functions.contains_key(name) {
            return Err(undeclared(name, span));
        }
        let next = FunctionId(entry.kernel.functions.len() as u32);
        let function = *entry.functions.entry(name).or_insert(next);
        if function == next {
            entry.called.push(name);
            entry.kernel.functions.push(Function {
                name: entry.names.unique.name(name, None),
                results: Vec::new(),
                params: Vec::new(),
                no_return: false,
                banks: 0..0,
                variables: 0..0,
                body: None,
            });
        }
        let arguments = if self.accept(b',') { self.arguments(entry)? } else { Vec::new() };
        Ok(vec![Operand::Arguments(results), Operand::Function(function), Operand::Arguments(arguments)])
    }

    fn arguments(&mut self, entry: &Entry<'t>) -> Result<Vec<Operand>> {
        self.expect(b'(')?;
        let mut arguments = Vec::new();
        if self.accept(b')') {
            return Ok(arguments);
        }
        loop {
            arguments.push(self.element(entry)?);
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b')')?;
        Ok(arguments)
    }

    fn operand(&mut self, entry: &Entry<'t>, branches: bool) -> Result<Operand> {
        match self.peek().kind {
            TokenKind::Symbol(b'[') => self.memory(entry),
            TokenKind::Symbol(b'{') => {
                self.advance();
                let mut elements = self.elements(entry)?;
                // `{%r1}` is how some compilers write a scalar.
                if elements.len() == 1 { Ok(elements.remove(0)) } else { Ok(Operand::Vector(elements)) }
            }
            TokenKind::Symbol(b'!') if self.peek_second().kind == TokenKind::Word => {
                self.advance();
                let (name, span) = self.name("a predicate")?;
                Ok(Operand::NotPredicate(register(entry, name, span)?))
            }
            TokenKind::Word if branches && !self.str(self.peek()).starts_with('%') => {
                let (name, span) = self.name("a label")?;
                let missing = |name: &str| Failure::new(span.clone(), format!("there is no label `{name}` in scope"));
                if let Some(table) = entry.names.table(name) {
                    let label = |name: &&'t str| entry.names.label(name).ok_or_else(|| missing(name));
                    return table.iter().map(label).collect::<Result<_>>().map(Operand::Labels);
                }
                entry.names.label(name).map(Operand::Label).ok_or_else(|| missing(name))
            }
            _ => self.element(entry),
        }
    }

    /// The rest of a vector behind its brace.
    fn elements(&mut self, entry: &Entry<'t>) -> Result<Vec<Operand>> {
        let mut elements = Vec::new();
        loop {
            elements.push(self.element(entry)?);
            if !self.accept(b',') {
                break;
            }
        }
        self.expect(b'}')?;
        Ok(elements)
    }

    /// What may also stand in a vector.
    fn element(&mut self, entry: &Entry<'t>) -> Result<Operand> {
        let token = self.peek();
        if token.kind != TokenKind::Word || self.str(token) == "WARP_SZ" {
            return match self.float() {
                Some(float) => Ok(float),
                None => Ok(Operand::Integer(self.constant()?)),
            };
        }
        let name = self.str(token);
        self.advance();
        if name == "_" {
            return Ok(if self.accept(b'|') {
                Operand::RegisterPair(None, self.second(entry)?)
            } else {
                Operand::Sink
            });
        }
        if let Some(special) = Special::from_name(name) {
            return Ok(Operand::Special(special));
        }
        match entry.names.find(name) {
            Some(Named::Register(first)) if self.accept(b'|') => {
                Ok(Operand::RegisterPair(Some(first), self.second(entry)?))
            }
            Some(Named::Register(register)) => Ok(Operand::Register(register)),
            Some(Named::Variable(variable)) => Ok(Operand::VariableAddress(variable, self.offset()?)),
            Some(Named::Parameter(parameter)) => Ok(Operand::ParameterAddress(parameter, self.offset()?)),
            None => Err(undeclared(name, token.span())),
        }
    }

    /// The register behind `|`, or `_`.
    fn second(&mut self, entry: &Entry<'t>) -> Result<Option<Register>> {
        match self.name("a register")? {
            ("_", _) => Ok(None),
            (name, span) => register(entry, name, span).map(Some),
        }
    }

    /// `[%rd1+8]`, `[ %rd1 + -8 ]`, `[symbol+4]`, `[4096]`, `[%rd1, {%r1, %r2}]`
    fn memory(&mut self, entry: &Entry<'t>) -> Result<Operand> {
        self.expect(b'[')?;
        let token = self.peek();
        let address = if token.kind == TokenKind::Word {
            self.advance();
            let base = match entry.names.find(self.str(token)) {
                Some(Named::Register(register)) => Base::Register(register),
                Some(Named::Variable(variable)) => Base::Variable(variable),
                Some(Named::Parameter(parameter)) => Base::Parameter(parameter),
                None => return Err(undeclared(self.str(token), token.span())),
            };
            Address { base, offset: self.offset()? }
        } else {
            Address { base: Base::Absolute, offset: self.constant()? }
        };
        if self.accept(b',') {
            self.expect(b'{')?;
            let coordinates = self.elements(entry)?;
            self.expect(b']')?;
            return Ok(Operand::Tensor(address, coordinates));
        }
        self.expect(b']')?;
        Ok(Operand::Memory(address))
    }

    /// `+ 8`, `+-8` and, though ptxas has it not, `-8`; 0 where none of them stands.
    fn offset(&mut self) -> Result<i64> {
        if self.accept(b'+') || self.at(b'-') { self.constant() } else { Ok(0) }
    }
}

/// Lets code that other code follows end where it would run off.
fn end(body: &mut Vec<Statement>) {
    if goes_on(body)
        && let Ok(mut ret) = Instruction::new(Opcode::Ret, Vec::new(), Vec::new())
    {
        ret.location = body.iter().rev().find_map(|statement| match statement {
            Statement::Instruction(last) => last.location,
            _ => None,
        });
        body.push(Statement::Instruction(ret));
    }
}

fn undeclared(name: &str, span: Range<usize>) -> Failure {
    Failure::new(span, format!("`{name}` is not declared"))
}

fn register(entry: &Entry<'_>, name: &str, span: Range<usize>) -> Result<Register> {
    match entry.names.find(name) {
        Some(Named::Register(register)) => Ok(register),
        Some(_) => Err(Failure::new(span, format!("`{name}` is not a register"))),
        None => Err(undeclared(name, span)),
    }
}

/// The manual's order of what memory instructions begin with: ordering, scope, state space.
fn rank(modifier: Modifier) -> Option<u8> {
    use Modifier as M;
    match modifier {
        M::Mmio => Some(0),
        M::Weak | M::Volatile | M::Relaxed | M::Acquire | M::Release | M::AcqRel => Some(1),
        M::Cta | M::Cluster | M::Gpu | M::Sys => Some(2),
        M::Global | M::Shared | M::SharedCta | M::SharedCluster | M::Local | M::Const | M::Param | M::ParamEntry => {
            Some(3)
        }
        _ => None,
    }
}

/// An unsigned integer of 64 bits as PTX writes it: decimal, `0x`, `0b`, octal after a 0, and perhaps `U` at its end.
fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_suffix(['U', 'u']).unwrap_or(text);
    let (digits, radix) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&digits[2..], 16),
        [b'0', b'b' | b'B', ..] => (&digits[2..], 2),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    u64::from_str_radix(digits, radix).ok()
}

/// A floating-point constant as PTX writes it: `0f` or `0d` and its bits, or decimal with a point or an exponent.
fn float(text: &str) -> Option<Operand> {
    let bits = |digits: &str, length| {
        let hexadecimal = digits.len() == length && digits.bytes().all(|b| b.is_ascii_hexdigit());
        hexadecimal.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
    };
    match text.as_bytes() {
        [b'0', b'f' | b'F', ..] => bits(&text[2..], 8).map(|bits| Operand::F32(bits as u32)),
        [b'0', b'd' | b'D', ..] => bits(&text[2..], 16).map(Operand::F64),
        [b'0', b'x' | b'X', ..] => None,
        _ if text.contains(['.', 'e', 'E']) => text.parse::<f64>().ok().map(|value| Operand::F64(value.to_bits())),
        _ => None,
    }
}

/// A text without its quotes, escapes (`\\` and three octal digits, as LLVM writes them) resolved.
fn unescape(quoted: &str) -> String {
    let mut rest = quoted.trim_matches('"').as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .filter(|digits| !digits.starts_with('+'))
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        let (byte, skipped) = match (octal, tail.first()) {
            (Some(octal), _) => (octal, 3),
            (None, Some(b'\\')) if byte == b'\\' => (b'\\', 1),
            _ => (byte, 0),
        };
        bytes.push(byte);
        rest = &tail[skipped..];
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests;
