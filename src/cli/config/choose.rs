//! From flags, or a plan, to what is computed and on what.

use super::{Config, Defaults};
use crate::cli::chosen::Chosen;
use crate::cli::fitting::fitting;
use crate::cli::flags::value::dtype;
use crate::device::Profile;
use crate::error::{Cause, Error, Result};
use crate::plan::{Plan, Route};
use crate::spec::{Architecture, ClusterSpec, GpuSpec, Parallelism, Recompute};
use crate::sweep::{Case, Point, Said, usual_batch};
use std::path::Path;

impl Config {
    /// From the flags, or from a plan file that no flag may contradict.
    pub fn choose(&self, file: Option<&Path>, defaults: Defaults) -> Result<Chosen> {
        match file {
            Some(file) => self.by_plan(file, defaults),
            None => self.by_flags(defaults),
        }
    }

    /// Only the plan, whatever machine it is for; and, if a router's log is read more than once, a sentence that says so.
    pub fn plan(&self, file: Option<&Path>, defaults: Defaults) -> Result<(Plan, Option<String>)> {
        let Some(file) = file else {
            let chosen = self.by_flags(defaults)?;
            return Ok((chosen.plan()?, chosen.repeated()));
        };
        Ok((self.load(file)?, None))
    }

    /// The plan of the flags with routes for every layer.
    pub fn plan_by_layer(&self, routes: Vec<Route>, defaults: Defaults) -> Result<Plan> {
        let chosen = self.by_flags(defaults)?;
        chosen.case.plan_by_layer(&chosen.point, routes)
    }

    fn load(&self, file: &Path) -> Result<Plan> {
        let plan = Plan::load(file)?;
        self.agrees(&plan, file)?;
        Ok(plan)
    }

    fn by_flags(&self, defaults: Defaults) -> Result<Chosen> {
        let model_name = self.model.as_deref().unwrap_or(defaults.model);
        let mut model = self.mtp.trained(model_name)?;
        if let Some(dropout) = self.dropout {
            model.dropout = dropout;
        }
        let cluster_name = self.cluster.as_deref().unwrap_or(defaults.cluster);
        let cluster = ClusterSpec::find(cluster_name)?;
        let gpu = GpuSpec::find(&cluster.gpu)?;
        let [ulysses, ring, tp, pp] = [self.ulysses, self.ring, self.tp, self.pp].map(|d| d.unwrap_or(1));
        let gpus = self.gpus_of(&cluster, &gpu, defaults)?;
        let split = [ulysses, ring, tp, pp].iter().fold(1u64, |n, &d| n.saturating_mul(u64::from(d)));
        let dp = self.dp.unwrap_or((u64::from(gpus) / split.max(1)).max(1) as u32);
        let micro_batch = self.micro_batch.unwrap_or(1);
        let point = Point {
            seq_len: self.seq_len.unwrap_or(match &model.name[..] {
                "tiny" => 128,
                "small" => 512,
                _ => 8192,
            }),
            global_batch: self.global_batch.unwrap_or_else(|| usual_batch(dp, micro_batch)),
            micro_batch,
            par: Parallelism {
                dp,
                pp,
                vp: self.vp.unwrap_or(1),
                ring,
                ulysses,
                tp,
                ep: self.ep.unwrap_or(1),
                zero: self.zero.unwrap_or(1),
                recompute: self.recompute.unwrap_or(Recompute::None),
                options: self.all_options(),
            },
        };
        self.mixture.check(&model, &self.implementation.options.unwrap_or_default())?;
        let mut case = Case::new(model, cluster_name, self.stack.on(&gpu), gpus, self.precision.dtype)?;
        case.documents = self.packing.documents.clone().unwrap_or_default();
        self.measured(&mut case, defaults)?;
        case.routing = self.mixture.routing.clone().unwrap_or_else(|| (defaults.routing)());
        let mut point = point;
        if self.mixture.shadows_by_rule() {
            point.par.options.shadow = case.shadows(&point)?;
        }
        let fits = !defaults.at_hand && !self.says_split() && gpu.architecture != Architecture::Cpu;
        let taken = if fits { fitting(&case, &point, self.global_batch)? } else { None };
        let (point, taken) = taken.map_or((point, None), |taken| (taken.point, Some(taken.note)));
        Ok(Chosen {
            case,
            point,
            loaded: None,
            taken,
            said: Said { batch: self.global_batch.is_some(), dp: self.dp.is_some() },
        })
    }

    /// Nobody means all cores of a machine by default; a cluster is used whole.
    fn gpus_of(&self, cluster: &ClusterSpec, gpu: &GpuSpec, defaults: Defaults) -> Result<u32> {
        if let Some(gpus) = self.gpus {
            return Ok(gpus);
        }
        if self.dp.is_none() && gpu.architecture != Architecture::Cpu && !defaults.at_hand {
            return Ok(cluster.nodes.saturating_mul(cluster.gpus_per_node));
        }
        let degrees = [self.dp, self.ulysses, self.ring, self.tp, self.pp].map(|d| d.unwrap_or(1));
        let gpus = degrees.iter().try_fold(1u32, |n, &d| n.checked_mul(d));
        gpus.ok_or_else(|| {
            let said = format!("dp x ulysses x ring x tp x pp = {degrees:?} is more than any cluster has");
            Cause::Degrees.infeasible(said)
        })
    }

    fn by_plan(&self, file: &Path, defaults: Defaults) -> Result<Chosen> {
        let chosen = self.of_plan(self.load(file)?, defaults, &file.display().to_string())?;
        let unsaid = self.cluster.is_none() && !defaults.at_hand;
        let of = &chosen.case.cluster.spec.name;
        let taken = unsaid.then(|| format!("cluster: a plan names none, and no --cluster is given: taken is {of}"));
        Ok(Chosen { taken, ..chosen })
    }

    /// The machine by the flags, for a plan that was found in `file`.
    pub fn of_plan(&self, plan: Plan, defaults: Defaults, file: &str) -> Result<Chosen> {
        let cluster = self.cluster.as_deref().unwrap_or(defaults.cluster);
        let gpu = GpuSpec::find(&ClusterSpec::find(cluster)?.gpu)?;
        let dtype = dtype(&plan.about.dtype).map_err(|why| Error::spec(file, "about.dtype", why))?;
        let mut case = Case::new(plan.model()?.clone(), cluster, self.stack.on(&gpu), plan.ranks(), Some(dtype))?;
        case.documents = plan.about.documents.clone();
        case.can_run(&plan.about.par)?;
        case.aside(&plan)?;
        self.measured(&mut case, defaults)?;
        Ok(Chosen { case, point: Point::of_plan(&plan.about), loaded: Some(plan), taken: None, said: Said::default() })
    }

    /// Puts the profile's kernel times into a case, if they are those of its machine.
    fn measured(&self, case: &mut Case, defaults: Defaults) -> Result<()> {
        let Some(file) = &self.profile else { return Ok(()) };
        let profile = Profile::load(file)?;
        if (case.cluster.gpu.architecture != Architecture::Cpu) != profile.gpu.is_some() {
            let why = format!(
                "was measured on {}, but cluster {} has {}; leave the profile out, or choose {}",
                profile.machine.cpu,
                case.cluster.spec.name,
                case.cluster.gpu.name,
                if profile.gpu.is_some() { "a cluster of such GPUs" } else { "--cluster local-cpu" }
            );
            return Err(Error::spec(file.display(), "machine.cpu", why));
        }
        if !profile.dtypes().contains(&case.dtype.name()) {
            let why = format!(
                "have no {}, but {}; choose --dtype {}",
                case.dtype.name(),
                profile.dtypes().join(", "),
                profile.dtypes().first().unwrap_or(&"f32")
            );
            return Err(Error::spec(file.display(), "kernels", why));
        }
        // Who asks for a step of training means one of many; who runs a few here does not wait until a GPU is hot.
        case.profile = Some(if defaults.at_hand { profile.at_rest() } else { profile.under_load() });
        Ok(())
    }
}
