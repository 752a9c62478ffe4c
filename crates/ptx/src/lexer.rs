//! PTX text as tokens (PTX ISA, section 4).

use std::ops::Range;

use crate::parse::Failure;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// A name with everything dotted to it: `%r1`, `%tid.x`, `ld.global.v4.b32`, `$L__BB0_2`.
    Word,
    /// A name with a dot before it: `.reg`, `.b32`.
    Directive,
    /// What starts with a digit: `12`, `0x1F`, `8.7`, `0f3F800000`, `1.5e-3`.
    Number,
    /// What stands between double quotes, quotes included.
    Text,
    /// Any other character.
    Symbol(u8),
    /// The end of the text.
    End,
}

/// A token and where it stands, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    pub kind: TokenKind,
    pub start: u32,
    pub end: u32,
}

impl Token {
    pub fn span(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

const SYMBOLS: &[u8] = b"{}()[],;:@!|+-*/<>=&^~%";

/// The tokens of a text, the last of which is `End`; comments and white space are left out.
pub(crate) fn tokens(text: &str) -> Result<Vec<Token>, Failure> {
    let bytes = text.as_bytes();
    if u32::try_from(bytes.len()).is_err() {
        return Err(Failure::new(0..0, format!("the text has {} bytes; 4 GiB are allowed", bytes.len())));
    }
    let starts_name = |at: usize| bytes.get(at).is_some_and(|b| b.is_ascii_alphabetic() || matches!(b, b'_' | b'$'));
    let in_name = |at: usize| bytes.get(at).is_some_and(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$'));
    // From inside a name to its end; `::` joins, and a dot does where the name may be dotted.
    let name_end = |mut at: usize, dotted: bool| loop {
        if in_name(at) {
            at += 1;
        } else if bytes[at..].starts_with(b"::") && in_name(at + 2) {
            at += 2;
        } else if dotted && bytes.get(at) == Some(&b'.') && in_name(at + 1) {
            at += 1;
        } else {
            return at;
        }
    };
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let (kind, end) = if byte.is_ascii_whitespace() {
            at += 1;
            continue;
        } else if rest.starts_with(b"//") {
            at += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
            continue;
        } else if rest.starts_with(b"/*") {
            let Some(length) = rest[2..].windows(2).position(|pair| pair == b"*/") else {
                return Err(Failure::new(at..at + 2, "this comment has no end".into()));
            };
            at += length + 4;
            continue;
        } else if starts_name(at) || (byte == b'%' && starts_name(at + 1)) {
            (TokenKind::Word, name_end(at + 1, true))
        } else if byte == b'.' && starts_name(at + 1) {
            (TokenKind::Directive, name_end(at + 1, false))
        } else if byte.is_ascii_digit() {
            (TokenKind::Number, number_end(bytes, at))
        } else if byte == b'"' {
            match rest[1..].iter().position(|b| matches!(b, b'"' | b'\n')) {
                Some(length) if rest[length + 1] == b'"' => (TokenKind::Text, at + length + 2),
                _ => return Err(Failure::new(at..at + 1, "this text has no closing quote on its line".into())),
            }
        } else if SYMBOLS.contains(&byte) {
            (TokenKind::Symbol(byte), at + 1)
        } else {
            let character = text[at..].chars().next().unwrap_or_default();
            let message = format!("the character `{}` has no meaning here", character.escape_default());
            return Err(Failure::new(at..at + character.len_utf8(), message));
        };
        tokens.push(Token { kind, start: at as u32, end: end as u32 });
        at = end;
    }
    tokens.push(Token { kind: TokenKind::End, start: at as u32, end: at as u32 });
    Ok(tokens)
}

fn number_end(bytes: &[u8], start: usize) -> usize {
    // `0x1e+4` is a sum, `1e+4` is a number.
    let decimal = !matches!(bytes.get(start..start + 2), Some([b'0', b'x' | b'X' | b'f' | b'F' | b'd' | b'D']));
    let mut at = start;
    while let Some(byte) = bytes.get(at) {
        let exponent_sign = decimal
            && matches!(byte, b'+' | b'-')
            && matches!(bytes[at - 1], b'e' | b'E')
            && bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        if !(byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.') || exponent_sign) {
            break;
        }
        at += 1;
    }
    at
}
