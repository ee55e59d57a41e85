//! Ctrl-C: asked once, a command stops at the next good place and leaves what it has; asked twice, it ends at once.
//! Commands that write every row as it is done need none of it.

use crate::error::{Error, Result};
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a shell says of a program that Ctrl-C has ended.
const ENDED: i32 = 130;

#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes Ctrl-C from here on.
    pub fn watch() -> Result<Interrupt> {
        let asked = Arc::new(AtomicBool::new(false));
        // In this order the second Ctrl-C finds what the first has left.
        let hooked = flag::register_conditional_shutdown(SIGINT, ENDED, asked.clone())
            .and_then(|_| flag::register(SIGINT, asked.clone()));
        hooked.map_err(|e| Error::device("signals", e))?;
        Ok(Interrupt(asked))
    }

    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
