pub mod error;
pub mod plan;
pub mod plot;
