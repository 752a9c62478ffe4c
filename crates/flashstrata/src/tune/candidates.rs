//! Which configurations are worth timing.

use arch::Target;
use kernels::{Layout, Problem, Stratum, Tiles};

use crate::planner::{Plan, PlanFailure, Planner, footprint, tiles_text};
use crate::tune::{TuneOptions, model};

/// A configuration to be timed.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// It as a plan.
    pub plan: Plan,
    /// Clocks of the busiest multiprocessor, modelled (see the module `model`).
    pub modelled_clocks: f64,
    /// Warps that a multiprocessor holds at once of the launch that fills it least, at the estimated registers.
    pub warps: u32,
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.plan.stratum(), tiles_text(self.plan.tiles()))
    }
}

/// How many configurations were left out, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// The generation has no such tiles.
    pub refused: usize,
    /// The model puts them too far behind, or behind enough others.
    pub modelled_slower: usize,
    /// Their shared memory does not fit, or they leave a multiprocessor fewer than half the warps that the generation's own tiles do.
    pub occupancy: usize,
}

/// What is to be timed for a problem.
#[derive(Clone, Debug)]
pub struct Candidates {
    /// The first is what is taken without a measurement.
    pub kept: Vec<Candidate>,
    /// What is left out.
    pub pruned: Pruned,
}

/// Tile sizes that are tried.
const BLOCKS_Q: [u32; 8] = [16, 32, 48, 64, 96, 128, 192, 256];
const BLOCKS_KV: [u32; 14] = [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256];
const THREADS: [u32; 7] = [32, 64, 128, 256, 384, 512, 1024];

/// Of two configurations, the slower by the model is not timed when it is this many times slower than the fastest.
const TOO_SLOW: f64 = 3.0;

/// The generations that tuning considers; the others are never the fastest.
fn is_considered(stratum: Stratum) -> bool {
    !matches!(stratum, Stratum::Naive | Stratum::V1)
}

/// The configurations that the planner's generations have for a problem, without those that cannot be the fastest.
///
/// # Errors
/// When there is no plan for the problem at all.
pub fn candidates(
    planner: &Planner,
    problem: &Problem,
    layout: &Layout,
    options: &TuneOptions,
) -> Result<Candidates, PlanFailure> {
    let hardware = planner.hardware().clone();
    // Without what was measured before: it is to be measured again.
    let default = planner.clone().untuned().plan(problem, layout)?;
    let of = |plan: Plan| {
        let modelled_clocks = model::clocks(&hardware, problem, plan.stratum(), &plan.kernels.config);
        let footprints = plan.launches().iter().map(|launch| footprint(&hardware, launch).occupancy);
        let warps = footprints.map(|occupancy| occupancy.map_or(0, |o| o.warps_per_sm)).min().unwrap_or(0);
        Candidate { plan, modelled_clocks, warps }
    };
    // Speed is not paid for with precision: what rounds more than the default is timed only where it was asked for.
    let rounds = |stratum: Stratum| stratum.relative_error(problem.dtype).is_some();
    let as_exact = |&stratum: &Stratum| rounds(default.stratum()) || !rounds(stratum);
    let considered: Vec<_> = planner.candidates().into_iter().filter(|&s| is_considered(s)).filter(as_exact).collect();
    let mut kept = vec![of(default)];
    let mut pruned = Pruned::default();
    let mut ranked = Vec::new();
    for stratum in considered {
        let Ok(own) = planner.clone().untuned().stratum(stratum).plan(problem, layout) else { continue };
        let own = of(own);
        for tiles in grid() {
            match kernels::configure(
                stratum,
                problem,
                Target::best(hardware.sm),
                layout,
                &kernels::Options { tiles: Some(tiles), ..Default::default() },
            ) {
                Err(_) => pruned.refused += 1,
                Ok(_) if (stratum, tiles) == (kept[0].plan.stratum(), kept[0].plan.tiles()) => {}
                Ok(config) => {
                    ranked.push((model::clocks(&hardware, problem, stratum, &config), stratum, tiles, own.warps));
                }
            }
        }
    }
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let fastest = ranked.first().map_or(kept[0].modelled_clocks, |first| first.0.min(kept[0].modelled_clocks));
    for (clocks, stratum, tiles, own_warps) in ranked {
        let of_stratum = kept.iter().skip(1).filter(|one| one.plan.stratum() == stratum).count();
        if clocks > TOO_SLOW * fastest || of_stratum >= options.per_stratum {
            pruned.modelled_slower += 1;
            continue;
        }
        // Only now is the kernel written, which takes longer than all the rest.
        match planner.clone().untuned().stratum(stratum).tiles(tiles).plan(problem, layout).map(of) {
            Ok(candidate) if 2 * candidate.warps >= own_warps => kept.push(candidate),
            _ => pruned.occupancy += 1,
        }
    }
    Ok(Candidates { kept, pruned })
}

fn grid() -> impl Iterator<Item = Tiles> {
    BLOCKS_Q.into_iter().flat_map(|block_q| {
        BLOCKS_KV.into_iter().flat_map(move |block_kv| THREADS.map(|threads| Tiles { block_q, block_kv, threads }))
    })
}

#[cfg(test)]
mod tests {
    use kernels::{Dtype, ProblemSpec};

    use super::*;
    use crate::Hardware;

    fn candidates_of(gpu: &str, spec: ProblemSpec) -> Candidates {
        let problem = spec.build().unwrap();
        let planner = Planner::new(Hardware::from(arch::Gpu::find(gpu).unwrap()));
        candidates(&planner, &problem, &Layout::contiguous(&problem), &TuneOptions::default()).unwrap()
    }

    #[test]
    fn the_default_is_first_and_nothing_is_there_twice() {
        for (gpu, spec) in [
            ("H200", ProblemSpec::new(2, 16, 4096, 128).dtype(Dtype::Bf16)),
            ("H200", ProblemSpec::new(2, 16, 512, 64).dtype(Dtype::F16).causal()),
            ("T4", ProblemSpec::new(2, 16, 1024, 64)),
        ] {
            let Candidates { kept, pruned } = candidates_of(gpu, spec);
            let all: Vec<_> = kept.iter().map(|one| (one.plan.stratum(), one.plan.tiles())).collect();
            let distinct: std::collections::HashSet<_> = all.iter().collect();
            assert_eq!(distinct.len(), all.len(), "{all:?}");
            assert!((3..=1 + 3 * TuneOptions::default().per_stratum).contains(&all.len()), "{all:?}");
            assert!(pruned.refused > 100, "{pruned:?}");
            assert!(kept.iter().skip(1).all(|one| one.warps > 0 && one.modelled_clocks > 0.0));
        }
        // CUDA cores are not timed where tensor cores are there.
        let Candidates { kept, .. } = candidates_of("H200", ProblemSpec::new(2, 16, 4096, 128).dtype(Dtype::Bf16));
        assert!(kept.iter().all(|one| !Stratum::ON_CUDA_CORES.contains(&one.plan.stratum())));
    }

    #[test]
    fn precision_is_not_traded_for_speed() {
        let spec = || ProblemSpec::new(2, 16, 1024, 64);
        let strata =
            |candidates: Candidates| candidates.kept.into_iter().map(|one| one.plan.stratum()).collect::<Vec<_>>();
        assert!(!strata(candidates_of("H200", spec())).contains(&Stratum::V2Tc));
        // Where only tensor cores compute it, they are what is timed.
        assert!(strata(candidates_of("H200", spec().softcap(20.0))).iter().all(|&stratum| stratum == Stratum::V2Tc));
    }

    #[test]
    fn without_a_plan_there_is_no_candidate() {
        let problem = ProblemSpec::new(1, 1, 64, 64).softcap(30.0).build().unwrap();
        let planner = Planner::new(Hardware::from(arch::Gpu::find("T4").unwrap()));
        let planner = planner.stratum(Stratum::V1);
        let none = candidates(&planner, &problem, &Layout::contiguous(&problem), &TuneOptions::default());
        assert!(none.is_err());
    }
}
