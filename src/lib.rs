pub mod error;
pub mod exec;
pub mod plan;
