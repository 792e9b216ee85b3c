#!/usr/bin/env bash
# Builds a release in dist/: program, image, chart, bill of materials, checksums.
#
#   ./release.sh                   for this machine's architecture
#   ./release.sh --target TRIPLE   for another one, with a cross compiler (docs/kubernetes.md#image)
#   ./release.sh --program FILE    packs a program that is already built (tests)
#   ./release.sh --output DIR      writes to DIR instead of dist/; replaces an earlier release
#
# Needs Rust, a C compiler, CA certificates and Python 3.11; neither a container engine nor Helm. All
# times in the files are SOURCE_DATE_EPOCH, by default the time of the last commit: equal sources,
# equal toolchain, equal files.
set -euo pipefail
cd "$(dirname "$0")"

output=dist program= target=$(rustc --print host-tuple)
while [ $# -gt 0 ]; do
  case $1 in
    --target) target=${2:?a target is missing} && shift ;;
    --program) program=${2:?a file is missing} && shift ;;
    --output) output=${2:?a directory is missing} && shift ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
    *) echo "unknown option $1; see ./release.sh --help" >&2; exit 2 ;;
  esac
  shift
done
case $target in
  x86_64-unknown-linux-gnu) architecture=amd64 ;;
  aarch64-unknown-linux-gnu) architecture=arm64 ;;
  *) echo "there is no release for $target: use x86_64- or aarch64-unknown-linux-gnu" >&2; exit 2 ;;
esac
certificates=${CERTIFICATES:-/etc/ssl/certs/ca-certificates.crt}
[ -s "$certificates" ] || { echo "$certificates is missing: install ca-certificates" >&2; exit 1; }
# The first version of Cargo.toml is that of the workspace.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || true)}
[ -n "$epoch" ] ||
  { echo "this is no Git repository: set SOURCE_DATE_EPOCH, the time of the files (s)" >&2; exit 2; }
export SOURCE_DATE_EPOCH=$epoch
# The directory is deleted below: it has to be new, empty, or an earlier release.
if [ -e "$output" ] && [ ! -f "$output/SHA256SUMS" ] && [ -n "$(ls -A "$output")" ]; then
  echo "$output is not empty and has no SHA256SUMS of an earlier release: choose another one" >&2
  exit 2
fi

chart=deploy/helm/smart-router
for field in version appVersion; do
  grep -qx "$field: $version" $chart/Chart.yaml ||
    { echo "$chart/Chart.yaml: $field is not $version" >&2; exit 1; }
done
if [ -z "$program" ]; then
  program=$(deploy/image/static.sh --release --target "$target")
fi

# A release that fails leaves the earlier one as it is.
mkdir -p "$(dirname "$output")"
complete=$output
output=$(mktemp --directory "$(dirname "$complete")/.release.XXXXXX")
trap 'rm -rf "$output"' EXIT
name=smart-router-$version
install -m 755 "$program" "$output/$name-linux-$architecture"
deploy/image/sbom.py --target "$target" --epoch "$epoch" --program "$program" \
  --output "$output/$name-linux-$architecture.cdx.json"
deploy/image/oci_image.py --program "$program" --certificates "$certificates" \
  --version "$version" --architecture $architecture --epoch "$epoch" \
  --output "$output/$name-image-linux-$architecture.tar"
# A package of Helm is a tar file of the chart's directory; helm package would write the time of
# the day into it. Links to alerts and dashboard become files.
tar --create --directory deploy/helm --sort=name --format=ustar --mode=u=rwX,go=rX \
  --owner=0 --group=0 --numeric-owner --mtime="@$epoch" smart-router |
  gzip --no-name --best > "$output/$name.tgz"
(cd "$output" && sha256sum -- * > SHA256SUMS)
chmod 755 "$output"
rm -rf "$complete" && mv "$output" "$complete"
ls -l "$complete"
