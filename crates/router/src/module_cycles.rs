//! Checks that the top-level modules of every crate depend on each other without a cycle. Test
//! modules may use any module.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The modules that each module names, with a file that names them.
type Dependencies = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn top_level_modules_depend_on_each_other_without_a_cycle() {
    let crates = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).unwrap();
    let crates: Vec<PathBuf> = crates.map(|entry| entry.unwrap().path()).collect();
    assert!(crates.len() > 1, "{crates:?}");
    for path in crates {
        let cycles = in_cycles(dependencies(&path.join("src")));
        assert!(cycles.is_empty(), "{}: {cycles:#?}", path.display());
    }
}

#[test]
fn every_notation_of_a_path_counts_as_a_dependency() {
    let text = "use crate::{\n    a::{B, C},\n    c,\n};\nuse super::super::d;\nuse super::e;";
    assert_eq!(named(text, 2), ["a", "c", "d"].map(String::from).into());
    assert_eq!(named("/// See [`crate::a`].\nfn f() { crate::b::g() }", 1), ["b".into()].into());
    assert_eq!(named("use super::e;", 1), ["e".into()].into());
}

#[test]
fn only_modules_in_a_cycle_are_reported() {
    let mut all = Dependencies::new();
    for (from, to) in [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")] {
        all.entry(from.into()).or_default().insert(to.into(), "a file".into());
    }
    assert_eq!(in_cycles(all).into_keys().collect::<Vec<_>>(), ["b", "c"]);
}

/// The dependencies between the top-level modules of a crate.
fn dependencies(source: &Path) -> Dependencies {
    let mut found = Dependencies::new();
    for file in rust_files(source) {
        let path = file.strip_prefix(source).unwrap().with_extension("");
        let mut path: Vec<&str> = path.iter().map(|part| part.to_str().unwrap()).collect();
        path.pop_if(|last| *last == "mod");
        let is_root = matches!(path[0], "lib" | "main");
        if is_root || path.contains(&"tests") || path.contains(&"properties") {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let module = found.entry(path[0].to_owned()).or_default();
        for name in named(code, path.len()).into_iter().filter(|name| name != path[0]) {
            module.insert(name, file.display().to_string());
        }
    }
    found
}

fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let (directories, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let is_rust = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let below = directories.iter().flat_map(|directory| rust_files(directory));
    files.into_iter().filter(is_rust).chain(below).collect()
}

/// The items of the crate's root that the code of a module names; the module is this deep.
fn named(code: &str, depth: usize) -> BTreeSet<String> {
    let is_comment = |line: &&str| line.trim_start().starts_with("//");
    let code: Vec<&str> = code.lines().filter(|line| !is_comment(line)).collect();
    let code = code.join("\n");
    let mut found = BTreeSet::new();
    for root in ["crate::", &"super::".repeat(depth)] {
        for path in code.split(root).skip(1) {
            found.extend(first_names(path).into_iter().filter(|name| !name.is_empty()));
        }
    }
    found
}

/// The name that a path begins with, or those of a group of paths in braces.
fn first_names(path: &str) -> Vec<String> {
    let is_in_name = |letter: &char| letter.is_alphanumeric() || *letter == '_';
    let name = |path: &str| path.trim_start().chars().take_while(is_in_name).collect();
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut names, mut depth) = (vec![name(group)], 0);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => names.push(name(&group[at + 1..])),
            _ => {}
        }
    }
    names
}

/// Removes modules that use no other one, or that no other one uses, until only cycles remain, and
/// modules between two of them.
fn in_cycles(mut all: Dependencies) -> Dependencies {
    loop {
        let known: BTreeSet<String> = all.keys().cloned().collect();
        all.values_mut().for_each(|named| named.retain(|name, _| known.contains(name)));
        let used: BTreeSet<String> = all.values().flat_map(BTreeMap::keys).cloned().collect();
        all.retain(|name, named| !named.is_empty() && used.contains(name));
        if all.len() == known.len() {
            return all;
        }
    }
}
