#!/usr/bin/env bash
# Runs cargo-mutants on the fleet crate and counts the mutants that its own tests catch.
# Arguments go to cargo-mutants: -f crates/fleet/src/fleet/queue.rs limits the run to one file.
# Needs the Rust toolchain.
set -euo pipefail
cd "$(dirname "$0")"
mutants=target/mutants

PATH=$PWD/$mutants/tools/bin:$PATH
command -v cargo-mutants >/dev/null ||
  cargo install --locked --quiet --root $mutants/tools cargo-mutants

# The same random cases in every run, as many as run in a second; failures are not shrunk.
export PROPTEST_CASES=${PROPTEST_CASES:-20} PROPTEST_RNG_SEED=7 PROPTEST_MAX_SHRINK_ITERS=0
export CARGO_PROFILE_DEV_DEBUG=false
code=0
cargo mutants --package fleet --output $mutants --jobs 2 --timeout 120 --colors never \
  --exclude 'crates/fleet/src/testing/*' --cargo-arg=--lib "$@" || code=$?
# 2: mutants were missed; 3: mutants timed out. Any other code is a failure of the run.
case $code in 0 | 2 | 3) ;; *) exit $code ;; esac

of() { wc -l < "$mutants/mutants.out/$1.txt"; }
missed=$(of missed) caught=$(($(of caught) + $(of timeout)))
viable=$((missed + caught))
cat $mutants/mutants.out/missed.txt
awk -v viable=$viable -v caught=$caught -v missed="$missed" 'BEGIN {
  printf "mutants: %d viable, %d caught (%.1f %%), %d missed\n",
    viable, caught, viable ? 100 * caught / viable : 0, missed }'
