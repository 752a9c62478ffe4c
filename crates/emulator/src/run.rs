//! Running a launch.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ptx::{Kernel, Launch, Special};

use crate::allocate::Width;
use crate::cta::Worker;
use crate::fault::RunError;
use crate::global_race::GlobalRaces;
use crate::interpret::Level;
use crate::lanes::WARP;
use crate::map;
use crate::memory::Memory;
use crate::options::{Options, Policy, Sample};
use crate::pattern::SECTOR;
use crate::program::{self, Merged, Program};
use crate::report::{Access, InstructionCounters, Part, Report, Shape, Watched};
use crate::warp::Warp;

/// What all workers of a launch share.
pub(crate) struct Job<'a> {
    pub memory: &'a Memory,
    pub launch: &'a Launch<'a>,
    pub options: &'a Options<'a>,
    pub threads: u32,
    pub shared_bytes: usize,
    pub level: Level,
    /// When races between CTAs are looked for.
    pub global_races: Option<GlobalRaces>,
}

/// Threads a CTA may have on any architecture.
const MAX_THREADS: u64 = 1024;
/// Bytes of registers and local memory that the emulator holds for a CTA at most; every worker thread holds as many.
const MAX_CTA_BYTES: u64 = 1 << 29;

/// Runs a launch, or the part of it that the options ask for.
///
/// Memory then holds what the CTAs that ran wrote. Runs are deterministic for a kernel whose CTAs do not race with each other.
///
/// # Errors
/// An invalid kernel or launch, an instruction that cannot be executed, a fault of the kernel (of several, the one in the
/// lowest CTA), or cancellation.
pub fn run(memory: &Memory, launch: &Launch<'_>, options: &Options<'_>) -> Result<Report, RunError> {
    let kernel = launch.kernel;
    kernel.validate()?;
    let refuse = |message: String| RunError::Launch(format!("launch of `{}`: {message}", kernel.name));
    let params = parameter_memory(launch).map_err(refuse)?;
    let program = Program::new(kernel, params, memory)?;
    let threads = launch.threads();
    let block = launch.block;
    if threads == 0 || threads > MAX_THREADS {
        return Err(refuse(format!("block {block:?} has {threads} threads; allowed are 1 to {MAX_THREADS}")));
    }
    if let Some(required) = kernel.required_block.filter(|required| *required != block) {
        return Err(refuse(format!("block is {block:?}; the kernel requires {required:?} (.reqntid)")));
    }
    if let Some(largest) = kernel.max_block.filter(|largest| threads > largest.iter().map(|&n| u64::from(n)).product())
    {
        return Err(refuse(format!("block {block:?} is larger than the {largest:?} the kernel allows (.maxntid)")));
    }
    if launch.grid.contains(&0) {
        return Err(refuse(format!("grid is {:?}; every dimension must be at least 1", launch.grid)));
    }
    check_cluster(launch, options).map_err(refuse)?;
    let shared_bytes = program.static_shared.saturating_add(launch.dynamic_shared.into());
    let allowed = u64::from(options.sm.limits().shared_opt_in_per_block);
    if shared_bytes > allowed {
        return Err(refuse(format!(
            "shared memory is {} static + {} dynamic = {shared_bytes} bytes; {} allows a block {allowed}",
            program.static_shared, launch.dynamic_shared, options.sm
        )));
    }
    let ctas: Vec<u64> = match &options.sample {
        Sample::Full => Vec::new(),
        Sample::Ctas(ctas) => ctas.clone(),
    };
    let warps = threads.div_ceil(WARP as u64);
    let register_bytes =
        warps * (128 * u64::from(program.narrow) + 256 * u64::from(program.wide) + 4 * u64::from(program.predicates));
    let local_bytes = threads.next_multiple_of(WARP as u64) * program.local_bytes;
    let ctas_at_once = launch.cluster.iter().map(|&n| u64::from(n)).product::<u64>();
    if (register_bytes + local_bytes).saturating_mul(ctas_at_once) > MAX_CTA_BYTES {
        return Err(refuse(format!(
            "a CTA takes {register_bytes} bytes of registers and {local_bytes} of local memory, {ctas_at_once} CTAs run together; the emulator allows {MAX_CTA_BYTES}"
        )));
    }
    let total = launch.ctas();
    if let Some(cta) = ctas.iter().find(|&&cta| cta >= total) {
        return Err(refuse(format!("sampled CTA {cta} is not in the grid of {total}")));
    }
    let job = Job {
        memory,
        launch,
        options,
        threads: threads as u32,
        shared_bytes: shared_bytes as usize,
        level: Level::detect(),
        global_races: options.global_races.then(GlobalRaces::default),
    };
    let cluster_ctas = job.cluster_ctas() as u64;
    // CTAs of a cluster run together: a sample holds whole clusters.
    let mut clusters: Vec<u64> = ctas.iter().map(|&cta| job.cluster_of(cta)).collect();
    if cluster_ctas > 1 {
        clusters.sort_unstable();
        clusters.dedup();
    }
    let count = if options.sample == Sample::Full { total / cluster_ctas } else { clusters.len() as u64 };

    let next = AtomicU64::new(0);
    let finished = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    // The failure in the lowest cluster.
    let failure: Mutex<Option<(u64, RunError)>> = Mutex::new(None);
    let work = || {
        let mut worker = Worker::new(&job, &program);
        let mut first = u64::MAX;
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            first = first.min(index);
            if index >= count || stop.load(Ordering::Relaxed) {
                return (first, worker);
            }
            let cluster = clusters.get(index as usize).copied().unwrap_or(index);
            if let Err(error) = worker.run_cluster(cluster) {
                stop.store(true, Ordering::Relaxed);
                let mut failure = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if failure.as_ref().is_none_or(|(lowest, _)| cluster < *lowest) {
                    *failure = Some((cluster, error));
                }
                return (first, worker);
            }
            let done = finished.fetch_add(cluster_ctas, Ordering::Relaxed) + cluster_ctas;
            if let Some(progress) = options.progress {
                progress(done);
            }
        }
    };
    let available = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = if options.threads == 0 { available } else { options.threads }.min(count.max(1) as usize);
    let mut workers = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut results = vec![work()];
        // A worker does not panic; if one did, its panic goes on here.
        results.extend(
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
        );
        results
    });
    if let Some((_, error)) = failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        return Err(error);
    }
    // Whoever ran the first cluster comes first: what is watched is shown as that one saw it.
    workers.sort_by_key(|&(first, _)| first);
    let workers = workers.into_iter().map(|(_, worker)| worker).collect();
    let mut report = collect(kernel, &program, workers, options.watch, count * cluster_ctas, total);
    report.races_complete &= job.global_races.as_ref().is_none_or(GlobalRaces::atomics_are_ordered);
    Ok(report)
}

/// The counters of all workers together.
fn collect(
    kernel: &Kernel,
    program: &Program,
    workers: Vec<Worker<'_>>,
    watch: &[usize],
    ctas_run: u64,
    ctas_total: u64,
) -> Report {
    let watched = watched(program, &workers, watch);
    // The last decoded instruction is the end of the code, which the kernel does not have.
    let instructions = program.ops.len() - 1;
    let mut ptx = vec![InstructionCounters::default(); instructions];
    let mut merged = ptx.clone();
    let mut touched: Option<crate::traffic::Touched> = None;
    let races_complete = workers.iter().all(|worker| !worker.races.forgot);
    for mut worker in workers {
        for (memory, shapes) in program.memory.iter().zip(worker.shapes) {
            let (ptx, merged) = shapes.totals();
            worker.ptx[memory.position] += ptx;
            worker.merged[memory.position] += merged;
        }
        for position in 0..instructions {
            let executions = worker.executions[position];
            let ran = InstructionCounters {
                executions,
                active_lanes: executions * WARP as u64 - worker.idle_lanes[position],
                ..InstructionCounters::default()
            };
            for (total, own) in [(&mut ptx, &worker.ptx), (&mut merged, &worker.merged)] {
                total[position] += own[position];
                total[position] += ran;
            }
        }
        match &mut touched {
            Some(touched) => touched.merge(worker.touched),
            None => touched = Some(worker.touched),
        }
    }
    let mut traffic = touched.map(|touched| touched.traffic()).unwrap_or_default();
    for (instruction, counted) in kernel.instructions().zip(&ptx) {
        match Access::of(instruction) {
            Some(Access::GlobalLoad | Access::Copy | Access::BulkLoad) => {
                traffic.requested_read += counted.sectors * SECTOR
            }
            Some(Access::GlobalStore | Access::GlobalAtomic | Access::BulkStore) => {
                traffic.requested_written += counted.sectors * SECTOR
            }
            _ => {}
        }
    }
    Report {
        ptx,
        merged,
        traffic,
        ctas_run,
        ctas_total,
        live_registers: program.live_registers,
        watched,
        races_complete,
    }
}

/// The addresses that the instructions at these positions accessed.
fn watched(program: &Program, workers: &[Worker<'_>], watch: &[usize]) -> Vec<Watched> {
    let watched = program.memory.iter().enumerate().filter(|(_, memory)| watch.contains(&memory.position));
    watched
        .map(|(index, memory)| {
            let mut shapes: Vec<Shape> = Vec::new();
            for seen in workers.iter().flat_map(|worker| worker.shapes[index].seen()) {
                match shapes.iter_mut().find(|shape| shape.is_like(&seen)) {
                    Some(shape) => shape.executions += seen.executions,
                    None => shapes.push(seen),
                }
            }
            let part = |access: &Merged| Part { offset: access.delta, bytes: access.bytes };
            let merged = memory.merged.iter().map(part).collect();
            Watched { position: memory.position, bytes: memory.lane_bytes(), merged, shapes }
        })
        .collect()
}

/// The arguments as they lie in parameter memory.
fn parameter_memory(launch: &Launch<'_>) -> Result<Vec<u8>, String> {
    let params = &launch.kernel.params;
    if params.len() != launch.arguments.len() {
        return Err(format!("{} arguments given; the kernel has {} parameters", launch.arguments.len(), params.len()));
    }
    let (offsets, size) = program::parameter_layout(launch.kernel);
    // The driver's limit (CUDA C++ Programming Guide, kernel parameters, since 12.1).
    const LARGEST: u64 = 32_764;
    if size > LARGEST {
        return Err(format!("parameters take {size} bytes; allowed are {LARGEST}"));
    }
    let mut memory = vec![0; size as usize];
    for (index, ((param, argument), offset)) in params.iter().zip(&launch.arguments).zip(offsets).enumerate() {
        let bytes = match argument.to_bytes() {
            Ok(bytes) => bytes,
            Err(map) => {
                map.validate().map_err(|error| format!("argument {index} (`{}`): {error}", param.name))?;
                map::encode(map).to_vec()
            }
        };
        if !argument.fits(param) {
            return Err(format!(
                "argument {index} (`{}`) has {} bytes; the parameter has {}",
                param.name,
                bytes.len(),
                param.bytes()
            ));
        }
        memory[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(memory)
}

/// Checks a launch's clusters against the grid, the kernel and the architecture (PTX ISA 11.8, CUDA C++ Programming Guide).
fn check_cluster(launch: &Launch<'_>, options: &Options<'_>) -> Result<(), String> {
    let (cluster, grid) = (launch.cluster, launch.grid);
    let ctas: u64 = cluster.iter().map(|&n| u64::from(n)).product();
    let allowed = options.sm.limits().max_cluster_blocks;
    if ctas == 0 || ctas > u64::from(allowed) {
        return Err(format!("cluster {cluster:?} has {ctas} CTAs; {} allows 1 to {allowed}", options.sm));
    }
    if (0..3).any(|axis| !grid[axis].is_multiple_of(cluster[axis])) {
        return Err(format!("grid {grid:?} is not a multiple of the cluster {cluster:?}"));
    }
    match launch.kernel.required_cluster.filter(|required| *required != cluster) {
        Some(required) => Err(format!("cluster is {cluster:?}; the kernel requires {required:?} (.reqnctapercluster)")),
        None => Ok(()),
    }
}

/// The place of a linear index, x fastest.
fn place(linear: u64, [x, y, _]: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(x), u64::from(y));
    [(linear % x) as u32, (linear / x % y) as u32, (linear / x / y) as u32]
}

impl Job<'_> {
    pub(crate) fn is_random(&self) -> bool {
        matches!(self.options.policy, Policy::Random(_))
    }

    /// Whether asynchronous work is done where it is issued.
    pub(crate) fn completes_now(&self) -> bool {
        self.options.policy == Policy::Eager
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.options.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    /// Where the policy's sequence starts for a cluster.
    pub(crate) fn seed(&self, cluster: u64) -> u64 {
        match self.options.policy {
            Policy::Random(seed) => seed ^ cluster.wrapping_mul(0xff51_afd7_ed55_8ccd),
            _ => 0,
        }
    }

    /// Warps of a CTA.
    pub(crate) fn warps(&self) -> usize {
        self.threads.div_ceil(WARP as u32) as usize
    }

    /// CTAs of a cluster.
    pub(crate) fn cluster_ctas(&self) -> usize {
        self.launch.cluster.iter().product::<u32>() as usize
    }

    /// The cluster, by linear index, of a CTA.
    fn cluster_of(&self, cta: u64) -> u64 {
        let cta = place(cta, self.launch.grid);
        let [x, y, _] = self.launch.clusters().map(u64::from);
        let [i, j, k] = std::array::from_fn(|axis| u64::from(cta[axis] / self.launch.cluster[axis]));
        i + x * (j + y * k)
    }

    /// The index of the CTA of a rank in a cluster.
    pub(crate) fn cta_index(&self, cluster: u64, rank: usize) -> [u32; 3] {
        let cluster = place(cluster, self.launch.clusters());
        let inside = place(rank as u64, self.launch.cluster);
        std::array::from_fn(|axis| cluster[axis] * self.launch.cluster[axis] + inside[axis])
    }

    /// The instruction as text and its source place; the end of the code for a position past the last.
    pub(crate) fn source(&self, position: usize) -> (String, Option<(String, u32)>) {
        let kernel = self.launch.kernel;
        match kernel.instructions().nth(position) {
            Some(instruction) => (kernel.instruction_text(instruction), program::place(kernel, instruction)),
            None => ("the end of the kernel".into(), None),
        }
    }

    /// One line about an instruction, for messages.
    pub(crate) fn instruction(&self, position: usize) -> String {
        match self.source(position) {
            (text, Some((file, line))) => format!("`{text}` ({file}:{line})"),
            (text, None) => format!("`{text}`"),
        }
    }

    /// Puts a warp at the start of the kernel with its constants and special registers.
    pub(crate) fn start_warp(&self, program: &Program, warp: &mut Warp, cta: [u32; 3], rank: u32) {
        let first = warp.index as u32 * WARP as u32;
        let threads = (self.threads - first).min(WARP as u32);
        warp.reset(u32::MAX >> (WARP as u32 - threads));
        warp.wgmma.reset(program.watched_names.len());
        warp.predicates[program::TRUE as usize] = u32::MAX;
        warp.predicates[program::FALSE as usize] = 0;
        for &(place, width, value) in &program.constants {
            match width {
                Width::Wide => warp.wide[place as usize].0 = [value; WARP],
                _ => warp.narrow[place as usize].0 = [value as u32; WARP],
            }
        }
        for &(place, width, special) in &program.specials {
            let values: [u64; WARP] = std::array::from_fn(|lane| self.special(special, first + lane as u32, cta, rank));
            match width {
                Width::Wide => warp.wide[place as usize].0 = values,
                _ => warp.narrow[place as usize].0 = values.map(|value| value as u32),
            }
        }
    }

    fn special(&self, special: Special, thread: u32, cta: [u32; 3], rank: u32) -> u64 {
        use Special::*;
        let [x, y, z] = self.launch.block;
        let (grid, cluster) = (self.launch.grid, self.launch.cluster);
        let lane = thread % WARP as u32;
        let value = match special {
            TidX => thread % x,
            TidY => thread / x % y,
            TidZ => thread / x / y,
            NtidX => x,
            NtidY => y,
            NtidZ => z,
            CtaidX => cta[0],
            CtaidY => cta[1],
            CtaidZ => cta[2],
            NctaidX => grid[0],
            NctaidY => grid[1],
            NctaidZ => grid[2],
            // Without clusters each CTA is a cluster of its own.
            ClusteridX => cta[0] / cluster[0],
            ClusteridY => cta[1] / cluster[1],
            ClusteridZ => cta[2] / cluster[2],
            NclusteridX => grid[0] / cluster[0],
            NclusteridY => grid[1] / cluster[1],
            NclusteridZ => grid[2] / cluster[2],
            ClusterCtaidX => cta[0] % cluster[0],
            ClusterCtaidY => cta[1] % cluster[1],
            ClusterCtaidZ => cta[2] % cluster[2],
            ClusterNctaidX => cluster[0],
            ClusterNctaidY => cluster[1],
            ClusterNctaidZ => cluster[2],
            ClusterCtarank => rank,
            ClusterNctarank => cluster.iter().product(),
            Nsmid => 1,
            Smid => 0,
            Laneid => lane,
            Warpid => thread / WARP as u32,
            Nwarpid => self.threads.div_ceil(WARP as u32),
            LanemaskEq => 1 << lane,
            LanemaskLt => (1 << lane) - 1,
            LanemaskLe => u32::MAX >> (31 - lane),
            LanemaskGt => !(u32::MAX >> (31 - lane)),
            LanemaskGe => !((1 << lane) - 1),
            DynamicSmemSize => self.launch.dynamic_shared,
            TotalSmemSize | AggrSmemSize => self.shared_bytes as u32,
            // Read where they are (`SmallOp::Clock`).
            Clock | ClockHi | Clock64 | Globaltimer | GlobaltimerLo | GlobaltimerHi => 0,
            Gridid | CurrentGraphExec | IsExplicitCluster => 0,
            ReservedSmemOffsetBegin | ReservedSmemOffsetEnd | ReservedSmemOffsetCap => 0,
        };
        u64::from(value)
    }
}
