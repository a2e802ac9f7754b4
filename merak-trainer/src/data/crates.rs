//! Text that a machine with Rust already has: the sources of the crates in `Cargo.lock`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::{
    fingerprint::names_below,
    plain::TextKind,
    text::{Candidate, Documents, Reading, list, read_up_to},
};
use crate::error::{DataError, Error, Result};

/// Default limit on the bytes that are read.
const DEFAULT_MAX_BYTES: usize = 8 << 20;

/// The most bytes of a `Cargo.lock`.
const MAX_LOCK_BYTES: u64 = 64 << 20;

/// Files beyond this are mostly generated tables.
const MAX_FILE_BYTES: u64 = 128 << 10;

/// Crates of generated declarations.
const BINDINGS: &[&str] = &[
    "libc",
    "winapi",
    "windows",
    "js-sys",
    "web-sys",
    "linux-raw-sys",
];

/// Where to look for the default text.
#[derive(Debug, Clone, Default)]
pub struct CrateSources {
    /// Cargo's unpacked sources, `$CARGO_HOME/registry/src`; `None` where there is no home.
    pub registry: Option<PathBuf>,
    /// Folders to look for `Cargo.lock` in, each followed by its parents: that of the configuration
    /// file, then the current one.
    pub search: Vec<PathBuf>,
}

impl CrateSources {
    /// The files that [`CrateSources::read`] reads, by their names in the registry's index.
    pub(super) fn named(&self, max_bytes: Option<usize>) -> Result<Vec<(String, Candidate)>> {
        let root = self.registry.as_deref().unwrap_or(Path::new(""));
        let files = names_below(root, self.files(max_bytes)?);
        let in_index = |(name, file): (String, Candidate)| {
            let name = name.split_once('/').map(|(_, name)| name.to_owned());
            (name.unwrap_or_default(), file)
        };
        Ok(files.into_iter().map(in_index).collect())
    }

    /// The library sources of the crates that `Cargo.lock` names, sorted by crate and path.
    ///
    /// Takes the `*.rs` under `src` of each crate. Leaves out bindings (`libc`, `windows-*`,
    /// `*-sys`), hidden files, files over 128 KiB, and crates that cargo has not unpacked because
    /// this platform does not need them. Where the rest exceeds `max_bytes` (8 MiB unless given),
    /// whole files are left out evenly over the list, so that the text stays as varied.
    ///
    /// # Errors
    ///
    /// [`DataError::NoDefaultText`] without `Cargo.lock`, without a registry, or when none of the
    /// crates is in it.
    pub(crate) fn read(&self, max_bytes: Option<usize>, kind: TextKind) -> Result<Documents> {
        let files = self.files(max_bytes)?;
        // The user did not choose these files, so one that is not text is passed over.
        let reading = Reading { kind, skips: true };
        read_up_to(&files, max_bytes.unwrap_or(DEFAULT_MAX_BYTES), reading)
    }

    /// These files by their paths.
    pub(super) fn files(&self, max_bytes: Option<usize>) -> Result<Vec<Candidate>> {
        let missing = |reason: String| Error::Data(DataError::NoDefaultText { reason });
        let lock = self
            .lock_file()
            .ok_or_else(|| missing("there is no Cargo.lock".into()))?;
        let Some(registry) = &self.registry else {
            return Err(missing("cargo's home folder is not known".into()));
        };
        let mut indices = match fs::read_dir(registry) {
            Ok(entries) => entries
                .flatten()
                .map(|entry| entry.path())
                .collect::<Vec<_>>(),
            Err(_) => return Err(missing(format!("{} cannot be listed", registry.display()))),
        };
        indices.sort();
        let mut files = Vec::new();
        for package in packages(&lock)? {
            let unpacked = indices.iter().map(|index| index.join(&package).join("src"));
            if let Some(source) = unpacked.into_iter().find(|source| source.is_dir()) {
                files.extend(list(&source, &|path| {
                    path.extension() == Some("rs".as_ref())
                })?);
            }
        }
        files.retain(|file| (1..=MAX_FILE_BYTES).contains(&file.bytes));
        if files.is_empty() {
            let (lock, registry) = (lock.display(), registry.display());
            return Err(missing(format!(
                "none of the crates of {lock} is in {registry}"
            )));
        }
        let max_bytes = max_bytes.unwrap_or(DEFAULT_MAX_BYTES);
        Ok(thin_out(files, max_bytes as u64))
    }

    fn lock_file(&self) -> Option<PathBuf> {
        let folders = self.search.iter().flat_map(|folder| folder.ancestors());
        folders
            .map(|folder| folder.join("Cargo.lock"))
            .find(|path| path.is_file())
    }
}

/// `name-version` of the packages from a registry, sorted.
fn packages(lock: &Path) -> Result<BTreeSet<String>> {
    let text = merak_ckpt::read_text(lock, MAX_LOCK_BYTES).map_err(Error::reading(lock))?;
    let damaged = |reason: &str| {
        Error::Data(DataError::NoDefaultText {
            reason: format!("{}: {reason}", lock.display()),
        })
    };
    let table: toml::Table = text.parse().map_err(|_| damaged("it is no TOML file"))?;
    let packages = table.get("package").and_then(toml::Value::as_array);
    let packages = packages.ok_or_else(|| damaged("it names no packages"))?;
    let field = |package: &toml::Value, name| {
        package
            .get(name)
            .and_then(toml::Value::as_str)
            .map(ToOwned::to_owned)
    };
    Ok(packages
        .iter()
        .filter(|package| package.get("source").is_some())
        .filter_map(|package| Some((field(package, "name")?, field(package, "version")?)))
        .filter(|(name, _)| !is_binding(name))
        .map(|(name, version)| format!("{name}-{version}"))
        .collect())
}

fn is_binding(name: &str) -> bool {
    let of_family = |family: &&str| {
        let rest = name.strip_prefix(*family);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_']))
    };
    name.ends_with("-sys") || BINDINGS.iter().any(of_family)
}

/// Leaves files out evenly until at most `max_bytes` stay: a file is kept as soon as the share of
/// the bytes passed so far has room for it.
fn thin_out(files: Vec<Candidate>, max_bytes: u64) -> Vec<Candidate> {
    let total: u64 = files.iter().map(|file| file.bytes).sum();
    if total <= max_bytes {
        return files;
    }
    let (mut passed, mut kept) = (0_u128, 0_u128);
    let mut stay = Vec::new();
    for file in files {
        passed += u128::from(file.bytes);
        let allowed = passed * u128::from(max_bytes) / u128::from(total);
        if kept + u128::from(file.bytes) <= allowed {
            kept += u128::from(file.bytes);
            stay.push(file);
        }
    }
    stay
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_are_left_out_by_family() {
        for name in [
            "libc",
            "windows-targets",
            "windows_x86_64_gnu",
            "openblas-sys",
            "winapi",
        ] {
            assert!(is_binding(name), "{name}");
        }
        for name in ["libcst", "windowing", "system", "serde"] {
            assert!(!is_binding(name), "{name}");
        }
    }

    #[test]
    fn files_are_left_out_evenly() {
        let files: Vec<Candidate> = (0..100)
            .map(|i| Candidate {
                path: format!("{i:02}.rs").into(),
                bytes: 100,
            })
            .collect();
        let kept = thin_out(files.clone(), 1000);
        let names: Vec<_> = kept
            .iter()
            .map(|file| file.path.to_string_lossy().into_owned())
            .collect();
        assert_eq!(names.len(), 10);
        assert_eq!((names[0].as_str(), names[9].as_str()), ("09.rs", "99.rs"));
        assert_eq!(thin_out(files.clone(), 10_000), files);
    }
}
