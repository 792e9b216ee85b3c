//! Concatenates the Lua files to the text of the library. It starts with declarations shared with
//! Rust: the constants of the rules, the keys, and the flags of the functions.

use std::{collections::BTreeSet, env, fmt::Write, fs, path::Path};

#[path = "src/redis/keys.rs"]
mod keys;
// By path: as a dependency, the whole crate would be built a second time for the host.
#[allow(dead_code, unreachable_pub)]
#[path = "../fleet/src/rules.rs"]
mod rules;

type Millis = u64;

macro_rules! functions {
    ($($name:ident $access:ident $priority:ident $(=> $operation:literal)?)*) => {
        const FUNCTIONS: &[(&str, &str)] = &[$((stringify!($name), stringify!($access)),)*];
    };
}
include!("src/redis/function_table.rs");

/// Shared parts, each after the parts that it uses.
const COMMON: [&str; 15] = [
    "prelude",
    "outbound",
    "pod",
    "queue",
    "choose_pod",
    "end_released",
    "streams",
    "reregister",
    "repeat_request",
    "merchant_config",
    "reservations",
    "fencing",
    "capacity",
    "pod_row",
    "call_row",
];

fn main() {
    println!("cargo::rerun-if-changed=lua");
    println!("cargo::rerun-if-changed=src/redis/keys.rs");
    println!("cargo::rerun-if-changed=src/redis/function_table.rs");
    let read = |path: &Path| fs::read_to_string(path).expect("a Lua file can be read");
    let mut library = declarations();
    library += &arithmetic(&read(Path::new("lua/common/held.lua")));
    for name in COMMON {
        library += &read(&Path::new("lua/common").join(name).with_extension("lua"));
        library.push('\n');
    }
    let mut files: Vec<_> = fs::read_dir("lua")
        .expect("lua/ exists")
        .map(|entry| entry.expect("lua/ can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "lua"))
        .collect();
    files.sort();
    let names: BTreeSet<String> =
        files.iter().map(|path| path.file_stem().unwrap().to_string_lossy().into()).collect();
    let declared: BTreeSet<String> = FUNCTIONS.iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names, declared, "the files in lua/ and src/redis/function_table.rs differ");
    for path in files {
        // A block per file keeps its local names apart.
        library += &format!("do\n{}end\n\n", read(&path));
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("library.lua"), library).expect("OUT_DIR can be written");
}

/// The arithmetic of reservations as one local name: a chunk has at most 200.
fn arithmetic(text: &str) -> String {
    const NAMES: [&str; 4] =
        ["held_slots", "first_answer_rate", "record_dial_ended", "answer_probability"];
    let names: Vec<String> = NAMES.iter().map(|name| format!("{name} = {name}")).collect();
    format!("local ARITHMETIC = (function()\n{text}\nreturn {{{}}}\nend)()\n\n", names.join(", "))
}

fn declarations() -> String {
    let mut lua = String::from("-- Declared in Rust.\nlocal RULES = {\n");
    for (name, value) in rules::ALL {
        writeln!(lua, "  {name} = {value},").unwrap();
    }
    let rows =
        rules::NORMAL_QUANTILES.map(|(tail, deviations)| format!("{{{tail}, {deviations}}}"));
    writeln!(lua, "  NORMAL_QUANTILES = {{{}}},", rows.join(", ")).unwrap();
    lua += "}\n\nlocal FLAGS = {\n";
    for (name, access) in FUNCTIONS {
        let flags = match *access {
            "Reads" => "'no-writes'",
            "AllowOom" => "'allow-oom'",
            "Grows" => "",
            other => panic!("{name}: expected Reads, Grows or AllowOom, got {other}"),
        };
        writeln!(lua, "  {name} = {{{flags}}},").unwrap();
    }
    lua += "}\n\nlocal function keys_under(prefix)\n  return {\n";
    for (name, key) in keys::ALL {
        writeln!(lua, "    {} = prefix .. '{key}',", name.to_lowercase()).unwrap();
    }
    lua += "  }\nend\n\n";
    lua
}
