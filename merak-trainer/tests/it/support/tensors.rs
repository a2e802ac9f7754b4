//! Whole tensors from the slices of ranks, and their comparison.

use std::collections::BTreeMap;

use merak_mpu::Coord;
use merak_trainer::{NamedTensors, Plan, StepReport};

use super::{Run, Tensors};

/// Losses and norms of steps, as bits.
pub(crate) fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, u64)> {
    let bits = |report: &StepReport| {
        (
            report.loss.to_bits(),
            report.grad_norm.to_bits(),
            report.lr.to_bits(),
        )
    };
    reports.iter().map(bits).collect()
}

/// Joins the ranks' slices. Those of replicas are averaged where `replicas` counts them, and must
/// be equal otherwise.
pub(super) fn whole<'a>(
    plan: &Plan,
    ranks: impl Iterator<Item = (Coord, &'a NamedTensors)>,
    replicas: Option<u8>,
) -> Tensors {
    let divisor = f32::from(replicas.unwrap_or(1));
    let mut tensors = Tensors::new();
    let mut seen = BTreeMap::<(String, Vec<usize>, [usize; 2]), Vec<f32>>::new();
    for (place, slices) in ranks {
        // Ranks that share a sequence have summands, as replicas do.
        let replica = [place.dp, place.sp];
        for (name, values) in slices {
            let param = plan.graph.param(
                plan.graph
                    .find_param(name)
                    .expect("a parameter of the model"),
            );
            let tensor = tensors
                .entry(name.clone())
                .or_insert_with(|| vec![0.0; param.full.numel()]);
            for piece in param.placements.local_boxes(&param.full, place) {
                let local = piece.local_ranges(&param.local.shape);
                let full = piece.full_ranges(&param.full.shape);
                let part: Vec<f32> = local.flat_map(|range| &values[range]).copied().collect();
                // Ranks of one replica that hold the same box hold the same bits, on any stage.
                let key = (name.clone(), piece.offset.clone(), replica);
                if let Some(twin) = seen.get(&key) {
                    assert_eq!(bits(twin), bits(&part), "{name} differs on {place:?}");
                    continue;
                }
                let elements = full.flatten();
                if replicas.is_none() && replica != [0, 0] {
                    let first: Vec<f32> = elements.map(|index| tensor[index]).collect();
                    assert_eq!(bits(&first), bits(&part), "{name} differs on {place:?}");
                } else {
                    // The first replica finds nothing yet, and -0 + 0 would lose its sign.
                    let add = |(index, x): (usize, &f32)| match replica {
                        [0, 0] => tensor[index] = x / divisor,
                        _ => tensor[index] += x / divisor,
                    };
                    elements.zip(&part).for_each(add);
                }
                seen.insert(key, part);
            }
        }
    }
    // Only trained parameters have gradients.
    let expected = match replicas {
        None => plan.graph.params().len(),
        Some(_) => plan.trained_params().count(),
    };
    assert_eq!(tensors.len(), expected, "every parameter lies on some rank");
    tensors
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Demands the same bits of every number of two trainings.
pub(crate) fn assert_same_bits(actual: &Run, expected: &Run, what: &str) {
    assert_eq!(
        numbers(&actual.reports),
        numbers(&expected.reports),
        "losses and norms, {what}"
    );
    assert_same_tensors(
        &actual.weights,
        &expected.weights,
        &format!("weights, {what}"),
    );
    assert_same_tensors(
        &actual.gradients,
        &expected.gradients,
        &format!("gradients, {what}"),
    );
}

/// Demands the same bits of every tensor.
pub(crate) fn assert_same_tensors(actual: &Tensors, expected: &Tensors, what: &str) {
    assert!(actual.keys().eq(expected.keys()), "names, {what}");
    for (name, values) in actual {
        assert!(bits(values) == bits(&expected[name]), "{name}: {what}");
    }
}

/// The norm of a tensor.
pub(crate) fn norm(values: impl IntoIterator<Item = f32>) -> f64 {
    values
        .into_iter()
        .map(|x| f64::from(x).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Demands equality up to the order of summation: the difference of each tensor within `tolerance`
/// of its norm, or of a millionth of all tensors' norm where that is larger. The bias of a key is
/// measured by that of the query beside it: without rotary positions it adds the same to all scores
/// of a query, so its gradient is nothing but rounding.
pub(crate) fn assert_close_tensors(
    actual: &Tensors,
    expected: &Tensors,
    tolerance: f64,
    what: &str,
) {
    assert!(actual.keys().eq(expected.keys()), "names, {what}");
    let all = norm(expected.values().flatten().copied());
    let expected_of = |name: &str| &expected[name];
    for (name, values) in actual {
        let expected = expected_of(name);
        let gap = norm(values.iter().zip(expected).map(|(a, b)| a - b));
        let query = name
            .replace(".key.bias", ".query.bias")
            .replace(".attn.k.bias", ".attn.q.bias")
            .replace(".k_proj.bias", ".q_proj.bias");
        let measure = norm(expected_of(&query).iter().copied());
        let size = norm(expected.iter().copied()).max(measure).max(1e-6 * all);
        assert!(
            gap <= tolerance * size,
            "{name}: gap {gap:e} of {size:e}, {what}"
        );
    }
}

/// Demands losses that agree within a relative tolerance.
pub(crate) fn assert_close_losses(
    actual: &[StepReport],
    expected: &[StepReport],
    tolerance: f64,
    what: &str,
) {
    assert_eq!(actual.len(), expected.len(), "steps, {what}");
    for (actual, expected) in actual.iter().zip(expected) {
        let gap = (actual.loss / expected.loss - 1.0).abs();
        assert!(
            gap <= tolerance,
            "step {}: loss {} against {}, {what}",
            actual.step,
            actual.loss,
            expected.loss
        );
    }
}
