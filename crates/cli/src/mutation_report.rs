//! What `strata probe --mutate` prints: how many mistakes in a working kernel are found, and which are not.

use std::collections::BTreeMap;
use std::fmt::Write;

use lab::figures::{count, percent};
use lab::mutate::{Blame, Change, Mutated, Role, Tally, Verdict};
use lab::probe::policy_name;

use crate::prose::{self, Style, paragraph};

const COLUMNS: [&str; 11] =
    ["mutants", "found", "line", "relying", "else", "wrong", "unknown", "same", "by order", "by runs", "not run"];

fn cells(tally: &Tally) -> Vec<String> {
    let elsewhere = tally.found - tally.on_line - tally.relying;
    let Tally { all, found, on_line, relying, wrong, unexplained, equivalent, by_order, by_runs, not_run } = *tally;
    let figures = [all, found, on_line, relying, elsewhere, wrong, unexplained, equivalent, by_order, by_runs, not_run];
    figures.map(count).to_vec()
}

/// The report on several kernels, by the names they were asked for.
pub fn text(mutated: &[(String, Mutated)], color: bool) -> String {
    let style = Style { color };
    let mut out = String::new();
    let mut changes = BTreeMap::<(Role, Change), Tally>::new();
    let mut all = Tally::default();
    let mut kernels = prose::table(["kernel"].into_iter().chain(COLUMNS).chain(["rate"]));
    for (name, mutated) in mutated {
        let tally = mutated.tally();
        all = all.and(tally);
        let rate = percent(tally.rate());
        kernels.add_row([name.clone()].into_iter().chain(cells(&tally)).chain([rate]));
        for (change, tally) in mutated.by_change() {
            let sum = changes.entry(change).or_default();
            *sum = sum.and(tally);
        }
    }
    let mut table = prose::table(["change"].into_iter().chain(COLUMNS));
    for ((role, change), tally) in &changes {
        table.add_row([format!("{role} {change}")].into_iter().chain(cells(tally)));
    }
    let width = COLUMNS.len() + 1;
    let _ = writeln!(out, "{}\n{}\n", style.heading("Kernels"), prose::set(kernels, 1..width + 1));
    let _ = writeln!(out, "{}\n{}\n", style.heading("Changes"), prose::set(table, 1..width));
    for (name, mutated) in mutated {
        missed(&mut out, name, mutated);
    }
    let said = format!(
        "{} of {} mutants that change the meaning are found with the right line: {}; {} where those count as missed that the runs \
         alone show to mean the same.",
        count(all.on_line + all.relying),
        count(all.meaningful()),
        percent(all.rate()),
        percent(all.strict_rate())
    );
    paragraph(&mut out, "", &said);
    out
}

/// The mutants of a kernel that were not found, or not with the right line, or may not have been.
fn missed(out: &mut String, name: &str, mutated: &Mutated) {
    for tried in &mutated.tried {
        let what = match &tried.verdict {
            Verdict::Found { fault, policy, blame: Blame::Elsewhere } => {
                format!("found elsewhere, under {}: {} at `{}`", policy_name(*policy), fault.kind, fault.instruction)
            }
            Verdict::WrongResult(policy) => format!("wrong result under {}", policy_name(*policy)),
            Verdict::Unexplained => "the result is right, and nothing shows that it always is".into(),
            Verdict::Equivalent(reason) if reason.is_by_runs() => format!("the runs alone show that {reason}"),
            _ => continue,
        };
        let place = tried.place.as_ref().map(|(file, line)| format!(" ({file}:{line})")).unwrap_or_default();
        let position = tried.mutation.position;
        let said = format!("{name}, {position}: `{}`{place} {}: {what}", tried.instruction, tried.mutation.change);
        paragraph(out, "", &said);
    }
}
