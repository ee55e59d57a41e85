//! cuDNN's fused attention, by its backend's functions: the library is looked for where the program runs, and what it
//! takes is asked of itself.
//!
//! On an H100 and an H200 with cuDNN 9.14 every group of `selftest` that it takes is right; with 9.19 attention's gradients
//! are, and nothing else was tried. What 9.19 says without a GPU, told of the properties of an H100 and others: every graph
//! of `attention` has engines, their kernels compile, and so much memory they work in (`tests/cudnn.rs`). What the graphs
//! mean is held to the CPU's kernels by a library that stands for cuDNN and does what a graph says, operation by operation
//! (`tests/cuda_ffi.rs`).

mod api;
mod attention;
mod graph;
mod names;

use super::fused::{Attention, Fused, Pass, Sdpa};
use crate::error::{Error, Result};
use api::{Api, Descriptor, Failed, Handle, Value};
use graph::{Bound, Whole};
use names::{attribute, kind};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::Rc;

/// The library, a kind of GPU, and plans for its shapes.
#[derive(Debug)]
pub struct Cudnn {
    api: Rc<Api>,
    /// The properties of the GPU that plans are for.
    device: Descriptor,
    plans: RefCell<FxHashMap<Sdpa, Option<Rc<Plan>>>>,
    /// Whether a shape that it does not take is an error.
    strict: bool,
}

/// The oldest version with descriptions of devices (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).
const OLDEST: usize = 90_800;

/// Versions whose backward passes are known to be wrong (cudnn-frontend says so, and refuses them).
const WRONG_BACKWARD: [usize; 2] = [91_000, 91_001];

impl Cudnn {
    /// Whether attention is to be done by cuDNN on this machine. Errors: it is asked for and is not here, or is too old.
    pub fn is_here(attention: Attention) -> Result<bool> {
        match attention {
            Attention::Own => Ok(false),
            Attention::Cudnn => recent().map(|_| true),
            Attention::Best => Ok(recent().is_ok()),
        }
    }

    /// cuDNN for the GPU of this thread's context. Errors: it is not on this machine, is too old, or cannot begin.
    pub fn new(strict: bool) -> Result<Cudnn> {
        let api = recent()?;
        let handle = Handle::new(&api)?;
        Cudnn::of(api, Value::Handle(&handle), attribute::DEVICE_HANDLE, strict)
    }

    /// cuDNN for a GPU that need not be there, by the properties that cuDNN writes of one, in JSON: a shape that has no
    /// plan here has none on such a GPU. Nothing can be executed.
    pub fn without_gpu(properties: &str, strict: bool) -> Result<Cudnn> {
        Cudnn::of(recent()?, Value::Text(properties.as_bytes()), attribute::DEVICE_JSON, strict)
    }

    fn of(api: Rc<Api>, by: Value, attribute: i32, strict: bool) -> Result<Cudnn> {
        let device = Descriptor::new(&api, kind::DEVICE).and_then(|device| {
            device.set(attribute, by)?;
            device.finish("a GPU's properties")
        });
        let device = device.map_err(Failed::error)?;
        Ok(Cudnn { api, device, plans: RefCell::default(), strict })
    }

    /// The seat that executes plans on the GPU of this thread's context.
    pub fn seat(&self) -> Result<Seat> {
        Ok(Seat(Handle::new(&self.api)?))
    }

    fn plan(&self, sdpa: &Sdpa) -> Result<Option<Rc<Plan>>> {
        if let Some(known) = self.plans.borrow().get(sdpa) {
            return Ok(known.clone());
        }
        let made = match self.planned(sdpa) {
            Ok(plan) => Some(Rc::new(plan)),
            Err(failed) if failed.is_unsupported() && !self.strict => None,
            Err(failed) => {
                let why = format!("{}, on {sdpa:?}; --attention own does without", failed.error());
                return Err(Error::device("attention", why));
            }
        };
        self.plans.borrow_mut().insert(sdpa.clone(), made.clone());
        Ok(made)
    }

    /// The first plan that the library proposes and can finish.
    fn planned(&self, sdpa: &Sdpa) -> std::result::Result<Plan, Failed> {
        let whole = attention::graph(&self.api, sdpa)?;
        let asked = Descriptor::new(&self.api, kind::HEURISTICS)?;
        asked.set(attribute::HEURISTICS_GRAPH, Value::Of(&whole.graph))?;
        asked.set(attribute::HEURISTICS_MODE, Value::Mode(names::of::HEURISTICS_MODE, names::BY_MODEL))?;
        asked.set(attribute::HEURISTICS_DEVICE, Value::Of(&self.device))?;
        let asked = asked.finish("heuristics")?;
        let configs = asked.descriptors(attribute::HEURISTICS_RESULTS, kind::ENGINE_CONFIG, PROPOSALS)?;
        let mut last = Failed::unsupported(format!("no engine of {:?} takes it", self.api));
        for config in configs {
            match self.finished(&config) {
                Ok((plan, workspace)) => return Ok(Plan { plan, whole, workspace }),
                Err(failed) => last = failed,
            }
        }
        Err(last)
    }

    fn finished(&self, config: &Descriptor) -> std::result::Result<(Descriptor, u64), Failed> {
        let plan = Descriptor::new(&self.api, kind::PLAN)?;
        plan.set(attribute::PLAN_CONFIG, Value::Of(config))?;
        plan.set(attribute::PLAN_DEVICE, Value::Of(&self.device))?;
        let plan = plan.finish("a plan")?;
        let workspace = plan.int(attribute::PLAN_WORKSPACE)?;
        Ok((plan, workspace.max(0) as u64))
    }
}

/// Plans that the library is asked to propose, of which the first that works is taken.
const PROPOSALS: usize = 4;

impl Fused for Cudnn {
    fn name(&self) -> String {
        format!("{:?}", self.api)
    }

    fn workspace(&self, sdpa: &Sdpa) -> Result<Option<u64>> {
        if sdpa.pass == Pass::Backward && WRONG_BACKWARD.contains(&self.api.version()) {
            return Ok(None);
        }
        Ok(self.plan(sdpa)?.map(|plan| plan.workspace))
    }
}

/// A plan of the library, which can be executed, with the graph that it came from.
#[derive(Debug)]
struct Plan {
    plan: Descriptor,
    whole: Whole,
    workspace: u64,
}

/// A GPU's place in the library.
#[derive(Debug)]
pub struct Seat(Handle);

impl Seat {
    /// One pass on a stream of the seat's GPU, which has a plan: the addresses of its operands, in the order of [`Pass`], and
    /// of the memory that it works in.
    ///
    /// # Safety
    /// The stream is live, and operands and workspace lie in live allocations.
    #[allow(unsafe_code)]
    pub unsafe fn run(&self, by: &Cudnn, sdpa: &Sdpa, at: &[u64], workspace: u64, stream: *mut c_void) -> Result<()> {
        let plan = by.plan(sdpa)?.ok_or_else(|| Error::device("attention", format!("{sdpa:?} has no plan")))?;
        let mut next = at.iter();
        let (mut ids, mut pointers) = (vec![], vec![]);
        for (id, bound) in &plan.whole.bound {
            ids.push(*id);
            pointers.push(match bound {
                Bound::Operand => *next.next().expect("an address for every operand"),
                Bound::Scalar(bytes) => bytes.as_ptr() as u64,
            });
        }
        assert!(next.next().is_none(), "{} addresses for the operands of {sdpa:?}", at.len());
        let pack = Descriptor::new(&by.api, kind::VARIANT_PACK).and_then(|pack| {
            pack.set(attribute::PACK_IDS, Value::Ints(&ids))?;
            pack.set(attribute::PACK_POINTERS, Value::Addresses(&pointers))?;
            pack.set(attribute::PACK_WORKSPACE, Value::Addresses(&[workspace]))?;
            pack.finish("addresses")
        });
        let pack = pack.map_err(Failed::error)?;
        // SAFETY: as the caller says; scalars are the plan's own, and read before the call returns.
        unsafe { self.0.execute(&plan.plan, &pack, stream) }
    }
}

/// The library. Errors: there is no cuDNN, or none with descriptions of devices.
fn recent() -> Result<Rc<Api>> {
    let api = Api::load()?;
    if api.version() < OLDEST {
        let why =
            format!("{api:?} is on this machine, and 9.8 is wanted; install a newer one, or give --attention own");
        return Err(Error::device("cudnn", why));
    }
    Ok(api)
}
