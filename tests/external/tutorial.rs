//! Executes the commands of `docs/tutorial.md`, in order and in one shell.

use std::{
    fs,
    os::unix::{fs::symlink, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use testkit::{free_port, program_path, scratch};

/// Marks a block of commands that need an account.
const NEEDS_ACCOUNT: &str = "<!-- needs an account -->";

/// Blocks of commands of a page, and the number of those that need an account.
pub(crate) fn commands(page: &str) -> (Vec<String>, usize) {
    let (mut blocks, mut skipped, mut current, mut before) = (Vec::new(), 0, None, "");
    for line in page.lines() {
        match (&mut current, line) {
            (None, "```sh") if before == NEEDS_ACCOUNT => skipped += 1,
            (None, "```sh") => current = Some(String::new()),
            (Some(_), "```") => blocks.extend(current.take()),
            (Some(block), line) => *block += &format!("{line}\n"),
            (None, _) => {}
        }
        before = line;
    }
    (blocks, skipped)
}

/// A directory like the root of the repository, with the tested program as the result of the
/// build.
fn checkout() -> PathBuf {
    let directory = scratch();
    fs::create_dir_all(directory.join("target/release")).unwrap();
    symlink(program_path(), directory.join("target/release/smart-router")).unwrap();
    symlink(Path::new(testkit::ROOT).join("examples"), directory.join("examples")).unwrap();
    directory
}

/// The test program is built already.
const NO_BUILD: &str = r#"cargo() { [ "$*" = "build --release" ]; }"#;

/// Executes the blocks of a page in one shell. Returns the directory and the output.
pub(crate) fn execute(blocks: &[String]) -> (PathBuf, String) {
    let mut script = format!("set -euxo pipefail\n{NO_BUILD}\n{}", blocks.concat());
    // Ports of the page may be taken on this machine. A free port may contain the digits of
    // another one, so that all are replaced by names first.
    let ports = ["8000", "8001", "8080", "8081", "8082", "9090", "9091", "9092", "6379"];
    for (index, port) in ports.iter().enumerate() {
        script = script.replace(port, &format!("<port {index}>"));
    }
    let free_ports = ports.map(|_| free_port().to_string());
    for (index, port) in free_ports.iter().enumerate() {
        script = script.replace(&format!("<port {index}>"), port);
    }
    let [_, _, http, _, _, metrics, ..] = &free_ports;
    let directory = checkout();
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).current_dir(&directory);
    shell.env("HTTP_PORT", http).env("METRICS_PORT", metrics);
    shell.env("SMART_ROUTER_URL", format!("http://localhost:{http}"));
    // The programs that the page starts in the background end with their group.
    let (stdout, stderr) = (directory.join("stdout"), directory.join("stderr"));
    let output = |path: &Path| fs::File::create(path).unwrap();
    shell.stdout(output(&stdout)).stderr(output(&stderr)).process_group(0);
    let mut child = shell.spawn().unwrap();
    let status = child.wait().unwrap();
    let group = format!("-{}", child.id());
    let _ = Command::new("kill").args(["-KILL", "--", &group]).output();
    let [printed, errors] = [stdout, stderr].map(|path| fs::read_to_string(path).unwrap());
    assert!(status.success(), "{printed}\n{errors}");
    (directory, printed)
}

#[test]
fn every_command_of_the_tutorial_succeeds() {
    let page = fs::read_to_string(Path::new(testkit::ROOT).join("docs/tutorial.md")).unwrap();
    let (blocks, skipped) = commands(&page);
    assert_eq!(skipped, 1, "the tunnel");
    assert_eq!(page.matches("\n```sh").count(), blocks.len() + skipped, "blocks of another form");
    let (directory, printed) = execute(&blocks);
    assert_eq!(printed.matches("of audio came back; correlation").count(), 3, "{printed}");
    assert!(printed.contains("403\n"), "{printed}");
    assert!(printed.contains("<Stream url=\"wss://voice.example.com/media/CA"), "{printed}");
    let recorded = fs::metadata(directory.join("out.wav")).unwrap().len();
    assert!(recorded > 30_000, "{recorded} bytes");
    fs::remove_dir_all(&directory).unwrap();
}
