//! What to say about a path at which nothing lies.

use crate::words::file;
use merak_mpu::names::{did_you_mean, nearest, similar};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A folder with more entries is not searched.
const MOST_ENTRIES: usize = 10_000;

/// The end of a message that nothing lies at a path: the first folder on the way that is missing,
/// and the entry beside it that the name probably means. Empty where there is neither, something
/// lies at the path, or the folder around cannot be read.
///
/// ```
/// let folder = tempfile::tempdir()?;
/// let corpus = folder.path().join("corpus.txt");
/// std::fs::write(&corpus, "")?;
/// let hint = merak_ckpt::path_hint(&corpus.with_file_name("corpu.txt"));
/// assert_eq!(hint, format!("; did you mean \"{}\"?", corpus.display()));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn path_hint(path: &Path) -> String {
    let is_missing = |part: &&Path| {
        let found = part.symlink_metadata();
        let is_absent = found.is_err_and(|error| error.kind() == ErrorKind::NotFound);
        is_absent && !part.as_os_str().is_empty()
    };
    let Some(missing) = path.ancestors().take_while(is_missing).last() else {
        return String::new();
    };
    let near = neighbour(missing).map(|near| file(&near));
    let hint = did_you_mean(near.as_deref());
    if missing == path {
        hint
    } else {
        format!("; there is no folder {}{hint}", file(missing))
    }
}

/// The entry beside a missing one with the most similar name, if one is similar. Hidden entries
/// count for a hidden one alone.
fn neighbour(missing: &Path) -> Option<PathBuf> {
    let name = missing.file_name()?.to_str()?;
    let folder = missing.parent()?;
    let named = Some(folder).filter(|folder| !folder.as_os_str().is_empty());
    let entries = fs::read_dir(named.unwrap_or(Path::new("."))).ok()?;
    let entries: Vec<_> = entries.take(MOST_ENTRIES + 1).collect();
    if entries.len() > MOST_ENTRIES {
        return None;
    }
    let names = entries
        .into_iter()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_shown = |other: &String| name.starts_with('.') || !other.starts_with('.');
    let mut names: Vec<_> = names.filter(is_shown).collect();
    names.sort_unstable();
    most_similar(name, &names).map(|near| folder.join(near))
}

/// The most similar name, if one is similar. Of names with the same ending the rest is compared:
/// `.json` alone makes no two names similar.
fn most_similar(name: &str, others: &[String]) -> Option<String> {
    let (stem, ending) = split(name);
    let others = others.iter().map(String::as_str);
    let (same, other): (Vec<&str>, Vec<&str>) = others.partition(|name| split(name).1 == ending);
    let stems = same.into_iter().map(|name| split(name).0);
    let near = if ending.is_empty() {
        nearest(stem, stems)
    } else {
        similar(stem, stems)
    };
    near.map(|near| format!("{near}{ending}"))
        .or_else(|| nearest(name, other).map(str::to_owned))
}

/// A name before its last dot, and the rest.
fn split(name: &str) -> (&str, &str) {
    let dot = name.rfind('.').filter(|at| *at > 0);
    name.split_at(dot.unwrap_or(name.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_part_of_a_path_is_named_with_its_nearest_neighbour() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        fs::create_dir_all(at("runs/quickstart/checkpoints")).unwrap();
        for name in ["corpus.txt", "other.json", ".hidden.txt", "notes"] {
            fs::write(at(name), "").unwrap();
        }
        let root = format!("{}/", folder.path().display());
        let hint = |path: &str| path_hint(&at(path)).replace(&root, "");
        let meant = |name: &str| format!("; did you mean \"{name}\"?");
        assert_eq!(hint("corpu.txt"), meant("corpus.txt"));
        assert_eq!(hint("corpus"), meant("corpus.txt"));
        assert_eq!(hint("corpus.text"), meant("corpus.txt"));
        assert_eq!(hint("runs/quikstart"), meant("runs/quickstart"));
        assert_eq!(hint(".hiden.txt"), meant(".hidden.txt"));
        let inside = "; there is no folder runs/quikstart; did you mean \"runs/quickstart\"?";
        assert_eq!(hint("runs/quikstart/checkpoints/step-00000001"), inside);
        assert_eq!(hint("else/where"), "; there is no folder else");
        // Nothing is near, nothing is missing, or a file is no folder.
        fs::write(at("tokenizer_config.json"), "").unwrap();
        for path in [
            "tokenizer.json",
            "nowhere.json",
            "hiden.txt",
            "corpus.txt",
            "notes/a",
            "",
        ] {
            assert_eq!(hint(path), "", "{path}");
        }
    }
}
