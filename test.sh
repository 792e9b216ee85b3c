#!/usr/bin/env bash
# Installs missing packages and runs tests. Needs Debian and the Rust toolchain.
#
#   ./test.sh             formatting, lints, unit tests, end-to-end tests with a real Redis
#   ./test.sh --full      adds browser, SDKs, schemathesis, nginx, promtool, fault injection
#                         under load (every cell once) and growth; CI runs this
#   ./test.sh --nightly   adds tests of the tests: mutated Redis functions, broken builds,
#                         sabotages of the model, cargo-mutants
#   ./test.sh NAME        runs the tests whose names contain NAME
set -euo pipefail
cd "$(dirname "$0")"

run=default name=
case "${1-}" in
  '') ;;
  --full) run=full ;;
  --nightly) run=nightly ;;
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
  -*) echo "unknown option $1; see ./test.sh --help" >&2; exit 2 ;;
  *) run=one name=$1 ;;
esac
at_least() { # at_least full: does this run include the full one?
  case $run in nightly) true ;; full) [ "$1" = full ] ;; *) false ;; esac
}

# command:package
needed=(cc:gcc kill:procps redis-server:redis-server redis-cli:redis-tools openssl:openssl
  curl:curl tmux:tmux)
if [ $run != default ]; then
  needed+=(python3:python3 node:nodejs npm:npm nginx:nginx-light promtool:prometheus chromium:chromium)
fi
missing=()
for pair in "${needed[@]}"; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ $run != default ]; then
  python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
fi
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -yq --no-install-recommends "${missing[@]}"
  # The package of promtool also starts a Prometheus on the router's metrics port.
  if [[ " ${missing[*]} " == *" prometheus "* && -d /run/systemd/system ]]; then
    systemctl disable --now prometheus
  fi
fi

if [ $run != default ]; then
  command -v cargo-deny >/dev/null || cargo install --locked --quiet cargo-deny
  # The SDKs of the providers, schemathesis and browser drivers.
  checkers=target/checkers
  if ! cmp -s <(cat tests/checkers/requirements.txt tests/checkers/package.json) $checkers/installed; then
    rm -rf $checkers && mkdir -p $checkers
    python3 -m venv $checkers/venv
    $checkers/venv/bin/pip install --quiet --disable-pip-version-check -r tests/checkers/requirements.txt
    cp tests/checkers/package.json $checkers/
    npm install --prefix $checkers --silent --no-fund --no-audit
    cat tests/checkers/requirements.txt tests/checkers/package.json > $checkers/installed
  fi
fi

step() {
  printf '\n== %s\n' "$*"
  local began=$SECONDS
  "$@"
  printf '== took %s s\n' $((SECONDS - began))
}
# End-to-end tests mostly wait, so run more of them than there are cores.
threads=$((4 * $(nproc)))
router() { step cargo test --locked --package smart-router "$@"; }

if [ $run = one ]; then
  step cargo test --locked --workspace --lib -- "$name"
  router --test e2e --test external --test differential --test model -- "$name"
  exit
fi

step cargo fmt --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo test --locked --workspace --lib
router --test allocations
router --test e2e -- --test-threads=$threads
router --test differential -- --skip mutations
router --test model -- --skip sabotage

if at_least full; then
  step cargo clippy --manifest-path fuzz/Cargo.toml --target-dir target --locked -- -D warnings
  step cargo deny --log-level error check bans licenses sources
  router --test external
  router --test chaos -- --jobs 2 --sound-only
  # Compares the work of Redis for few pods and for many.
  router --test growth -- --test-threads=1 --nocapture
  if command -v valkey-server >/dev/null; then
    REDIS_SERVER=valkey-server router --test e2e redis
  fi
fi

if at_least nightly; then
  router --test differential mutations
  router --test model sabotage
  router --test chaos -- --jobs 2 --runs 0
  step ./mutants.sh
fi
