//! What other programs have written.

pub mod nccl_tests;
