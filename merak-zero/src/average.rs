//! Exponential moving averages of weights, element by element.

use crate::{Error, NORM_BLOCK, Result, flat};
use std::ops::Range;

/// The name of the average of a weight among the state that an optimizer keeps.
pub const EMA: &str = "ema";

/// Where adjacent elements lie: among the parameters, and among the averages.
pub(crate) type Place = [Range<usize>; 2];

/// The numbers of [`is_decay`].
pub(crate) const DECAYS: &str = "at least 0 and less than 1, also when rounded to f32";

/// Whether an average may decay by this factor. One that rounds to 1 keeps all, for ever.
pub(crate) fn is_decay(decay: f64) -> bool {
    decay >= 0.0 && (decay as f32) < 1.0
}

/// Checks the decay of averages, if there are any.
pub(crate) fn check(decay: Option<f64>) -> Result<()> {
    match decay {
        Some(decay) if !is_decay(decay) => {
            Err(Error::number_out_of_range("ema_decay", decay, DECAYS))
        }
        _ => Ok(()),
    }
}

/// Makes each average its parameter.
pub(crate) fn start(params: &[f32], averages: &mut [f32], places: &[Place]) {
    for (average, param) in pieces(params, averages, places) {
        average.copy_from_slice(param);
    }
}

/// Moves each average towards its parameter: `decay` of it stays, the rest is the parameter's.
///
/// Both factors, the products and the sum are f32, so any cut over ranks and threads gives the same
/// bits. The factors sum to one after rounding too: averages of a weight that rests do not drift.
pub(crate) fn follow(
    decay: f64,
    params: &[f32],
    averages: &mut [f32],
    places: &[Place],
    threads: usize,
) {
    let kept = decay as f32;
    let taken = 1.0 - kept;
    let blocks = pieces(params, averages, places)
        .into_iter()
        .flat_map(|(average, param)| {
            let params = param.chunks(NORM_BLOCK);
            average.chunks_mut(NORM_BLOCK).zip(params)
        });
    let jobs: Vec<(&mut [f32], &[f32])> = blocks.collect();
    flat::for_each(threads, jobs, |(average, param)| {
        for (average, param) in average.iter_mut().zip(param) {
            *average = kept * *average + taken * param;
        }
    });
}

/// Exchanges each average and its parameter.
pub(crate) fn swap(params: &mut [f32], averages: &mut [f32], places: &[Place]) {
    for [param, average] in places {
        params[param.clone()].swap_with_slice(&mut averages[average.clone()]);
    }
}

/// The averages of each place beside the parameters.
fn pieces<'a>(
    params: &'a [f32],
    averages: &'a mut [f32],
    places: &[Place],
) -> Vec<(&'a mut [f32], &'a [f32])> {
    let ranges = places.iter().map(|[_, average]| average.clone());
    let averages = flat::carve(averages, ranges).into_iter();
    let beside = averages.zip(places);
    beside
        .map(|(average, [param, _])| (average, &params[param.clone()]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, step: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 37 + step * 11) % 23) as f32 / 7.0 - 1.3;
        (0..len).map(value).collect()
    }

    #[test]
    fn an_average_follows_its_formula_and_no_cut_or_thread_changes_a_bit() {
        let len = 20 * NORM_BLOCK + 5;
        let whole = [[0..len, 0..len]];
        // Parameters with a gap, of which the averages are packed.
        let parts = [[0..70, 0..70], [71..len + 1, 70..len]];
        let (mut expected, mut alone, mut cut) = (noise(len, 0), noise(len, 0), noise(len, 0));
        for step in 1..4 {
            let params = noise(len, step);
            for (average, param) in expected.iter_mut().zip(&params) {
                *average = 0.9_f32 * *average + (1.0 - 0.9_f32) * param;
            }
            follow(0.9, &params, &mut alone, &whole, 3);
            let mut apart = params.clone();
            apart.insert(70, f32::NAN);
            follow(0.9, &apart, &mut cut, &parts, 1);
        }
        assert!(alone == expected && cut == expected);
        // Of a decay of 0 nothing stays.
        let params = noise(len, 9);
        follow(0.0, &params, &mut alone, &whole, 2);
        assert!(alone == params);
    }

    #[test]
    fn the_average_of_a_weight_that_rests_stays_where_it_is() {
        let (weight, whole) = ([0.7_f32], [[0..1, 0..1]]);
        for decay in [0.9, 0.999, 0.9999, 0.99999] {
            let mut average = weight;
            for _ in 0..200_000 {
                follow(decay, &weight, &mut average, &whole, 1);
            }
            assert!(
                (average[0] / 0.7 - 1.0).abs() < 1e-6,
                "{decay}: {average:?}"
            );
        }
    }

    #[test]
    fn two_exchanges_give_back_what_there_was() {
        let places = [[0..2, 0..2], [3..5, 2..4]];
        let (mut params, mut averages) = (noise(6, 1), noise(4, 2));
        let before = (params.clone(), averages.clone());
        swap(&mut params, &mut averages, &places);
        assert_eq!((params[3], averages[2]), (before.1[2], before.0[3]));
        assert_eq!((params[2], params[5]), (before.0[2], before.0[5]));
        swap(&mut params, &mut averages, &places);
        assert!((params, averages) == before);
    }

    #[test]
    fn a_decay_that_keeps_all_or_is_no_share_is_refused() {
        for decay in [None, Some(0.0), Some(0.999), Some(0.999_999_9)] {
            check(decay).unwrap();
        }
        // As f32 the second one is 1, so an average would never move.
        for decay in [1.0, 0.999_999_99, -0.1, f64::NAN] {
            let text = check(Some(decay)).unwrap_err().to_string();
            let expected = "at least 0 and less than 1, also when rounded to f32";
            assert_eq!(text, format!("`ema_decay` is {decay}, expected {expected}"));
        }
    }
}
