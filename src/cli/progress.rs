//! What long work shows while it goes on: on stderr, and nothing where that is no terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::borrow::Cow;
use std::time::Duration;

const TICK: Duration = Duration::from_millis(200);

/// A bar of `len` steps; `template` as indicatif has it, `{pos}/{len} rows, {eta} left` behind the bar itself.
pub fn bar(len: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{{bar:40}} {template}"));
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Says what is done, and for how long, where nobody knows how long it will take; until it is dropped.
pub struct Clock(ProgressBar);

impl Clock {
    pub fn start(what: impl Into<Cow<'static, str>>) -> Clock {
        let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}");
        let spinner = ProgressBar::new_spinner().with_message(what);
        let spinner = spinner.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        spinner.enable_steady_tick(TICK);
        Clock(spinner)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
