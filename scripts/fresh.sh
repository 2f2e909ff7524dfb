#!/usr/bin/env bash
# Installs a wheel as the README says, without pins, which takes the newest torch and transformers there are, into an
# environment of its own, and runs the README's examples there.
#
#   bash scripts/fresh.sh FILE
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$PWD/.venv-fresh
rm -rf "$venv"
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "$1[hf]"
# Elsewhere, for in the tree Python would take the sources.
env -C / "$venv/bin/python" -m llmkernels info
env -C / "$venv/bin/python" "$PWD/scripts/readme_examples.py"
