//! Which software: what the name of a system means, and what that system did by default at its time.
//!
//! What is known of each system by the words of its name ([`system`], [`release`]) is in one [`table`]. It decides about attention
//! kernels and habits ([`habits`], [`sdpa`], [`loss`]), about recipes where the system has public ones ([`recipe`]), about the optimizer
//! ([`adam`]), and of a model's card about all that the makers have reported ([`reports`]). The shipped stack with that kernel
//! ([`stacks`]) is made what it was when the run was ([`era`]).

pub mod adam;
pub mod era;
pub mod habits;
pub mod loss;
pub mod recipe;
pub mod release;
pub mod reports;
pub mod sdpa;
pub mod stacks;
pub mod system;
pub mod table;
