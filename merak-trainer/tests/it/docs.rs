//! Links of the repository's documents lead somewhere, and what they name is there.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The documents: those of the root, of `docs` and of the crates.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders = vec![root.clone(), root.join("docs"), root.join("examples")];
    let entries = fs::read_dir(&root).expect("the repository is a folder");
    let crates = entries.map(|entry| entry.expect("a readable entry").path());
    folders.extend(crates.filter(|path| path.join("Cargo.toml").is_file()));
    let mut documents = BTreeSet::new();
    for folder in folders {
        let Ok(entries) = fs::read_dir(folder) else {
            continue;
        };
        let files = entries.map(|entry| entry.expect("a readable entry").path());
        documents.extend(files.filter(|path| path.extension().is_some_and(|end| end == "md")));
    }
    documents.into_iter().collect()
}

/// The lines of a document that are text, not code.
fn text(document: &str) -> String {
    let mut is_code = false;
    let mut lines = Vec::new();
    for line in document.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            lines.push(line);
        }
    }
    lines.join("\n")
}

/// Where links lead: what stands in `](..)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let end = rest.find(')')?;
        Some(&rest[..end])
    })
}

/// The anchors of a document's headings, as hosts of repositories make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_of_a_document_leads_somewhere() {
    let documents = documents();
    assert!(documents.len() > 10, "{documents:?}");
    let mut broken = Vec::new();
    for document in documents {
        let content = fs::read_to_string(&document).expect("documents are text");
        for link in links(&text(&content)) {
            if link.starts_with("http") || link.contains("://") || link.contains(' ') {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() {
                document.clone()
            } else {
                document.with_file_name(path)
            };
            let leads = target.exists()
                && (anchor.is_empty() || {
                    let content = fs::read_to_string(&target).unwrap_or_default();
                    anchors(&text(&content)).contains(anchor)
                });
            if !leads {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_example_that_a_document_runs_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = fs::read_to_string(root.join("examples/Cargo.toml")).expect("a manifest");
    let (mut runs, mut lost) = (0, Vec::new());
    for document in documents() {
        let content = fs::read_to_string(&document).expect("documents are text");
        let commands = content.split("-p merak-examples --example ").skip(1);
        for name in commands.filter_map(|rest| rest.split_whitespace().next()) {
            runs += 1;
            if !manifest.contains(&format!("name = \"{name}\"")) {
                lost.push(format!("{}: {name}", document.display()));
            }
        }
    }
    assert!(runs > 0 && lost.is_empty(), "{runs} commands, {lost:?}");
}

#[test]
fn every_page_with_rust_code_is_a_doc_test_of_the_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tested = fs::read_to_string(root.join("examples/lib.rs")).expect("a source is text");
    let (mut pages, mut untested) = (0, Vec::new());
    for page in documents() {
        let content = fs::read_to_string(&page).expect("documents are text");
        let name = page.file_name().unwrap_or_default().to_string_lossy();
        let is_page = root.join("docs").join(&*name).is_file();
        if !is_page || !content.contains("```rust") {
            continue;
        }
        pages += 1;
        if !tested.contains(&format!("include_str!(\"../docs/{name}\")")) {
            untested.push(name.into_owned());
        }
    }
    assert!(pages > 0 && untested.is_empty(), "{pages}, {untested:?}");
}

/// The paths of all sources in a folder, but for those that a build makes.
fn source_paths(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let entry = entry.expect("a readable entry");
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
            source_paths(&path, all);
        } else if path.extension().is_some_and(|end| end == "rs") {
            all.push(path);
        }
    }
}

#[test]
fn every_source_that_the_pages_for_developers_name_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut sources = Vec::new();
    source_paths(&root, &mut sources);
    let (mut named, mut lost) = (0, Vec::new());
    for page in ["docs/ARCHITECTURE.md", "docs/HOW-TO-ADD.md"] {
        let content = fs::read_to_string(root.join(page)).expect("the page is there");
        let content = text(&content);
        let quoted = content.split('`').skip(1).step_by(2);
        let paths = quoted.map(|path| path.split("::").next().unwrap_or_default());
        let paths = paths
            .filter(|path| !path.contains(['<', '{']))
            .map(Path::new);
        for path in paths.filter(|path| path.extension().is_some_and(|end| end == "rs")) {
            named += 1;
            if !sources.iter().any(|source| source.ends_with(path)) {
                lost.push(format!("{page}: {}", path.display()));
            }
        }
    }
    assert!(named > 100 && lost.is_empty(), "{named} names, {lost:?}");
}

/// All sources in a folder as one text, in which a line that ends with a backslash goes on.
fn sources(folder: &Path, all: &mut String) {
    let mut paths = Vec::new();
    source_paths(folder, &mut paths);
    for path in paths {
        let text = fs::read_to_string(&path).expect("a source is text");
        let mut lines = text.split("\\\n");
        all.push_str(lines.next().unwrap_or_default());
        all.extend(lines.map(str::trim_start));
    }
}

#[test]
fn the_page_of_errors_quotes_messages_that_the_sources_have() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = String::new();
    for entry in fs::read_dir(&root).expect("the repository is a folder") {
        let source = entry.expect("a readable entry").path().join("src");
        if source.is_dir() {
            sources(&source, &mut all);
        }
    }
    let page = fs::read_to_string(root.join("docs/ERRORS.md")).expect("the page is there");
    let quoted: Vec<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|(message, _)| message)
        .collect();
    assert!(quoted.len() > 30, "{} messages", quoted.len());
    let unknown: Vec<_> = quoted.iter().filter(|one| !all.contains(**one)).collect();
    assert!(unknown.is_empty(), "no source says {unknown:?}");
}

#[test]
fn every_trap_has_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).expect("the page is there");
    let traps: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| N"))
        .collect();
    assert_eq!(traps.len(), 20);
    let is_there = |named: &str| {
        let (path, test) = named.split_once("::")?;
        let source = fs::read_to_string(root.join(path)).ok()?;
        let (before, _) = source.split_once(&format!("fn {test}() {{"))?;
        before.trim_end().ends_with("#[test]").then_some(())
    };
    let mut lost = Vec::new();
    for trap in traps {
        let named: Vec<_> = trap.split('`').filter(|text| text.contains("::")).collect();
        assert!(!named.is_empty(), "no test in {trap}");
        lost.extend(named.into_iter().filter(|named| is_there(named).is_none()));
    }
    assert!(lost.is_empty(), "{lost:?}");
}
