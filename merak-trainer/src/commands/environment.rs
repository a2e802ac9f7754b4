//! What the command takes from the process around it.

use merak_trainer::data::CrateSources;
use std::path::{Path, PathBuf};

/// The environment's variables.
pub(crate) fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
}

/// Where measured times are kept: in the user's folder for caches, where there is one.
pub(crate) fn cost_cache() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let usual = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let folder = given.filter(|folder| folder.is_absolute()).or_else(usual)?;
    Some(folder.join("merak").join("costs.json"))
}

/// Where cargo unpacks the sources of crates, and where to look for a `Cargo.lock`.
pub(crate) fn crate_sources(config: Option<&Path>) -> CrateSources {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let beside = config
        .and_then(|path| path.canonicalize().ok())
        .and_then(|path| path.parent().map(Path::to_path_buf));
    let search = beside
        .into_iter()
        .chain(std::env::current_dir().ok())
        .collect();
    CrateSources {
        registry: home.map(|home| home.join("registry").join("src")),
        search,
    }
}
