#!/usr/bin/env bash
# Installs a wheel as the README says, without pins, which takes the newest torch and transformers there are, into an
# environment made anew, LLMKERNELS_VENV (.venv-fresh), and runs the examples of README.md and docs/ there.
#
#   bash scripts/fresh.sh FILE
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${LLMKERNELS_VENV:-.venv-fresh}
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
python=$(realpath -s "$venv")/bin/python
"$python" -m pip install -q --disable-pip-version-check "$1[hf]"
# Elsewhere, for in the tree Python would take the sources.
env -C / "$python" -m llmkernels info
env -C / "$python" "$PWD/scripts/readme_examples.py"
