//! Waits for a shared device, and hands it on: whose turn it is stands in [`Turns`].

use super::transport::Hub;
pub use crate::plan::turns::Turns;

pub fn is_mine(turns: &Turns, hub: &Hub, rank: u32, node: u32) -> bool {
    turns.of(rank, node).is_none_or(|(device, turn)| hub.turn(device) == turn)
}

pub fn end(turns: &Turns, hub: &Hub, rank: u32, node: u32) {
    if let Some((device, turn)) = turns.of(rank, node) {
        hub.end_turn(device, turns.rank(device, turn + 1));
    }
}
