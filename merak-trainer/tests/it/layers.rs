//! The modules of each crate of the workspace depend on each other without circles.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The modules of merak-trainer, the lowest first.
const ORDER: [&str; 14] = [
    "error", "machine", "config", "folder", "world", "network", "data", "plan", "memory", "stage",
    "trainer", "metrics", "costs", "planner",
];

/// The modules at the top of a crate, each with those that it imports from.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Every source file below a folder, by its path within, without comments and unit tests.
fn sources(folder: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        if name == "tests" || name == "tests.rs" {
            continue;
        }
        let path = entry.path();
        if path.is_dir() {
            let within = sources(&path).into_iter();
            found.extend(within.map(|(below, text)| (format!("{name}/{below}"), text)));
        } else {
            found.insert(name, code(&fs::read_to_string(&path).expect("text")));
        }
    }
    found
}

/// A source without its comments and unit tests.
fn code(text: &str) -> String {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let lines: Vec<_> = text.lines().filter(is_code).collect();
    let text = lines.join("\n");
    let code = text.split("#[cfg(test)]\nmod tests {").next();
    code.unwrap_or_default().to_owned()
}

/// The name at the beginning of a text.
fn first_name(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The name at the beginning of a path, or those at the first level of a group of paths.
fn first_names(path: &str) -> Vec<&str> {
    let Some(group) = path.strip_prefix('{') else {
        return vec![first_name(path)];
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
                found.push(first_name(&group[at..]));
                start = false;
            }
            _ => {}
        }
    }
    found
}

/// The modules that the root of a crate declares, and for each name that it exports its module.
fn declared(root: &str) -> (BTreeSet<&str>, BTreeMap<&str, &str>) {
    let modules = root.lines().filter_map(|line| {
        let after = line.strip_prefix("pub ").unwrap_or(line);
        after.strip_prefix("mod ")?.strip_suffix(';')
    });
    let exports = root.split("pub use ").skip(1);
    let exports = exports.filter_map(|export| export.split_once("::"));
    let exports = exports.flat_map(|(module, names)| {
        let names = first_names(names).into_iter();
        names.map(move |name| (name, module))
    });
    (modules.collect(), exports.collect())
}

/// What each module of a crate imports from the others. A name that the root exports is one of the
/// module that defines it.
fn imports(crate_root: &Path) -> Imports {
    let sources = sources(&crate_root.join("src"));
    let (modules, exports) = declared(&sources["lib.rs"]);
    let mut imports: Imports = modules
        .iter()
        .map(|&module| (module.to_owned(), BTreeSet::new()))
        .collect();
    for (path, code) in &sources {
        let Some(of_module) = imports.get_mut(first_name(path)) else {
            continue;
        };
        let names = code.split("crate::").skip(1).flat_map(first_names);
        let from = names.filter_map(|name| modules.get(name).or_else(|| exports.get(name)));
        let others = from.filter(|from| **from != first_name(path));
        of_module.extend(others.map(|&other| other.to_owned()));
    }
    imports
}

/// The modules on circles or above them, without what they import from others.
fn circles(mut imports: Imports) -> Imports {
    loop {
        let free = |from: &BTreeSet<String>| from.iter().all(|from| !imports.contains_key(from));
        let free: Vec<_> = imports
            .iter()
            .filter(|(_, from)| free(from))
            .map(|(module, _)| module.clone())
            .collect();
        if free.is_empty() {
            break;
        }
        for module in free {
            imports.remove(&module);
        }
    }
    let left: BTreeSet<_> = imports.keys().cloned().collect();
    for from in imports.values_mut() {
        from.retain(|module| left.contains(module));
    }
    imports
}

#[test]
fn modules_import_from_those_below_them_alone() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let beside = fs::read_dir(own.parent().expect("a folder above")).expect("it is there");
    let beside = beside.map(|entry| entry.expect("an entry").path());
    let crates: Vec<_> = beside
        .filter(|path| path.join("src/lib.rs").exists())
        .collect();
    assert!(crates.iter().any(|path| path == own));
    let circles: BTreeMap<_, _> = crates
        .iter()
        .map(|path| (path.file_name(), circles(imports(path))))
        .filter(|(_, circles)| !circles.is_empty())
        .collect();
    assert!(circles.is_empty(), "{circles:#?}");
    // The order that docs/ARCHITECTURE.md tells.
    let of_trainer = imports(own);
    assert_eq!(of_trainer.len(), ORDER.len());
    for (place, module) in ORDER.iter().enumerate() {
        let mut from = of_trainer[*module].iter();
        assert!(
            from.all(|from| ORDER[..place].contains(&&**from)),
            "{module}"
        );
    }
}

#[test]
fn a_circle_is_found() {
    let imports = |pairs: &[(&str, &[&str])]| -> Imports {
        let owned = |from: &[&str]| from.iter().map(|&from| from.to_owned()).collect();
        let pairs = pairs.iter();
        pairs
            .map(|(module, from)| ((*module).to_owned(), owned(from)))
            .collect()
    };
    let straight = imports(&[("a", &[]), ("b", &["a"]), ("c", &["a", "b"])]);
    assert_eq!(circles(straight), Imports::new());
    let round = imports(&[("a", &[]), ("b", &["a", "c"]), ("c", &["a", "b"])]);
    assert_eq!(circles(round), imports(&[("b", &["c"]), ("c", &["b"])]));
}
