//! A warp's state: registers, and which lanes stand where.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::copy::BulkGroups;
use crate::lanes::{ALL, Lanes, WARP, Wide};
use crate::program::Program;
use crate::race::Clock;
use crate::tensor::WgmmaState;

/// Lanes that wait at one position while others run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub pc: usize,
    pub mask: u32,
    /// Waiting for other lanes to arrive at the same position.
    pub parked: bool,
}

/// Whether a warp can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a barrier, by its id.
    Waiting(u32),
    Parked(Wait),
    /// At a `wgmma`, for the other warps of the warpgroup.
    Gathering,
    Done,
}

/// What a parked warp waits for; it then executes its instruction again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The mbarrier at an address of shared memory has completed this phase.
    Phase { address: u32, phase: u64 },
    /// The cluster's barrier has completed this often.
    Cluster { generation: u64 },
}

/// One `cp.async` that has not completed.
#[derive(Clone, Debug)]
pub(crate) struct PendingCopy {
    pub to: usize,
    pub bytes: Vec<u8>,
    pub lane: u8,
    pub position: usize,
}

/// A warp: registers of every lane and where the lanes stand.
///
/// Diverged lanes form groups; of those in the function most calls deep the one at the lowest position runs, so that groups meet
/// again where control flow joins.
#[derive(Debug)]
pub(crate) struct Warp {
    pub index: usize,
    /// As [`Program::depths`].
    depths: Arc<[(usize, u32)]>,
    pub narrow: Vec<Lanes>,
    pub wide: Vec<Wide>,
    pub predicates: Vec<u32>,
    pub pc: usize,
    pub active: u32,
    /// Lanes that have not exited.
    pub live: u32,
    /// The groups that do not run now.
    pub groups: Vec<Group>,
    /// The nearest position ahead where a group waits.
    pub meet: usize,
    /// Jumps back since the running group was chosen, while others wait.
    pub turns: u32,
    pub state: State,
    /// Copies by group, the oldest first; the last is the one being filled.
    pub copies: Vec<Vec<PendingCopy>>,
    /// Bulk copies by the lane that issued them.
    pub bulk: BTreeMap<u32, BulkGroups>,
    /// What a relaxed operation releases: what was before the last fence. And what relaxed operations have read, for the next.
    pub fenced: Clock,
    pub observed: Clock,
    /// Waits that found their phase not complete, one after the other.
    pub failed_waits: u32,
    /// Whether the next wait that fails says so instead of parking the warp.
    pub timed_out: bool,
    /// The phase of the cluster barrier it has arrived at and not waited for.
    pub cluster_arrived: Option<u64>,
    pub wgmma: WgmmaState,
}

/// Jumps back after which another group gets its turn: lanes may wait in a loop for what others will do.
const TURNS: u32 = 1 << 12;

impl Warp {
    pub(crate) fn new(index: usize, program: &Program) -> Self {
        Self {
            index,
            depths: Arc::clone(&program.depths),
            narrow: vec![Lanes::ZERO; program.narrow as usize],
            wide: vec![Wide([0; WARP]); program.wide as usize],
            predicates: vec![0; program.predicates as usize],
            pc: 0,
            active: ALL,
            live: ALL,
            groups: Vec::new(),
            meet: usize::MAX,
            turns: 0,
            state: State::Ready,
            copies: vec![Vec::new()],
            bulk: BTreeMap::new(),
            fenced: Clock::default(),
            observed: Clock::default(),
            failed_waits: 0,
            timed_out: false,
            cluster_arrived: None,
            wgmma: WgmmaState::default(),
        }
    }

    /// Starts over with the lanes of `mask`, all registers zero.
    pub(crate) fn reset(&mut self, mask: u32) {
        self.narrow.fill(Lanes::ZERO);
        self.wide.fill(Wide([0; WARP]));
        self.predicates.fill(0);
        self.pc = 0;
        self.active = mask;
        self.live = mask;
        self.groups.clear();
        self.meet = usize::MAX;
        self.turns = 0;
        self.state = State::Ready;
        self.copies.clear();
        self.copies.push(Vec::new());
        self.bulk.clear();
        self.fenced.clear();
        self.observed.clear();
        self.failed_waits = 0;
        self.timed_out = false;
        self.cluster_arrived = None;
    }

    /// The running lanes wait in a loop: lanes that stand elsewhere go on, if there are any that have not waited too.
    #[cold]
    pub(crate) fn rotate(&mut self) -> bool {
        let ready = self.groups.iter().filter(|group| !group.parked).count() as u32;
        self.failed_waits += 1;
        if self.failed_waits > ready {
            return false;
        }
        let (pc, active) = (self.pc, self.active);
        // The others first: this group is put back only then.
        if !self.choose() {
            return false;
        }
        self.suspend(pc, active, false);
        self.look_ahead();
        true
    }

    /// Sends the lanes of `taken` to `target`, the other active ones to the next position.
    #[inline]
    pub(crate) fn branch(&mut self, taken: u32, target: usize) {
        let next = self.pc + 1;
        if taken == self.active && self.groups.is_empty() {
            self.pc = target;
            return;
        }
        self.diverge(taken, target, next);
    }

    /// Sends each lane of `taken` to a target of its own, the other active ones to the next position.
    #[cold]
    pub(crate) fn scatter(&mut self, taken: u32, target: impl Fn(usize) -> usize) {
        let (pc, rest) = (self.pc, self.active & !taken);
        for lane in crate::pattern::lanes_of(taken) {
            let to = target(lane);
            self.turns += u32::from(to <= pc && taken.trailing_zeros() as usize == lane);
            self.suspend(to, 1 << lane, false);
        }
        if rest != 0 {
            self.suspend(pc + 1, rest, false);
        }
        self.choose();
    }

    #[cold]
    fn diverge(&mut self, taken: u32, target: usize, next: usize) {
        let rest = self.active & !taken;
        if target <= self.pc && taken != 0 {
            self.turns += 1;
        }
        for (pc, mask) in [(target, taken), (next, rest)] {
            if mask != 0 {
                self.suspend(pc, mask, false);
            }
        }
        self.choose();
    }

    /// Adds lanes to the group at a position.
    fn suspend(&mut self, pc: usize, mask: u32, parked: bool) {
        match self.groups.iter_mut().find(|group| group.pc == pc) {
            Some(group) => {
                group.mask |= mask;
                group.parked &= parked;
            }
            None => self.groups.push(Group { pc, mask, parked }),
        }
    }

    /// Takes the next group to run; false when every group is parked, or there is none.
    fn choose(&mut self) -> bool {
        let ready = self.groups.iter().enumerate().filter(|(_, group)| !group.parked);
        let chosen = if self.turns > TURNS {
            // The first had its turns: the last goes on until its next jump.
            ready.max_by_key(|(_, group)| self.turn(group.pc))
        } else {
            ready.min_by_key(|(_, group)| self.turn(group.pc))
        };
        let Some((index, group)) = chosen.map(|(index, group)| (index, *group)) else { return false };
        if self.turns > TURNS {
            self.turns = 0;
        }
        self.groups.swap_remove(index);
        (self.pc, self.active) = (group.pc, group.mask);
        self.look_ahead();
        true
    }

    /// Groups run in the order of this: those in functions before those that wait for them to come back.
    fn turn(&self, pc: usize) -> (Reverse<u32>, usize) {
        let behind = self.depths.partition_point(|&(start, _)| start <= pc);
        (Reverse(behind.checked_sub(1).map_or(0, |index| self.depths[index].1)), pc)
    }

    fn look_ahead(&mut self) {
        self.meet = self.groups.iter().map(|group| group.pc).filter(|&pc| pc >= self.pc).min().unwrap_or(usize::MAX);
    }

    /// The running group has reached [`Warp::meet`]: the lanes that wait there go on with it.
    #[cold]
    pub(crate) fn join(&mut self) {
        if let Some(index) = self.groups.iter().position(|group| group.pc == self.pc) {
            self.active |= self.groups.swap_remove(index).mask;
        }
        self.look_ahead();
    }

    /// The running lanes cannot go on before others arrive here; false when no others can run.
    #[cold]
    pub(crate) fn park(&mut self) -> bool {
        self.suspend(self.pc, self.active, true);
        self.choose()
    }

    /// The lanes of a mask have ended; false when no lane is left to run.
    #[cold]
    pub(crate) fn exit(&mut self, mask: u32) -> bool {
        self.live &= !mask;
        self.active &= !mask;
        if self.active != 0 {
            self.pc += 1;
            return true;
        }
        // Lanes that were waited for may have gone: those that wait look again.
        for group in &mut self.groups {
            group.parked = false;
        }
        self.choose()
    }
}
