//! What is ready to compute a problem, and calls of it.

use kernels::plan::{ArgRef, Buffer};
use kernels::{Buffers, Layout, Problem, Rotary};
use ptx::{Backend, Launch};

use crate::device::{Device, Kind};
use crate::error::Error;
use crate::layout;
use crate::planner::{Plan, WORKSPACE_ALIGNMENT};
use crate::stream::{Backing, DeviceSlice, DeviceSliceMut, Inner, Owner, Stream, locked};

/// A problem, ready to be computed on a device: what is left of a call is its memory.
#[derive(Clone, Debug)]
pub struct Attention {
    device: Device,
    by: By,
}

/// What computes it.
#[derive(Clone, Debug)]
enum By {
    /// Kernels, and each launch for the driver; none on the emulator.
    Kernels(Box<Plan>, Vec<Template>),
    /// The processor.
    Cpu(Box<Problem>, Layout),
}

/// A launch of which everything is ready but the addresses.
#[derive(Clone, Debug)]
struct Template {
    launch: cuda::Prepared,
    /// The arguments that are an address, or hold one, of which buffer.
    addresses: Vec<(usize, Buffer)>,
}

impl Template {
    /// A template for each launch of a plan.
    fn of(context: &cuda::Context, plan: &Plan) -> Result<Vec<Template>, Error> {
        let anywhere = WORKSPACE_ALIGNMENT;
        let workspaces = vec![anywhere; plan.kernels.workspaces.len()];
        let [q, k, v, out, lse] = [anywhere; 5];
        let buffers = Buffers { q, k, v, out, lse, workspaces, ..Buffers::default() };
        let launches = plan.kernels.launches(&buffers, Some(context.device().sm_count))?;
        let template = |(launch, plan): (&Launch<'_>, &kernels::plan::LaunchPlan)| {
            let address = |(index, argument): (usize, &ArgRef)| match argument {
                ArgRef::Buffer(buffer) | ArgRef::TensorMap(buffer, _) => Some((index, *buffer)),
                ArgRef::S32(_) | ArgRef::U32(_) | ArgRef::U64(_) | ArgRef::F32(_) => None,
            };
            Ok(Template {
                launch: context.function(launch.kernel)?.prepare(launch)?,
                addresses: plan.arguments.iter().enumerate().filter_map(address).collect(),
            })
        };
        launches.iter().zip(plan.launches()).map(template).collect()
    }

    /// The launch on these addresses.
    fn launch(&self, buffers: &Buffers) -> Result<cuda::Prepared, Error> {
        let mut launch = self.launch.clone();
        for &(argument, buffer) in &self.addresses {
            // A tensor without an element may be nowhere, which tensor maps cannot say.
            if let address @ 1.. = buffers.address(buffer) {
                launch.set_address(argument, address)?;
            }
        }
        Ok(launch)
    }
}

impl Attention {
    pub(crate) fn new(device: Device, plan: Plan) -> Result<Attention, Error> {
        check_architecture(&plan, &device)?;
        let templates = match &device.kind {
            Kind::Cuda(context) => Template::of(context, &plan)?,
            Kind::Cpu | Kind::Emulated(_) => Vec::new(),
        };
        Ok(Attention { device, by: By::Kernels(Box::new(plan), templates) })
    }

    pub(crate) fn on_cpu(device: Device, problem: &Problem, layout: &Layout) -> Result<Attention, Error> {
        cpu::check(problem)?;
        layout::check(problem, layout)?;
        Ok(Attention { device, by: By::Cpu(Box::new(problem.clone()), *layout) })
    }

    /// Which kernels, with which tiles, and why; `None` on the processor.
    pub fn plan(&self) -> Option<&Plan> {
        match &self.by {
            By::Kernels(plan, _) => Some(plan),
            By::Cpu(..) => None,
        }
    }

    /// What is computed.
    pub fn problem(&self) -> &Problem {
        match &self.by {
            By::Kernels(plan, _) => &plan.problem,
            By::Cpu(problem, _) => problem,
        }
    }

    /// Where the tensors' elements are.
    pub fn layout(&self) -> &Layout {
        match &self.by {
            By::Kernels(plan, _) => &plan.layout,
            By::Cpu(_, layout) => layout,
        }
    }

    /// Bytes from the first element of `out` to the end of its last.
    pub fn out_bytes(&self) -> u64 {
        layout::reach(self.problem(), self.layout(), "out") as u64
    }

    /// Bytes of `lse`: one f32 for each query and head, `[batch, heads_q, seqlen_q]` or packed `[heads_q, total_q]`.
    pub fn lse_bytes(&self) -> u64 {
        layout::lse_bytes(self.problem())
    }

    /// Bytes that a call needs beside its tensors and that the caller may bring: [`Plan::workspace_bytes`].
    pub fn workspace_bytes(&self) -> u64 {
        self.plan().map_or(0, Plan::workspace_bytes)
    }

    /// For what.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the driver's compiler made of each launch's kernel; nothing where there is no GPU.
    pub fn functions(&self) -> Vec<&cuda::Function> {
        match &self.by {
            By::Kernels(_, templates) => templates.iter().map(|template| template.launch.function()).collect(),
            By::Cpu(..) => Vec::new(),
        }
    }
}

/// Kernels are written for one architecture, and those of Hopper and later run on no other.
pub(crate) fn check_architecture(plan: &Plan, device: &Device) -> Result<(), Error> {
    if device.hardware().is_some_and(|hardware| hardware.sm == plan.hardware.sm) {
        return Ok(());
    }
    Err(Error::Architecture { planned: plan.hardware.to_string(), device: device.to_string() })
}

/// The memory of a call's cache, beside its keys and values.
#[derive(Clone, Copy, Debug, Default)]
struct CacheOperands<'a> {
    seqlens: Option<DeviceSlice<'a>>,
    leftpad: Option<DeviceSlice<'a>>,
    batch_idx: Option<DeviceSlice<'a>>,
    block_table: Option<DeviceSlice<'a>>,
    new: Option<[DeviceSlice<'a>; 2]>,
    rotary: Option<[DeviceSlice<'a>; 2]>,
}

/// The memory of a call.
#[derive(Debug)]
pub struct Operands<'a> {
    q: DeviceSlice<'a>,
    k: DeviceSlice<'a>,
    v: DeviceSlice<'a>,
    out: DeviceSliceMut<'a>,
    lse: DeviceSliceMut<'a>,
    cu_seqlens: Option<[DeviceSlice<'a>; 2]>,
    alibi_slopes: Option<DeviceSlice<'a>>,
    cache: CacheOperands<'a>,
    descales: Option<[DeviceSlice<'a>; 3]>,
    workspace: Option<DeviceSliceMut<'a>>,
}

impl<'a> Operands<'a> {
    /// Each from its first element on, laid out as the plan says.
    pub fn new(
        q: impl Into<DeviceSlice<'a>>,
        k: impl Into<DeviceSlice<'a>>,
        v: impl Into<DeviceSlice<'a>>,
        out: impl Into<DeviceSliceMut<'a>>,
        lse: impl Into<DeviceSliceMut<'a>>,
    ) -> Operands<'a> {
        let (q, k, v, out, lse) = (q.into(), k.into(), v.into(), out.into(), lse.into());
        Operands {
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens: None,
            alibi_slopes: None,
            descales: None,
            cache: CacheOperands::default(),
            workspace: None,
        }
    }

    /// Of a packed batch: where each sequence begins, `batch + 1` numbers of 32 bits each, the same as in the plan's problem.
    pub fn cu_seqlens(self, q: impl Into<DeviceSlice<'a>>, k: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cu_seqlens: Some([q.into(), k.into()]), ..self }
    }

    /// ALiBi's slopes, f32, as many as the plan's problem has.
    pub fn alibi_slopes(self, slopes: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { alibi_slopes: Some(slopes.into()), ..self }
    }

    /// Of a cache: how many keys each entry has before the call, `batch` numbers of 32 bits.
    pub fn cache_seqlens(self, seqlens: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cache: CacheOperands { seqlens: Some(seqlens.into()), ..self.cache }, ..self }
    }

    /// Of a cache: how many places there are before each entry's first key, `batch` numbers of 32 bits.
    pub fn cache_leftpad(self, leftpad: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cache: CacheOperands { leftpad: Some(leftpad.into()), ..self.cache }, ..self }
    }

    /// Of a cache: the row that each entry's keys are in, `batch` numbers of 32 bits.
    pub fn cache_batch_idx(self, batch_idx: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cache: CacheOperands { batch_idx: Some(batch_idx.into()), ..self.cache }, ..self }
    }

    /// Of pages: the table, `[batch, pages of an entry]` numbers of 32 bits, contiguous.
    pub fn block_table(self, table: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cache: CacheOperands { block_table: Some(table.into()), ..self.cache }, ..self }
    }

    /// What is appended to the cache, which the call then writes. `k` and `v` must be memory that it may write: of a buffer that
    /// is borrowed, whoever borrows it vouches for that.
    pub fn append(self, k_new: impl Into<DeviceSlice<'a>>, v_new: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cache: CacheOperands { new: Some([k_new.into(), v_new.into()]), ..self.cache }, ..self }
    }

    /// The cosines and sines that new keys and queries are turned by, `[positions, dim / 2]` in the problem's type, contiguous.
    pub fn rotary(self, cos: impl Into<DeviceSlice<'a>>, sin: impl Into<DeviceSlice<'a>>) -> Operands<'a> {
        Operands { cache: CacheOperands { rotary: Some([cos.into(), sin.into()]), ..self.cache }, ..self }
    }

    /// What the elements of 8-bit q, k and v are multiplied by, f32, `[batch, heads_kv]` each, contiguous.
    pub fn descales(
        self,
        q: impl Into<DeviceSlice<'a>>,
        k: impl Into<DeviceSlice<'a>>,
        v: impl Into<DeviceSlice<'a>>,
    ) -> Operands<'a> {
        Operands { descales: Some([q.into(), k.into(), v.into()]), ..self }
    }

    /// A workspace of at least [`Plan::workspace_bytes`], at a multiple of [`WORKSPACE_ALIGNMENT`]; nothing need be in it.
    pub fn workspace(self, workspace: impl Into<DeviceSliceMut<'a>>) -> Operands<'a> {
        Operands { workspace: Some(workspace.into()), ..self }
    }

    /// Each piece of memory by name, with the bytes a plan needs and what must divide its address.
    fn needs(&self, attention: &Attention) -> Vec<(&'static str, DeviceSlice<'a>, u64, u64)> {
        let problem = attention.problem();
        let reach = |argument| layout::reach(problem, attention.layout(), argument) as u64;
        let (element, out_element) = (problem.dtype.bytes() as u64, problem.dtype.out().bytes() as u64);
        let mut needs = vec![
            ("q", self.q, reach("q"), element),
            ("k", self.k, reach("k"), element),
            ("v", self.v, reach("v"), element),
            ("out", self.out.slice, reach("out"), out_element),
            ("lse", self.lse.slice, attention.lse_bytes(), 4),
        ];
        if let Some([q, k]) = self.cu_seqlens {
            let bytes = 4 * (problem.batch as u64 + 1);
            needs.extend([("cu_seqlens_q", q, bytes, 4), ("cu_seqlens_k", k, bytes, 4)]);
        }
        if let (Some(slopes), Some(wanted)) = (self.alibi_slopes, &problem.alibi_slopes) {
            needs.push(("alibi_slopes", slopes, 4 * wanted.len() as u64, 4));
        }
        if let Some(cache) = &problem.cache {
            let CacheOperands { seqlens, leftpad, batch_idx, block_table, new, rotary } = self.cache;
            let list = |name, given: Option<DeviceSlice<'a>>, wanted: Option<&Vec<i32>>| {
                given.zip(wanted).map(|(slice, wanted)| (name, slice, 4 * wanted.len() as u64, 4))
            };
            needs.extend(list("cache_seqlens", seqlens, cache.seqlens.as_ref()));
            needs.extend(list("cache_leftpad", leftpad, cache.leftpad.as_ref()));
            needs.extend(list("cache_batch_idx", batch_idx, cache.batch_idx.as_ref()));
            needs.extend(list("block_table", block_table, cache.pages.as_ref().map(|pages| &pages.table)));
            if let (Some([k, v]), true) = (new, cache.append.is_some()) {
                needs.extend([("k_new", k, reach("k_new"), element), ("v_new", v, reach("v_new"), element)]);
            }
            if let (Some([cos, sin]), Some(Rotary { dim, positions, .. })) = (rotary, cache.rotary()) {
                let bytes = (positions * dim / 2) as u64 * element;
                needs.extend([("rotary_cos", cos, bytes, element), ("rotary_sin", sin, bytes, element)]);
            }
        }
        if let Some([q, k, v]) = self.descales.filter(|_| problem.dtype.is_scaled()) {
            let bytes = 4 * problem.descale_shape().into_iter().product::<usize>() as u64;
            needs.extend([("q_descale", q, bytes, 4), ("k_descale", k, bytes, 4), ("v_descale", v, bytes, 4)]);
        }
        if let Some(workspace) = &self.workspace {
            needs.push(("workspace", workspace.slice, attention.workspace_bytes(), WORKSPACE_ALIGNMENT));
        }
        needs
    }

    /// Refuses what a kernel would stumble over.
    fn check(&self, stream: &Stream, attention: &Attention) -> Result<(), Error> {
        let problem = attention.problem();
        if problem.varlen.is_some() && self.cu_seqlens.is_none() {
            return Err(Error::Missing { argument: "cu_seqlens_q" });
        }
        if problem.alibi_slopes.is_some() && self.alibi_slopes.is_none() {
            return Err(Error::Missing { argument: "alibi_slopes" });
        }
        if let Some(cache) = &problem.cache {
            let CacheOperands { seqlens, leftpad, batch_idx, block_table, new, rotary } = &self.cache;
            let missing = [
                ("cache_seqlens", cache.seqlens.is_some() && seqlens.is_none()),
                ("cache_leftpad", cache.leftpad.is_some() && leftpad.is_none()),
                ("cache_batch_idx", cache.batch_idx.is_some() && batch_idx.is_none()),
                ("block_table", cache.pages.is_some() && block_table.is_none()),
                ("k_new", cache.append.is_some() && new.is_none()),
                ("rotary_cos", cache.rotary().is_some() && rotary.is_none()),
            ];
            if let Some((argument, _)) = missing.into_iter().find(|(_, missing)| *missing) {
                return Err(Error::Missing { argument });
            }
        }
        if problem.dtype.is_scaled() && self.descales.is_none() {
            return Err(Error::Missing { argument: "q_descale" });
        }
        for (argument, slice, needed, alignment) in self.needs(attention) {
            let DeviceSlice { address, bytes: given, owner, .. } = slice;
            if matches!(owner, Owner::Stream(owner) if owner != stream.identity()) {
                return Err(Error::OtherStream { argument });
            }
            if given < needed {
                return Err(Error::Bytes { argument, given, needed });
            }
            if !address.is_multiple_of(alignment) {
                return Err(Error::Misaligned { argument, address, alignment });
            }
            if owner == Owner::Unknown
                && needed > 0
                && let Some(context) = stream.device().context()
            {
                let ordinal = context.device().ordinal;
                match context.pointer(address)?.device {
                    None => return Err(Error::HostPointer { argument, address, ordinal }),
                    Some(found) if found != ordinal => {
                        return Err(Error::OtherGpu { argument, address, found, ordinal });
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }
}

/// A call of which everything was checked.
pub(crate) enum Ready<'p> {
    Kernels {
        launches: Launches<'p>,
        /// What of the caller's workspace must be zero.
        zero: Option<(u64, u64)>,
    },
    Cpu(&'p Problem, &'p Layout, cpu::Memory),
}

/// Launches in order.
pub(crate) enum Launches<'p> {
    Driver(Vec<cuda::Prepared>),
    Emulator(Vec<Launch<'p>>),
}

/// Checks a call and makes its launches; nothing is started.
pub(crate) fn ready<'p>(
    stream: &Stream,
    inner: &mut Inner,
    attention: &'p Attention,
    operands: &Operands<'_>,
) -> Result<Ready<'p>, Error> {
    if !attention.device.is(stream.device()) {
        let (loaded, stream) = (attention.device.to_string(), stream.device().to_string());
        return Err(Error::OtherDevice { loaded, stream });
    }
    operands.check(stream, attention)?;
    let (plan, templates) = match &attention.by {
        By::Kernels(plan, templates) => (plan, templates),
        By::Cpu(problem, layout) => {
            let at = |slice: &DeviceSlice<'_>| slice.address as usize as *mut u8;
            let memory = cpu::Memory {
                q: at(&operands.q),
                k: at(&operands.k),
                v: at(&operands.v),
                out: at(&operands.out.slice),
                lse: at(&operands.lse.slice).cast(),
                new: operands.cache.new.filter(|_| problem.cache.is_some()).map(|[k, v]| cpu::NewMemory {
                    k: at(&k),
                    v: at(&v),
                    rotary: operands.cache.rotary.map(|[cos, sin]| [at(&cos).cast_const(), at(&sin).cast_const()]),
                }),
            };
            return Ok(Ready::Cpu(problem, layout, memory));
        }
    };
    let (workspaces, zero) = match &operands.workspace {
        Some(workspace) => {
            let address = workspace.slice.address;
            let parts = plan.workspace_parts().into_iter().map(|part| address + part.offset).collect();
            (parts, Some((address, plan.zeroed_bytes())).filter(|&(_, bytes)| bytes > 0))
        }
        None => (inner.own_workspaces(plan)?, None),
    };
    let [cu_seqlens_q, cu_seqlens_k] = operands.cu_seqlens.map_or([0; 2], |both| both.map(|slice| slice.address));
    let cache = &operands.cache;
    let address = |slice: Option<DeviceSlice<'_>>| slice.map_or(0, |slice| slice.address);
    let [q_descale, k_descale, v_descale] = operands.descales.map_or([0; 3], |all| all.map(|slice| slice.address));
    let buffers = Buffers {
        q: operands.q.address,
        k: operands.k.address,
        v: operands.v.address,
        out: operands.out.slice.address,
        lse: operands.lse.slice.address,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes: address(operands.alibi_slopes),
        k_new: address(cache.new.map(|[k, _]| k)),
        v_new: address(cache.new.map(|[_, v]| v)),
        rotary_cos: address(cache.rotary.map(|[cos, _]| cos)),
        rotary_sin: address(cache.rotary.map(|[_, sin]| sin)),
        cache_seqlens: address(cache.seqlens),
        cache_leftpad: address(cache.leftpad),
        cache_batch_idx: address(cache.batch_idx),
        block_table: address(cache.block_table),
        q_descale,
        k_descale,
        v_descale,
        workspaces,
    };
    let launches = match &inner.backing {
        Backing::Cuda(_) => {
            plan.kernels.check(&buffers)?;
            Launches::Driver(templates.iter().map(|template| template.launch(&buffers)).collect::<Result<_, _>>()?)
        }
        backing @ (Backing::Cpu(_) | Backing::Emulator(_)) => {
            Launches::Emulator(plan.kernels.launches(&buffers, backing.multiprocessors())?)
        }
    };
    Ok(Ready::Kernels { launches, zero })
}

/// Starts a call.
pub(crate) fn start(inner: &mut Inner, ready: &Ready<'_>) -> Result<(), Error> {
    let (launches, zero) = match ready {
        Ready::Kernels { launches, zero } => (launches, zero),
        Ready::Cpu(problem, layout, memory) => {
            // SAFETY: `Operands::check` found each tensor as large and as aligned as it must be, in memory that is the call's:
            // of this stream's buffers, or as whoever borrowed it vouches; `layout::check` that rows of `out` do not overlap.
            unsafe { cpu::attention(problem, layout, *memory, cpu::Options::default())? };
            return Ok(());
        }
    };
    match (&mut inner.backing, launches) {
        (Backing::Cuda(stream), Launches::Driver(launches)) => {
            if let Some((address, bytes)) = *zero {
                // SAFETY: the workspace is the caller's for this call and at least so long: `Operands::check`.
                unsafe { stream.fill_unchecked(address, bytes, 0)? };
            }
            launches.iter().try_for_each(|launch| stream.enqueue(launch))?;
        }
        (Backing::Emulator(device), Launches::Emulator(launches)) => {
            if let Some((address, bytes)) = *zero {
                device.write(address, &vec![0; bytes as usize])?;
            }
            launches.iter().try_for_each(|launch| device.launch(launch))?;
        }
        // `ready` made them for the stream's device, and for the processor none.
        _ => {}
    }
    Ok(())
}

pub(crate) fn enqueue(stream: &Stream, attention: &Attention, operands: Operands<'_>) -> Result<(), Error> {
    let mut inner = locked(&stream.inner);
    let ready = ready(stream, &mut inner, attention, &operands)?;
    start(&mut inner, &ready)
}
