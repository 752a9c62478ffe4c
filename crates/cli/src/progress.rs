//! A bar on the terminal; nothing where standard error is none.

use indicatif::{ProgressBar, ProgressStyle};

/// What is done of what there is to do.
pub struct Progress(ProgressBar);

impl Progress {
    /// Counts this: CTAs, say.
    pub fn new(unit: &str) -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) =
            ProgressStyle::with_template(&format!("{{msg:8}} {{bar:40}} {{pos}}/{{len}} {unit}, {{elapsed}}"))
        {
            bar.set_style(style);
        }
        Self(bar)
    }

    pub fn begin(&self, what: &str) {
        self.0.set_message(what.to_owned());
        self.show(0, 1);
    }

    pub fn show(&self, done: u64, of: u64) {
        self.0.set_length(of);
        self.0.set_position(done);
    }

    pub fn end(&self) {
        self.0.finish_and_clear();
    }
}
