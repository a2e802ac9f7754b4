//! Magnitudes of an adapter (`use_dora`), and where the weights lie whose norms they start at.

use super::Plan;
use crate::error::{Error, PlanError, Result};
use merak_ckpt::{FactorName, FactorRole};
use merak_trace::Param;

/// The name of a magnitude; `None` for other parameters.
pub(crate) fn magnitude(param: &Param) -> Option<FactorName<'_>> {
    let name = FactorName::parse(&param.name)?;
    (name.role == FactorRole::Magnitude && param.beside.is_some()).then_some(name)
}

/// Checks that each stage has the weights of its magnitudes. A table that is gathered for its first
/// use can come from another stage as a value.
///
/// # Errors
/// [`PlanError::AbsentWeight`].
pub(super) fn check(plan: &Plan) -> Result<()> {
    for stage in 0..plan.cuts.num_stages() {
        let nodes = &plan.graph.nodes()[plan.cuts.nodes(stage)];
        let read = nodes.iter().flat_map(|node| &node.inputs);
        let read = read.filter_map(|&input| Some(plan.graph.param(plan.graph.param_of(input)?)));
        let params: Vec<&Param> = read.collect();
        for param in params.iter().filter(|param| magnitude(param).is_some()) {
            let beside = param.beside.as_ref();
            let weight = beside.map_or(param.name.as_str(), |beside| beside.param.as_str());
            if !params.iter().any(|param| param.name == weight) {
                return Err(Error::Plan(PlanError::AbsentWeight {
                    magnitude: param.name.clone(),
                    weight: weight.to_owned(),
                    stage,
                }));
            }
        }
    }
    Ok(())
}
