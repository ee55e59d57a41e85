//! joined timelines
