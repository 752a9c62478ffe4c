//! Proxies: ordinary instructions and the asynchronous engines reach shared memory by different ways, and what was written by
//! the one is seen by the other only after a fence (PTX ISA 8.6 "proxies", 9.7.13.4 `fence.proxy.async`): of the thread that
//! wrote, or of the one that starts the engine after it has synchronised with the writer.

use std::collections::BTreeMap;

use crate::copy::words;
use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::program::Code;
use crate::race::Stamp;

/// What ordinary instructions wrote to a CTA's shared memory and no fence has made visible to the asynchronous engines.
#[derive(Debug, Default)]
pub(crate) struct Proxy {
    /// By warp: by word of 64 bytes what it wrote. Empty when no instruction reads by the other proxy.
    unfenced: Vec<BTreeMap<u32, Unfenced>>,
}

/// Bytes of a word that were written.
#[derive(Clone, Copy, Debug, Default)]
struct Unfenced {
    bits: u64,
    /// The instruction.
    position: u32,
    /// When.
    then: Stamp,
    /// Warps that have fenced after it.
    seen_by: u64,
}

impl Proxy {
    pub(crate) fn reset(&mut self, warps: usize, tracks: bool) {
        self.unfenced.clear();
        if tracks {
            self.unfenced.resize_with(warps, BTreeMap::new);
        }
    }

    fn tracks(&self) -> bool {
        !self.unfenced.is_empty()
    }

    /// A warp has written bytes by an ordinary instruction.
    fn generic_write(&mut self, warp: usize, then: Stamp, (word, bits): (u32, u64), position: u32) {
        for (other, unfenced) in self.unfenced.iter_mut().enumerate() {
            if other == warp {
                let entry = unfenced.entry(word).or_default();
                *entry = Unfenced { bits: entry.bits | bits, position, then, seen_by: 0 };
            } else if let Some(entry) = unfenced.get_mut(&word) {
                entry.bits &= !bits;
            }
        }
    }

    /// An asynchronous engine writes bytes: who reads them sees that.
    pub(crate) fn async_write(&mut self, start: usize, bytes: usize) {
        for unfenced in self.unfenced.iter_mut().filter(|unfenced| !unfenced.is_empty()) {
            for (word, bits) in words(start, bytes) {
                if let Some(entry) = unfenced.get_mut(&(word as u32)) {
                    entry.bits &= !bits;
                }
            }
        }
    }

    /// Of the bytes of a word, those that an ordinary instruction wrote without a fence before `reader` reads them: the first, and
    /// the instruction.
    fn unfenced_in(&self, reader: usize, (word, asked): (u32, u64)) -> Option<(u64, u32)> {
        self.unfenced.iter().filter(|unfenced| !unfenced.is_empty()).find_map(|unfenced| {
            let Unfenced { bits, position, seen_by, .. } = unfenced.get(&word).copied()?;
            let missing = bits & asked;
            (missing != 0 && seen_by >> reader & 1 == 0)
                .then(|| (u64::from(word) * 64 + u64::from(missing.trailing_zeros()), position))
        })
    }

    /// The first of these bytes that an ordinary instruction wrote without a fence before `reader` reads them, and the instruction.
    fn unfenced(&self, reader: usize, start: usize, bytes: usize) -> Option<(u64, u32)> {
        if self.unfenced.iter().all(BTreeMap::is_empty) {
            return None;
        }
        words(start, bytes).find_map(|(word, bits)| self.unfenced_in(reader, (word as u32, bits)))
    }
}

impl Worker<'_> {
    /// Takes over what a warp of the running CTA wrote in its running interval; before the interval ends.
    pub(crate) fn fold_writes(&mut self, warp: usize) {
        if !self.proxy.tracks() {
            return;
        }
        let Self { races, proxy, program, .. } = self;
        let then = races.open[warp].now();
        for write in races.open[warp].writes() {
            // `cp.async` writes are seen without a fence.
            if program.ops[write.position as usize].code != Code::CopyAsync {
                proxy.generic_write(warp, then, (write.word, write.bits), write.position);
            }
        }
    }

    /// `fence.proxy.async` by a warp: its writes so far are seen by the asynchronous engines, and those that it follows.
    pub(crate) fn fence(&mut self, warp: usize) -> Result<(), Fail> {
        if self.proxy.tracks() {
            self.release(warp)?;
            let open = &self.races.open[warp];
            for (writer, unfenced) in self.proxy.unfenced.iter_mut().enumerate() {
                if writer == warp {
                    unfenced.clear();
                } else {
                    let before = unfenced.values_mut().filter(|written| open.is_after(written.then));
                    before.for_each(|written| written.seen_by |= 1 << warp);
                }
            }
        }
        Ok(())
    }

    /// An asynchronous engine reads bytes of the running CTA's shared memory for a warp: ordinary writes to them need a fence
    /// before. The warp's own writes so far are known once it has released ([`Worker::release`]).
    pub(crate) fn async_read(&mut self, warp: usize, start: u32, bytes: u32, position: usize) -> Result<(), Fail> {
        match self.proxy.unfenced(warp, start as usize, bytes as usize) {
            Some((address, write)) => {
                let write = self.job.instruction(write as usize);
                Err(Box::new((FaultKind::MissingProxyFence { address, write }, position, warp, 0)))
            }
            None => Ok(()),
        }
    }

    /// As [`Worker::async_read`], of bytes of one word, which an instruction at `position` of warp `at` reads for `warp` too.
    pub(crate) fn async_read_word(
        &mut self,
        warp: usize,
        word: (u32, u64),
        position: usize,
        at: usize,
    ) -> Result<(), Fail> {
        match self.proxy.unfenced_in(warp, word) {
            Some((address, write)) => {
                let write = self.job.instruction(write as usize);
                Err(Box::new((FaultKind::MissingProxyFence { address, write }, position, at, 0)))
            }
            None => Ok(()),
        }
    }
}
