//! A run through which links flap: steps one after another, each of which begins where in the turns of the links the last ended.
//! A step by itself begins with all links up, and may be over before any goes down.

use super::Fault;
use crate::error::Result;

/// Steps that a time of a link being down falls into, or that begin in one.
const PLAYED: usize = 8;

/// The mean time of a step of such a run, s. `play`: that of one step with these faults, s, `None` if it is never over. `None`: no
/// link flaps, a step is never over, or a fault begins or ends within the step, which would befall every step of the run.
pub fn step_of_a_run(faults: &[Fault], mut play: impl FnMut(&[Fault]) -> Result<Option<f64>>) -> Result<Option<f64>> {
    let flaps = |fault: &&Fault| matches!(fault, Fault::Flapping { .. });
    if faults.iter().any(Fault::is_for_a_time) || !faults.iter().any(|fault| flaps(&fault)) {
        return Ok(None);
    }
    let steady: Vec<Fault> = faults.iter().filter(|fault| !flaps(fault)).cloned().collect();
    let Some(well) = play(&steady)?.filter(|step| *step > 0.0) else { return Ok(None) };
    let (mut at, mut steps) = (0.0, 0.0);
    let mut felt: Vec<(f64, f64)> = vec![];
    for _ in 0..PLAYED {
        let now: Vec<Fault> = faults.iter().map(|fault| fault.later(at)).collect();
        let up = now.iter().filter(flaps).map(Fault::begins_s).fold(f64::INFINITY, f64::min);
        // Steps that are over before a link goes down are like those of links that do not.
        let undisturbed = (up / well).floor();
        at += undisturbed * well;
        let now: Vec<Fault> = faults.iter().map(|fault| fault.later(at)).collect();
        let Some(step) = play(&now)? else { return Ok(None) };
        at += step;
        steps += undisturbed + 1.0;
        if step > well * (1.0 + 1e-9) {
            felt.push((at, steps));
        }
    }
    // From the end of one step that is longer to that of another: whole turns, as a long run has.
    Ok(Some(match (felt.first(), felt.last()) {
        (Some(first), Some(last)) if last.1 > first.1 => (last.0 - first.0) / (last.1 - first.1),
        _ => at / steps,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of 2 s that needs the link for all of it, while the link is down for 3 s of 13: by hand, five steps in ten seconds
    /// and then three seconds of nothing, which the sixth waits for.
    #[test]
    fn a_run_has_steps_that_its_first_step_does_not_show() {
        let faults = [Fault::flapping("0:10:3").unwrap()];
        let played = |faults: &[Fault]| {
            let [Fault::Flapping { up_s, down_s, over_s, .. }] = faults else { return Ok(Some(2.0)) };
            let (mut left, mut at, dt) = (2.0, *over_s, 1e-3);
            let begun = at;
            while left > 1e-9 {
                left -= if at % (up_s + down_s) < *up_s { dt } else { 0.0 };
                at += dt;
            }
            Ok(Some(at - begun))
        };
        let mean = step_of_a_run(&faults, played).unwrap().unwrap();
        assert!((mean - 2.6).abs() < 0.02, "{mean}");
    }

    /// A fault of a time would befall each step of a run, and a run without flaps is as its step.
    #[test]
    fn a_run_is_not_asked_of_where_a_step_says_all_or_too_much() {
        let of = |faults: &[Fault]| step_of_a_run(faults, |_| Ok(Some(1.0))).unwrap();
        let flap = Fault::flapping("0:10:3").unwrap();
        assert_eq!(of(&[Fault::slow_gpu("0:1.5").unwrap()]), None);
        assert_eq!(of(&[flap.clone(), Fault::dead_plane("0@0.3").unwrap()]), None);
        assert!(of(&[flap.clone(), Fault::slow_gpu("0:1.5").unwrap()]).is_some());
        assert_eq!(step_of_a_run(&[flap], |_| Ok(None)).unwrap(), None);
    }
}
