//! Which model: its sizes as stated, of its name, or of the number of its weights.
//!
//! A row with a name and no sizes gets those that go with the name ([`known`]); [`sizes`] makes a model of them, a shipped one or a
//! shape that is about as large; of a mixture, experts and their ranks are in [`mixture`].

pub mod known;
pub mod mixture;
pub mod sizes;
