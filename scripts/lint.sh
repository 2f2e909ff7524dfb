#!/usr/bin/env bash
# ruff, clang-format and mypy in the versions of the `dev` extra. `bash scripts/lint.sh --fix` changes what it can.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath -s "${LLMKERNELS_VENV:-.venv}")/bin
[ -x "$bin/ruff" ] && PATH=$bin:$PATH

mapfile -t sources < <(find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' | sort)
if [ "${1:-}" = --fix ]; then
  ruff check --fix .
  ruff format .
  clang-format -i "${sources[@]}"
else
  ruff check .
  ruff format --check .
  clang-format --dry-run -Werror "${sources[@]}"
  mypy --no-error-summary
  # Of everything else: names that a module does not have, in code that no test reaches without a GPU.
  if { mypy llmkernels benchmarks || true; } | grep 'Module has no attribute'; then exit 1; fi
  for script in scripts/*.sh .ci/run; do bash -n "$script"; done
fi
