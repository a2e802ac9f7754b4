//! Whether the data have labels to learn from.

use super::{TrainerParts, evaluation};
use crate::{
    config::CheckedArguments,
    data::{Dataset, IGNORED_LABEL, has_labels},
    error::{DataError, Error, Result},
};

/// Samples of a stream that are looked through for a label.
const CHECKED_SAMPLES: usize = 1024;

/// Refuses data of which nothing can be learned: no sample has a label.
///
/// # Errors
/// [`DataError::NoLabels`], or when a sample cannot be read.
pub(super) fn check_labels(args: &CheckedArguments, parts: &TrainerParts) -> Result<()> {
    if let Some(data) = &parts.train_data {
        let samples = data.len().min(if data.is_stream() {
            CHECKED_SAMPLES
        } else {
            usize::MAX
        });
        check_part(args, "training", &**data, samples)?;
    }
    let measured = parts.eval_data.as_ref();
    if let Some(data) = measured.filter(|_| !args.only_predicts()) {
        let samples = evaluation::order(args, data.len())?.samples();
        check_part(args, "evaluation", &**data, samples)?;
    }
    Ok(())
}

fn check_part(
    args: &CheckedArguments,
    part: &'static str,
    data: &dyn Dataset,
    samples: usize,
) -> Result<()> {
    if has_labels(data, samples)? {
        return Ok(());
    }
    Err(Error::Data(DataError::NoLabels {
        part,
        samples,
        ignored: IGNORED_LABEL,
        path: args
            .data
            .path
            .as_ref()
            .filter(|paths| paths.count() == 1)
            .map(|paths| paths.first().to_path_buf()),
    }))
}
