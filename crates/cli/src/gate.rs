//! `strata gate` and `strata accept`.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context, anyhow};
use clap::Args;
use kernels::{ProblemSpec, Stratum};
use lab::figures::percent;
use lab::gate::against::{AgainstError, against};
use lab::gate::{Baseline, GateConfig, Gated, Judged, JudgedFigure, MeasureError, TimeCase, Verdict, gate, measure};
use lab::probe::ProbeError;
use lab::{AnyRecord, DigError, ExecuteError, Watch, reference};
use maud::{PreEscaped, html};
use serde::Serialize;

use crate::history::number;
use crate::progress::Progress;
use crate::record::HistoryFile;
use crate::{CANCEL, Failure, output, prose};

/// What is measured now.
#[derive(Debug, Args)]
pub struct CurrentArguments {
    /// What to measure, and how much may change (TOML); by default the strata of the baseline, and nothing.
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// Records that were made with --json, rather than measured now.
    #[arg(long, value_name = "FILE.json")]
    pub current: Option<PathBuf>,
}

/// What is judged by what.
#[derive(Debug, Args)]
pub struct GateArguments {
    /// What to judge by: a file that `strata accept` or --json wrote, or a revision of the history.
    #[arg(long, value_name = "FILE|REVISION", required_unless_present = "against")]
    pub baseline: Option<String>,
    #[command(flatten)]
    pub now: CurrentArguments,
    /// Time another build of this program and this one in turn on the GPU, and judge the times.
    #[arg(long, value_name = "BINARY", conflicts_with_all = ["baseline", "current"])]
    pub against: Option<PathBuf>,
    /// The build that is judged with --against; this one by default.
    #[arg(long, value_name = "BINARY", requires = "against")]
    pub candidate: Option<PathBuf>,
    /// What is timed with --against, as `strata bench` takes it; by default what the configuration says. May be repeated.
    #[arg(long, value_name = "PROBLEM", requires = "against")]
    pub problem: Vec<ProblemSpec>,
    /// Which strata are timed with --problem, separated by commas; all by default.
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "problem")]
    pub strata: Vec<Stratum>,
    /// How often each build is timed.
    #[arg(long, value_name = "N", default_value_t = 12, requires = "against")]
    pub rounds: usize,
    /// Write the verdicts to FILE as JSON; `-` writes them to standard output in place of the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write them as JUnit XML.
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Write them as Markdown.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    #[command(flatten)]
    pub history: HistoryFile,
}

/// What becomes the baseline, and why.
#[derive(Debug, Args)]
pub struct AcceptArguments {
    /// The file to write; what was accepted before stays in its list of reasons.
    #[arg(long, value_name = "FILE")]
    pub baseline: PathBuf,
    #[command(flatten)]
    pub now: CurrentArguments,
    /// Why the figures are as they should be.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    #[serde(flatten)]
    gated: &'a Gated,
}

/// Judges, prints, and ends with the verdict's status.
pub fn run(arguments: &GateArguments) -> Result<(), Failure> {
    for path in [&arguments.json, &arguments.junit, &arguments.markdown] {
        output::check(path.as_deref())?;
    }
    let config = config(&arguments.now)?;
    let gated = match (&arguments.baseline, &arguments.against) {
        (_, Some(binary)) => timed(arguments, &config, binary)?,
        (Some(baseline), None) => {
            let baseline = reference::set(baseline, &arguments.history.path().unwrap_or_default())?;
            gate(&baseline, &current(&arguments.now, &config, &baseline)?, &config.tolerance)
        }
        (None, None) => return Err(anyhow!("no baseline: give --baseline, or --against").into()),
    };
    if let Some(path) = &arguments.json {
        let document = Document { schema: lab::record::SCHEMA, gated: &gated };
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    if let Some(path) = &arguments.junit {
        output::write(path, &junit(&gated))?;
    }
    if let Some(path) = &arguments.markdown {
        output::write(path, &markdown(&gated))?;
    }
    if !arguments.json.as_deref().is_some_and(output::is_stdout) {
        output::print(&screen(&gated))?;
    }
    let said = || anyhow!("{}: {}", gated.verdict.name(), tally(&gated));
    match gated.verdict.status() {
        0 => Ok(()),
        1 => Err(Failure::No(said())),
        _ => Err(Failure::CannotSay(said())),
    }
}

/// Measures, and makes that the baseline.
pub fn accept(arguments: &AcceptArguments) -> Result<(), Failure> {
    if arguments.reason.trim().is_empty() {
        return Err(anyhow!("reason is empty: say why the figures are as they should be").into());
    }
    output::check(Some(&arguments.baseline))?;
    let config = config(&arguments.now)?;
    let mut baseline = Baseline::read(&arguments.baseline)?;
    let records = current(&arguments.now, &config, &baseline.records)?;
    let changed = gate(&baseline.records, &records, &config.tolerance);
    baseline.accept(&records, arguments.reason.trim());
    let path = &arguments.baseline;
    baseline.write(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(output::print(&format!("{}accepted {} records in {}\n", screen(&changed), records.len(), path.display()))?)
}

fn config(arguments: &CurrentArguments) -> anyhow::Result<GateConfig> {
    Ok(arguments.config.as_ref().map_or_else(|| Ok(GateConfig::default()), |path| GateConfig::read(path))?)
}

fn current(
    arguments: &CurrentArguments,
    config: &GateConfig,
    baseline: &[AnyRecord],
) -> Result<Vec<AnyRecord>, Failure> {
    if let Some(path) = &arguments.current {
        return Ok(reference::read(path)?.records);
    }
    let progress = Progress::new("CTAs");
    let show = |done, of| progress.show(done, of);
    let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() };
    let measured = measure(config, baseline, |what| progress.begin(what), watch);
    progress.end();
    let interrupted = |error: &MeasureError| match error {
        MeasureError::Dig { source, .. } => matches!(**source, DigError::Execute(ExecuteError::Cancelled)),
        MeasureError::Probe { source, .. } => matches!(**source, ProbeError::Cancelled),
        _ => false,
    };
    measured.map_err(|error| match error {
        error if interrupted(&error) => Failure::Interrupted,
        MeasureError::Wrong { .. } | MeasureError::Hazard { .. } => Failure::No(error.into()),
        error => error.into(),
    })
}

/// Milliseconds that `bench` samples in each round.
const ROUND_MS: &str = "100";

fn timed(arguments: &GateArguments, config: &GateConfig, binary: &Path) -> Result<Gated, Failure> {
    let own = std::env::current_exe().context("this program's own file")?;
    let candidate = arguments.candidate.as_ref().unwrap_or(&own);
    let asked = arguments.problem.iter().map(|problem| TimeCase {
        problem: problem.to_string(),
        strata: arguments.strata.iter().map(ToString::to_string).collect(),
    });
    let mut cases: Vec<TimeCase> = asked.collect();
    if cases.is_empty() {
        cases.clone_from(&config.time);
    }
    if cases.is_empty() {
        return Err(anyhow!("there is nothing to time: give --problem, or `[[time]]` in the configuration").into());
    }
    let progress = Progress::new("rounds");
    let show = |done, of| progress.show(done, of);
    let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() };
    let mut judged = Vec::new();
    for case in &cases {
        if CANCEL.load(Ordering::Relaxed) {
            break;
        }
        progress.begin(&case.problem);
        let mut words =
            ["bench", "--json", "-", "--budget-ms", ROUND_MS, "--problem", &case.problem].map(String::from).to_vec();
        if !case.strata.is_empty() {
            words.extend(["--strata".into(), case.strata.join(",")]);
        }
        match against((binary, candidate), &words, arguments.rounds, &config.tolerance, watch) {
            Ok(records) => judged.extend(records),
            // What was judged before is told; where nothing was, there is no answer.
            Err(AgainstError::Cancelled) if judged.is_empty() => return Err(Failure::Interrupted),
            Err(AgainstError::Cancelled) => break,
            Err(error @ AgainstError::NoTime { .. }) => return Err(Failure::CannotSay(error.into())),
            Err(error) => return Err(error.into()),
        }
    }
    progress.end();
    Ok(Gated::of(judged))
}

const ALL: [Verdict; 5] =
    [Verdict::Regressed, Verdict::Incomparable, Verdict::Insufficient, Verdict::Improved, Verdict::Pass];

/// `2 regressed, 5 pass`.
fn tally(gated: &Gated) -> String {
    let counts = ALL.into_iter().map(|verdict| (gated.count(verdict), verdict.name()));
    let counts: Vec<String> = counts.filter(|(n, _)| *n > 0).map(|(n, name)| format!("{n} {name}")).collect();
    if counts.is_empty() { "nothing was judged".into() } else { counts.join(", ") }
}

/// Figures of a record that are shown; the others are counted.
const SHOWN: usize = 6;

/// Why a record does not just pass, in lines: the worst first.
fn reasons(judged: &Judged) -> Vec<String> {
    let mut reasons: Vec<String> = judged.differing.iter().map(ToString::to_string).collect();
    let mut figures: Vec<&JudgedFigure> = judged.figures.iter().collect();
    figures.sort_by_key(|figure| std::cmp::Reverse(figure.verdict));
    reasons.extend(figures.iter().take(SHOWN).map(|figure| changed(figure)));
    if figures.len() > SHOWN {
        reasons.push(format!("{} more figures changed", figures.len() - SHOWN));
    }
    reasons.extend(judged.note.clone());
    reasons
}

fn changed(figure: &JudgedFigure) -> String {
    let value = |value: Option<f64>| value.map_or_else(|| "none".into(), number);
    let signed = |change: f64| format!("{}{}", if change > 0.0 { "+" } else { "" }, percent(change));
    let mut text = format!("{} {} -> {}", figure.name, value(figure.before), value(figure.after));
    if let Some(change) = figure.change {
        text += &format!(" ({}", signed(change));
        if let Some([low, high]) = figure.interval {
            text += &format!(", 95 % of the resamples between {} and {}", signed(low), signed(high));
        }
        text += &format!("; allowed {})", percent(figure.tolerance));
    }
    text
}

fn screen(gated: &Gated) -> String {
    let mut text = String::new();
    for judged in gated.records.iter().filter(|judged| judged.verdict != Verdict::Pass) {
        text += &format!("{:<12} {}\n", judged.verdict.name(), prose::clip(&judged.key.to_string(), prose::WIDTH - 13));
        for reason in reasons(judged) {
            prose::wrapped(&mut text, "             ", "               ", &reason);
        }
    }
    text + &format!("{}: {}\n", gated.verdict.name(), tally(gated))
}

fn markdown(gated: &Gated) -> String {
    let mut text = format!("## strata gate: {}\n\n{}\n", gated.verdict.name(), tally(gated));
    let others: Vec<&Judged> = gated.records.iter().filter(|judged| judged.verdict != Verdict::Pass).collect();
    if !others.is_empty() {
        text += "\n| verdict | record | why |\n|---|---|---|\n";
    }
    let cell = |text: &str| text.replace('\\', "\\\\").replace('|', "\\|").replace('\n', " ");
    for judged in others {
        let why: Vec<String> = reasons(judged).iter().map(|reason| cell(reason)).collect();
        text += &format!("| {} | {} | {} |\n", judged.verdict.name(), cell(&judged.key.to_string()), why.join("<br>"));
    }
    text
}

/// A test suite with a case per record: a regression fails, what cannot be said is an error.
fn junit(gated: &Gated) -> String {
    let failures = gated.count(Verdict::Regressed);
    let errors = gated.count(Verdict::Incomparable) + gated.count(Verdict::Insufficient);
    let all = gated.records.len();
    // A control character is not allowed in XML, not even escaped (XML 1.0, 2.2).
    let clean = |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    let suite = html! {
        testsuites name="strata gate" tests=(all) failures=(failures) errors=(errors) {
            testsuite name="strata gate" tests=(all) failures=(failures) errors=(errors) {
                @for judged in &gated.records {
                    @let why = clean(&reasons(judged).join("; "));
                    testcase classname=(clean(&judged.key.gpu)) name=(clean(&judged.key.to_string())) {
                        @match judged.verdict {
                            Verdict::Regressed => failure type=(judged.verdict.name()) message=(why) {}
                            Verdict::Incomparable | Verdict::Insufficient => error type=(judged.verdict.name()) message=(why) {}
                            Verdict::Improved => system-out { (why) }
                            Verdict::Pass => {}
                        }
                    }
                }
            }
        }
    };
    html! { (PreEscaped("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n")) (suite) }.into_string() + "\n"
}
