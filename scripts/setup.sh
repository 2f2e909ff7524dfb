#!/usr/bin/env bash
# A virtual environment with all that the package, its tests and its benchmarks need, and the package in it.
#
#   bash scripts/setup.sh                 the package from this tree, editable
#   bash scripts/setup.sh --wheel FILE    the package from a wheel
#   bash scripts/setup.sh --no-package    only what it takes to build the package
#
# From the environment: LLMKERNELS_VENV (.venv), LLMKERNELS_TORCH (2.11.0), LLMKERNELS_TRANSFORMERS (5.17.0), PYTHON
# (python3), and the build switches of setup.py. Where there is a GPU, or LLMKERNELS_CUDA=1, and no nvcc, nvcc is
# installed from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${LLMKERNELS_VENV:-.venv}
torch=torch==${LLMKERNELS_TORCH:-2.11.0}
transformers=transformers==${LLMKERNELS_TRANSFORMERS:-5.17.0}
python=${PYTHON:-python3}
wheel=
package=yes
while [ $# -gt 0 ]; do
  case $1 in
    --wheel) wheel=$2; shift 2 ;;
    --no-package) package=; shift ;;
    *) echo "setup.sh: unknown argument $1" >&2; exit 2 ;;
  esac
done

say() { printf '\n==> %s\n' "$*"; }
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

install_system_packages() {
  local missing=() header
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -e "$header" ] || missing+=(python3-dev)
  command -v g++ >/dev/null || missing+=(g++)
  [ ${#missing[@]} -gt 0 ] || return 0
  say "apt-get install ${missing[*]}"
  local sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get -qq update </dev/null
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "${missing[@]}" </dev/null
}

cuda_is_wanted() {
  case ${LLMKERNELS_CUDA:-} in
    0) return 1 ;;
    1) return 0 ;;
    *) nvidia-smi -L >/dev/null 2>&1 ;;
  esac
}

# One that setup.py takes: Debian's own is too old.
have_nvcc() {
  local nvcc
  for nvcc in "$(command -v nvcc)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" \
    "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
    if [ -x "$nvcc" ] && "$nvcc" --version | grep -Eq 'release (1[2-9]|[2-9][0-9])\.'; then return 0; fi
  done
  return 1
}

# The compiler of the very CUDA that torch brings. All of its parts are named, since pip would mix versions, and torch
# too, or pip would change what torch depends on.
install_nvcc() {
  local cuda
  cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda)')
  say "nvcc $cuda from PyPI"
  install "$torch" "cuda-toolkit[nvcc,cccl,cudart]==$cuda.*" "nvidia-nvvm==$cuda.*" "nvidia-cuda-crt==$cuda.*"
}

install_system_packages
if [ ! -x "$venv/bin/python" ]; then
  say "virtual environment $venv"
  "$python" -m venv "$venv"
fi
say "$torch $transformers"
install "$torch" "$transformers" "setuptools>=70.1" wheel pybind11 ninja
if [ -z "$wheel" ] && cuda_is_wanted && ! have_nvcc; then install_nvcc; fi
if [ -n "$wheel" ]; then
  say "$wheel"
  install "$wheel[benchmarks,dev,test]"
  install --force-reinstall --no-deps "$wheel"  # also when this version is installed already
elif [ -n "$package" ]; then
  say "building llmkernels"
  "$venv/bin/python" -W ignore setup.py -q build_ext --inplace  # pip would hide its progress
  install --no-build-isolation -e ".[benchmarks,dev,test]"
  "$venv/bin/python" -m llmkernels info
fi
