//! How reports are set: columns, wrapping, colour.

use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use lab::{Finding, Place, Severity, Sources};

/// Columns that prose is wrapped to and tables are kept within.
pub const WIDTH: usize = 100;

/// Whether colours mark headings and severities.
#[derive(Clone, Copy)]
pub struct Style {
    pub color: bool,
}

impl Style {
    pub fn heading(self, text: &str) -> String {
        console::style(text).bold().force_styling(self.color).to_string()
    }

    pub fn warning(self, text: &str) -> String {
        console::style(text).yellow().force_styling(self.color).to_string()
    }

    pub fn note(self, text: &str) -> String {
        console::style(text).cyan().force_styling(self.color).to_string()
    }
}

/// A table with a line under its header.
pub fn table(header: impl IntoIterator<Item = &'static str>) -> Table {
    let mut table = Table::new();
    let style = TableStyle::new().header_separator(LineStyle::none().fill('─'));
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH as u16);
    table.set_header(header.into_iter().collect::<Vec<_>>());
    table
}

/// A table as text, the columns of `right` aligned to the right.
pub fn set(mut table: Table, right: std::ops::Range<usize>) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    for column in right {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Each finding as a paragraph, with the source line that causes it.
pub fn findings(out: &mut String, findings: &[Finding], style: Style, sources: &mut Sources) {
    if findings.is_empty() {
        paragraph(out, "  ", "Nothing passes a threshold.");
    }
    for finding in findings {
        let mark = match finding.severity {
            Severity::Warning => style.warning(&finding.id),
            Severity::Note => style.note(&finding.id),
        };
        wrapped(out, "  * ", "    ", &format!("{mark}: {}", finding.text));
        if let (Some(file), Some(line)) = (&finding.file, finding.line) {
            let place = Place { file: file.clone(), line };
            let _ = match sources.line(&place) {
                Some(text) => writeln!(out, "      {}", clip(&format!("{file}:{line}: {text}"), WIDTH - 6)),
                None => writeln!(out, "      {file}:{line}"),
            };
        }
    }
}

/// The beginning of a text that is too long.
pub fn clip(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_string();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Wraps text.
pub fn paragraph(out: &mut String, indent: &str, text: &str) {
    wrapped(out, indent, indent, text);
}

/// Wraps text; a number keeps its unit.
pub fn wrapped(out: &mut String, first: &str, others: &str, text: &str) {
    const NO_BREAK: &str = "\u{a0}";
    let mut text = text.to_string();
    for unit in ["%", "ms", "us", "B", "KB", "MB", "GB", "TB", "MiB"] {
        for end in [" ", ",", ".", ":", ";", ")"] {
            text = text.replace(&format!(" {unit}{end}"), &format!("{NO_BREAK}{unit}{end}"));
        }
    }
    let options = textwrap::Options::new(WIDTH)
        .initial_indent(first)
        .subsequent_indent(others)
        .word_splitter(textwrap::WordSplitter::NoHyphenation);
    out.push_str(&textwrap::fill(&text, options).replace(NO_BREAK, " "));
    out.push('\n');
}
