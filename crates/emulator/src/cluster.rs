//! Clusters: CTAs that run together and reach each other's shared memory (PTX ISA 4.2.2, 5.1.7, 9.7.13.4).

use std::collections::{BTreeMap, HashMap};

use crate::cta::{Barrier, Fail, Worker};
use crate::fault::FaultKind;
use crate::mbarrier::Mbarrier;
use crate::program::Program;
use crate::proxy::Proxy;
use crate::race::Clock;
use crate::run::Job;
use crate::small::RegisterRequest;
use crate::tensor::Flights;
use crate::warp::{Wait, Warp};

/// The bit of a `shared::cluster` address above which the CTA's rank plus one stands; zero there is the CTA's own memory.
pub(crate) const RANK_SHIFT: u32 = 24;

/// What a CTA keeps while another of its cluster runs.
#[derive(Default)]
pub(crate) struct Away {
    shared: Vec<u8>,
    written: Vec<u64>,
    local: Vec<u8>,
    barriers: Vec<Barrier>,
    pub warps: Vec<Warp>,
    cta: [u32; 3],
    pub mbarriers: BTreeMap<u32, Mbarrier>,
    unwaited: HashMap<u32, u32>,
    proxy: Proxy,
    flights: Flights,
    register_requests: Vec<RegisterRequest>,
    /// All its warps have ended. Kept for the running CTA too.
    pub ended: bool,
}

impl Away {
    /// Of a CTA that is not the first; the first's is with the worker.
    pub(crate) fn new(job: &Job<'_>, program: &Program, rank: usize) -> Self {
        if rank == 0 {
            return Self::default();
        }
        Self {
            shared: vec![0; job.shared_bytes],
            written: vec![0; job.shared_bytes.div_ceil(64)],
            local: vec![0; program.local_bytes as usize * 32 * job.warps()],
            barriers: vec![Barrier::default(); crate::cta::BARRIERS as usize],
            warps: (0..job.warps()).map(|index| Warp::new(index, program)).collect(),
            ..Self::default()
        }
    }
}

/// The barrier of a cluster's threads.
#[derive(Debug, Default)]
pub(crate) struct ClusterBarrier {
    /// How often it has completed.
    pub generation: u64,
    /// Warps that have arrived, and that have ended without having arrived.
    arrived: usize,
    ended: usize,
    arriving: Clock,
    done: Clock,
}

impl ClusterBarrier {
    pub(crate) fn describe(&self, warps: usize) -> String {
        format!("{} of {} warps arrived", self.arrived, warps - self.ended)
    }
}

impl Worker<'_> {
    /// Lets another CTA of the cluster run.
    pub(crate) fn enter(&mut self, rank: usize) {
        if rank == self.rank {
            return;
        }
        self.swap(self.rank);
        self.swap(rank);
        self.rank = rank;
        self.races.enter(rank);
        // What was found written was so in another CTA's memory.
        self.written_since += 1;
    }

    fn swap(&mut self, rank: usize) {
        let away = &mut self.peers[rank];
        std::mem::swap(&mut self.shared, &mut away.shared);
        std::mem::swap(&mut self.written, &mut away.written);
        std::mem::swap(&mut self.local, &mut away.local);
        std::mem::swap(&mut self.barriers, &mut away.barriers);
        std::mem::swap(&mut self.warps, &mut away.warps);
        std::mem::swap(&mut self.cta, &mut away.cta);
        std::mem::swap(&mut self.mbarriers, &mut away.mbarriers);
        std::mem::swap(&mut self.unwaited, &mut away.unwaited);
        std::mem::swap(&mut self.proxy, &mut away.proxy);
        std::mem::swap(&mut self.flights, &mut away.flights);
        std::mem::swap(&mut self.register_requests, &mut away.register_requests);
    }

    /// A CTA's shared memory, and which bytes of it are written.
    pub(crate) fn memory_of(&mut self, rank: usize) -> (&mut Vec<u8>, &mut Vec<u64>) {
        if rank == self.rank {
            (&mut self.shared, &mut self.written)
        } else {
            let peer = &mut self.peers[rank];
            (&mut peer.shared, &mut peer.written)
        }
    }

    /// The products that read a CTA's shared memory.
    pub(crate) fn flights_of(&self, rank: usize) -> &Flights {
        if rank == self.rank { &self.flights } else { &self.peers[rank].flights }
    }

    /// The proxy state of a CTA's shared memory.
    pub(crate) fn proxy_of(&mut self, rank: usize) -> &mut Proxy {
        if rank == self.rank { &mut self.proxy } else { &mut self.peers[rank].proxy }
    }

    /// The CTA and the address in its shared memory that a `shared::cluster` address means.
    pub(crate) fn resolve(&self, address: u32) -> Result<(usize, u32), FaultKind> {
        let (high, low) = (address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1));
        let rank = if high == 0 { self.rank } else { high as usize - 1 };
        if rank >= self.peers.len() {
            return Err(FaultKind::ClusterRank { rank: rank as u32, ctas: self.peers.len() as u32 });
        }
        if rank != self.rank && self.peers[rank].ended {
            return Err(FaultKind::PeerEnded { rank: rank as u32 });
        }
        Ok((rank, low))
    }

    /// `barrier.cluster.arrive`: the warp's arrival, which orders what it `releases`.
    pub(crate) fn cluster_arrive(&mut self, warp: &mut Warp, released: &Clock) -> Result<(), FaultKind> {
        if warp.cluster_arrived.is_some() {
            return Err(FaultKind::ClusterBarrier { what: "arrives again before it has waited" });
        }
        warp.cluster_arrived = Some(self.cluster_barrier.generation);
        self.cluster_barrier.arriving.join(released);
        self.cluster_barrier.arrived += 1;
        self.progress += 1;
        self.complete_cluster_barrier();
        Ok(())
    }

    /// `barrier.cluster.wait`: `None` when the barrier is complete, with what it ordered; else what to wait for.
    pub(crate) fn cluster_wait(&mut self, warp: &mut Warp) -> Result<Result<Clock, Wait>, FaultKind> {
        let Some(generation) = warp.cluster_arrived else {
            return Err(FaultKind::ClusterBarrier { what: "waits without having arrived" });
        };
        if self.cluster_barrier.generation == generation {
            return Ok(Err(Wait::Cluster { generation }));
        }
        warp.cluster_arrived = None;
        Ok(Ok(self.cluster_barrier.done.clone()))
    }

    /// A warp has ended: the barrier does not expect it any more (9.7.13.4: exited threads count as arrived).
    pub(crate) fn cluster_barrier_end(&mut self, warp: &Warp) {
        if warp.cluster_arrived == Some(self.cluster_barrier.generation) {
            self.cluster_barrier.arrived -= 1;
        }
        self.cluster_barrier.ended += 1;
        self.complete_cluster_barrier();
    }

    fn complete_cluster_barrier(&mut self) {
        let warps = self.peers.len() * self.job.warps();
        let barrier = &mut self.cluster_barrier;
        if barrier.arrived > 0 && barrier.arrived + barrier.ended >= warps {
            barrier.arrived = 0;
            barrier.generation += 1;
            barrier.done.join(&barrier.arriving);
            self.progress += 1;
        }
    }

    /// The running CTA's last warp has ended.
    pub(crate) fn end_cta(&mut self, last: &Warp) -> Result<(), Fail> {
        self.peers[self.rank].ended = true;
        if let Some((agent, position)) = self.races.accessed_after_end() {
            let (who, at) = (self.agent(agent), position.unwrap_or(last.pc));
            return Err(Box::new((FaultKind::AccessAfterEnd { who, rank: self.rank as u32 }, at, last.index, 0)));
        }
        self.end_copies(last)
    }
}
