//! How often a model repeats its layers, and the same model with fewer of them.

use super::LlmSpec;

/// Some first layers as they come, then `turns` times the same `turn` layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    pub lead: u64,
    pub turn: u64,
    pub turns: u64,
}

/// Longer turns are not looked for: Nemotron-H's pattern has none, Gemma 3 and Jamba have turns of 6 and 8.
const LONGEST: u64 = 8;

impl Depth {
    /// Of the turns that a model can be read as, the one whose first few take the fewest layers.
    pub fn of(model: &LlmSpec) -> Depth {
        let kind = |l: u64| (model.pattern.get(l as usize), model.has_experts(l), model.window_of(l));
        let read = |turn: u64| {
            let differs = |l: &u64| kind(*l) != kind(*l + turn);
            let alike_from = (0..model.layers.saturating_sub(turn)).rev().find(differs).map_or(0, |l| l + 1);
            let turns = (model.layers - alike_from.min(model.layers)) / turn;
            Depth { lead: model.layers - turns * turn, turn, turns }
        };
        (1..=LONGEST).map(read).min_by_key(|depth| depth.lead + 2 * depth.turn).expect("turns of one layer at least")
    }

    pub fn layers(&self, turns: u64) -> u64 {
        self.lead + turns * self.turn
    }
}

impl LlmSpec {
    /// The first so many layers of the model, with all that stands before and behind them.
    pub fn shortened(&self, layers: u64) -> LlmSpec {
        let first = layers as usize;
        LlmSpec {
            layers,
            windowed: self.windowed.iter().take(first).copied().collect(),
            pattern: self.pattern.iter().take(first).copied().collect(),
            dense_at: self.dense_at.iter().filter(|l| **l < layers).copied().collect(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_read_as_their_turns() {
        let of = |name: &str| {
            let Depth { lead, turn, turns } = Depth::of(&LlmSpec::find(name).unwrap());
            (lead, turn, turns)
        };
        assert_eq!(of("llama-3-8b"), (0, 1, 32));
        assert_eq!(of("qwen3-235b-a22b"), (0, 1, 94));
        assert_eq!(of("deepseek-v3"), (3, 1, 58));
        assert_eq!(of("gpt-oss-120b"), (0, 2, 18));
    }

    /// Weights are linear in turns whatever the layers are, since turns are alike.
    #[test]
    fn every_turn_adds_the_same_weights() {
        for name in crate::spec::shipped("llm") {
            let model = LlmSpec::find(name).unwrap();
            let depth = Depth::of(&model);
            assert_eq!(depth.layers(depth.turns), model.layers, "{name}");
            assert_eq!(model.shortened(model.layers), model, "{name}");
            let params = |turns: u64| model.shortened(depth.layers(turns)).params();
            if depth.turns > 2 {
                let each = params(2) - params(1);
                assert_eq!(params(1) + (depth.turns - 1) * each, model.params(), "{name}");
            }
        }
    }
}
