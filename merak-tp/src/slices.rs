//! Parameters that are sliced by name, and kernels of convolutions.

use crate::{
    Error, LayerLists, Result, SplitKind,
    error::divisors,
    layers::{Layer, Matches, Role},
};
use merak_trace::{Graph, Node, Op, ParamId, Shard};

/// Dimension of the input channels of a kernel, `[out, in, height, width]`.
const CHANNELS: usize = 1;

/// Dimension of the heads of a table of biases, `[buckets, heads]`.
const HEADS: usize = 1;

/// Adds the roles and slices of `weight_change_list`, and the slices of kernels that
/// `conv_para_list` matched.
///
/// # Errors
/// [`Error::Indivisible`], [`Error::NoDimension`], [`Error::BothKinds`].
pub(crate) fn find(
    model: &Graph,
    lists: &LayerLists,
    degree: usize,
    layers: &[Layer<'_>],
    matches: &mut Matches,
) -> Result<()> {
    let users = model.users();
    for (name, dim) in &lists.weight_change_list {
        let list = format!("weight_change_list [{name:?}, {dim}]");
        let named = layers
            .iter()
            .filter(|layer| layer.node.scope.contains(name.as_str()));
        let mut found = false;
        for layer in named {
            found = true;
            let kind = match dim {
                0 => SplitKind::Col,
                1 => SplitKind::Row,
                _ => return Err(no_dimension(&layer.node.scope, 2, *dim, list)),
            };
            let role = Role {
                kind,
                list: list.clone(),
                parts: layer.parts(model, &users),
                pads: false,
            };
            add(layer, role, matches)?;
        }
        if !found {
            found = slice_params(model, (name, *dim), degree, &list, matches)?;
        }
        if !found {
            matches.unmatched.push(list);
        }
    }
    for layer in layers {
        let role = matches.roles.get(&layer.id);
        if let (Some(kernel), Some(role)) = (layer.kernel, role)
            && role.list.starts_with("conv_para_list")
        {
            let list = role.list.clone();
            slice(model, kernel, CHANNELS, degree, &list, matches)?;
        }
    }
    Ok(())
}

/// Gives a layer its role, unless another list splits it the other way.
fn add(layer: &Layer<'_>, role: Role, matches: &mut Matches) -> Result<()> {
    match matches.roles.get(&layer.id) {
        Some(known) if known.kind != role.kind => {
            Err(layer.both_kinds((known.kind, &known.list), &role.list))
        }
        Some(_) => Ok(()),
        None => {
            matches.roles.insert(layer.id, role);
            Ok(())
        }
    }
}

/// Slices the parameters `name` and `name.weight` of any module; whether there are some.
fn slice_params(
    model: &Graph,
    (name, dim): (&str, usize),
    degree: usize,
    list: &str,
    matches: &mut Matches,
) -> Result<bool> {
    let mut found = false;
    for param in model.params() {
        let path = param.name.strip_suffix(".weight").unwrap_or(&param.name);
        if path.ends_with(name)
            && let Some(id) = model.find_param(&param.name)
        {
            slice(model, id, dim, degree, list, matches)?;
            found = true;
        }
    }
    Ok(found)
}

/// Slices a parameter.
fn slice(
    model: &Graph,
    id: ParamId,
    dim: usize,
    degree: usize,
    list: &str,
    matches: &mut Matches,
) -> Result<()> {
    let param = model.param(id);
    let shape = &param.full.shape;
    let Some(&size) = shape.get(dim) else {
        return Err(no_dimension(&param.name, shape.len(), dim, list.to_owned()));
    };
    if !size.is_multiple_of(degree) {
        return Err(Error::Indivisible {
            module: param.name.clone(),
            size,
            what: if dim == CHANNELS && shape.len() == 4 {
                "input channels"
            } else if dim == HEADS && is_of_attention(model, id) {
                "attention heads"
            } else {
                "slices"
            },
            degree,
            list: list.to_owned(),
            legal: divisors(size),
        });
    }
    let parts = vec![size];
    matches.slices.insert(id, Shard::new(dim, parts));
    Ok(())
}

/// Whether a parameter is an operand of an attention, as a table of biases is.
fn is_of_attention(model: &Graph, id: ParamId) -> bool {
    let is_operand = |node: &Node| {
        let mut params = node.inputs.iter().map(|&input| model.param_of(input));
        matches!(node.op, Op::Attention(_)) && params.any(|param| param == Some(id))
    };
    model.nodes().iter().any(is_operand)
}

fn no_dimension(module: &str, dims: usize, dim: usize, list: String) -> Error {
    Error::NoDimension {
        module: module.to_owned(),
        dims: match dims {
            0 => "no dimension".to_owned(),
            1 => "dimension 0 alone".to_owned(),
            _ => format!("dimensions 0 to {}", dims - 1),
        },
        dim,
        list,
    }
}
