#!/usr/bin/env bash
# Measures the router beside its baselines in one run; --quick runs only the cases behind the
# ratios. Needs Debian and the Rust toolchain.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v redis-server >/dev/null; then
  apt-get update -q
  apt-get install -yq --no-install-recommends redis-server
fi
exec cargo bench --quiet --locked --package smart-router --bench compare -- "$@"
