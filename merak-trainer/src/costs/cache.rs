//! The file that keeps measured times.

use super::Profile;
use crate::machine::this_process;
use merak_mpu::hash::fnv1a;
use serde::{Deserialize, Serialize};
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::Path,
};

/// Profiles by the conditions under which they were measured, the newest last.
pub(super) type Profiles = BTreeMap<String, Vec<Profile>>;

/// The most bytes of a file of times.
const MAX_BYTES: u64 = 64 << 20;

/// Conditions that are kept: hosts stand in them by their names, so that each run on a cluster may
/// add some.
const KEPT_CONDITIONS: usize = 64;

/// Bytes that tell a file of times from others.
const FIRST_BYTES: u64 = 256;

/// Raised when the meaning of the numbers changes.
const FORMAT: u32 = 7;

#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    profiles: Profiles,
}

/// The fields of every version of the format.
#[derive(Deserialize)]
struct Version {
    format: u32,
}

/// The profiles of a file. An unreadable file counts as empty: all of it can be measured again.
pub(super) fn read(file: &Path) -> Profiles {
    let profiles = merak_ckpt::read_regular(file, MAX_BYTES).and_then(|bytes| {
        let Version { format } = serde_json::from_slice(&bytes)?;
        if format != FORMAT {
            let reason = format!("it has version {format} of the format, expected {FORMAT}");
            return Err(io::Error::other(reason));
        }
        let document: Document = serde_json::from_slice(&bytes)?;
        for (conditions, profiles) in &document.profiles {
            let mut faults = profiles.iter().map(Profile::fault).enumerate();
            let found = faults.find_map(|(place, fault)| Some((place, fault?)));
            if let Some((place, fault)) = found {
                let reason = format!("profile {place} of {conditions:?}: {fault}");
                return Err(io::Error::other(reason));
            }
        }
        Ok(document.profiles)
    });
    match profiles {
        Ok(profiles) => profiles,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Profiles::new(),
        Err(error) => {
            let (file, reason) = (file.display(), error.to_string());
            tracing::warn!(%file, reason, "measured times cannot be read and are measured again");
            Profiles::new()
        }
    }
}

/// Whether the file may be replaced: it is missing, or holds times, even damaged ones.
fn is_ours(file: &Path) -> io::Result<bool> {
    let begins = |bytes: &[u8]| bytes.trim_ascii_start().starts_with(b"{\n  \"format\":");
    let file = match merak_ckpt::open_regular(file) {
        Ok((file, _)) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(FIRST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes.is_empty() || begins(&bytes))
}

/// The profiles of the conditions that were measured last.
fn newest(profiles: &Profiles) -> Profiles {
    let mut all: Vec<_> = profiles.iter().collect();
    let measured_at = |of: &[Profile]| of.iter().map(|profile| profile.measured_at).max();
    all.sort_by_key(|(_, profiles)| Reverse(measured_at(profiles)));
    all.truncate(KEPT_CONDITIONS);
    let all = all.into_iter();
    all.map(|(conditions, profiles)| (conditions.clone(), profiles.clone()))
        .collect()
}

/// Replaces a file that holds times. A failure is only logged: the run goes on with its times.
pub(super) fn write(file: &Path, profiles: &Profiles) {
    let document = Document {
        format: FORMAT,
        profiles: newest(profiles),
    };
    let written = serde_json::to_vec_pretty(&document)
        .map_err(io::Error::from)
        .and_then(|bytes| {
            if !is_ours(file)? {
                let reason =
                    "it holds something else and is left as it is: name another \"cost_cache\"";
                return Err(io::Error::other(reason));
            }
            if let Some(folder) = file.parent() {
                fs::create_dir_all(folder)?;
            }
            // A concurrent reader sees the old file or the new one. Processes of several hosts may
            // share the folder.
            let draft = file.with_extension(format!("{:x}.tmp", fnv1a(this_process().bytes())));
            fs::write(&draft, &bytes)?;
            fs::rename(&draft, file)
        });
    if let Err(error) = written {
        let (file, reason) = (file.display(), error.to_string());
        tracing::warn!(%file, reason, "measured times cannot be kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_back_what_was_kept_and_a_damaged_one_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/costs.json");
        assert_eq!(read(&file), Profiles::new());
        let profile = Profile {
            nodes: BTreeMap::from([("Add: f32[2] f32[2] -> f32[2]".to_owned(), 0.25)]),
            per_node: 1e-6,
            ..Profile::default()
        };
        let kept = Profiles::from([("here".to_owned(), vec![profile])]);
        write(&file, &kept);
        assert_eq!(read(&file), kept);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, &text[..text.len() / 2]).unwrap();
        assert_eq!(read(&file), Profiles::new());
        fs::write(&file, text.replace("\"format\": 7", "\"format\": 6")).unwrap();
        assert_eq!(read(&file), Profiles::new());
        write(&file, &kept);
        assert_eq!(read(&file), kept, "what was measured is kept again");
        for wrong in ["-0.25", "1e300"] {
            fs::write(&file, text.replace("0.25", wrong)).unwrap();
            assert_eq!(read(&file), Profiles::new(), "{wrong} is no time");
        }
    }

    #[test]
    fn the_newest_conditions_are_kept_and_a_file_that_is_too_long_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("costs.json");
        // The later ones come first in the order of their names.
        let of = |measured_at: usize| {
            let profile = Profile {
                measured_at: measured_at as u64,
                ..Profile::default()
            };
            (format!("{:03}", 999 - measured_at), vec![profile])
        };
        write(&file, &(0..KEPT_CONDITIONS + 2).map(of).collect());
        let kept: Profiles = (2..KEPT_CONDITIONS + 2).map(of).collect();
        assert_eq!(read(&file), kept);
        let long = fs::OpenOptions::new().write(true).open(&file).unwrap();
        long.set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(read(&file), Profiles::new());
        write(&file, &kept);
        assert_eq!(read(&file), kept);
    }

    #[test]
    fn a_file_that_holds_something_else_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("precious.toml");
        for text in ["tp = 2\n", "{\"format\": 3}"] {
            fs::write(&file, text).unwrap();
            write(&file, &Profiles::new());
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        write(folder.path(), &Profiles::new());
        assert!(folder.path().is_dir());
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "no draft is left"
        );
    }
}
