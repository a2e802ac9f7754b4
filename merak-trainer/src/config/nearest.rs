//! The nearest known name to one that was mistyped.

/// Names further away than this share of their length are no help.
const LEAST_SIMILARITY: f64 = 0.6;

/// The candidate that is most like `name`, if any is like it; the first one on ties. Capitals make no difference.
pub(crate) fn nearest<'a>(
    name: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let name = name.to_lowercase();
    let mut best = None;
    let mut best_similarity = LEAST_SIMILARITY;
    for candidate in candidates {
        let similarity = strsim::normalized_damerau_levenshtein(&name, &candidate.to_lowercase());
        if similarity > best_similarity {
            best = Some(candidate);
            best_similarity = similarity;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_typing_slip_finds_its_name_and_nonsense_finds_none() {
        let names = ["train_schedule", "tp", "pp"];
        assert_eq!(
            nearest("train_shedule", names.into_iter()),
            Some("train_schedule")
        );
        assert_eq!(nearest("TP", names.into_iter()), Some("tp"));
        assert_eq!(nearest("zzz", names.into_iter()), None);
    }
}
