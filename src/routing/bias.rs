//! Balancing without an auxiliary loss: a bias that goes up where an expert has too little to do.

/// One update by `rate` (DeepSeek-V3: 0.001) from the loads of a step: by the sign of what is missing, not its size.
pub fn update(bias: &mut [f64], loads: &[u64], rate: f64) {
    let mean = loads.iter().sum::<u64>() as f64 / loads.len().max(1) as f64;
    for (b, load) in bias.iter_mut().zip(loads) {
        let missing = mean - *load as f64;
        *b += if missing == 0.0 { 0.0 } else { rate * missing.signum() };
    }
}
