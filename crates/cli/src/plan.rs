//! `strata plan`.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use flashstrata::{Coverage, Hardware, Layout, Plan, PlanFailure, Planner, Stratum};
use kernels::{Dtype, Problem, ProblemSpec};
use serde::Serialize;

use crate::arguments::{Choice, MaskArguments, TileArguments};
use crate::device::Device;
use crate::{Failure, output, prose, question, tune};

/// What is planned.
#[derive(Debug, Args)]
pub struct PlanArguments {
    /// The GPU, by its name.
    #[arg(long, default_value = "RTX 2070", conflicts_with = "device")]
    pub gpu: String,
    /// A GPU of this machine: cuda, or cuda:N for GPU N.
    #[arg(long)]
    pub device: Option<Device>,
    /// BATCHxHEADSxSEQLENxHEAD_DIM and options, such as "2x8/2x512x64 f16 causal".
    #[arg(long, value_name = "PROBLEM", default_value = "10x64x1024x64")]
    pub problem: ProblemSpec,
    /// Storage type: f32, f16 or bf16.
    #[arg(long)]
    pub dtype: Option<Dtype>,
    #[command(flatten)]
    pub mask: MaskArguments,
    /// Which stratum; auto takes the newest that can.
    #[arg(long, default_value = "auto")]
    pub stratum: Choice,
    #[command(flatten)]
    pub tiles: TileArguments,
    /// CTAs of v3 that load blocks of keys and values together, 1 or 2.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cluster: u32,
    /// What was measured: a file of `strata tune`, or cached for the one that it writes by default.
    #[arg(long, value_name = "FILE")]
    pub tuned: Option<tune::Source>,
    /// Write the plan to FILE as JSON; `-` writes it to standard output in place of the text.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Prints which stratum would compute, on which tiles, why not another, and what each covers.
pub fn plan(arguments: &PlanArguments) -> Result<(), Failure> {
    output::check(arguments.json.as_deref())?;
    let hardware = match arguments.device {
        Some(Device::Emulator) | None => Hardware::from(arch::Gpu::find(&arguments.gpu)?),
        Some(device) => device.open(&arguments.gpu)?.planner()?.hardware().clone(),
    };
    let problem = question::problem(&arguments.problem, arguments.dtype, &arguments.mask)?;
    let mut planner = Planner::new(hardware).cluster(arguments.cluster);
    if let Some(source) = &arguments.tuned {
        planner = planner.tuned(source.load()?);
    }
    let alternatives = alternatives(&planner, &problem);
    let planner = arguments.tiles.planner(planner, arguments.stratum, &problem)?;
    let chosen = planner.plan(&problem, &Layout::contiguous(&problem));
    if let Some(path) = &arguments.json {
        let document =
            Document { schema: lab::record::SCHEMA, records: [Record::of(&planner, &problem, &chosen, &alternatives)] };
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    if !arguments.json.as_deref().is_some_and(output::is_stdout) {
        output::print(&text(&planner, &chosen, &alternatives))?;
    }
    chosen.map(|_| ()).map_err(|error| Failure::No(error.into()))
}

/// Each stratum by itself, the newest first.
fn alternatives(planner: &Planner, problem: &Problem) -> Vec<(Stratum, Result<Plan, PlanFailure>)> {
    let of = |stratum| {
        let planner = planner.clone().untuned().stratum(stratum);
        (stratum, planner.plan(problem, &Layout::contiguous(problem)))
    };
    Stratum::ALL.into_iter().rev().map(of).collect()
}

fn text(
    planner: &Planner,
    chosen: &Result<Plan, PlanFailure>,
    alternatives: &[(Stratum, Result<Plan, PlanFailure>)],
) -> String {
    let mut out = String::new();
    if let Ok(plan) = chosen {
        let _ = writeln!(out, "{plan}");
    }
    let mut table = prose::table(["stratum", "tiles", "shared", "CTAs/SM", "occupancy", "workspace"]);
    for (stratum, plan) in alternatives {
        let mut row = vec![stratum.to_string()];
        match plan {
            // Why is said above, or in the error.
            Err(_) => row.push("not for this problem on this GPU".into()),
            Ok(plan) => {
                let tiles = plan.tiles();
                row.push(format!("{}x{}, {} threads", tiles.block_q, tiles.block_kv, tiles.threads));
                let footprints = plan.footprints();
                let largest = plan.launches().iter().zip(&footprints).max_by_key(|(launch, _)| launch.dynamic_shared);
                if let Some((launch, footprint)) = largest {
                    row.push(launch.dynamic_shared.to_string());
                    match &footprint.occupancy {
                        Ok(occupancy) => {
                            let limiters: Vec<_> = occupancy.limiters.iter().map(ToString::to_string).collect();
                            row.push(occupancy.blocks_per_sm.to_string());
                            row.push(format!("{:.0} %, {}", occupancy.theoretical_pct, limiters.join("+")));
                        }
                        Err(error) => row.extend(["-".into(), error.to_string()]),
                    }
                } else {
                    row.extend(["-".into(), "-".into(), "no launch".into()]);
                }
                row.push(plan.workspace_bytes().to_string());
            }
        }
        table.add_row(row);
    }
    let _ =
        writeln!(out, "The strata on {}, each on its own tiles:\n{}\n", planner.hardware(), prose::set(table, 2..4));
    out.push_str(&coverage());
    out
}

/// What each stratum covers of the contract; of what stands nowhere, no stratum does.
fn coverage() -> String {
    let mut out = String::from("What a stratum covers:\n");
    for stratum in Stratum::ALL.into_iter().rev() {
        let CoverageRecord { min_sm, needs, dtypes, max_head_dim, max_seqlen, features } = stratum.coverage().into();
        let on = needs.map_or_else(|| format!("{min_sm} and later"), |needs| format!("{min_sm} with {needs}"));
        let text = format!(
            "{stratum}: {on}; {}; head_dim to {max_head_dim}, lengths to {max_seqlen}; {}",
            dtypes.join(", "),
            features.join(", ")
        );
        prose::wrapped(&mut out, "  ", "    ", &text);
    }
    out
}

#[derive(Serialize)]
struct Document<R> {
    schema: u32,
    records: [R; 1],
}

/// A plan as data.
#[derive(Serialize)]
struct Record {
    gpu: String,
    sm: String,
    multiprocessors: u32,
    problem: String,
    /// Nothing computes it: then why of each stands under `strata`.
    chosen: Option<Chosen>,
    strata: Vec<Alternative>,
}

#[derive(Serialize)]
struct Chosen {
    stratum: String,
    chosen_by: String,
    #[serde(flatten)]
    plan: PlanRecord,
    passed_over: Vec<PassedOver>,
}

#[derive(Serialize)]
struct PassedOver {
    stratum: String,
    why: String,
}

#[derive(Serialize)]
struct Alternative {
    stratum: String,
    plan: Option<PlanRecord>,
    why_not: Option<String>,
    covers: CoverageRecord,
}

#[derive(Serialize)]
struct CoverageRecord {
    min_sm: String,
    needs: Option<String>,
    dtypes: Vec<String>,
    max_head_dim: usize,
    max_seqlen: usize,
    features: Vec<String>,
}

impl From<Coverage> for CoverageRecord {
    fn from(coverage: Coverage) -> Self {
        Self {
            min_sm: coverage.min_sm.to_string(),
            needs: coverage.needs.map(|needs| needs.to_string()),
            dtypes: coverage.dtypes.iter().map(ToString::to_string).collect(),
            max_head_dim: coverage.max_head_dim,
            max_seqlen: coverage.max_seqlen,
            features: coverage.features.iter().map(ToString::to_string).collect(),
        }
    }
}

#[derive(Serialize)]
struct PlanRecord {
    tiles: lab::record::TileRecord,
    launches: Vec<LaunchRecord>,
    workspace_bytes: u64,
    zeroed_bytes: u64,
}

#[derive(Serialize)]
struct LaunchRecord {
    kernel: String,
    ctas: u64,
    threads: u32,
    shared_bytes: u32,
    shared: String,
    registers_estimated: Option<u32>,
    occupancy: Option<arch::Occupancy>,
}

impl PlanRecord {
    fn of(plan: &Plan) -> Self {
        let tiles = plan.tiles();
        let launch = |(launch, footprint): (&kernels::plan::LaunchPlan, flashstrata::Footprint)| LaunchRecord {
            kernel: launch.kernel.name.clone(),
            ctas: launch.ctas(),
            threads: launch.block.iter().product(),
            shared_bytes: launch.dynamic_shared,
            shared: launch.shared.to_string(),
            registers_estimated: footprint.registers,
            occupancy: footprint.occupancy.ok(),
        };
        Self {
            tiles: lab::record::TileRecord { block_q: tiles.block_q, block_kv: tiles.block_kv, threads: tiles.threads },
            launches: plan.launches().iter().zip(plan.footprints()).map(launch).collect(),
            workspace_bytes: plan.workspace_bytes(),
            zeroed_bytes: plan.zeroed_bytes(),
        }
    }
}

impl Record {
    fn of(
        planner: &Planner,
        problem: &Problem,
        chosen: &Result<Plan, PlanFailure>,
        alternatives: &[(Stratum, Result<Plan, PlanFailure>)],
    ) -> Self {
        let hardware = planner.hardware();
        let alternative = |(stratum, plan): &(Stratum, Result<Plan, PlanFailure>)| Alternative {
            stratum: stratum.to_string(),
            plan: plan.as_ref().ok().map(PlanRecord::of),
            why_not: plan.as_ref().err().map(ToString::to_string),
            covers: stratum.coverage().into(),
        };
        let passed_over =
            |one: &flashstrata::PassedOver| PassedOver { stratum: one.stratum.to_string(), why: one.why.to_string() };
        let chosen = chosen.as_ref().ok().map(|plan| Chosen {
            stratum: plan.stratum().to_string(),
            chosen_by: plan.chosen_by.to_string(),
            plan: PlanRecord::of(plan),
            passed_over: plan.passed_over.iter().map(passed_over).collect(),
        });
        Self {
            gpu: hardware.name.clone(),
            sm: hardware.sm.to_string(),
            multiprocessors: hardware.multiprocessors,
            problem: problem.to_string(),
            chosen,
            strata: alternatives.iter().map(alternative).collect(),
        }
    }
}
