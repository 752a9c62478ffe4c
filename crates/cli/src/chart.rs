//! Charts as inline SVG: axes, units, a legend, colours by class so that a page's style sets them for light and dark.

use std::fmt::Write;

use lab::probe::Phase;
use maud::{Markup, PreEscaped, html};

/// Units of width of every chart: so few that text is still read on a phone.
const WIDTH: f64 = 480.0;
/// Text that stands at the left of bars.
const LABELS: f64 = 126.0;
/// Room for the figure at a bar's end.
const FIGURES: f64 = 62.0;

/// One row of bars.
pub struct Row {
    pub label: String,
    /// One per series; `None` where it has no figure.
    pub values: Vec<Option<f64>>,
    /// Series whose bar is marked.
    pub marked: Option<usize>,
}

/// How a length is reckoned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    Log,
}

fn escaped(text: &str) -> String {
    html! { (text) }.into_string()
}

/// Colour, and what it stands for.
fn legend(series: &[&str]) -> Markup {
    html! {
        @if series.len() > 1 {
            p.legend { @for (index, name) in series.iter().enumerate() { span { i class={ "c" (index) } {} (name) } " " } }
        }
    }
}

fn figure(title: &str, series: &[&str], height: f64, inner: &str) -> Markup {
    let (view, described) = (format!("0 0 {WIDTH} {height:.0}"), escaped(title));
    html! {
        figure {
            figcaption { (title) }
            (legend(series))
            svg viewBox=(view) role="img" xmlns="http://www.w3.org/2000/svg" {
                title { (PreEscaped(described)) }
                (PreEscaped(inner))
            }
        }
    }
}

/// Round numbers from 0 to at least `most`, four to six of them.
fn ticks(most: f64) -> Vec<f64> {
    let raw = most.max(1e-12) / 4.0;
    let power = 10_f64.powf(raw.log10().floor());
    let step =
        [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= raw).unwrap_or(10.0 * power);
    (0..=((most / step).ceil() as usize).max(1)).map(|n| n as f64 * step).collect()
}

/// Powers of ten around all of them.
fn decades(values: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let positive = values.filter(|value| *value > 0.0);
    let low = positive.clone().fold(f64::INFINITY, f64::min).log10().floor();
    let high = positive.fold(0.0, f64::max).log10().ceil();
    if !(low.is_finite() && high.is_finite()) {
        return vec![1.0, 10.0];
    }
    (low as i32..=(high as i32).max(low as i32 + 1)).map(|power| 10_f64.powi(power)).collect()
}

/// A number in as few letters as an axis wants.
pub fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e12 => (value / 1e12, "T"),
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = match value.abs() {
        v if v >= 100.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        v if v >= 0.001 => format!("{value:.4}"),
        _ => format!("{value:.0e}"),
    };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text };
    format!("{text}{unit}")
}

/// Horizontal bars, the series of a row one below the other.
pub fn bars(title: &str, unit: &str, series: &[&str], rows: &[Row], scale: Scale) -> Markup {
    let all = rows.iter().flat_map(|row| row.values.iter().flatten().copied());
    let marks = match scale {
        Scale::Linear => ticks(all.clone().fold(0.0, f64::max)),
        Scale::Log => decades(all),
    };
    let (first, last) = (marks[0], marks[marks.len() - 1]);
    let room = WIDTH - LABELS - FIGURES;
    let at = |value: f64| match scale {
        Scale::Linear => LABELS + room * value / last,
        Scale::Log if value <= 0.0 => LABELS,
        Scale::Log => LABELS + room * ((value / first).log10() / (last / first).log10()).clamp(0.0, 1.0),
    };
    let bar = if series.len() > 2 { 11.0 } else { 14.0 };
    let row_height = bar * series.len() as f64 + 8.0;
    let bottom = 4.0 + row_height * rows.len() as f64;
    let mut inner = String::new();
    for mark in &marks {
        let x = at(*mark);
        let _ = write!(inner, r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="2" y2="{bottom:.1}"/>"#);
        let _ = write!(
            inner,
            r#"<text class="tick" x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            bottom + 14.0,
            short(*mark)
        );
    }
    let logarithmic = if scale == Scale::Log { ", logarithmic" } else { "" };
    let middle = LABELS + room / 2.0;
    let _ = write!(
        inner,
        r#"<text class="axis" x="{middle:.1}" y="{:.1}" text-anchor="middle">{}{logarithmic}</text>"#,
        bottom + 30.0,
        escaped(unit)
    );
    for (index, row) in rows.iter().enumerate() {
        let top = 4.0 + row_height * index as f64;
        let _ = write!(
            inner,
            r#"<text class="label" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            LABELS - 6.0,
            top + row_height / 2.0,
            escaped(&crate::prose::clip(&row.label, 16))
        );
        for (which, value) in row.values.iter().enumerate() {
            let Some(value) = value else { continue };
            let (y, width) = (top + bar * which as f64, (at(*value) - LABELS).max(0.5));
            let mark = if row.marked == Some(which) { " marked" } else { "" };
            let _ = write!(
                inner,
                r#"<rect class="c{which}{mark}" x="{LABELS}" y="{y:.1}" width="{width:.1}" height="{:.1}" rx="1.5"/><text class="value" x="{:.1}" y="{:.1}">{}</text>"#,
                bar - 2.0,
                LABELS + width + 4.0,
                y + bar - 4.0,
                short(*value)
            );
        }
    }
    figure(title, series, bottom + 36.0, &inner)
}

/// A point of a roofline.
pub struct Point {
    pub label: String,
    /// Floating-point operations a byte of DRAM.
    pub intensity: f64,
    /// Operations a second.
    pub rate: f64,
}

/// Attainable rate by intensity: what memory lets through, up to each ceiling (operations a second).
pub fn roofline(title: &str, bandwidth: f64, ceilings: &[(&str, f64)], points: &[Point]) -> Markup {
    let height = 300.0;
    let (left, right, top, bottom) = (52.0, WIDTH - 20.0, 10.0, height - 44.0);
    let highest = ceilings.iter().map(|ceiling| ceiling.1).fold(bandwidth, f64::max);
    let xs = decades(points.iter().map(|point| point.intensity).chain([1.0, 4.0 * highest / bandwidth]));
    let ys = decades(points.iter().map(|point| point.rate).chain([highest, highest / 90.0]));
    let along = |value: f64, marks: &[f64]| {
        let (first, last) = (marks[0], marks[marks.len() - 1]);
        ((value / first).log10() / (last / first).log10()).clamp(0.0, 1.0)
    };
    let x = |value: f64| left + (right - left) * along(value, &xs);
    let y = |value: f64| bottom - (bottom - top) * along(value, &ys);
    let mut inner = String::new();
    for mark in &xs {
        let at = x(*mark);
        let _ = write!(
            inner,
            r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{top}" y2="{bottom}"/><text class="tick" x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            bottom + 14.0,
            short(*mark)
        );
    }
    for mark in &ys {
        let at = y(*mark);
        let _ = write!(
            inner,
            r#"<line class="grid" x1="{left}" x2="{right}" y1="{at:.1}" y2="{at:.1}"/><text class="tick" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            left - 4.0,
            at + 4.0,
            short(*mark / 1e12)
        );
    }
    let _ = write!(
        inner,
        r#"<text class="axis" x="{:.1}" y="{:.1}" text-anchor="middle">FLOP a byte of DRAM, logarithmic</text>"#,
        f64::midpoint(left, right),
        height - 8.0
    );
    let _ = write!(
        inner,
        r#"<text class="axis" transform="translate(12 {:.1}) rotate(-90)" text-anchor="middle">TFLOP/s, logarithmic</text>"#,
        f64::midpoint(top, bottom)
    );
    for (name, ceiling) in ceilings {
        let knee = ceiling / bandwidth;
        let lowest = (ys[0] / bandwidth).max(xs[0]);
        let _ = write!(
            inner,
            r#"<polyline class="roof" points="{:.1},{:.1} {:.1},{:.1} {right},{:.1}"/>"#,
            x(lowest),
            y(lowest * bandwidth),
            x(knee),
            y(*ceiling),
            y(*ceiling)
        );
        let _ = write!(
            inner,
            r#"<text class="note" x="{:.1}" y="{:.1}" text-anchor="end">{} {}</text>"#,
            right - 2.0,
            y(*ceiling) - 4.0,
            escaped(name),
            short(*ceiling / 1e12)
        );
    }
    let mut taken: Vec<(f64, f64)> = Vec::new();
    for (index, point) in points.iter().enumerate() {
        let (px, py) = (x(point.intensity), y(point.rate));
        let class = index % 6;
        let _ = write!(
            inner,
            r#"<circle class="c{class}" cx="{px:.1}" cy="{py:.1}" r="5"><title>{}: {} FLOP a byte, {} TFLOP/s</title></circle>"#,
            escaped(&point.label),
            short(point.intensity),
            short(point.rate / 1e12)
        );
        // A label goes up until no other is near.
        let mut label = py + 4.0;
        while taken.iter().any(|(tx, ty)| (tx - px).abs() < 64.0 && (ty - label).abs() < 12.0) {
            label -= 12.0;
        }
        taken.push((px, label));
        let (anchor, offset) = if px > right - 70.0 { ("end", -8.0) } else { ("start", 8.0) };
        let _ = write!(
            inner,
            r#"<text class="value" x="{:.1}" y="{label:.1}" text-anchor="{anchor}">{}</text>"#,
            px + offset,
            escaped(&crate::prose::clip(&point.label, 14))
        );
    }
    figure(title, &[], height, &inner)
}

/// Which bank each lane of a phase goes to; lanes that wait for each other at the fullest are marked.
pub fn lanes_to_banks(title: &str, phase: &Phase) -> Markup {
    let (left, cell) = (44.0, (WIDTH - 52.0) / 32.0);
    let (top, bottom, height) = (20.0, 118.0, 142.0);
    let x = |index: u64| left + cell * (index as f64 + 0.5);
    let mut inner = String::new();
    let _ = write!(
        inner,
        r#"<text class="tick" x="2" y="{:.1}">lane</text><text class="tick" x="2" y="{:.1}">bank</text>"#,
        top + 4.0,
        bottom + 4.0
    );
    for index in 0..32 {
        if index % 4 == 0 {
            let at = x(index);
            let _ = write!(
                inner,
                r#"<text class="tick" x="{at:.1}" y="10" text-anchor="middle">{index}</text><text class="tick" x="{at:.1}" y="{:.1}" text-anchor="middle">{index}</text>"#,
                height - 4.0
            );
        }
        let full = if index == phase.fullest && phase.wavefronts > 1 { " full" } else { "" };
        let _ = write!(
            inner,
            r#"<rect class="bank{full}" x="{:.1}" y="{:.1}" width="{:.1}" height="10"/>"#,
            left + cell * index as f64 + 1.0,
            bottom - 5.0,
            cell - 2.0
        );
    }
    for (lane, bank) in phase.lanes.iter().zip(&phase.banks) {
        let hit = if phase.wavefronts > 1 && phase.colliding.contains(lane) { " hit" } else { "" };
        let (from, to) = (x(*lane as u64), x(*bank));
        let _ = write!(
            inner,
            r#"<line class="wire{hit}" x1="{from:.1}" x2="{to:.1}" y1="{top}" y2="{:.1}"/><circle class="lane{hit}" cx="{from:.1}" cy="{top}" r="4"/>"#,
            bottom - 5.0
        );
    }
    figure(title, &[], height, &inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers_around_all_values() {
        assert_eq!(ticks(143.9), [0.0, 50.0, 100.0, 150.0]);
        assert!(ticks(0.0).len() > 1);
        assert_eq!(decades([3.0, 450.0].into_iter()), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(decades([0.0].into_iter()), [1.0, 10.0]);
        assert_eq!([0.0, 0.25, 12.5, 29_700_000_000.0].map(short), ["0", "0.25", "12.5", "29.7G"]);
    }
}
