//! Orders of a pipeline's microbatches, by the names that users have for them.

use super::{Fold, Options, Parallelism};
use serde::Serialize;

/// In which order a pipeline's stages take their microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    #[serde(rename = "1f1b")]
    OneF1B,
    Interleaved,
    ZbH1,
    ZbV,
    VHalf,
    VMin,
    DualpipeV,
}

impl Schedule {
    pub const ALL: [Schedule; 7] = [
        Schedule::OneF1B,
        Schedule::Interleaved,
        Schedule::ZbH1,
        Schedule::ZbV,
        Schedule::VHalf,
        Schedule::VMin,
        Schedule::DualpipeV,
    ];

    /// As the flag has it.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::OneF1B => "1f1b",
            Schedule::Interleaved => "interleaved",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbV => "zb-v",
            Schedule::VHalf => "v-half",
            Schedule::VMin => "v-min",
            Schedule::DualpipeV => "dualpipe-v",
        }
    }

    /// The schedule of a way; none where there is no pipeline.
    pub fn of(par: &Parallelism) -> Option<Schedule> {
        match (par.pp, par.options.fold) {
            (1, _) => None,
            (_, Fold::DualPipe) => Some(Schedule::DualpipeV),
            (_, Fold::ZeroBubble) => Some(Schedule::ZbV),
            (_, Fold::Half) => Some(Schedule::VHalf),
            (_, Fold::Min) => Some(Schedule::VMin),
            _ if par.options.zb_h1 => Some(Schedule::ZbH1),
            _ if par.vp > 1 => Some(Schedule::Interleaved),
            _ => Some(Schedule::OneF1B),
        }
    }

    /// The schedule that words of options name; none where they leave it open.
    pub fn named(options: &Options) -> Option<Schedule> {
        let par = Parallelism { pp: 2, vp: 1, options: *options, ..Parallelism::default() };
        Schedule::of(&par).filter(|schedule| *schedule != Schedule::OneF1B)
    }

    /// What tables and pictures call that.
    pub fn name_of(par: &Parallelism) -> &'static str {
        Schedule::of(par).map_or("no pipeline", Schedule::name)
    }

    /// The way with this schedule; `vp` is for interleaved ones.
    pub fn on(self, par: Parallelism, vp: u32) -> Parallelism {
        let fold = match self {
            Schedule::DualpipeV => Fold::DualPipe,
            Schedule::ZbV => Fold::ZeroBubble,
            Schedule::VHalf => Fold::Half,
            Schedule::VMin => Fold::Min,
            _ => par.options.fold,
        };
        let vp = match self {
            Schedule::Interleaved => vp,
            _ if fold != Fold::None => 2,
            _ => 1,
        };
        let zb_h1 = par.options.zb_h1 || self == Schedule::ZbH1;
        Parallelism { vp, options: Options { fold, zb_h1, ..par.options }, ..par }
    }
}
