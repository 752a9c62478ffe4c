//! Memory of a thread that vectors are read from.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

/// A cache line.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Floats that begin at a cache line, so that no vector is in two.
#[derive(Default)]
pub(crate) struct Buffer {
    lines: Vec<Line>,
    length: usize,
}

impl Buffer {
    /// So many floats; what was there stays, as far as it fits.
    pub fn resize(&mut self, length: usize) {
        self.lines.resize(length.div_ceil(16), Line::zeroed());
        self.length = length;
    }

    /// So many floats, all of this value.
    pub fn refill(&mut self, length: usize, value: f32) {
        self.resize(length);
        self.fill(value);
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.length]
    }
}
