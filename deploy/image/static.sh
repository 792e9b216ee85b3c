#!/usr/bin/env bash
# Builds the program without shared libraries and prints its path.
#
#   deploy/image/static.sh [--release] [--target TRIPLE]
#
# glibc is linked statically (decision 38). The builds have a directory of their own, target/image,
# because other flags would rebuild everything in target/. Paths of this machine are replaced, so
# that equal sources give equal programs.
set -euo pipefail
cd "$(dirname "$0")/../.."

profile=debug arguments=() target=$(rustc --print host-tuple)
while [ $# -gt 0 ]; do
  case $1 in
    --release) profile=release arguments=(--release) ;;
    --target) target=${2:?a target is missing} && shift ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
  shift
done

cargo_home=${CARGO_HOME:-$HOME/.cargo}
export RUSTFLAGS="-C target-feature=+crt-static --remap-path-prefix=$PWD=/src --remap-path-prefix=$cargo_home=/cargo"
maps="-ffile-prefix-map=$PWD=/src -ffile-prefix-map=$cargo_home=/cargo"
export CFLAGS="${CFLAGS-} $maps" CXXFLAGS="${CXXFLAGS-} $maps"
# A cross compiler of Debian, gcc-aarch64-linux-gnu for example.
if [ "$target" != "$(rustc --print host-tuple)" ]; then
  linker=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<< "$target")_LINKER
  export "$linker=${!linker:-${target/-unknown/}-gcc}"
fi
cargo build --locked "${arguments[@]}" --target "$target" --target-dir target/image \
  --package smart-router --bin smart-router >&2
echo "$PWD/target/image/$target/$profile/smart-router"
