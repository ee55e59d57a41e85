//! The ports of a rank, as bits.

use crate::cluster::Tier;

/// The ports of a bit set, by number.
pub fn numbers(ports: u8) -> impl Iterator<Item = usize> {
    // Most sets have one port: to look for the next bit takes less time than to look at each.
    let mut left = ports & ((1 << PORTS) - 1);
    std::iter::from_fn(move || {
        let next = (left != 0).then_some(left.trailing_zeros() as usize);
        left &= left.wrapping_sub(1);
        next
    })
}

/// Ports of a rank: send and receive inside the node, then send and receive out of it.
pub const PORTS: usize = 4;
/// The first port out of the node.
pub const SCALE_OUT: usize = 2;
pub const SEND: u8 = 1;
pub const RECV: u8 = 2;

/// The ports for the bits `ways` (send, receive) of a link of `tier`; 0 where nothing leaves the device.
pub fn port(tier: Tier, ways: u8) -> u8 {
    match tier {
        Tier::Local => 0,
        Tier::ScaleUp => ways,
        Tier::ScaleOut => ways << 2,
    }
}
