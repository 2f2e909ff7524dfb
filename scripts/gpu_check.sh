#!/usr/bin/env bash
# All tests of the GPU on this machine, and compute-sanitizer on a short selection of them; writes
# results/gpu_tests.json.
#
#   bash scripts/gpu_check.sh [--sanitizer | --tools memcheck,synccheck] [--no-tests | --two-gpus | --again] [--output FILE]
#       [-n WORKERS] [-- pytest arguments]
#
# Needs no installed package: it takes the library that lies in llmkernels/ if that is of these sources, else builds it.
# Parts of a report on the same sources that are not run again are kept, those of compute-sanitizer as long as csrc/ is
# the same. --two-gpus runs only the tests that need two, --again those that failed according to the report, which names
# them then: for tests that were wrong themselves.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${LLMKERNELS_VENV:-.venv}/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
output=results/gpu_tests.json
tests=yes
tools=()
workers=()
threads=()
command=$(sed 's/ --output [^ ]*//' <<<"bash scripts/gpu_check.sh $*")  # results name no place on this machine
while [ $# -gt 0 ]; do
  case $1 in
    --sanitizer) tools=(memcheck racecheck synccheck initcheck); shift ;;
    --tools) IFS=, read -ra tools <<<"$2"; shift 2 ;;
    --no-tests) tests=; shift ;;
    --two-gpus) tests=two_gpus; shift ;;
    --again) tests=again; shift ;;
    --output) output=$2; shift 2 ;;
    -n) workers=(-n "$2" --dist worksteal); threads=(env "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"); shift 2 ;;
    --) shift; break ;;
    *) echo "gpu_check.sh: unknown argument $1" >&2; exit 2 ;;
  esac
done

work=build/gpu_check
rm -rf "$work"
mkdir -p "$work"
echo "$command" > "$work/command"
: > "$work/started"
build=("$python" -W ignore setup.py -q build_ext --inplace)
LLMKERNELS_REUSE_LIBRARY=1 "${build[@]}" || "${build[@]}"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" -m llmkernels info
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu_check.sh: torch finds no GPU")'

# Beside the tests, for they take long. Only our kernels are looked at; initcheck has to see who wrote the inputs, so
# there the report picks ours out. Without torch's caching allocator every tensor is an allocation of its own, so that
# its end is the end of what may be touched.
# Nor does initcheck see what the TMA engine writes, such as results of cuBLAS, which no test of the selection reads.
# racecheck does not see that copies of the TMA engine have arrived, which their readers wait for at a barrier in shared
# memory: it takes every one for a race, or dies. So it skips the kernels that use them. It takes longer than the others
# together, and runs as several processes.
for tool in "${tools[@]}"; do
  options=(--tool "$tool")
  skipped=()
  parts=1
  case $tool in
    initcheck) options+=(--print-limit 0 --show-backtrace no) ;;
    *) options+=(--kernel-name kns=llmk) ;;
  esac
  [ "$tool" != memcheck ] || options+=(--padding 64 --report-api-errors no)
  [ "$tool" != synccheck ] || options+=(--num-cuda-barriers 128)  # of a block; gemv has one per slot of each warp
  if [ "$tool" = racecheck ]; then
    parts=3
    for name in linear gemm decode_attention rope_decode_attention compose; do
      skipped+=(--ignore "tests/test_$name.py")
    done
  fi
  for part in $(seq $parts); do
    echo "$tool.$part" >> "$work/started"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 540 compute-sanitizer "${options[@]}" --log-file "$work/$tool.$part.log" \
      "$python" -m pytest -q -m sanitizer -k "cuda or gpu" --part "$part/$parts" "${skipped[@]}" \
      --junitxml="$work/$tool.$part.xml" "$@" tests || true &
  done
done

# --order: where a worker has crashed, what ran before.
# Workers share the GPU, so the tests that want most of its memory run after the others, one by one. They share the cores
# as well: 16 of them with a thread per core each take ten times as long as with one.
if [ "$tests" = two_gpus ]; then
  echo two_gpus >> "$work/started"
  "${threads[@]}" "$python" -m pytest -q -m two_gpus "${workers[@]}" --junitxml="$work/two_gpus.xml" "$@" tests || true
elif [ "$tests" = again ]; then
  echo again >> "$work/started"
  mapfile -t names < <("$python" scripts/gpu_report.py --failures "$output")
  "${threads[@]}" "$python" -m pytest -q -k "cuda or gpu or large" "${workers[@]}" --junitxml="$work/again.xml" "$@" \
    "${names[@]}" || true
elif [ -n "$tests" ]; then
  run=("$python" -m pytest -q -k "cuda or gpu or large")
  echo tests >> "$work/started"
  if [ ${#workers[@]} -gt 0 ]; then
    echo tests_large >> "$work/started"
    "${threads[@]}" "${run[@]}" "${workers[@]}" -m "not large" --order "$work" --junitxml="$work/tests.xml" "$@" tests || true
    "${run[@]}" -m large --junitxml="$work/tests_large.xml" "$@" tests || true
  else
    "${run[@]}" --junitxml="$work/tests.xml" "$@" tests || true
  fi
fi

wait
for tool in "${tools[@]}"; do
  tail -n 20 "$work/$tool".*.log || true
done

"$python" scripts/gpu_report.py "$work" "$output"
