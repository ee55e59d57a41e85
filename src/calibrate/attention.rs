//! Whose kernels do attention while a GPU is measured: a library's where it is right and faster, else our own.

use super::gpu::Job;
use crate::device::measured::AttentionBy;
use crate::error::{Error, Result};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::fused::{Attention, OWN, said};
use crate::exec::cuda::selftest::{cases, check, speed};

/// The layer that decides: both passes of it.
const LAYER: [&str; 2] = ["attention forward causal 16384 d128", "attention backward causal 16384 d128"];
const TIMES: usize = 15;

/// Leaves attention to whom the job says, or to the better of the two, and says how fast each was. Errors: a library is asked
/// for, and is not there or is wrong.
pub fn choose<D: Device>(device: &mut D, job: &Job) -> Result<AttentionBy> {
    device.leave_attention(Attention::Own)?;
    let timed = !job.effort.tiny;
    let own = if timed { Some(rates(device)?) } else { None };
    let by_own = |why| AttentionBy { by: OWN.into(), own_flops_per_s: own, library_flops_per_s: None, why };
    if job.attention == Attention::Own {
        return Ok(by_own(None));
    }
    device.leave_attention(job.attention)?;
    let Some(library) = device.fused() else { return Ok(by_own(None)) };
    let name = said(Some(&*library));
    if let Some(wrong) = wrong(device)? {
        let why = format!("{name} is wrong: {wrong}");
        if job.attention == Attention::Cudnn {
            return Err(Error::device("attention", why));
        }
        device.leave_attention(Attention::Own)?;
        return Ok(by_own(Some(why)));
    }
    let theirs = if timed { Some(rates(device)?) } else { None };
    // A backward pass has two and a half times the work of a forward one.
    let seconds = |[forward, backward]: [f64; 2]| 1.0 / forward + 2.5 / backward;
    let slower = own.zip(theirs).is_some_and(|(own, theirs)| seconds(theirs) > seconds(own));
    if slower && job.attention == Attention::Best {
        device.leave_attention(Attention::Own)?;
        return Ok(AttentionBy { library_flops_per_s: theirs, ..by_own(Some(format!("{name} is slower"))) });
    }
    Ok(AttentionBy { by: name, own_flops_per_s: own, library_flops_per_s: theirs, why: None })
}

/// The first of some blocks of attention that is not the CPU's.
fn wrong<D: Device>(device: &mut D) -> Result<Option<String>> {
    let verdicts: Vec<_> =
        cases::of_group("attention_head_dims").iter().flat_map(|case| check(device, case, 1)).collect();
    device.clear()?;
    Ok(verdicts.into_iter().find_map(|verdict| verdict.wrong))
}

/// Floating-point operations a second of both passes, the mask's half not counted.
fn rates<D: Device>(device: &mut D) -> Result<[f64; 2]> {
    let all = speed::all();
    let mut rates = [0.0; 2];
    for (rate, name) in rates.iter_mut().zip(LAYER) {
        let timed = all.iter().find(|timed| timed.name == name).expect("among those that are timed");
        *rate = speed::time(device, timed, TIMES)?.flops_per_s;
        device.clear()?;
    }
    Ok(rates)
}
