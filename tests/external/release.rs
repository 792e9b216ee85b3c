//! `release.sh`: the files of a release, from a program that is already built.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use serde_json::Value;
use testkit::scratch;

use crate::{
    agent_stacks::python,
    image::{program, run},
    render::{EVERYTHING, helm, helm_release},
};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// A program that is not static.
const DYNAMIC: &str = "/bin/true";

fn release() -> Command {
    let mut command = Command::new("./release.sh");
    command.env("SOURCE_DATE_EPOCH", "1700000000");
    command
}

fn pack() -> PathBuf {
    let directory = scratch().join("dist");
    run(release().arg("--program").arg(program()).arg("--output").arg(&directory));
    directory
}

/// A release that several tests read.
fn packed() -> &'static PathBuf {
    static PACKED: OnceLock<PathBuf> = OnceLock::new();
    PACKED.get_or_init(pack)
}

/// The content of each file of a release.
fn contents(directory: &PathBuf) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    entries
        .map(|it| (it.file_name().into_string().unwrap(), fs::read(it.path()).unwrap()))
        .collect()
}

#[test]
fn a_release_has_all_files_and_is_reproducible() {
    let directory = packed();
    let files = contents(directory);
    let name = format!("smart-router-{VERSION}");
    let expected = [
        "SHA256SUMS".to_owned(),
        format!("{name}-image-linux-amd64.tar"),
        format!("{name}-linux-amd64"),
        format!("{name}-linux-amd64.cdx.json"),
        format!("{name}.tgz"),
    ];
    assert_eq!(files.keys().cloned().collect::<Vec<_>>(), expected);
    let checked = Command::new("sha256sum")
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(directory)
        .output()
        .unwrap();
    let shown = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(shown.lines().filter(|line| line.ends_with(": OK")).count(), 4, "{shown}");
    let again = contents(&pack());
    for (name, content) in files {
        assert!(content == again[&name], "{name} differs");
    }
}

#[test]
fn the_packaged_chart_renders_the_same_objects() {
    let package = packed().join(format!("smart-router-{VERSION}.tgz"));
    assert_eq!(helm_release("smart-router", &package, EVERYTHING), helm(EVERYTHING));
    let list =
        run(Command::new("tar").args(["--list", "--verbose", "--gzip", "--file"]).arg(package));
    assert!(!list.contains(" -> "), "links become files: {list}");
}

#[test]
fn the_bill_of_materials_lists_the_crates_of_the_program() {
    let path = packed().join(format!("smart-router-{VERSION}-linux-amd64.cdx.json"));
    run(python("bill_of_materials.py").arg(&path));
    let bill: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let components = bill["components"].as_array().unwrap();
    let names: Vec<&str> = components.iter().map(|it| it["name"].as_str().unwrap()).collect();
    for used in ["tokio", "rustls", "aws-lc-sys", "store", "fleet"] {
        assert!(names.contains(&used), "{used}");
    }
    for unused in ["testkit", "proptest", "allocation-counter", "smart-router"] {
        assert!(!names.contains(&unused), "{unused}");
    }
    for component in components {
        assert!(component["licenses"][0]["expression"].is_string(), "{component}");
        let ours = component["externalReferences"].is_null();
        assert!(ours || component["hashes"][0]["content"].is_string(), "{component}");
    }
}

/// Runs `release.sh`, which refuses; returns its error.
fn refusal(command: &mut Command) -> String {
    let output = command.current_dir(testkit::ROOT).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_directory_with_other_files_is_not_deleted() {
    let directory = scratch().join("home");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("letter"), "dear").unwrap();
    let shown = refusal(release().args(["--program", DYNAMIC, "--output"]).arg(&directory));
    assert!(shown.contains("is not empty and has no SHA256SUMS"), "{shown}");
    assert_eq!(fs::read_to_string(directory.join("letter")).unwrap(), "dear");
}

#[test]
fn a_dynamically_linked_program_is_not_packed() {
    let directory = scratch().join("dist");
    let shown = refusal(release().args(["--program", DYNAMIC, "--output"]).arg(&directory));
    assert!(shown.contains("needs the loader /lib64/ld-linux-x86-64.so.2"), "{shown}");
    assert!(!directory.exists(), "a failed release leaves nothing");
}

#[test]
fn outside_of_git_the_time_has_to_be_set() {
    let copy = scratch().join("sources");
    fs::create_dir(&copy).unwrap();
    for file in ["release.sh", "Cargo.toml"] {
        fs::copy(Path::new(testkit::ROOT).join(file), copy.join(file)).unwrap();
    }
    let mut command = Command::new("./release.sh");
    command.env_remove("SOURCE_DATE_EPOCH").env("GIT_DIR", &copy).args(["--program", DYNAMIC]);
    let output = command.current_dir(copy).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{shown}");
    assert!(shown.contains("set SOURCE_DATE_EPOCH"), "{shown}");
}

#[test]
fn a_wrong_option_is_refused_before_anything_is_written() {
    let directory = scratch().join("dist");
    for (option, value, expected) in [
        ("--tarball", "x", "unknown option --tarball"),
        ("--target", "wasm32-wasip1", "there is no release for wasm32-wasip1"),
    ] {
        let mut command = release();
        command.arg("--output").arg(&directory).args([option, value]);
        let output = command.current_dir(testkit::ROOT).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let shown = String::from_utf8_lossy(&output.stderr);
        assert!(shown.contains(expected), "{shown}");
        assert!(!directory.exists());
    }
}
