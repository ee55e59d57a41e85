pub mod error;
pub mod plan;
