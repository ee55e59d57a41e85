//! Tables as others have published them, one number or one row of them a case: logs of collectives, libraries of exchanges with
//! what else they measured (products, training runs), and tables of operators.

pub mod collectives;
pub mod exchanges;
pub mod libraries;
mod runs;
