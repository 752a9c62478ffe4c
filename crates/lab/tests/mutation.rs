//! Mistakes put into working kernels, and how many of them the emulator finds. `docs/mutation.md` says what is counted.

use std::fs;
use std::path::Path;

use arch::{Sm, Target};
use emulator::filetest::FileTest;
use emulator::{Options, Policy};
use kernels::{Dtype, Inputs, Layout, Problem, Stratum};
use lab::Watch;
use lab::mutate::{FileTestRun, LEAST, Mutated, StratumLaunch, Subject, Tally, Tried, Verdict, mutate};
use rayon::prelude::*;

fn print(name: &str, mutated: &Mutated) -> Tally {
    let tally = mutated.tally();
    println!(
        "{name:28} {:4} mutants, {:4} found ({} on the line, {} relying), {} wrong, {} unexplained, {} equivalent ({} by order, {} by runs), {} not run",
        tally.all,
        tally.found,
        tally.on_line,
        tally.relying,
        tally.wrong,
        tally.unexplained,
        tally.equivalent,
        tally.by_order,
        tally.by_runs,
        tally.not_run
    );
    for tried in &mutated.tried {
        let missed = match &tried.verdict {
            Verdict::Found { fault, blame: lab::mutate::Blame::Elsewhere, .. } => format!("elsewhere: {fault}"),
            Verdict::WrongResult(policy) => format!("wrong result under {policy:?}"),
            Verdict::Unexplained => "unexplained".into(),
            Verdict::Equivalent(reason) if reason.is_by_runs() => format!("by the runs: {reason}"),
            Verdict::NotRun(why) if why != "no warp executes it" => why.clone(),
            _ => continue,
        };
        let line = tried.place.as_ref().map_or(0, |place| place.1);
        println!("    line {line}, {} `{}`: {missed}", tried.mutation.change, tried.instruction);
    }
    tally
}

/// Whatever is said to mean the same, and not by the runs alone, does so under schedules that it was not judged by.
fn agree(name: &str, subject: &impl Subject, mutated: &Mutated) {
    let proven = |tried: &&Tried| matches!(tried.verdict, Verdict::Equivalent(reason) if !reason.is_by_runs());
    mutated.tried.par_iter().filter(proven).for_each(|tried| {
        let mutant = tried.mutation.apply(subject.kernel()).unwrap();
        for seed in 3..7 {
            let policy = Policy::Random(seed);
            let options = Options { policy, lane_races: true, global_races: true, threads: 1, ..subject.options() };
            let ran = subject.run(&mutant.kernel, &options);
            let what = format!("{name}: {} `{}` under {policy:?}", tried.mutation.change, tried.instruction);
            assert!(ran.unwrap_or_else(|error| panic!("{what}: {error}")).same, "{what}");
        }
    });
}

fn strata() -> Tally {
    let mut all = Tally::default();
    for stratum in Stratum::ALL {
        let sm = if stratum.runs_on(Sm::Sm80.into()) { Sm::Sm80 } else { Sm::Sm90 };
        let covered = stratum.coverage().dtypes;
        for dtype in [Dtype::F32, Dtype::F16].into_iter().filter(|dtype| covered.contains(dtype)) {
            // Several tiles for a CTA that stays, several blocks for each.
            let (heads, seqlen) = if stratum == Stratum::V3 { (2, 400) } else { (1, 48) };
            let problem = Problem::builder(1, heads, seqlen, 32).dtype(dtype).causal().build().unwrap();
            let inputs = Inputs::randn(&problem, 3).unwrap();
            let layout = Layout::of(&problem, &inputs).unwrap();
            let plan = kernels::plan(stratum, &problem, Target::best(sm), &layout, None).unwrap();
            for launch in 0..plan.launches.len() {
                let subject = StratumLaunch::new(plan.clone(), launch, problem.clone(), inputs.clone()).unwrap();
                let mutated = mutate(&subject, Watch::default()).unwrap();
                let name = format!("{stratum} {dtype}, launch {launch}");
                agree(&name, &subject, &mutated);
                all = all.and(print(&name, &mutated));
            }
        }
    }
    all
}

fn file_tests() -> Tally {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../emulator/tests/filetests");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut all = Tally::default();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let test = FileTest::parse(&fs::read_to_string(&path).unwrap(), &name).unwrap();
        let mut seen = Vec::new();
        for run in test.runs().iter().filter(|run| run.fault.is_none()) {
            let subject = FileTestRun::new(&test, run).unwrap();
            let kernel = subject.kernel();
            // The other runs of a kernel differ in the policy.
            if seen.contains(&kernel.name) || lab::mutate::mutations(kernel).is_empty() {
                continue;
            }
            seen.push(kernel.name.clone());
            match mutate(&subject, Watch::default()) {
                Ok(mutated) => {
                    let name = format!("{name}:{}", run.line);
                    agree(&name, &subject, &mutated);
                    all = all.and(print(&name, &mutated));
                }
                Err(error) => println!("{name}:{}: {error}", run.line),
            }
        }
    }
    all
}

#[test]
fn mistakes_in_working_kernels_are_found() {
    let own = strata();
    let files = file_tests();
    for (of, tally) in [("own strata", own), ("working kernels of the file tests", files)] {
        let (rate, strict) = (100.0 * tally.rate(), 100.0 * tally.strict_rate());
        println!("{of}: {tally:?}: {rate:.2} %, {strict:.2} % where what the runs alone excuse counts as missed");
        assert!(tally.strict_rate() >= LEAST, "{of}: {strict:.2} % are found; {:.0} % is the least", 100.0 * LEAST);
    }
}
