#!/usr/bin/env bash
# One command on a machine with an NVIDIA GPU, PyTorch 2.11 or later and its triton; nothing is downloaded:
#   bench/gpu.sh [folder for the result, default bench/results]
# Builds the CUDA library (or takes the one of dist/*.whl), runs the GPU tests of cuda and triton, compute-sanitizer on small
# cases, and the benchmarks; writes one <gpu>.json. Each step has a limit, the sum is under nine minutes; a step that
# cannot run says why and does not stop the others. Exit status: number of failed steps.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-bench/results}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET
steps=$(mktemp)
work=$(mktemp -d)
trap 'rm -rf "$steps" "$work"' EXIT
failed=0

step() { # name, limit in seconds, command...
  local name=$1 limit=$2 start=$SECONDS status verdict
  shift 2
  printf '\n=== %s\n' "$name"
  timeout --kill-after=5 "$limit" "$@"
  status=$?
  case $status in
    0) verdict=ok ;;
    77) verdict=skipped ;;
    124 | 137) verdict="over its limit of $limit s" ;;
    *) verdict="failed ($status)" ;;
  esac
  [ "$status" = 0 ] || [ "$status" = 77 ] || failed=$((failed + 1))
  printf '%s\t%s\t%d\n' "$name" "$verdict" $((SECONDS - start)) | tee -a "$steps"
}

"$python" - <<'EOF' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("bench/gpu.sh: this torch sees no CUDA device")
print(torch.cuda.get_device_name(0), "torch", torch.__version__, "CUDA", torch.version.cuda)
EOF

build() {
  local wheel capability nvcc
  wheel=$(ls -t dist/specdec_kernels-*.whl 2>/dev/null | head -n 1)
  nvcc=$(command -v "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
  if [ -n "$wheel" ] && "$python" -m zipfile -l "$wheel" | grep -q '_cuda\.'; then
    echo "taking the libraries of $wheel"
    "$python" -m zipfile -e "$wheel" "$work/wheel" && cp "$work"/wheel/specdec_kernels/*.so specdec_kernels/
  elif [ -n "$nvcc" ]; then
    capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability(0))')
    CUDA_HOME=$(dirname "$(dirname "$nvcc")") TORCH_CUDA_ARCH_LIST="$capability" \
      "$python" setup.py build_ext --inplace
  else
    echo "no nvcc and no wheel in dist/ that holds _cuda: only triton is measured"
    return 77
  fi
}

tests() {
  "$python" -c 'import pytest' 2>/dev/null || { echo "pytest is not installed"; return 77; }
  # No hypothesis here: its tests are left out rather than failed.
  local without=()
  "$python" -c 'import hypothesis' 2>/dev/null || without=(--ignore=tests/test_properties.py)
  "$python" -m pytest -q -x -p no:cacheprovider -m "not slow" -k "(cuda or triton) and not cuda_host" \
    "${without[@]}" tests
}

sanitize() { # tool
  local tool
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  [ -n "$tool" ] || { echo "compute-sanitizer is not installed"; return 77; }
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$1" --error-exitcode 1 --kernel-name-exclude kns=at \
    "$python" -m bench.gpu_small
}
export -f build tests sanitize
export python work

step build 150 bash -c build
step tests 130 bash -c tests
step "small cases" 40 "$python" -m bench.gpu_small
step memcheck 45 bash -c 'sanitize memcheck'
step racecheck 45 bash -c 'sanitize racecheck'
step benchmarks 120 "$python" -m bench.gpu --out "$out" --steps "$steps"
"$python" -m bench.gpu --out "$out" --steps "$steps" --only-steps

printf '\n'
cat "$steps"
exit "$failed"
