//! Streams, and memory on them.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arch::Sm;
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use kernels::{Dtype, Inputs, Layout, Outputs, Problem};
use ptx::{Backend, Launch};

use crate::compute::compute;
use crate::device::Device;
use crate::emulated::Emulator;
use crate::error::Error;
use crate::planner::Plan;
use crate::{Operands, attention};

/// What a stream's work runs on.
pub(crate) enum Backing {
    Cuda(cuda::Stream),
    Cpu(Heap),
    Emulator(Emulator),
}

/// Buffers in host memory, by their addresses.
#[derive(Default)]
pub(crate) struct Heap(BTreeMap<u64, HostBuffer>);

struct HostBuffer {
    blocks: Vec<Block>,
    bytes: usize,
}

/// As aligned as memory of a GPU.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(256))]
struct Block([u8; 256]);

impl Heap {
    fn alloc(&mut self, bytes: u64) -> Result<u64, Error> {
        let length = usize::try_from(bytes).map_err(|_| Error::HostMemory { bytes })?;
        // Of no bytes too, there is an address that is no other's.
        let blocks = zeros(length.div_ceil(size_of::<Block>()).max(1))?;
        let buffer = HostBuffer { blocks, bytes: length };
        let address = buffer.blocks.as_ptr().addr() as u64;
        self.0.insert(address, buffer);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), Error> {
        self.0.remove(&address).map(|_| ()).ok_or(Error::NoMemory { address, bytes: 0 })
    }

    /// The memory of a buffer.
    fn slice(&mut self, address: u64, bytes: u64) -> Result<&mut [u8], Error> {
        let buffer = self.0.range_mut(..=address).next_back();
        let slice = buffer.and_then(|(&first, HostBuffer { blocks, bytes: length })| {
            let start = usize::try_from(address - first).ok()?;
            let end = start.checked_add(usize::try_from(bytes).ok()?)?;
            bytemuck::cast_slice_mut(blocks)[..*length].get_mut(start..end)
        });
        slice.ok_or(Error::NoMemory { address, bytes })
    }
}

impl Backend for Backing {
    type Report = ();
    type Error = Error;

    fn sm(&self) -> Sm {
        match self {
            Backing::Cuda(stream) => stream.sm(),
            // No kernel is launched there.
            Backing::Cpu(_) => Sm::Sm75,
            Backing::Emulator(device) => device.sm(),
        }
    }

    fn multiprocessors(&self) -> Option<u32> {
        match self {
            Backing::Cuda(stream) => stream.multiprocessors(),
            Backing::Cpu(_) => None,
            Backing::Emulator(device) => device.multiprocessors(),
        }
    }

    fn alloc(&mut self, bytes: u64) -> Result<u64, Error> {
        Ok(match self {
            Backing::Cuda(stream) => stream.alloc(bytes)?,
            Backing::Cpu(heap) => heap.alloc(bytes)?,
            Backing::Emulator(device) => device.alloc(bytes)?,
        })
    }

    fn free(&mut self, address: u64) -> Result<(), Error> {
        match self {
            Backing::Cuda(stream) => stream.free(address)?,
            Backing::Cpu(heap) => heap.free(address)?,
            Backing::Emulator(device) => device.free(address)?,
        }
        Ok(())
    }

    fn write(&mut self, address: u64, contents: &[u8]) -> Result<(), Error> {
        match self {
            Backing::Cuda(stream) => stream.write(address, contents)?,
            Backing::Cpu(heap) => heap.slice(address, contents.len() as u64)?.copy_from_slice(contents),
            Backing::Emulator(device) => device.write(address, contents)?,
        }
        Ok(())
    }

    fn read(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, Error> {
        Ok(match self {
            Backing::Cuda(stream) => stream.read(address, bytes)?,
            Backing::Cpu(heap) => heap.slice(address, bytes)?.to_vec(),
            Backing::Emulator(device) => device.read(address, bytes)?,
        })
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), Error> {
        match self {
            Backing::Cuda(stream) => stream.launch(launch).map(|_| ())?,
            Backing::Cpu(_) => return Err(Error::Cpu { what: "kernels to launch" }),
            Backing::Emulator(device) => device.launch(launch)?,
        }
        Ok(())
    }
}

impl Backing {
    fn read_into(&mut self, address: u64, contents: &mut [u8]) -> Result<(), Error> {
        match self {
            Backing::Cuda(stream) => stream.read_into(address, contents)?,
            Backing::Cpu(heap) => contents.copy_from_slice(heap.slice(address, contents.len() as u64)?),
            Backing::Emulator(device) => contents.copy_from_slice(&device.read(address, contents.len() as u64)?),
        }
        Ok(())
    }

    /// Zeros an allocation of this backing.
    fn zero(&mut self, address: u64, bytes: u64) -> Result<(), Error> {
        match self {
            Backing::Cuda(stream) => stream.fill(address, bytes, 0)?,
            Backing::Cpu(heap) => heap.slice(address, bytes)?.fill(0),
            Backing::Emulator(device) => device.write(address, &vec![0; bytes as usize])?,
        }
        Ok(())
    }
}

/// Memory of the stream's own that grows to what calls need.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    address: u64,
    bytes: u64,
}

/// What a stream and its buffers share.
pub(crate) struct Inner {
    pub backing: Backing,
    /// Workspace that every call finds zeroed and leaves so.
    zeroed: Own,
    /// Workspace in which anything may be.
    scratch: Own,
}

impl Inner {
    /// Addresses for a plan's workspaces in memory of the stream's own.
    pub fn own_workspaces(&mut self, plan: &Plan) -> Result<Vec<u64>, Error> {
        let parts = plan.workspace_parts();
        if parts.is_empty() {
            return Ok(Vec::new());
        }
        let zeroed_bytes = plan.zeroed_bytes();
        let begin = zeroed_bytes.next_multiple_of(crate::WORKSPACE_ALIGNMENT);
        let scratch_bytes = plan.workspace_bytes().saturating_sub(begin);
        if let Backing::Cuda(stream) = &mut self.backing
            && stream.is_borrowed()
        {
            // Its owner may record it to graphs, which write there whenever they are replayed: what was once used stays. It grows
            // by half at least, so that all together is a small multiple of the last.
            for (own, needed) in [(&mut self.zeroed, zeroed_bytes), (&mut self.scratch, scratch_bytes)] {
                if needed > own.bytes {
                    let bytes = needed.max(own.bytes.saturating_add(own.bytes / 2));
                    *own = Own { address: stream.alloc_apart(bytes)?, bytes };
                }
            }
        }
        if zeroed_bytes > self.zeroed.bytes {
            let address = self.backing.alloc(zeroed_bytes)?;
            self.backing.zero(address, zeroed_bytes)?;
            let before = std::mem::replace(&mut self.zeroed, Own { address, bytes: zeroed_bytes });
            self.give_back(before)?;
        }
        if scratch_bytes > self.scratch.bytes {
            // Given back first: the two together may be more than there is.
            let before = std::mem::take(&mut self.scratch);
            self.give_back(before)?;
            self.scratch = Own { address: self.backing.alloc(scratch_bytes)?, bytes: scratch_bytes };
        }
        let address = |part: crate::Part| match part.zeroed {
            true => self.zeroed.address + part.offset,
            false => self.scratch.address + part.offset - begin,
        };
        Ok(parts.into_iter().map(address).collect())
    }

    fn give_back(&mut self, own: Own) -> Result<(), Error> {
        if own.bytes > 0 { self.backing.free(own.address) } else { Ok(()) }
    }
}

pub(crate) fn locked(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work in order, on one device, and memory that belongs to it. Clones are the same stream.
///
/// On a GPU, [`Stream::enqueue`] returns at once and what reads memory back waits; the processor and the emulator compute at
/// once. Two streams
/// run beside each other: buffers of the one cannot be given to the other, so that no safe program has a race.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    pub(crate) inner: Arc<Mutex<Inner>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.device)
    }
}

impl Stream {
    pub(crate) fn new(device: Device, backing: Backing) -> Stream {
        let inner = Inner { backing, zeroed: Own::default(), scratch: Own::default() };
        Stream { device, inner: Arc::new(Mutex::new(inner)) }
    }

    /// What it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What tells its buffers from those of others.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// Memory with nothing in it.
    ///
    /// # Errors
    /// When there is no room; the error says how many bytes were asked for.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceBuffer, Error> {
        let address = locked(&self.inner).backing.alloc(bytes)?;
        Ok(DeviceBuffer { inner: self.inner.clone(), address, bytes })
    }

    /// Memory that holds `contents`.
    ///
    /// # Errors
    /// When there is no room.
    pub fn upload<T: Pod>(&self, contents: &[T]) -> Result<DeviceBuffer, Error> {
        let mut buffer = self.alloc(std::mem::size_of_val(contents) as u64)?;
        buffer.write(contents)?;
        Ok(buffer)
    }

    /// Makes room for a plan's workspace in the stream's own, so that [`Stream::enqueue`] allocates nothing.
    ///
    /// # Errors
    /// When there is no room.
    pub fn reserve(&self, plan: &Plan) -> Result<(), Error> {
        locked(&self.inner).own_workspaces(plan).map(|_| ())
    }

    /// Starts a plan's kernels behind what is in the stream; does not wait for them.
    ///
    /// The workspace is the stream's own unless `operands` bring one; it grows when a call needs more, which
    /// [`Stream::reserve`] does beforehand. Each call needs all of its memory until it has ended: freeing or overwriting
    /// buffers of this stream is behind it in the stream; of borrowed memory the caller takes care.
    ///
    /// # Errors
    /// When the memory is too small, misaligned, of the host or of another stream or GPU, or the device refuses. Then nothing
    /// was started. On the emulator, which does not return before the end, also when a kernel does something wrong.
    pub fn enqueue(&self, attention: &crate::Attention, operands: Operands<'_>) -> Result<(), Error> {
        attention::enqueue(self, attention, operands)
    }

    /// Waits for everything in the stream.
    ///
    /// # Errors
    /// When a kernel faulted.
    pub fn synchronize(&self) -> Result<(), Error> {
        match &mut locked(&self.inner).backing {
            Backing::Cuda(stream) => Ok(stream.synchronize()?),
            Backing::Cpu(_) | Backing::Emulator(_) => Ok(()),
        }
    }

    /// Attention from host slices to vectors: plans, copies, computes, waits.
    ///
    /// The slices are contiguous `[batch, seqlen, heads, dim]`, or `[total, heads, dim]` of a packed batch, and of a cache as the
    /// problem says.
    ///
    /// # Errors
    /// When a slice is not the problem's, the problem appends to its cache ([`Stream::enqueue`] does), no generation computes it, there is no room, or a kernel fails.
    pub fn attention<T: Element>(&self, problem: &Problem, q: &[T], k: &[T], v: &[T]) -> Result<HostOutputs<T>, Error> {
        let rows = problem.total_q() * problem.heads_q;
        let mut outputs = HostOutputs { out: zeros(rows * problem.head_dim_v)?, lse: zeros(rows)? };
        self.attention_into(problem, q, k, v, &mut outputs.out, &mut outputs.lse)?;
        Ok(outputs)
    }

    /// The same into slices of the caller's, which are left alone when the call is refused.
    ///
    /// # Errors
    /// As [`Stream::attention`].
    pub fn attention_into<T: Element>(
        &self,
        problem: &Problem,
        q: &[T],
        k: &[T],
        v: &[T],
        out: &mut [T],
        lse: &mut [f32],
    ) -> Result<(), Error> {
        let product = |shape: Vec<usize>| shape.into_iter().product::<usize>();
        for (argument, given, expected) in [
            ("q", q.len(), problem.q_shape()),
            ("k", k.len(), problem.k_shape()),
            ("v", v.len(), problem.v_shape()),
            ("out", out.len(), problem.out_shape()),
            ("lse", lse.len(), problem.lse_shape()),
        ] {
            let expected = product(expected);
            if T::DTYPE != problem.dtype && argument != "lse" {
                return Err(kernels::InputError::Dtype { argument, dtype: T::DTYPE, expected: problem.dtype }.into());
            }
            if given != expected {
                return Err(Error::Length { argument, given, expected });
            }
        }
        let attention = self.device.prepare(problem, &Layout::contiguous(problem))?;
        if self.device.is_cpu() {
            // They are where the processor reads and writes them.
            // SAFETY: the slices are borrowed until the call has returned, and the processor has then computed it.
            let operands = unsafe {
                let of = |slice: &[T]| DeviceSlice::borrow(slice.as_ptr().addr() as u64, size_of_val(slice) as u64);
                let out = DeviceSliceMut::borrow(out.as_mut_ptr().addr() as u64, size_of_val(out) as u64);
                let lse = DeviceSliceMut::borrow(lse.as_mut_ptr().addr() as u64, size_of_val(lse) as u64);
                Operands::new(of(q), of(k), of(v), out, lse)
            };
            return self.enqueue(&attention, operands);
        }
        let (q, k, v) = (self.upload(q)?, self.upload(k)?, self.upload(v)?);
        let (mut device_out, mut device_lse) = (self.alloc(attention.out_bytes())?, self.alloc(attention.lse_bytes())?);
        let offsets = match &problem.varlen {
            Some(varlen) => Some((self.upload(&varlen.cu_seqlens_q)?, self.upload(&varlen.cu_seqlens_k)?)),
            None => None,
        };
        let mut operands = Operands::new(&q, &k, &v, &mut device_out, &mut device_lse);
        if let Some((cu_seqlens_q, cu_seqlens_k)) = &offsets {
            operands = operands.cu_seqlens(cu_seqlens_q, cu_seqlens_k);
        }
        let list = |list: Option<&Vec<i32>>| list.map(|list| self.upload(list)).transpose();
        let cache = problem.cache.as_ref();
        let seqlens = list(cache.and_then(|cache| cache.seqlens.as_ref()))?;
        let leftpad = list(cache.and_then(|cache| cache.leftpad.as_ref()))?;
        let batch_idx = list(cache.and_then(|cache| cache.batch_idx.as_ref()))?;
        let block_table = list(cache.and_then(|cache| cache.pages.as_ref()).map(|pages| &pages.table))?;
        if let Some(seqlens) = &seqlens {
            operands = operands.cache_seqlens(seqlens);
        }
        if let Some(leftpad) = &leftpad {
            operands = operands.cache_leftpad(leftpad);
        }
        if let Some(batch_idx) = &batch_idx {
            operands = operands.cache_batch_idx(batch_idx);
        }
        if let Some(block_table) = &block_table {
            operands = operands.block_table(block_table);
        }
        self.enqueue(&attention, operands)?;
        self.synchronize()?;
        device_out.read_into(out)?;
        device_lse.read_into(lse)
    }

    /// Attention from host tensors of any strides to host tensors: copies, computes, waits. What no kernel wrote is NaN.
    ///
    /// # Errors
    /// When the inputs are not the plan's problem's or lie otherwise, there is no room, or a kernel fails.
    pub fn run(&self, plan: &Plan, inputs: &Inputs) -> Result<Outputs, Error> {
        attention::check_architecture(plan, &self.device)?;
        let mut inner = locked(&self.inner);
        Ok(compute(&mut inner.backing, &plan.kernels, &plan.problem, inputs)?.outputs)
    }
}

fn zeros<T: Pod>(length: usize) -> Result<Vec<T>, Error> {
    let mut zeros = Vec::new();
    let bytes = (length as u64).saturating_mul(std::mem::size_of::<T>() as u64);
    zeros.try_reserve_exact(length).map_err(|_| Error::HostMemory { bytes })?;
    zeros.resize(length, T::zeroed());
    Ok(zeros)
}

/// A type of q, k, v and out.
pub trait Element: Pod + private::Sealed {
    /// As problems name it.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// What a call computed, in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostOutputs<T> {
    /// `[batch, seqlen_q, heads_q, head_dim_v]`, or packed.
    pub out: Vec<T>,
    /// `[batch, heads_q, seqlen_q]`, or packed `[heads_q, total_q]`.
    pub lse: Vec<f32>,
}

/// Memory of a stream's device; it goes back, behind what is in the stream, when it is dropped.
pub struct DeviceBuffer {
    inner: Arc<Mutex<Inner>>,
    address: u64,
    bytes: u64,
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} bytes at {:#x})", self.bytes, self.address)
    }
}

impl DeviceBuffer {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where kernels find it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// All of it, to read.
    pub fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice { address: self.address, bytes: self.bytes, owner: Owner::Stream(self.owner()), lives: PhantomData }
    }

    /// All of it, to write.
    pub fn slice_mut(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut { slice: DeviceSlice { lives: PhantomData, ..self.slice() }, lives: PhantomData }
    }

    fn owner(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// Copies `contents` to its beginning.
    ///
    /// # Errors
    /// When it is too small, or the device fails.
    pub fn write<T: Pod>(&mut self, contents: &[T]) -> Result<(), Error> {
        let contents: &[u8] = bytemuck::cast_slice(contents);
        self.check("contents", contents.len())?;
        locked(&self.inner).backing.write(self.address, contents)
    }

    /// Copies it out, when what is in the stream has ended: as many elements as fit whole.
    ///
    /// # Errors
    /// When host memory does not suffice, or something in the stream failed.
    pub fn read<T: Pod>(&self) -> Result<Vec<T>, Error> {
        let mut contents = zeros::<T>(self.bytes as usize / std::mem::size_of::<T>().max(1))?;
        self.read_into(&mut contents)?;
        Ok(contents)
    }

    /// Copies as many elements out as `contents` has.
    ///
    /// # Errors
    /// When it has not so many, or something in the stream failed.
    pub fn read_into<T: Pod>(&self, contents: &mut [T]) -> Result<(), Error> {
        let contents: &mut [u8] = bytemuck::cast_slice_mut(contents);
        self.check("contents", contents.len())?;
        locked(&self.inner).backing.read_into(self.address, contents)
    }

    fn check(&self, argument: &'static str, needed: usize) -> Result<(), Error> {
        let (given, needed) = (self.bytes, needed as u64);
        if needed > given { Err(Error::Bytes { argument, given, needed }) } else { Ok(()) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // What cannot be given back belongs to a device that is lost: its end takes everything along.
        let _ = locked(&self.inner).backing.free(self.address);
    }
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A buffer's of the stream with this identity.
    Stream(usize),
    /// Somebody else's: the driver is asked where it is.
    Unknown,
    /// Somebody else's, who knows where it is.
    Known,
}

/// Device memory that a call reads: a buffer's, or somebody else's.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a> {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) owner: Owner,
    lives: PhantomData<&'a ()>,
}

impl DeviceSlice<'_> {
    /// Memory that someone else allocated, on the device of the stream that it goes to: a framework's tensor, say.
    ///
    /// # Safety
    /// The bytes are device memory, stay allocated until the call has ended, and nothing writes them meanwhile.
    pub unsafe fn borrow(address: u64, bytes: u64) -> Self {
        Self { address, bytes, owner: Owner::Unknown, lives: PhantomData }
    }

    /// The same of memory whose device the caller knows: the driver, which takes its time to answer, is not asked for it.
    ///
    /// # Safety
    /// As [`DeviceSlice::borrow`], and the device is that of the stream that it goes to.
    pub unsafe fn borrow_known(address: u64, bytes: u64) -> Self {
        Self { address, bytes, owner: Owner::Known, lives: PhantomData }
    }

    /// The part from `offset` bytes on; `None` when that is past its end.
    pub fn offset(self, offset: u64) -> Option<Self> {
        let bytes = self.bytes.checked_sub(offset)?;
        Some(Self { address: self.address.checked_add(offset)?, bytes, ..self })
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceSlice<'a> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        buffer.slice()
    }
}

/// Device memory that a call writes.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    pub(crate) slice: DeviceSlice<'a>,
    lives: PhantomData<&'a mut ()>,
}

impl DeviceSliceMut<'_> {
    /// Memory that someone else allocated, on the device of the stream that it goes to.
    ///
    /// # Safety
    /// The bytes are device memory, stay allocated until the call has ended, and nothing else reads or writes them meanwhile.
    pub unsafe fn borrow(address: u64, bytes: u64) -> Self {
        // SAFETY: the caller vouches for more.
        Self { slice: unsafe { DeviceSlice::borrow(address, bytes) }, lives: PhantomData }
    }

    /// The same of memory whose device the caller knows: the driver is not asked for it.
    ///
    /// # Safety
    /// As [`DeviceSliceMut::borrow`], and the device is that of the stream that it goes to.
    pub unsafe fn borrow_known(address: u64, bytes: u64) -> Self {
        // SAFETY: the caller vouches for more.
        Self { slice: unsafe { DeviceSlice::borrow_known(address, bytes) }, lives: PhantomData }
    }

    /// The part from `offset` bytes on; `None` when that is past its end.
    pub fn offset(self, offset: u64) -> Option<Self> {
        Some(Self { slice: self.slice.offset(offset)?, ..self })
    }
}

impl<'a> From<&'a mut DeviceBuffer> for DeviceSliceMut<'a> {
    fn from(buffer: &'a mut DeviceBuffer) -> Self {
        buffer.slice_mut()
    }
}
