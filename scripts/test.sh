#!/usr/bin/env bash
# Sets up an environment (setup.sh) and passes the tests in it.
#
#   bash scripts/test.sh [--wheel FILE] [pytest arguments]
#
# With a wheel the tests run in a copy of the tree without llmkernels/, where only the installed package can be found.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${LLMKERNELS_VENV:-.venv}
setup=()
if [ "${1:-}" = --wheel ]; then
  setup=(--wheel "$2")
  shift 2
fi
bash scripts/setup.sh "${setup[@]}"
python=$(realpath -s "$venv")/bin/python
if [ ${#setup[@]} -gt 0 ]; then
  copy=build/wheel-tests
  rm -rf "$copy"
  mkdir -p "$copy"
  cp -r README.md benchmarks docs examples pyproject.toml scripts setup.py tests "$copy"
  cd "$copy"
fi
exec "$python" -m pytest "$@"
