#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian packages that are missing, and only those. `tools/deps.sh build` is what the library, the
# command and the demo need; `tools/deps.sh test` adds what the tests, the benchmarks and the lint need, `tools/deps.sh docs`
# what the documentation site and its test need.
set -euo pipefail

declare -A packages=(
  [build]="g++ make cmake libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libeigen3-dev"
  [test]="git libgtest-dev python3 python3-venv clang clang-format clang-tidy libclang-rt-dev binutils pkg-config abigail-tools"
  [docs]="doxygen chromium"
  [wheel]="qemu-user libc6-arm64-cross"
  [bench]="libopenblas-dev libdnnl-dev"
)

[ $# -gt 0 ] || set -- build
wanted=""
for group in "$@"; do
  [ -n "${packages[$group]:-}" ] || { echo "deps: no group '$group'; there are: ${!packages[*]}" >&2; exit 2; }
  wanted="$wanted ${packages[$group]}"
done

# A tool that is there from elsewhere (a newer cmake, pyenv's python) is as good as Debian's.
have() {
  case "$1" in
    g++ | make | cmake | git | clang | clang-format | clang-tidy) command -v "$1" >/dev/null ;;
    pkg-config) command -v pkg-config >/dev/null ;;
    abigail-tools) command -v abidiff >/dev/null ;;
    binutils) command -v nm >/dev/null ;;
    doxygen | chromium) command -v "$1" >/dev/null ;;
    python3) command -v python3 >/dev/null ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    *) [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ] ;;
  esac
}

missing=""
for package in $wanted; do
  have "$package" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "deps: not a Debian machine; please install the equivalents of:$missing" >&2
  exit 1
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "deps: run as root once: apt-get install$missing" >&2; exit 1; }
  as_root="sudo"
fi
echo "deps: installing$missing"
export DEBIAN_FRONTEND=noninteractive
exec 9<"$0"
flock 9  # stages of the tests run at once, and apt-get does not wait for another
$as_root apt-get update -qq
# shellcheck disable=SC2086
$as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
