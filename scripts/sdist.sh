#!/usr/bin/env bash
# The sdist, in dist/; what comes out of it is built for the CPU with $CXX, which may be an older g++ of Debian's, and
# passes a part of the quick tests, and those that need the sources, which the tests of the wheel have not.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${LLMKERNELS_VENV:-.venv}")/bin/python
export CXX=${CXX:-g++} LLMKERNELS_CUDA=0

if ! command -v "$CXX" >/dev/null; then
  apt-get -qq update </dev/null
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$CXX" </dev/null
fi
rm -rf dist/*.tar.gz build/sdist
"$python" -W ignore setup.py -q sdist -d dist
mkdir -p build/sdist
tar -xzf dist/*.tar.gz -C build/sdist --strip-components 1
cd build/sdist
"$python" -W ignore setup.py -q build_ext --inplace
export OMP_NUM_THREADS=1
exec "$python" -m pytest -q -n 2 --dist worksteal --thin 16 \
  tests/test_{build,package,plans,rms_norm,glu,rope,decode_attention}.py \
  tests/test_{attention_route,device_facts,early_start,fingerprint,graphs,linear_route,private_names,profiling}.py
