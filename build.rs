//! Joins the Lua scripts: a line `-- include: name` becomes `lua/include/name.lua`.

use std::{env, fs, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=lua");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    for entry in fs::read_dir("lua").expect("lua/ is there") {
        let path = entry.expect("lua/ can be read").path();
        if path.extension().is_some_and(|extension| extension == "lua") {
            let name = path.file_name().expect("a file has a name");
            fs::write(Path::new(&out).join(name), join(&path)).expect("OUT_DIR can be written");
        }
    }
}

fn join(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a script can be read");
    let mut joined = String::new();
    for line in text.lines() {
        match line.strip_prefix("-- include: ") {
            Some(name) => joined += &join(&Path::new("lua/include").join(format!("{name}.lua"))),
            None => joined += line,
        }
        joined.push('\n');
    }
    joined
}
