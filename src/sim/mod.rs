//! The discrete-event interpreter: what shares a link, who waits for whom, and what a slow or dead part costs.

pub mod share;
