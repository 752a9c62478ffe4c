//! A CTA's memory, barriers and checks, and the schedule of its warps. A cluster's CTAs take turns.

use std::collections::{BTreeMap, HashMap};

use crate::cluster::{Away, ClusterBarrier};
use crate::copy::Copies;
use crate::fault::{Fault, FaultKind, RunError};
use crate::global_race::ClusterRaces;
use crate::lane_race::LaneRaces;
use crate::mbarrier::Mbarrier;
use crate::pattern::Shapes;
use crate::program::Program;
use crate::proxy::Proxy;
use crate::race::{Access, Clock, Expand, Race, Races, Read, Stamp, Waits};
use crate::report::InstructionCounters;
use crate::run::Job;
use crate::small::RegisterRequest;
use crate::stale::StaleCopies;
use crate::tensor::Flights;
use crate::traffic::Touched;
use crate::warp::{PendingCopy, State, Wait, Warp};

/// What goes wrong inside a CTA; where is added by [`Worker::fault`].
pub(crate) type Fail = Box<(FaultKind, usize, usize, u32)>;

/// What shared reads were, for the race check.
pub(crate) struct Shared<'a> {
    pub program: &'a Program,
    pub shapes: &'a [Shapes],
}

impl Expand for Shared<'_> {
    fn expand(&self, read: Read) -> (usize, &[(i64, u64)]) {
        let pattern = &self.shapes[read.memory as usize].patterns[read.shape as usize];
        (self.program.memory[read.memory as usize].position, &pattern.words)
    }
}

/// Named barriers of a CTA (PTX ISA 9.7.13.1).
pub(crate) const BARRIERS: u32 = 16;

/// One named barrier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Barrier {
    arrived: u32,
    /// Threads that complete it, once somebody has said.
    expected: Option<u32>,
    /// Warps that wait.
    waiting: u64,
    /// `bar.red`: threads whose predicate holds.
    votes: u32,
    /// What those released that arrived and do not wait.
    released: Clock,
    /// What whoever arrives must know, or it may have done so a round before if it was faster: that the last round has ended.
    last: Clock,
}

/// Why a warp stopped running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It may go on.
    Pause,
    /// It arrived at a barrier.
    Barrier(Arrival),
    /// It arrived at a `wgmma`.
    Warpgroup,
    Done,
}

/// A tensor map that a warp wrote: the instruction, when, and the fences after it.
#[derive(Clone, Debug)]
pub(crate) struct WrittenMap {
    pub position: usize,
    pub then: Stamp,
    pub fences: Vec<Stamp>,
}

/// A warp's arrival at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub id: u32,
    pub threads: Option<u32>,
    /// Whether the warp waits there.
    pub waits: bool,
    pub votes: u32,
}

/// What one worker thread needs to run CTAs, one after the other.
pub(crate) struct Worker<'a> {
    pub job: &'a Job<'a>,
    pub program: &'a Program,
    /// By memory instruction.
    pub shapes: Vec<Shapes>,
    /// By instruction: executions, and lanes that were not active in them.
    pub executions: Vec<u64>,
    pub idle_lanes: Vec<u64>,
    pub ptx: Vec<InstructionCounters>,
    pub merged: Vec<InstructionCounters>,
    pub touched: Touched,
    pub shared: Vec<u8>,
    /// One bit per byte of shared memory that something wrote.
    pub written: Vec<u64>,
    /// What a store is about to overwrite, by 64-byte word.
    pub before: Vec<[u8; 64]>,
    /// Changes whenever bits of `written` are taken back: reads that were found fine may not be any more.
    pub written_since: u64,
    pub local: Vec<u8>,
    pub races: Races,
    /// Where races between lanes are looked for.
    pub lane_races: Option<LaneRaces>,
    /// Where what copies leave of earlier ones is looked for.
    pub stale: Option<StaleCopies>,
    pub flights: Flights,
    pub random: u64,
    pub barriers: Vec<Barrier>,
    pub warps: Vec<Warp>,
    pub cta: [u32; 3],
    /// By address in shared memory.
    pub mbarriers: BTreeMap<u32, Mbarrier>,
    /// `cp.async` in flight: the instruction, by the 4-byte word it will write. Kept where copies do not complete at once.
    pub unwaited: HashMap<u32, u32>,
    pub proxy: Proxy,
    /// The rank in its cluster of the CTA that runs, the others by rank (nothing of the one that runs), and what they share.
    pub rank: usize,
    pub peers: Vec<Away>,
    pub cluster_barrier: ClusterBarrier,
    pub copies: Copies,
    /// Tensor maps in global memory that the cluster wrote, by address.
    pub maps: HashMap<u64, WrittenMap>,
    /// The linear index of the cluster that runs.
    pub cluster: u32,
    /// Where races on global memory are looked for.
    pub cluster_races: ClusterRaces,
    /// What atomics on shared memory have released, by rank and address.
    pub flags: HashMap<(usize, u32), Clock>,
    /// Counts what may let somebody go on who waits.
    pub progress: u64,
    /// The warp instructions that the cluster will have executed when the running warp's fuel is spent.
    pub clock: u64,
    /// By warpgroup.
    pub register_requests: Vec<RegisterRequest>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(job: &'a Job<'a>, program: &'a Program) -> Self {
        let warps = job.threads.div_ceil(32) as usize;
        Self {
            job,
            program,
            shapes: program.memory.iter().map(|_| Shapes::default()).collect(),
            executions: vec![0; program.ops.len()],
            idle_lanes: vec![0; program.ops.len()],
            ptx: vec![InstructionCounters::default(); program.ops.len()],
            merged: vec![InstructionCounters::default(); program.ops.len()],
            touched: Touched::new(job.memory),
            shared: vec![0; job.shared_bytes],
            written: vec![0; job.shared_bytes.div_ceil(64)],
            before: Vec::new(),
            written_since: 0,
            local: vec![0; program.local_bytes as usize * 32 * warps],
            races: Races::default(),
            lane_races: job.options.lane_races.then(LaneRaces::default),
            stale: job.options.stale_copies.then(StaleCopies::default),
            flights: Flights::default(),
            random: 0,
            barriers: vec![Barrier::default(); BARRIERS as usize],
            warps: (0..warps).map(|index| Warp::new(index, program)).collect(),
            cta: [0; 3],
            mbarriers: BTreeMap::new(),
            unwaited: HashMap::new(),
            proxy: Proxy::default(),
            rank: 0,
            peers: (0..job.cluster_ctas()).map(|rank| Away::new(job, program, rank)).collect(),
            cluster_barrier: ClusterBarrier::default(),
            copies: Copies::default(),
            maps: HashMap::new(),
            cluster: 0,
            cluster_races: ClusterRaces::default(),
            flags: HashMap::new(),
            progress: 0,
            clock: 0,
            register_requests: Vec::new(),
        }
    }

    /// Runs one cluster, which is mostly one CTA, to its end.
    pub(crate) fn run_cluster(&mut self, cluster: u64) -> Result<(), RunError> {
        self.races.reset(self.peers.len(), self.warps.len(), self.job.shared_bytes);
        if let Some(races) = &mut self.lane_races {
            races.reset(self.peers.len() * self.job.warps());
        }
        if let Some(stale) = &mut self.stale {
            stale.reset();
        }
        self.cluster_barrier = ClusterBarrier::default();
        self.copies.clear();
        self.maps.clear();
        self.flags.clear();
        self.cluster_races.clear();
        self.cluster = cluster as u32;
        self.progress = 0;
        self.random = self.job.seed(cluster);
        for rank in (0..self.peers.len()).rev() {
            self.enter(rank);
            self.peers[rank].ended = false;
            self.cta = self.job.cta_index(cluster, rank);
            self.shared.fill(0);
            self.written.fill(0);
            self.written_since += 1;
            self.barriers.fill(Barrier::default());
            self.mbarriers.clear();
            self.unwaited.clear();
            self.proxy.reset(self.warps.len(), self.program.uses_async_proxy);
            self.flights.reset(self.job.shared_bytes);
            self.register_requests.clear();
            let mut warps = std::mem::take(&mut self.warps);
            for warp in &mut warps {
                self.job.start_warp(self.program, warp, self.cta, rank as u32);
            }
            self.warps = warps;
        }
        let outcome = self.schedule();
        self.touched.end_cta();
        outcome
    }

    /// Runs until every warp of the cluster has ended.
    fn schedule(&mut self) -> Result<(), RunError> {
        let mut spent = 0;
        let mut order: Vec<usize> = (0..self.warps.len()).collect();
        let mut ranks: Vec<usize> = (0..self.peers.len()).collect();
        let mut stalled = Stalled::default();
        loop {
            let (mut ran, mut done) = (false, true);
            self.shuffle(&mut ranks);
            for &rank in &ranks {
                self.enter(rank);
                self.shuffle(&mut order);
                let mut warps = std::mem::take(&mut self.warps);
                let outcome = self.turn(&mut warps, &order, &mut spent);
                done &= warps.iter().all(|warp| warp.state == State::Done);
                self.warps = warps;
                ran |= outcome?;
            }
            if done {
                return Ok(());
            }
            if self.job.is_random() {
                self.complete_some_copies().map_err(|fail| self.fault(*fail))?;
            }
            if !ran && !self.unblock(&mut stalled).map_err(|fail| self.fault(*fail))? {
                return Err(self.deadlock());
            }
        }
    }

    /// Puts a list in an order drawn from the policy's sequence.
    fn shuffle(&mut self, list: &mut [usize]) {
        if self.job.is_random() {
            for index in (1..list.len()).rev() {
                list.swap(index, (self.draw() % (index as u64 + 1)) as usize);
            }
        }
    }

    /// Gives each warp of the running CTA that can run its turn; false when none can.
    fn turn(&mut self, warps: &mut [Warp], order: &[usize], spent: &mut u64) -> Result<bool, RunError> {
        let budget = self.job.options.budget_per_cta.saturating_mul(self.peers.len() as u64);
        let mut ran = false;
        for &index in order {
            if let State::Parked(wait) = warps[index].state
                && self.is_over(wait)
            {
                warps[index].state = State::Ready;
            }
            if warps[index].state != State::Ready {
                continue;
            }
            ran = true;
            let mut fuel = if self.job.is_random() { 1 + self.draw() % 64 } else { QUANTUM };
            fuel = fuel.min(budget.saturating_sub(*spent)).max(1);
            let given = fuel;
            self.clock = *spent + fuel;
            let stop = self.job.level.run(self, &mut warps[index], &mut fuel).map_err(|fail| self.fault(*fail))?;
            *spent += given - fuel;
            match stop {
                Stop::Pause => {}
                Stop::Done => self.end_warp(warps, index).map_err(|fail| self.fault(*fail))?,
                Stop::Warpgroup => self.gather(warps, index).map_err(|fail| self.fault(*fail))?,
                Stop::Barrier(arrival) => self.arrive(warps, index, arrival).map_err(|fail| self.fault(*fail))?,
            }
            if *spent >= budget {
                let pc = warps[index].pc;
                let budget = self.job.options.budget_per_cta;
                return Err(self.fault((FaultKind::Budget { budget }, pc, index, 0)));
            }
            if self.job.is_cancelled() {
                return Err(RunError::Cancelled);
            }
        }
        Ok(ran)
    }

    /// A warp has ended: nobody waits for it any more.
    fn end_warp(&mut self, warps: &mut [Warp], index: usize) -> Result<(), Fail> {
        warps[index].state = State::Done;
        self.progress += 1;
        self.finish_copies(&mut warps[index], 0, true);
        self.cluster_barrier_end(&warps[index]);
        self.end_warp_copies(&warps[index])?;
        self.fold_writes(index);
        let shared = Shared { program: self.program, shapes: &self.shapes };
        self.races.end(index, &shared).map_err(|race| self.race_failure(race))?;
        for id in 0..BARRIERS {
            // Who is let go so does not learn what the warp did.
            self.complete(warps, id)?;
        }
        if warps.iter().all(|warp| warp.state == State::Done) {
            self.end_register_requests()?;
            self.end_cta(&warps[index])?;
        }
        Ok(())
    }

    /// The next number of the policy's sequence (splitmix64, Steele, Lea and Flood 2014).
    pub(crate) fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn arrive(&mut self, warps: &mut [Warp], index: usize, arrival: Arrival) -> Result<(), Fail> {
        let pc = warps[index].pc;
        let fail = |kind| Box::new((kind, pc, index, warps[index].active.trailing_zeros() & 31));
        let Arrival { id, threads, waits, votes } = arrival;
        if id >= BARRIERS {
            return Err(fail(FaultKind::BarrierId { id }));
        }
        let released = if waits { Clock::default() } else { self.release(index)? };
        if !waits {
            self.lanes_meet(index);
        }
        let barrier = &mut self.barriers[id as usize];
        if let Some(threads) = threads {
            let limit = 32 * warps.len() as u32;
            if threads == 0 || threads % 32 != 0 || threads > limit {
                return Err(fail(FaultKind::BarrierCount { id, found: threads, expected: limit }));
            }
            match barrier.expected {
                Some(expected) if expected != threads => {
                    return Err(fail(FaultKind::BarrierCount { id, found: threads, expected }));
                }
                _ => barrier.expected = Some(threads),
            }
        }
        self.progress += 1;
        self.races.forgot |= !self.races.open[index].knows(&barrier.last);
        barrier.arrived += 32;
        barrier.votes += votes;
        barrier.released.join(&released);
        if waits {
            barrier.waiting |= 1 << index;
            warps[index].state = State::Waiting(id);
            self.wait(index, Waits::Barrier)?;
        } else {
            warps[index].pc += 1;
        }
        self.complete(warps, id)
    }

    /// Lets the waiting warps go if enough threads have arrived.
    fn complete(&mut self, warps: &mut [Warp], id: u32) -> Result<(), Fail> {
        let live = 32 * warps.iter().filter(|warp| warp.state != State::Done).count() as u32;
        let barrier = &mut self.barriers[id as usize];
        let expected = barrier.expected.unwrap_or(live);
        if barrier.arrived == 0 || barrier.arrived < expected {
            return Ok(());
        }
        let done = std::mem::take(barrier);
        for warp in crate::pattern::bits_of(done.waiting) {
            self.lanes_meet(warp);
        }
        let shared = Shared { program: self.program, shapes: &self.shapes };
        let known = self.races.barrier(done.waiting, &done.released, &shared);
        self.barriers[id as usize].last = known.map_err(|race| self.race_failure(race))?;
        for warp in warps.iter_mut().filter(|warp| done.waiting >> warp.index & 1 == 1) {
            warp.state = State::Ready;
            self.let_go(warp, done.votes, done.arrived);
        }
        Ok(())
    }

    /// A barrier has completed: its instruction gets its result and the warp goes on behind it.
    fn let_go(&mut self, warp: &mut Warp, votes: u32, arrived: u32) {
        use ptx::Modifier;
        let op = self.program.ops[warp.pc];
        if let Some((mode, _)) = self.program.barriers[op.aux as usize].reduce {
            let threads = arrived.min(self.job.threads);
            match mode {
                Modifier::Popc => {
                    for lane in crate::pattern::lanes_of(warp.active) {
                        warp.narrow[op.d as usize].0[lane] = votes;
                    }
                }
                mode => {
                    let holds = if mode == Modifier::And { votes == threads } else { votes > 0 };
                    let predicate = &mut warp.predicates[op.d as usize];
                    *predicate = *predicate & !warp.active | if holds { warp.active } else { 0 };
                }
            }
        }
        warp.pc += 1;
    }

    /// Completes a warp's copy groups until at most `remaining` are in flight; also the one being filled if `open`.
    pub(crate) fn finish_copies(&mut self, warp: &mut Warp, remaining: usize, open: bool) {
        while warp.copies.len() > remaining + 1 {
            let group = warp.copies.remove(0);
            group.iter().for_each(|copy| self.deliver(warp.index, copy));
        }
        if open && let Some(group) = warp.copies.last_mut() {
            let group = std::mem::take(group);
            group.iter().for_each(|copy| self.deliver(warp.index, copy));
        }
    }

    /// Puts the bytes of a copy in place.
    pub(crate) fn deliver(&mut self, warp: usize, copy: &PendingCopy) {
        let place = &mut self.shared[copy.to..copy.to + copy.bytes.len()];
        let (word, bits) = word_bits(copy.to, copy.bytes.len());
        let repeats = self.written[word] & bits == bits && *place == *copy.bytes;
        place.copy_from_slice(&copy.bytes);
        self.written[word] |= bits;
        let access = if repeats { Access::Repeat } else { Access::Write };
        self.races.note_at(warp, self.rank, (word, bits), access, copy.position);
        if self.lane_races.is_some() {
            self.note_copied(warp, copy);
        }
        if !self.unwaited.is_empty() {
            for at in (copy.to..copy.to + copy.bytes.len()).step_by(4) {
                self.unwaited.remove(&(at as u32));
            }
        }
    }

    pub(crate) fn race_failure(&self, race: Race) -> Fail {
        let (earlier, later) = race.positions;
        let position = later.or(earlier).unwrap_or(self.program.ops.len() - 1);
        let other = match later.and(earlier) {
            Some(position) => self.job.instruction(position),
            None => "not known: too many accesses to remember".into(),
        };
        let (first, second) = (self.agent(race.agents.0), self.agent(race.agents.1));
        let warp = if race.agents.1 < self.peers.len() * self.job.warps() {
            race.agents.1 % self.job.warps()
        } else {
            race.agents.0 % self.job.warps()
        };
        Box::new((FaultKind::Race { address: race.address, first, second, other }, position, warp, 0))
    }

    /// Who an agent of the race check is, for messages.
    pub(crate) fn agent(&self, agent: usize) -> String {
        let warps = self.job.warps();
        let (rank, warp) = (agent / warps, agent % warps);
        match (rank < self.peers.len(), self.peers.len()) {
            (false, _) => "an asynchronous copy".into(),
            (true, 1) => format!("warp {warp}"),
            (true, _) => format!("warp {warp} of CTA {rank} of the cluster"),
        }
    }

    fn deadlock(&mut self) -> RunError {
        let mut stuck = Vec::new();
        let mut first = None;
        for rank in 0..self.peers.len() {
            self.enter(rank);
            if let Some(warp) = self.warps.iter().find(|warp| warp.state == State::Gathering) {
                return self.fault(*self.incomplete(&self.warps, warp.index));
            }
            for warp in self.warps.iter().filter(|warp| warp.state != State::Done) {
                let why = match warp.state {
                    State::Waiting(id) => {
                        let barrier = &self.barriers[id as usize];
                        let expected = barrier.expected.map_or("all".into(), |threads| threads.to_string());
                        format!("waits at barrier {id} ({} of {expected} threads arrived)", barrier.arrived)
                    }
                    State::Parked(Wait::Phase { address, .. }) => match self.mbarriers.get(&address) {
                        Some(mbarrier) => format!("waits for the mbarrier at {address:#x} ({mbarrier})"),
                        None => format!("waits for an mbarrier at {address:#x} that is gone"),
                    },
                    State::Parked(Wait::Cluster { .. }) => {
                        format!(
                            "waits at the cluster barrier ({})",
                            self.cluster_barrier.describe(self.peers.len() * self.job.warps())
                        )
                    }
                    _ => "cannot run".into(),
                };
                let who = self.agent(rank * self.job.warps() + warp.index);
                stuck.push(format!("{who} {why} at {}", self.job.instruction(warp.pc)));
                first = first.or(Some((rank, warp.pc, warp.index)));
            }
        }
        let (rank, pc, warp) = first.unwrap_or_default();
        self.enter(rank);
        self.fault((FaultKind::Deadlock { positions: stuck.join("; ") }, pc, warp, 0))
    }

    /// A failure with everything a reader wants to know about where it happened.
    pub(crate) fn fault(&self, (kind, position, warp, lane): (FaultKind, usize, usize, u32)) -> RunError {
        let (instruction, place) = self.job.source(position);
        RunError::Fault(Box::new(Fault {
            kind,
            position,
            instruction,
            place,
            cta: self.cta,
            thread: warp as u32 * 32 + lane,
        }))
    }
}

/// What was tried when nothing could run.
#[derive(Default)]
pub(crate) struct Stalled {
    /// [`Worker::progress`] at the last time waits were told that their time is up, and how often since it last changed.
    pub progress: u64,
    pub times: u32,
}

/// Warp instructions a warp runs before others get their turn.
const QUANTUM: u64 = 1 << 18;

/// Bytes as bits of the 64-bit word they lie in; they lie in one.
pub(crate) fn word_bits(start: usize, bytes: usize) -> (usize, u64) {
    (start / 64, (u64::MAX >> (64 - bytes)) << (start % 64))
}
