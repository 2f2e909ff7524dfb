#!/usr/bin/env bash
# The main job from nothing: an environment, the build, a Hugging Face model patched and measured, and a small one with
# real weights that answers a prompt, unpatched and patched, on the GPU where there is one. Arguments go to the benchmark,
# for example --model Qwen/Qwen2.5-7B.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
python=${LLMKERNELS_VENV:-.venv}/bin/python
"$python" -m benchmarks model --quick "$@"
exec "$python" -m llmkernels demo
