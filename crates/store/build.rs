//! Joins the Lua files to one library: what operations have in common first, in the
//! order in which the parts build on each other.

use std::{env, fs, path::Path};

const COMMON: [&str; 9] =
    ["base", "pod", "queue", "draw", "again", "merchant", "fence", "pod_row", "call_row"];

fn main() {
    println!("cargo::rerun-if-changed=lua");
    let read = |path: &Path| fs::read_to_string(path).expect("a Lua file can be read");
    let mut library = String::new();
    for name in COMMON {
        library += &read(&Path::new("lua/common").join(name).with_extension("lua"));
        library.push('\n');
    }
    let mut operations: Vec<_> = fs::read_dir("lua")
        .expect("lua/ is there")
        .map(|entry| entry.expect("lua/ can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "lua"))
        .collect();
    operations.sort();
    for path in operations {
        // Each with names of its own.
        library += &format!("do\n{}end\n\n", read(&path));
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("library.lua"), library).expect("OUT_DIR can be written");
}
