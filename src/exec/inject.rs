//! Faults on purpose, to see that a run ends with their names and does not hang.

use crate::error::{Error, Result};
use crate::plan::Plan;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The first message that the rank sends is gone.
    LostMessage,
    /// Half way through its program the rank falls silent: it neither ends nor says anything.
    DeadRank,
    /// Half way through its program the rank panics.
    Panic,
    /// The rank comes with another plan than the others.
    OtherPlan,
    /// The rank starts no message and no collective before its peers have ended theirs, as a plan with a cycle has it.
    Deadlock,
}

impl Fault {
    const ALL: [(&'static str, Fault); 5] = [
        ("lost-message", Fault::LostMessage),
        ("dead-rank", Fault::DeadRank),
        ("panic", Fault::Panic),
        ("other-plan", Fault::OtherPlan),
        ("deadlock", Fault::Deadlock),
    ];

    fn name(self) -> &'static str {
        Fault::ALL.iter().find(|(_, fault)| *fault == self).map_or("", |(name, _)| name)
    }
}

/// A fault of one rank, in the last step of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injection {
    pub fault: Fault,
    pub rank: u32,
}

impl Injection {
    pub fn is(&self, fault: Fault, rank: u32) -> bool {
        (self.fault, self.rank) == (fault, rank)
    }

    /// Errors: a fault that cannot happen to a plan, which has no such rank, or one rank alone and no peers.
    pub fn check(&self, plan: &Plan) -> Result<()> {
        let (ranks, name) = (plan.ranks(), self.fault.name());
        let wrong = |why: String| Err(Error::spec("the command line", "--inject", why));
        if self.rank >= ranks {
            return wrong(format!("{name}:{}: the plan has ranks 0 to {}", self.rank, ranks - 1));
        }
        if ranks == 1 && self.fault != Fault::Panic {
            return wrong(format!("{name}: one rank has no peers that could notice; share the plan, as with --ring 2"));
        }
        Ok(())
    }
}

impl FromStr for Injection {
    type Err = String;

    /// A fault and the rank that has it, 0 where none is named.
    fn from_str(text: &str) -> std::result::Result<Injection, String> {
        let names: Vec<&str> = Fault::ALL.iter().map(|(name, _)| *name).collect();
        let (name, rank) = text.split_once(':').unwrap_or((text, "0"));
        let fault = Fault::ALL.iter().find(|(known, _)| *known == name).map(|(_, fault)| *fault);
        let fault = fault.ok_or_else(|| format!("`{name}` is none of {}", names.join(", ")))?;
        let rank = rank.parse().map_err(|_| format!("`{rank}` is no rank; write {name}:1"))?;
        Ok(Injection { fault, rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_by_name_and_rank() {
        assert_eq!("dead-rank:3".parse(), Ok(Injection { fault: Fault::DeadRank, rank: 3 }));
        assert_eq!("deadlock".parse(), Ok(Injection { fault: Fault::Deadlock, rank: 0 }));
        assert!("flood".parse::<Injection>().unwrap_err().contains("lost-message, dead-rank"));
        assert!("panic:x".parse::<Injection>().unwrap_err().contains("panic:1"));
    }
}
