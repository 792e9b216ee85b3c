#!/usr/bin/env bash
# Measures the router beside its baselines in one run. Installs missing packages. Needs Debian
# and the Rust toolchain; close other programs first.
#
#   ./bench.sh                   allocation, beside the procedure that the router replaces
#   ./bench.sh --quick           only the cases behind the ratios
#   ./bench.sh --write           the whole run; writes its results to docs/performance.md
#   ./bench.sh --media           the media gateway beside nginx, each on one core: CPU per frame,
#                                latency, memory per call, new streams a second; gaps of calls
#                                whose agents are killed; about 8 minutes
#   ./bench.sh --media --quick   one short turn
set -euo pipefail
cd "$(dirname "$0")"

fail() { echo "$1; see ./bench.sh --help" >&2; exit 2; }
bench=compare args=()
for option in "$@"; do
  case $option in
    --media) bench=media ;;
    --quick | --write) args+=("$option") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
    *) fail "unknown option $option" ;;
  esac
done
case "$bench ${args[*]}" in
  *--quick*--write* | *--write*--quick*) fail "--write needs the whole run" ;;
  media*--write*) fail "--media writes no results" ;;
esac

# command:package
case $bench in
  compare) needed=(redis-server:redis-server) ;;
  media) needed=(kill:procps nginx:nginx-light openssl:openssl setpriv:util-linux taskset:util-linux) ;;
esac
missing=()
for pair in "${needed[@]}"; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -yq --no-install-recommends "${missing[@]}"
fi

if [ $bench = media ]; then
  # Clients and agents have two files per stream each, as have the systems under test.
  ulimit -n "$(ulimit -Hn)"
fi
exec cargo bench --quiet --locked --package smart-router --bench $bench -- "${args[@]}"
