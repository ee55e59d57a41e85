//! Hugging Face weights in, and what a step brought out again under the same names: whatever the layout, the file is
//! the dense reference's.

mod families;
mod folder;
mod layouts;
mod reading;
mod training;
