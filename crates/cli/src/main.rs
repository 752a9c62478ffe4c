//! The program `strata`.

fn main() {}
