#!/usr/bin/env bash
# Installs what is missing and runs all tests. Needs Debian and the Rust toolchain.
set -euo pipefail
cd "$(dirname "$0")"

# command:package, for what the tests call besides cargo
needed=(cc:gcc kill:procps redis-server:redis-server redis-cli:redis-tools openssl:openssl)
missing=()
for pair in "${needed[@]}"; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -yq --no-install-recommends "${missing[@]}"
fi
command -v cargo-deny >/dev/null || cargo install --locked --quiet cargo-deny

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --check
step cargo clippy --all-targets --locked -- -D warnings
step cargo deny --log-level error check bans licenses sources
step cargo test --locked --lib --test all
# Measures Redis's own time: nothing else may run beside it.
step cargo test --locked --test growth
if command -v valkey-server >/dev/null; then
  REDIS_SERVER=valkey-server step cargo test --locked --test all redis
fi
