#!/usr/bin/env bash
# Breaks every rule of src/domain in turn and counts how many of the breaks the domain's
# own tests notice. Arguments go to cargo-mutants: -f src/domain/fleet/queue.rs does one
# file. Needs the Rust toolchain.
set -euo pipefail
cd "$(dirname "$0")"
mutants=target/mutants

PATH=$PWD/$mutants/tools/bin:$PATH
command -v cargo-mutants >/dev/null ||
  cargo install --locked --quiet --root $mutants/tools cargo-mutants

# The domain needs nothing of the rest: alone it builds in a second.
crate=$mutants/crate
rm -rf $crate && mkdir -p $crate/src
cp -r src/domain $crate/src/
cp Cargo.lock $crate/
echo 'pub mod domain;' > $crate/src/lib.rs
cat > $crate/Cargo.toml <<EOF
[package]
name = "domain"
version = "0.0.0"
$(grep '^edition =' Cargo.toml)

[dependencies]
$(grep -E '^(serde|serde_json|thiserror) =' Cargo.toml)

[dev-dependencies]
$(grep -E '^proptest =' Cargo.toml)

[profile.dev]
debug = false

[workspace]
EOF

# The same random lives in every run, as many as a second allows; what fails is not
# made smaller.
export PROPTEST_CASES=${PROPTEST_CASES:-20} PROPTEST_RNG_SEED=7 PROPTEST_MAX_SHRINK_ITERS=0
code=0
cargo mutants --dir $crate --output $mutants --jobs 2 --timeout 30 --colors never \
  --cargo-arg=--lib "$@" || code=$?
# 2: some were missed; 3: some ran too long. Anything else is a failure of the run.
case $code in 0 | 2 | 3) ;; *) exit $code ;; esac

of() { wc -l < "$mutants/mutants.out/$1.txt"; }
missed=$(of missed) caught=$(($(of caught) + $(of timeout)))
viable=$((missed + caught))
cat $mutants/mutants.out/missed.txt
awk -v viable=$viable -v caught=$caught -v missed="$missed" 'BEGIN {
  printf "mutants: %d viable, %d caught (%.1f %%), %d missed\n",
    viable, caught, viable ? 100 * caught / viable : 0, missed }'
