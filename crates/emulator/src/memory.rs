//! Global memory.
//!
//! CTAs run on several threads and a wrong kernel may race, so memory is a vector of atomic words accessed with relaxed
//! order: plain moves on the machine, and no undefined behaviour whatever the kernel does.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use ptx::{Kernel, Space, VariableDecl};
use thiserror::Error;

/// Why an allocation or a transfer was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// The machine has no room.
    #[error("cannot allocate {bytes} bytes of emulated global memory")]
    OutOfMemory {
        /// What was asked for.
        bytes: u64,
    },
    /// A transfer that leaves every allocation.
    #[error("{bytes} bytes at {address:#x} are not inside one allocation")]
    OutOfBounds {
        /// Where it started.
        address: u64,
        /// How long it was.
        bytes: u64,
    },
}

/// The first address handed out; above 32 bits, so that truncated pointers are found.
const FIRST: u64 = 0x7_0000_0000;
/// Allocations start at multiples of this, as the driver's do.
const ALIGNMENT: u64 = 512;
/// Bytes of a variable of a module at most.
const MAX_VARIABLE: u64 = 1 << 32;
/// Unmapped bytes after each allocation.
const GUARD: u64 = 1 << 16;

/// Emulated global memory: allocations that launches address by 64-bit pointers.
#[derive(Debug, Default)]
pub struct Memory {
    /// By ascending address.
    buffers: Vec<Buffer>,
    end: u64,
    /// The variables of modules in global memory, and where they are, by name.
    variables: HashMap<String, Vec<(VariableDecl, u64)>>,
    /// Held while two words change together.
    pairs: Mutex<()>,
}

/// One allocation.
#[derive(Debug)]
pub(crate) struct Buffer {
    base: u64,
    bytes: u64,
    words: Box<[AtomicU32]>,
    /// One bit per byte that something wrote; `None` when all of it was written at once.
    written: Option<Box<[AtomicU64]>>,
}

fn zeroed<T: bytemuck::Zeroable>(count: u64, bytes: u64) -> Result<Box<[T]>, MemoryError> {
    let refused = MemoryError::OutOfMemory { bytes };
    let count = usize::try_from(count).map_err(|_| refused.clone())?;
    bytemuck::allocation::try_zeroed_slice_box(count).map_err(|()| refused)
}

impl Memory {
    /// Memory with nothing allocated.
    pub fn new() -> Self {
        Self::default()
    }

    /// An allocation of `bytes` bytes that nothing has written yet: a kernel that reads it before writing it is told so.
    ///
    /// # Errors
    /// When there is no room.
    pub fn alloc(&mut self, bytes: u64) -> Result<u64, MemoryError> {
        self.push(bytes, false)
    }

    /// An allocation that counts as written, all zeros. Pages that nothing touches cost no memory.
    ///
    /// # Errors
    /// When there is no room.
    pub fn alloc_zeroed(&mut self, bytes: u64) -> Result<u64, MemoryError> {
        self.push(bytes, true)
    }

    /// An allocation that holds `contents`.
    ///
    /// # Errors
    /// When there is no room.
    pub fn alloc_bytes(&mut self, contents: &[u8]) -> Result<u64, MemoryError> {
        let address = self.push(contents.len() as u64, true)?;
        self.write(address, contents)?;
        Ok(address)
    }

    /// Places the variables in global memory that a kernel's module has, with the values they start with (PTX ISA 5.4.4), as loading
    /// the module does. Those that are there already stay as they are: kernels that declare the same variable share it.
    ///
    /// Variables that another module defines are left out; [`run`](crate::run) refuses kernels that name such.
    ///
    /// # Errors
    /// When there is no room.
    pub fn load(&mut self, kernel: &Kernel) -> Result<(), MemoryError> {
        for variable in kernel.variables.iter().filter(|variable| variable.space == Space::Global) {
            if variable.external || variable.elements.is_none() || self.variable(variable).is_some() {
                continue;
            }
            let bytes = variable.bytes();
            if bytes > MAX_VARIABLE {
                return Err(MemoryError::OutOfMemory { bytes });
            }
            let start = self.end.max(FIRST).checked_next_multiple_of(u64::from(variable.align.max(1)));
            self.end = start.ok_or(MemoryError::OutOfMemory { bytes })?;
            let address = self.push(bytes, true)?;
            let held = variable.init.len().min(bytes as usize);
            self.write(address, &variable.init[..held])?;
            self.variables.entry(variable.name.clone()).or_default().push((variable.clone(), address));
        }
        Ok(())
    }

    /// Where a variable that was loaded is.
    pub(crate) fn variable(&self, variable: &VariableDecl) -> Option<u64> {
        let named = self.variables.get(&variable.name)?;
        named.iter().find(|(loaded, _)| loaded == variable).map(|&(_, address)| address)
    }

    fn push(&mut self, bytes: u64, initialised: bool) -> Result<u64, MemoryError> {
        let words = zeroed(bytes.div_ceil(4), bytes)?;
        let written = if initialised { None } else { Some(zeroed(bytes.div_ceil(64), bytes)?) };
        let base = self.end.max(FIRST);
        let end =
            base.checked_add(bytes).and_then(|end| end.checked_add(GUARD)).ok_or(MemoryError::OutOfMemory { bytes })?;
        self.end = end.next_multiple_of(ALIGNMENT);
        self.buffers.push(Buffer { base, bytes, words, written });
        Ok(base)
    }

    /// Gives an allocation back. Its address is not handed out again, so a use after this is found.
    ///
    /// # Errors
    /// When `address` is not the start of an allocation.
    pub fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        let index = self
            .buffers
            .iter()
            .position(|b| b.base == address)
            .ok_or(MemoryError::OutOfBounds { address, bytes: 0 })?;
        self.buffers.remove(index);
        Ok(())
    }

    /// Copies `contents` into an allocation and marks those bytes as written.
    ///
    /// # Errors
    /// When the bytes are not inside one allocation.
    pub fn write(&mut self, address: u64, contents: &[u8]) -> Result<(), MemoryError> {
        let bytes = contents.len() as u64;
        let (_, buffer) = self.find(address, bytes).ok_or(MemoryError::OutOfBounds { address, bytes })?;
        let start = address - buffer.base;
        buffer.write(start, contents);
        if let Some(written) = &buffer.written {
            mark(written, start, bytes);
        }
        Ok(())
    }

    /// Copies bytes out of an allocation; what nothing wrote reads as zero.
    ///
    /// # Errors
    /// When the bytes are not inside one allocation.
    pub fn read(&self, address: u64, bytes: u64) -> Result<Vec<u8>, MemoryError> {
        let (_, buffer) = self.find(address, bytes).ok_or(MemoryError::OutOfBounds { address, bytes })?;
        let mut contents = vec![0; usize::try_from(bytes).map_err(|_| MemoryError::OutOfMemory { bytes })?];
        buffer.read(address - buffer.base, &mut contents);
        Ok(contents)
    }

    /// Replaces 8 bytes by `update` of them; updates of one memory take turns.
    pub(crate) fn update_pair(&self, buffer: &Buffer, offset: u64, update: impl FnOnce(u64) -> u64) {
        let _turn = self.pairs.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let old = u64::from(buffer.load_word(offset)) | u64::from(buffer.load_word(offset + 4)) << 32;
        let new = update(old);
        buffer.store_word(offset, new as u32);
        buffer.store_word(offset + 4, (new >> 32) as u32);
    }

    pub(crate) fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// The allocation that holds all of `bytes` bytes from `address` on, and its index.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<(usize, &Buffer)> {
        let index = self.buffers.partition_point(|buffer| buffer.base <= address).checked_sub(1)?;
        let buffer = &self.buffers[index];
        let end = (address - buffer.base).checked_add(bytes)?;
        (end <= buffer.bytes).then_some((index, buffer))
    }
}

/// Held while 8 bytes are updated.
static WIDE_UPDATES: Mutex<()> = Mutex::new(());

/// Sets the bits `start..start + bytes`.
fn mark(bits: &[AtomicU64], start: u64, bytes: u64) {
    let end = start + bytes;
    let mut at = start;
    while at < end {
        let here = (64 - at % 64).min(end - at);
        let mask = (u64::MAX >> (64 - here)) << (at % 64);
        let word = &bits[(at / 64) as usize];
        if word.load(Relaxed) & mask != mask {
            word.fetch_or(mask, Relaxed);
        }
        at += here;
    }
}

impl Buffer {
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The word at a byte offset that is a multiple of 4.
    pub(crate) fn load_word(&self, offset: u64) -> u32 {
        self.words[(offset / 4) as usize].load(Relaxed)
    }

    pub(crate) fn store_word(&self, offset: u64, value: u32) {
        self.words[(offset / 4) as usize].store(value, Relaxed);
    }

    /// 1 or 2 bytes at an aligned offset.
    pub(crate) fn load_bytes(&self, offset: u64, bytes: u32) -> u32 {
        let word = self.load_word(offset & !3) >> (offset % 4 * 8);
        word & (u32::MAX >> (32 - 8 * bytes))
    }

    /// 1 or 2 bytes at an aligned offset; the rest of the word keeps what other threads put there.
    pub(crate) fn store_bytes(&self, offset: u64, bytes: u32, value: u64) {
        let shift = offset % 4 * 8;
        let mask = (u32::MAX >> (32 - 8 * bytes)) << shift;
        let value = ((value as u32) << shift) & mask;
        let word = &self.words[(offset / 4) as usize];
        let mut old = word.load(Relaxed);
        while let Err(found) = word.compare_exchange_weak(old, old & !mask | value, Relaxed, Relaxed) {
            old = found;
        }
    }

    /// Replaces 4 bytes by `update` of them, atomically; returns what was there.
    pub(crate) fn update_word(&self, offset: u64, mut update: impl FnMut(u32) -> u32) -> u32 {
        let word = &self.words[(offset / 4) as usize];
        let mut old = word.load(Relaxed);
        loop {
            match word.compare_exchange_weak(old, update(old), Relaxed, Relaxed) {
                Ok(old) => return old,
                Err(found) => old = found,
            }
        }
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = self.load_word(at & !3).to_le_bytes();
            let from = (at % 4) as usize;
            let (here, after) = rest.split_at_mut(rest.len().min(4 - from));
            here.copy_from_slice(&word[from..from + here.len()]);
            at += here.len() as u64;
            rest = after;
        }
    }

    /// Puts bytes in place; they are not marked as written.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let head = bytes.len().min((offset.wrapping_neg() % 4) as usize);
        let (head, rest) = bytes.split_at(head);
        let (whole, tail) = rest.as_chunks::<4>();
        let mut at = offset;
        for byte in head {
            self.store_bytes(at, 1, u64::from(*byte));
            at += 1;
        }
        for word in whole {
            self.store_word(at, u32::from_le_bytes(*word));
            at += 4;
        }
        for byte in tail {
            self.store_bytes(at, 1, u64::from(*byte));
            at += 1;
        }
    }

    /// The first of these bytes that nothing wrote.
    pub(crate) fn first_unwritten(&self, offset: u64, bytes: u64) -> Option<u64> {
        let written = self.written.as_ref()?;
        (offset..offset + bytes).find(|at| written[(at / 64) as usize].load(Relaxed) >> (at % 64) & 1 == 0)
    }

    /// As [`Buffer::update_word`], of 2, 4 or 8 bytes at an offset that is a multiple of them.
    pub(crate) fn update(&self, offset: u64, bytes: u32, update: impl Fn(u64) -> u64) -> u64 {
        match bytes {
            4 => self.update_word(offset, |old| update(old.into()) as u32).into(),
            8 => {
                // Words hold half of it: updates of this width exclude each other.
                let _alone = WIDE_UPDATES.lock().unwrap_or_else(PoisonError::into_inner);
                let old = u64::from(self.load_word(offset)) | u64::from(self.load_word(offset + 4)) << 32;
                let new = update(old);
                self.store_word(offset, new as u32);
                self.store_word(offset + 4, (new >> 32) as u32);
                old
            }
            _ => {
                let shift = offset % 4 * 8;
                let narrow = |word: u32| u64::from(word >> shift & 0xffff);
                let word = self.update_word(offset & !3, |word| {
                    word & !(0xffff << shift) | ((update(narrow(word)) as u32) & 0xffff) << shift
                });
                narrow(word)
            }
        }
    }

    /// Marks bytes as written.
    pub(crate) fn mark_written(&self, offset: u64, bytes: u64) {
        if let Some(written) = &self.written {
            mark(written, offset, bytes);
        }
    }

    /// Whether something wrote all of these bytes. `bytes` is 1, 2, 4, 8 or 16 and divides `offset`.
    pub(crate) fn is_written(&self, offset: u64, bytes: u32) -> bool {
        self.written.as_ref().is_none_or(|written| {
            let mask = ((1u64 << bytes) - 1) << (offset % 64);
            written[(offset / 64) as usize].load(Relaxed) & mask == mask
        })
    }

    /// Whether reads need checking.
    pub(crate) fn tracks_writes(&self) -> bool {
        self.written.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_from_where_they_were_put() {
        let mut memory = Memory::new();
        let a = memory.alloc(10).unwrap();
        let b = memory.alloc_bytes(&[9; 7]).unwrap();
        memory.write(a + 1, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        assert_eq!(memory.read(a, 10).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
        assert_eq!(memory.read(b, 7).unwrap(), [9; 7]);
        let (_, buffer) = memory.find(a, 10).unwrap();
        assert!(
            !buffer.is_written(0, 1) && buffer.is_written(1, 1) && buffer.is_written(4, 4) && !buffer.is_written(8, 2)
        );
        assert_eq!(memory.read(a, 11), Err(MemoryError::OutOfBounds { address: a, bytes: 11 }));
        assert_eq!(memory.read(u64::MAX, 1), Err(MemoryError::OutOfBounds { address: u64::MAX, bytes: 1 }));
        memory.free(a).unwrap();
        assert!(memory.read(a, 1).is_err() && memory.read(b, 1).is_ok());
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        let bytes = u64::MAX / 2;
        assert_eq!(Memory::new().alloc(bytes), Err(MemoryError::OutOfMemory { bytes }));
    }
}
