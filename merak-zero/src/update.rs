//! One update of what a rank owns.

use crate::{
    MatrixProducts, NORM_BLOCK, OwnedState, ParamSpec, Result, RuleStep, UpdateRule, adam_update,
    flat,
    layout::Extent,
    lion_update,
    optimizer::{LambStep, MAX_STATES, Rule, Tensor, adafactor, muon},
    sgd_update,
    whole::PieceHolders,
};

/// The owned run of a parameter, which has all of it where its rule needs that, with the rule.
pub(crate) type Owned<'a> = (Rule, Tensor<'a>);

/// A block of a parameter with its gradient and its state.
type BlockOf<'a> = (&'a mut [f32], &'a [f32], [&'a mut [f32]; MAX_STATES]);

/// What `state` says that the rank owns, in buffers of such extents; `rules` and `specs` are those
/// of all parameters.
pub(crate) fn owned<'a>(
    specs: &'a [ParamSpec],
    rules: &[Rule],
    state: &'a mut OwnedState,
    (params, held): (&'a mut [f32], Extent),
    (grads, kept): (&'a [f32], Extent),
) -> Vec<Owned<'a>> {
    let runs: Vec<_> = state.runs_and_values().collect();
    let places = runs.iter().map(|(run, _)| run.place(held));
    let params = flat::carve(params, places);
    let runs = runs.into_iter().zip(params);
    let tensor = |((run, state), param): ((&crate::state::Run, _), _)| Tensor {
        spec: &specs[run.param],
        param,
        grad: &grads[run.place(kept)],
        first: run.first(),
        state,
    };
    runs.map(|(run, param)| (rules[run.0.param], tensor((run, param))))
        .collect()
}

/// Steps every parameter whose rule looks at one element after the other.
pub(crate) fn step_elements(owned: &mut [Owned<'_>], threads: usize) {
    let jobs = owned.iter_mut().flat_map(|(rule, tensor)| {
        let is_elementwise = matches!(rule, Rule::Adam(_) | Rule::Sgd(_) | Rule::Lion(_));
        let blocks = is_elementwise.then(|| blocks(tensor)).into_iter().flatten();
        blocks.map(|block| (*rule, block))
    });
    flat::for_each(threads, jobs.collect(), |(rule, block)| {
        let (param, grad, [first, second, ..]): BlockOf<'_> = block;
        match rule {
            Rule::Adam(step) => adam_update(param, grad, first, second, &step),
            Rule::Sgd(step) => sgd_update(param, grad, first, &step),
            Rule::Lion(step) => lion_update(param, grad, first, &step),
            Rule::Lamb(_) | Rule::Adafactor(_) | Rule::Muon(_) | Rule::Other(_) => {}
        }
    });
}

/// Steps every parameter by a rule of another program.
pub(crate) fn step_others(owned: &mut [Owned<'_>], other: &dyn UpdateRule, threads: usize) {
    let num_states = other.state_names().len();
    flat::for_each(threads, owned.iter_mut().collect(), |(rule, tensor)| {
        let Rule::Other(step) = rule else { return };
        let scale = step.grad_scale as f32;
        let grads: Vec<f32> = tensor.grad.iter().map(|g| g * scale).collect();
        let step = RuleStep {
            spec: tensor.spec,
            first: tensor.first,
            lr: step.lr,
            time: step.time,
        };
        let mut state = tensor.state.each_mut().map(|kept| &mut **kept);
        other.step(&step, tensor.param, &grads, &mut state[..num_states]);
    });
}

/// Updates the moments of the parameters that LAMB steps; for each of their blocks the square of
/// the weight's norm, and of the update's.
pub(crate) fn lamb_moments(owned: &mut [Owned<'_>], threads: usize) -> [Vec<f64>; 2] {
    let blocks: Vec<_> = lamb_blocks(owned)
        .map(|(_, step, block)| (step, block))
        .collect();
    let mut sums = vec![[0.0; 2]; blocks.len()];
    let jobs = sums.iter_mut().zip(blocks).collect();
    flat::for_each(
        threads,
        jobs,
        |(sums, (step, block)): (&mut [f64; 2], _)| {
            let (param, grad, [first, second, ..]): BlockOf<'_> = block;
            *sums = LambStep::update_moments(&step, param, grad, first, second);
        },
    );
    [0, 1].map(|kind| sums.iter().map(|sums| sums[kind]).collect())
}

/// Steps the parameters that LAMB steps, with the squares of the norms that `squares_of` gives.
pub(crate) fn step_lamb(
    owned: &mut [Owned<'_>],
    squares_of: impl Fn(&ParamSpec) -> [f64; 2],
    threads: usize,
) {
    let jobs = lamb_blocks(owned).map(|(spec, step, block)| {
        let step_size = step.step_size(squares_of(spec));
        (step, step_size, block)
    });
    flat::for_each(threads, jobs.collect(), |(step, step_size, block)| {
        let (param, _, [first, second, ..]): BlockOf<'_> = block;
        step.update(param, first, second, step_size);
    });
}

/// Steps every parameter whose rule needs all of it.
///
/// # Communication
/// Over the tensor group, if there is one: [`adafactor::step`] and [`muon::step`].
pub(crate) fn step_tensors(
    owned: Vec<Owned<'_>>,
    holders: PieceHolders<'_>,
    products: &dyn MatrixProducts,
    threads: usize,
) -> Result<()> {
    let (mut factored, mut matrices) = (Vec::new(), Vec::new());
    for (rule, tensor) in owned {
        match rule {
            Rule::Adafactor(step) => factored.push((tensor, step)),
            Rule::Muon(step) => matrices.push((tensor, step)),
            Rule::Adam(_) | Rule::Sgd(_) | Rule::Lion(_) | Rule::Lamb(_) | Rule::Other(_) => {}
        }
    }
    adafactor::step(factored, holders, threads)?;
    muon::step(matrices, holders, products)
}

fn lamb_blocks<'a>(
    owned: &'a mut [Owned<'_>],
) -> impl Iterator<Item = (&'a ParamSpec, LambStep, BlockOf<'a>)> {
    owned.iter_mut().flat_map(|(rule, tensor)| {
        let step = match rule {
            Rule::Lamb(step) => Some(*step),
            _ => None,
        };
        let spec = tensor.spec;
        let of_step = step.map(|step| blocks(tensor).map(move |block| (spec, step, block)));
        of_step.into_iter().flatten()
    })
}

/// The norm blocks of a run, which begins with one.
fn blocks<'a>(tensor: &'a mut Tensor<'_>) -> impl Iterator<Item = BlockOf<'a>> {
    let params = tensor.param.chunks_mut(NORM_BLOCK);
    let state = tensor.state.each_mut();
    let mut state = state.map(|kept| kept.chunks_mut(NORM_BLOCK));
    params
        .zip(tensor.grad.chunks(NORM_BLOCK))
        .map(move |(param, grad)| {
            let state = state.each_mut();
            let state = state.map(|kept| kept.next().unwrap_or_default());
            (param, grad, state)
        })
}
