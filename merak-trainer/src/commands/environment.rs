//! What the command takes from the process around it.

use merak_ckpt::words::brief;
use merak_trainer::{ConfigError, Error, Result, VARIABLES, data::CrateSources};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The environment's variables that set keys.
///
/// # Errors
/// [`ConfigError::NotUtf8`] for the first of them that is not UTF-8.
pub(crate) fn variables() -> Result<Vec<(String, String)>> {
    of_ours(std::env::vars_os())
}

fn of_ours(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Vec<(String, String)>> {
    let ours = variables.into_iter().filter(|(name, _)| {
        let name = name.as_encoded_bytes();
        name.starts_with(VARIABLES.as_bytes())
    });
    let text = |text: OsString, place: String| {
        text.into_string().map_err(|text| {
            Error::Config(ConfigError::NotUtf8 {
                place,
                found: text.to_string_lossy().into_owned(),
            })
        })
    };
    let pair = |(name, value): (OsString, OsString)| {
        let name = text(name, "the name of an environment variable".to_owned())?;
        let value = text(value, format!("the environment variable {}", brief(&name)))?;
        Ok((name, value))
    };
    ours.map(pair).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_variable_of_ours_that_is_no_text_is_refused_by_name() {
        use std::os::unix::ffi::OsStringExt;
        let no_text = || OsString::from_vec(b"2\xff".to_vec());
        let of = |name: &str| of_ours([(OsString::from(name), no_text())]);
        assert_eq!(of("PATH").unwrap(), []);
        let refused = of("MERAK_TP").unwrap_err().to_string();
        let expected = "the environment variable MERAK_TP is no UTF-8 text, found \"2\u{fffd}\"";
        assert_eq!(refused, expected);
    }
}
