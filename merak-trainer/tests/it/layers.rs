//! The modules of the crate depend on each other without circles.

use std::{fs, path::Path};

/// The modules of the library, each of which imports from those before it. The commands are a
/// crate of their own above it.
const ORDER: [&str; 14] = [
    "error", "machine", "config", "folder", "world", "network", "data", "plan", "memory", "stage",
    "trainer", "metrics", "costs", "planner",
];

/// Every file of a folder, with its text.
fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            let text = fs::read_to_string(&path).expect("text");
            found.push((path.display().to_string(), text));
        }
    }
}

/// The modules that a file names after `crate::`, without those of its tests.
fn imported(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next();
    let code = code.unwrap_or_default().split("crate::").skip(1);
    code.flat_map(first_names).collect()
}

/// The name at the beginning of a path, or those at the first level of a group of paths.
fn first_names(path: &str) -> Vec<&str> {
    let name = |path: &str| {
        let end = path.find(|c: char| !c.is_alphanumeric() && c != '_');
        end.unwrap_or(path.len())
    };
    let Some(group) = path.strip_prefix('{') else {
        return vec![&path[..name(path)]];
    };
    let (mut depth, mut found, mut start) = (0_usize, Vec::new(), true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' => start = true,
            c if c.is_whitespace() => {}
            _ if start && depth == 0 => {
                found.push(&group[at..at + name(&group[at..])]);
                start = false;
            }
            _ => {}
        }
    }
    found
}

#[test]
fn every_module_imports_from_those_below_it_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let place = |name: &str| ORDER.iter().position(|module| *module == name);
    let mut wrong = Vec::new();
    for (path, text) in &files {
        let lines = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n");
        let path = path
            .strip_prefix(&*root.display().to_string())
            .expect("a source");
        let module = path.trim_start_matches('/').split(['/', '.']).next();
        let Some(own) = module.and_then(place) else {
            continue;
        };
        for name in imported(&code) {
            match place(name) {
                Some(other) if other <= own => {}
                _ => wrong.push(format!("{path}: {name}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(files.len() > 100, "{} files", files.len());
}
