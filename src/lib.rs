pub mod cluster;
pub mod collective;
pub mod device;
pub mod error;
pub mod exec;
pub mod plan;
pub mod spec;
pub mod units;
