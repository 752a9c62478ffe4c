//! What code is compiled for: an architecture and how specific to it.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::sm::{Sm, UnknownSm, list};

/// How far code for an architecture carries (PTX ISA, `.target`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Suffix {
    /// `sm_90`: runs on that architecture and every later one.
    Portable,
    /// `sm_100f`: may use what the family shares; runs on the family's members from that one on.
    Family,
    /// `sm_90a`: may use everything; runs on that architecture alone.
    Specific,
}

/// A `.target` of PTX: `sm_75`, `sm_90a`, `sm_100f`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    sm: Sm,
    suffix: Suffix,
}

impl Target {
    /// The target of that architecture and suffix.
    ///
    /// # Errors
    /// When there is no such target: `a` exists from sm_90 on, `f` from sm_100 on.
    pub fn new(sm: Sm, suffix: Suffix) -> Result<Target, TargetError> {
        let target = Target { sm, suffix };
        let exists = match suffix {
            Suffix::Portable => true,
            Suffix::Family => sm >= Sm::Sm100,
            Suffix::Specific => sm >= Sm::Sm90,
        };
        if exists { Ok(target) } else { Err(TargetError::NoSuchSuffix { given: target.to_string() }) }
    }

    pub(crate) const fn raw(sm: Sm, suffix: Suffix) -> Target {
        Target { sm, suffix }
    }

    /// The most specific target of an architecture, which may use everything that the chip can do: `sm_90a`, but `sm_80`.
    pub fn best(sm: Sm) -> Target {
        Target { sm, suffix: if sm >= Sm::Sm90 { Suffix::Specific } else { Suffix::Portable } }
    }

    /// Every target of every architecture of the table.
    pub fn all() -> impl Iterator<Item = Target> {
        Sm::ALL.into_iter().flat_map(|sm| {
            [Suffix::Portable, Suffix::Family, Suffix::Specific]
                .into_iter()
                .filter_map(move |s| Target::new(sm, s).ok())
        })
    }

    /// The architecture.
    pub fn sm(self) -> Sm {
        self.sm
    }

    /// How specific the target is.
    pub fn suffix(self) -> Suffix {
        self.suffix
    }

    /// Whether everything that code for `other` may use is there for this target too.
    ///
    /// A portable target is included in every later one, a family target in its family's later `f` and `a` targets,
    /// a specific one only in itself.
    pub fn includes(self, other: Target) -> bool {
        match other.suffix {
            Suffix::Portable => self.sm >= other.sm,
            Suffix::Family => {
                self.suffix != Suffix::Portable && self.sm.major() == other.sm.major() && self.sm >= other.sm
            }
            Suffix::Specific => self == other,
        }
    }

    /// Whether a chip of architecture `sm` runs code for this target.
    pub fn runs_on(self, sm: Sm) -> bool {
        Target::best(sm).includes(self)
    }

    /// The lowest PTX version, (major, minor), that knows the target (PTX ISA, "Release Notes").
    pub fn min_ptx_version(self) -> (u8, u8) {
        match (self.sm, self.suffix) {
            (Sm::Sm70, _) => (6, 0),
            (Sm::Sm75, _) => (6, 3),
            (Sm::Sm80, _) => (7, 0),
            (Sm::Sm86, _) => (7, 1),
            (Sm::Sm87, _) => (7, 4),
            (Sm::Sm89, _) | (Sm::Sm90, Suffix::Portable) => (7, 8),
            (Sm::Sm90, _) => (8, 0),
            (_, Suffix::Family) | (Sm::Sm103 | Sm::Sm121, _) => (8, 8),
            (Sm::Sm100, _) => (8, 6),
            (Sm::Sm120, _) => (8, 7),
        }
    }
}

impl From<Sm> for Target {
    /// The portable target.
    fn from(sm: Sm) -> Target {
        Target { sm, suffix: Suffix::Portable }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.suffix {
            Suffix::Portable => "",
            Suffix::Family => "f",
            Suffix::Specific => "a",
        };
        write!(f, "{}{suffix}", self.sm)
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Target, TargetError> {
        let (sm, suffix) = if let Some(sm) = text.strip_suffix('a') {
            (sm, Suffix::Specific)
        } else if let Some(sm) = text.strip_suffix('f') {
            (sm, Suffix::Family)
        } else {
            (text, Suffix::Portable)
        };
        Target::new(sm.parse()?, suffix)
    }
}

/// Why a text is no target.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TargetError {
    /// The architecture is not in the table.
    #[error(transparent)]
    UnknownSm(#[from] UnknownSm),
    /// The architecture has no such suffix.
    #[error("there is no target {given}: targets are {}", list(&Target::all().collect::<Vec<_>>()))]
    NoSuchSuffix {
        /// What was asked for.
        given: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap()
    }

    #[test]
    fn names_parse_back() {
        for t in Target::all() {
            assert_eq!(t.to_string().parse(), Ok(t));
        }
        assert_eq!(target("sm_90a"), Target::best(Sm::Sm90));
        assert!("sm_80a".parse::<Target>().unwrap_err().to_string().contains("no target sm_80a"));
        assert!("sm_90f".parse::<Target>().is_err());
        assert!("sm_77".parse::<Target>().unwrap_err().to_string().contains("sm_75"));
        assert!("a".parse::<Target>().is_err());
    }

    /// The compatibility rules of the PTX ISA, `.target`.
    #[test]
    fn where_code_runs() {
        assert!(target("sm_75").runs_on(Sm::Sm120));
        assert!(!target("sm_80").runs_on(Sm::Sm75));
        assert!(target("sm_90a").runs_on(Sm::Sm90));
        assert!(!target("sm_90a").runs_on(Sm::Sm100));
        assert!(target("sm_100f").runs_on(Sm::Sm103));
        assert!(!target("sm_103f").runs_on(Sm::Sm100));
        assert!(!target("sm_100f").runs_on(Sm::Sm120));
    }
}
