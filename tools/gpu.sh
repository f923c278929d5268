#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks the CUDA backend on this machine's GPU and measures it; a short table comes last. A few minutes.
#
#   tools/gpu.sh                        checks within 150 s, then a row of each kind of the benchmark
#   tools/gpu.sh check [pytest's ...]   tests/gpu alone: `check -k dropout`, `check --seconds 300`
#   tools/gpu.sh bench [run.py's ...]   bench/gpu alone: `bench --filter triangle`, `bench --all`; rows are kept in
#                                       bench/results/gpu.json and written into docs/performance.md
#   tools/gpu.sh sanitize [TOOL ...]    compute-sanitizer's memcheck, racecheck, initcheck, synccheck (or those named)
#                                       over the tests that are marked for it
#
# Needs: a built library (build/, or $FOVEA_BUILD) with the command beside it, and a Python with PyTorch ($PYTHON,
# else python3) and pytest. Nothing else is downloaded or built.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=${FOVEA_BUILD:-build}
export FOVEA_BUILD=$build PYTHONUNBUFFERED=1

usage() { sed -n '4,14p' "$0" | cut -c 3-; }
refuse() { echo "tools/gpu.sh: $1"; exit 1; }

case ${1:-} in -h | --help | help) usage; exit 0 ;; esac
case ${1:-all} in all | check | bench | sanitize) ;; *) usage; exit 2 ;; esac
command -v "$python" >/dev/null || refuse "no Python of the name $python: set PYTHON=... to one that has PyTorch"
"$python" -c 'import torch' 2>/dev/null ||
  refuse "$python cannot import PyTorch ($("$python" -c 'import torch' 2>&1 | tail -n 1)): set PYTHON=... to one that has it"
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
  refuse "no CUDA device that the PyTorch of $python sees; PYTHON=... names the Python that is used"
[ -e "$build/libfovea.so" ] || refuse "$build/libfovea.so is missing: make build"
export FOVEA_LIBRARY=${FOVEA_LIBRARY:-$build/libfovea.so}

check() { "$python" tests/gpu/run.py "$@"; }

bench() {
  "$python" bench/gpu/run.py --json bench/results/gpu.json "$@"
  local status=$?
  "$python" tools/tables.py
  return $status
}

# Tool by tool: a fault is a line of compute-sanitizer's own, and the exit status. Only our kernels are looked at, but by
# initcheck, which has to see every write. Each tensor gets an allocation of its own, so that bounds are those of
# tensors; SANITIZE_FAST=1 does without. The kernels are compiled before, on all cores.
sanitize() {
  local failed=0 tool log filter memory=(PYTORCH_NO_CUDA_MEMORY_CACHING=1)
  [ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
  [ -z "${SANITIZE_FAST:-}" ] || memory=()
  "$python" tests/gpu/table.py | FOVEA_NVRTC=${FOVEA_NVRTC:-$("$python" tests/gpu/table.py --nvrtc)} \
    "$build/cli/fovea" precompile --file - | tail -n 1
  for tool in "$@"; do
    log=${SANITIZE_LOG:-$(mktemp)}
    filter=(--kernel-name kernel_substring=fovea)
    [ "$tool" = initcheck ] && filter=()
    echo "== compute-sanitizer --tool $tool"
    env FOVEA_SANITIZE=1 "${memory[@]}" timeout "${SANITIZE_SECONDS:-600}" compute-sanitizer --tool "$tool" \
      --error-exitcode 99 "${filter[@]}" "$python" -m pytest -v -p no:cacheprovider -m sanitize tests/gpu/test_cases.py \
      >"$log" 2>&1 || failed=1
    grep -E '^=========' "$log" | head -40
    grep -cE 'PASSED' "$log" | sed 's/$/ rows passed/'
    tail -n 2 "$log"
  done
  return $failed
}

command=${1:-all}
[ $# -gt 0 ] && shift
case $command in
  check) check "$@" ;;
  bench) bench "$@" ;;
  sanitize) sanitize "$@" ;;
  all)
    checks=$(mktemp)
    check --seconds 150 >"$checks" 2>&1
    status=$?
    cat "$checks"
    "$python" bench/gpu/run.py --quick --seconds 120 || status=1
    echo
    echo "checks: $(grep -E '^[0-9]+ passed' "$checks" | tail -1)"
    grep '^rows of the case table' "$checks"
    rm -f "$checks"
    exit $status
    ;;
esac
