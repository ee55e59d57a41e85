//! Timelines in the formats of others.
