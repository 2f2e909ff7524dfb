#!/usr/bin/env bash
# The main job from nothing: an environment, the build, and a Hugging Face model patched and measured, on the GPU where
# there is one. Arguments go to the benchmark, for example --model Qwen/Qwen2.5-7B.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec "${LLMKERNELS_VENV:-.venv}/bin/python" -m benchmarks model --quick "$@"
