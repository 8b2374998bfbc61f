#!/usr/bin/env bash
# What a person with an NVIDIA GPU runs (docs/gpu.md). Needs PyTorch 2.11 or later and its triton; downloads nothing.
#   bench/gpu.sh [build] [tests] [triton] [sanitize] [bench] [counters]     no name: all, in this order
# Each part ends within ten minutes and writes what it finds, as it comes, into one file, OUT/<gpu>.json (OUT is a folder,
# default bench/results). A part that cannot run says why and does not stop the others. Exit status: failed steps.
# PYTHON names another interpreter; SLOW=3 triples the limits of the steps.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-bench/results} PYTHON=${PYTHON:-python3} SLOW=${SLOW:-1}
export PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(build tests triton sanitize bench counters)
for part in "${parts[@]}"; do
  case $part in
    build | tests | triton | sanitize | bench | counters) ;;
    *) echo "bench/gpu.sh: no part $part; parts: build tests triton sanitize bench counters" && exit 2 ;;
  esac
done
GPU_WORK=$(mktemp -d)
export GPU_WORK
trap 'rm -rf "$GPU_WORK"' EXIT
failed=0
summary=()

step() { # name, limit in seconds, function and its arguments; 77 is "skipped", with the reason in the last line
  local name=$1 limit=$(($2 * SLOW)) start=$SECONDS status verdict log="$GPU_WORK/log"
  shift 2
  printf '\n=== %s\n' "$name"
  GPU_STEP=$name timeout --kill-after=10 "$limit" bash -c '"$@"' part "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  case $status in
    0) verdict=ok ;;
    77) verdict=skipped ;;
    124 | 137) verdict="cut at its limit of $limit s" ;;
    *) verdict="failed ($status)" ;;
  esac
  [ "$status" = 0 ] || [ "$status" = 77 ] || failed=$((failed + 1))
  summary+=("$(printf '%-22s %s, %d s' "$name" "$verdict" $((SECONDS - start)))")
  "$PYTHON" -m bench.gpu_file "$GPU_FILE" "$name" "$verdict" $((SECONDS - start)) "$log"
}

find_tool() { # a program of the CUDA toolkit, or nothing
  command -v "${CUDA_HOME:+$CUDA_HOME/bin/}$1" || command -v "$1" || ls "/usr/local/cuda/bin/$1" 2>/dev/null
}

build() {
  local wheel nvcc
  wheel=$(ls -t dist/specdec_kernels-*.whl 2>/dev/null | head -n 1)
  nvcc=$(find_tool nvcc)
  if [ -n "$wheel" ] && "$PYTHON" -m zipfile -l "$wheel" | grep -q '_cuda\.'; then
    echo "taking the libraries of $(basename "$wheel")"
    "$PYTHON" -m zipfile -e "$wheel" "$GPU_WORK/wheel" && cp "$GPU_WORK"/wheel/specdec_kernels/*.so specdec_kernels/
  elif [ -n "$nvcc" ]; then
    TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability(0))')
    export TORCH_CUDA_ARCH_LIST CUDA_HOME="${nvcc%/bin/nvcc}"
    "$PYTHON" setup.py --quiet build_ext --inplace
  else
    echo "no wheel in dist/ that holds _cuda, and no nvcc: only triton runs"
    return 77
  fi
}

run_tests() { # pytest's arguments; in parallel where xdist is installed
  local parallel=()
  "$PYTHON" -c 'import pytest' 2>/dev/null || { echo "pytest is not installed"; return 77; }
  if [ "${WORKERS:-0}" -gt 0 ] && "$PYTHON" -c 'import xdist' 2>/dev/null; then parallel=(-n "$WORKERS"); fi
  "$PYTHON" -m pytest -q -p no:cacheprovider -p bench.gpu_tests -m "not slow" --continue-on-collection-errors \
    "${parallel[@]}" "$@"
}

backend_tests() { # backend, workers
  local files
  mapfile -t files < <(grep -lE '^def test_.*backend: str' tests/test_*.py)
  WORKERS=$2 run_tests --backend "$1" tests/ops "${files[@]}"
}

sanitize() { # tool of compute-sanitizer
  local tool status
  tool=$(find_tool compute-sanitizer)
  [ -n "$tool" ] || { echo "compute-sanitizer is not installed"; return 77; }
  # Kernels of torch are not watched, but for initcheck, which has to see what they write.
  local others=(--kernel-name-exclude kns=at6native)
  [ "$1" != initcheck ] || others=()
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$1" --error-exitcode 86 "${others[@]}" \
    "$PYTHON" -m bench.gpu_small --seconds 80 2>&1 | tee "$GPU_WORK/sanitizer"
  status=${PIPESTATUS[0]}
  if grep -qi 'device not supported' "$GPU_WORK/sanitizer"; then
    echo "compute-sanitizer refuses this device: $(grep -i -m 1 'device not supported' "$GPU_WORK/sanitizer")"
    return 77
  fi
  return "$status"
}

counters() {
  local ncu
  ncu=$(find_tool ncu)
  [ -n "$ncu" ] || { echo "Nsight Compute (ncu) is not installed"; return 77; }
  # Clocks are left as they are: the machine may belong to others too.
  "$ncu" --clock-control none --csv --print-units base --metrics "$("$PYTHON" -m bench.gpu_counters --metrics)" \
    --kernel-name-base mangled --kernel-name 'regex:.*specdec.*|.*_kernel$' \
    --log-file "$GPU_WORK/ncu.csv" "$PYTHON" -m bench.gpu_counters
  local status=$?
  if [ "$status" != 0 ]; then
    tail -n 3 "$GPU_WORK/ncu.csv"
    echo "ncu cannot read the counters here: $(grep -m 1 '==ERROR==' "$GPU_WORK/ncu.csv")"
    return 77
  fi
  "$PYTHON" -m bench.gpu_counters --file "$GPU_FILE" --csv "$GPU_WORK/ncu.csv"
}

"$PYTHON" - <<'END' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("bench/gpu.sh: this torch sees no CUDA device")
END
GPU_FILE=$("$PYTHON" -m bench.gpu --begin "$OUT" | tail -n 1) || exit 1
export GPU_FILE
export -f find_tool build run_tests backend_tests sanitize counters
echo "writing $GPU_FILE"

for part in "${parts[@]}"; do
  case $part in
    build) step build 580 build ;;
    tests)
      step "small calls" 130 "$PYTHON" -m bench.gpu_small --seconds 80
      step "tests of GPUs" 170 run_tests tests/gpu
      step "tests of cuda" 280 backend_tests cuda 4
      ;;
    triton) step "tests of triton" 580 backend_tests triton 8 ;;
    sanitize) for tool in memcheck racecheck initcheck synccheck; do step "$tool" 140 sanitize "$tool"; done ;;
    bench) step benchmarks 580 "$PYTHON" -m bench.gpu --file "$GPU_FILE" --seconds 500 ;;
    counters) step counters 300 counters ;;
  esac
done

printf '\n%s\n' "$GPU_FILE"
printf '%s\n' "${summary[@]}"
exit "$failed"
