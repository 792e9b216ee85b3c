#!/usr/bin/env bash
# Installs missing packages and runs tests. Needs Debian and the Rust toolchain.
#
#   ./test.sh             formatting, lints, unit tests, memory allocations per request,
#                         end-to-end tests with a real Redis
#   ./test.sh --full      adds the comparison of the stores, the model and outbound campaigns,
#                         browser, SDKs, example agents, schemathesis, nginx, promtool, chart,
#                         image, fault injection under load (every cell once), 200 killed agents
#                         and growth; CI runs this
#   ./test.sh --nightly   adds tests of the tests: mutated Redis functions, broken builds,
#                         sabotages of the model, a seventh of cargo-mutants (by weekday)
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
  needed+=(python3:python3 node:nodejs npm:npm nginx:nginx-light promtool:prometheus chromium:chromium
    # The image and a release: deploy/image, release.sh.
    buildah:buildah skopeo:skopeo umoci:umoci strip:binutils gzip:gzip unshare:util-linux git:git)
fi
missing=()
for pair in "${needed[@]}"; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ $run != default ]; then
  python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
  [ -s /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
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
  # The SDKs of the providers, schemathesis, browser drivers, the packages of the examples, and
  # Helm, kustomize and schemas for deploy/.
  checkers=target/checkers
  python_packages=(tests/checkers/requirements.txt examples/{fastapi,pipecat}/requirements.txt)
  listed() { cat "${python_packages[@]}" tests/checkers/package.json; }
  if ! cmp -s <(listed) $checkers/installed; then
    rm -rf $checkers && mkdir -p $checkers
    python3 -m venv $checkers/venv
    $checkers/venv/bin/pip install --quiet --disable-pip-version-check "${python_packages[@]/#/-r}"
    cp tests/checkers/package.json $checkers/
    npm install --prefix $checkers --silent --no-fund --no-audit
    listed > $checkers/installed
  fi
fi

step() {
  printf '\n== %s\n' "$*"
  local began=$SECONDS
  "$@"
  printf '== took %s s\n' $((SECONDS - began))
}
# End-to-end tests mostly wait, so run more of them than there are cores.
threads=$((8 * $(nproc)))
router() { step cargo test --locked --package smart-router "$@"; }

if [ $run = one ]; then
  step cargo test --locked --workspace --lib -- "$name"
  router --test e2e --test external --test differential --test model --test campaign \
    --test allocations --test growth -- "$name"
  exit
fi

step cargo fmt --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo test --locked --workspace --lib
router --test allocations
router --test e2e -- --test-threads=$threads

if at_least full; then
  router --test differential -- --skip mutations
  router --test model -- --skip sabotage
  router --test campaign
  step cargo clippy --manifest-path fuzz/Cargo.toml --target-dir target --locked -- -D warnings
  step cargo deny --log-level error check bans licenses sources
  router --test external
  router --test chaos -- --jobs 2 --sound-only
  # 50 live calls, 200 killed agents.
  KILLS=50,200 router --test e2e calls_survive_the_kills
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
  # All figures of docs/outbound.md; minutes.
  CAMPAIGN=full router --test campaign figures
  # A seventh of the mutants a day, by the day of the week: all of them take hours.
  step ./mutants.sh --shard "$(($(date +%u) - 1))/7"
fi
