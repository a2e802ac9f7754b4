//! Names that users write: enums of them, and what a mistyped one means, for the errors of every
//! crate.

/// Names with fewer characters are no abbreviation.
const SHORTEST_ABBREVIATION: usize = 3;

/// Names with less similarity than this are not suggested.
const LEAST_SIMILARITY: f64 = 0.6;

/// What a mistyped name probably means: the only candidate that begins with `name`, else the one
/// most similar to it, if any is similar; the first one on ties. Case is ignored.
///
/// ```
/// use merak_mpu::names::nearest;
/// let schedules = ["gpipe", "1f1b", "zb_h1"];
/// assert_eq!(nearest("1fb1", schedules), Some("1f1b"));
/// assert_eq!(nearest("megatron", schedules), None);
/// ```
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    let candidates: Vec<_> = candidates.into_iter().collect();
    if name.len() >= SHORTEST_ABBREVIATION {
        let mut longer = candidates
            .iter()
            .filter(|other| other.to_lowercase().starts_with(&name));
        if let (Some(&only), None) = (longer.next(), longer.next()) {
            return Some(only);
        }
    }
    similar(&name, candidates)
}

/// As [`nearest`], for names that nobody abbreviates.
///
/// ```
/// use merak_mpu::names::similar;
/// assert_eq!(similar("tokenizr", ["tokenizer", "tokenizer_config"]), Some("tokenizer"));
/// assert_eq!(similar("tokenizer", ["tokenizer_config"]), None);
/// ```
pub fn similar<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    let candidates: Vec<_> = candidates.into_iter().collect();
    let (best, similarity) = most_similar(&name, &candidates).unzip();
    best.filter(|_| similarity > Some(LEAST_SIMILARITY))
        .or_else(|| one_letter_off(&name, &candidates))
}

/// As [`nearest`], and the most similar name where none is similar; none without candidates.
///
/// ```
/// assert_eq!(merak_mpu::names::closest("zzz", ["gpipe", "1f1b"]), Some("gpipe"));
/// ```
pub fn closest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let candidates: Vec<_> = candidates.into_iter().collect();
    nearest(name, candidates.iter().copied())
        .or_else(|| Some(most_similar(&name.to_lowercase(), &candidates)?.0))
}

/// What a message about a mistyped name ends with: the name that it probably means, if any.
///
/// ```
/// use merak_mpu::names::{did_you_mean, nearest};
/// assert_eq!(did_you_mean(nearest("1fb1", ["1f1b"])), "; did you mean \"1f1b\"?");
/// assert_eq!(did_you_mean(None), "");
/// ```
pub fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean \"{name}\"?"))
}

/// Declares an enum whose variants have names that users write: each name stands once, beside its
/// variant. The enum is `Copy`, and gets `ALL`, `as_str`, `from_name` and `Display`.
///
/// ```
/// merak_mpu::named_enum! {
///     /// How ranks share a sequence.
///     #[derive(Debug, Clone, Copy, PartialEq, Eq)]
///     pub enum Method {
///         /// By heads.
///         Ulysses = "ulysses",
///         /// All keys and values on each rank.
///         AllGather = "all_gather",
///     }
/// }
/// assert_eq!(Method::ALL.map(Method::as_str), ["ulysses", "all_gather"]);
/// assert_eq!(Method::from_name("all_gather"), Some(Method::AllGather));
/// assert_eq!(format!("{:>8}", Method::Ulysses), " ulysses");
/// ```
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $vis:vis enum $enum:ident {
            $( $(#[$variant_meta:meta])* $variant:ident = $name:literal, )+
        }
    ) => {
        $(#[$meta])*
        $vis enum $enum {
            $( $(#[$variant_meta])* $variant, )+
        }

        impl $enum {
            /// Each of them, in the order of their declaration.
            $vis const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// The name that users write.
            $vis const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// The one with this name.
            $vis fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|one| one.as_str() == name)
            }
        }

        impl ::std::fmt::Display for $enum {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

/// The candidate that is most similar to a name in lower case, the first one on ties, and how
/// similar it is, from 0 to 1.
fn most_similar<'a>(name: &str, candidates: &[&'a str]) -> Option<(&'a str, f64)> {
    let scored = candidates.iter().map(|candidate| {
        let candidate_name = candidate.to_lowercase();
        let similarity = strsim::normalized_damerau_levenshtein(name, &candidate_name);
        (*candidate, similarity)
    });
    scored.reduce(|best, next| if next.1 > best.1 { next } else { best })
}

/// The only candidate as long as a name of two letters that differs in one: half of the name, which
/// a similarity takes for another name.
fn one_letter_off<'a>(name: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let is_off = |candidate: &&&str| {
        let slips = strsim::hamming(name, &candidate.to_lowercase());
        name.len() + 1 == SHORTEST_ABBREVIATION && slips == Ok(1)
    };
    let mut close = candidates.iter().filter(is_off);
    close.next().filter(|_| close.next().is_none()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_slip_finds_its_name_and_nonsense_finds_none() {
        let names = ["train_schedule", "tp", "pp"];
        assert_eq!(nearest("train_shedule", names), Some("train_schedule"));
        assert_eq!(nearest("TP", names), Some("tp"));
        assert_eq!(nearest("zzz", names), None);
        // Of two letters one is half of the name.
        assert_eq!(nearest("tq", names), Some("tp"));
        assert_eq!(nearest("xp", names), None);
        assert_eq!(nearest("xy", names), None);
        let names = ["adam", "adamw_torch", "sgd"];
        assert_eq!(nearest("adamw", names), Some("adamw_torch"));
        assert_eq!(nearest("adm", names), Some("adam"));
    }
}
