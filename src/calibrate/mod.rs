//! From measurements to the numbers that predictions rest on.

pub mod links;
