#!/usr/bin/env bash
# Injects faults under load and checks the invariants: ./chaos.sh --help
set -euo pipefail
cd "$(dirname "$0")"

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v cc >/dev/null || missing+=(gcc)
command -v kill >/dev/null || missing+=(procps)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -yq --no-install-recommends "${missing[@]}"
fi

profile=()
case " $* " in *" --overload"*) profile=(--release) ;; esac
exec cargo test --quiet --locked "${profile[@]}" --package smart-router --test chaos -- "$@"
