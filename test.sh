#!/usr/bin/env bash
# Installs what is missing and runs all tests. Needs Debian and the Rust toolchain.
set -euo pipefail
cd "$(dirname "$0")"

# command:package, for what the tests call besides cargo
needed=(cc:gcc kill:procps redis-server:redis-server redis-cli:redis-tools openssl:openssl curl:curl
  python3:python3 node:nodejs npm:npm nginx:nginx-light promtool:prometheus
  chromium:chromium tmux:tmux)
missing=()
for pair in "${needed[@]}"; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -yq --no-install-recommends "${missing[@]}"
  # The package of promtool also starts a Prometheus, on the port of our metrics.
  if [[ " ${missing[*]} " == *" prometheus "* && -d /run/systemd/system ]]; then
    systemctl disable --now prometheus
  fi
fi
command -v cargo-deny >/dev/null || cargo install --locked --quiet cargo-deny

# The providers' SDKs, which judge our signatures and documents.
judges=target/judges
if ! cmp -s <(cat tests/judges/requirements.txt tests/judges/package.json) $judges/installed; then
  rm -rf $judges && mkdir -p $judges
  python3 -m venv $judges/venv
  $judges/venv/bin/pip install --quiet --disable-pip-version-check -r tests/judges/requirements.txt
  cp tests/judges/package.json $judges/
  npm install --prefix $judges --silent --no-fund --no-audit
  cat tests/judges/requirements.txt tests/judges/package.json > $judges/installed
fi

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --check
step cargo clippy --all-targets --locked -- -D warnings
step cargo clippy --manifest-path fuzz/Cargo.toml --target-dir target --locked -- -D warnings
step cargo deny --log-level error check bans licenses sources
step cargo test --locked --lib --test all --test allocations --test model
# Faults under load, every kind once.
step cargo test --locked --test chaos -- --jobs 2
# Compares what Redis does for few pods and for many; the times it prints are for docs/performance.md.
step cargo test --locked --test growth -- --test-threads=1 --nocapture
if command -v valkey-server >/dev/null; then
  REDIS_SERVER=valkey-server step cargo test --locked --test all redis
fi
