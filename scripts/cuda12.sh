#!/usr/bin/env bash
# A CUDA 12 toolkit in FOLDER, for a library that runs with drivers before 580, where NVIDIA's own can't be had.
#
#   bash scripts/cuda12.sh FOLDER
#   CUDA_HOME=FOLDER LLMKERNELS_CUDA=1 pip wheel . --no-deps --no-build-isolation
#
# PyPI's packages of CUDA 12 hold everything but nvcc and its front end: those are Debian 13's, of CUDA 12.4, and run on
# Debian 12 as well. Headers are of 12.4, too; the assembler and the runtime are of 12.9, as code is then 13.0's.
set -euo pipefail
mkdir -p "$1"
home=$(realpath "$1")
python=$(realpath -s "$(dirname "$0")/../${LLMKERNELS_VENV:-.venv}")/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

mkdir -p lists/partial cache/archives/partial debian
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] http://deb.debian.org/debian trixie non-free" >sources.list
apt() {
  apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@" </dev/null
}
apt update
apt download nvidia-cuda-toolkit libnvvm4
for package in *.deb; do dpkg -x "$package" debian; done

pypi() { "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$@"; }
pypi 12.4 nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127
pypi 12.9 nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27

cd "$home"
mkdir -p bin include lib nvvm/bin nvvm/lib64
debian=$work/debian/usr
cp "$debian"/bin/{cudafe++,fatbinary,nvlink} "$debian/lib/nvidia-cuda-toolkit/bin/nvcc" bin
cp -r "$debian/lib/nvidia-cuda-toolkit/bin/crt" bin
cp "$debian/lib/nvidia-cuda-toolkit/bin/cicc" nvvm/bin
cp "$debian"/lib/*/libnvvm.so.4.* nvvm/lib64/libnvvm.so.4
cp -r "$work/12.4/nvidia/cuda_nvcc/nvvm/libdevice" nvvm
cp -r "$work"/12.4/nvidia/{cuda_nvcc,cuda_runtime}/include/. "$work/12.9/nvidia/cuda_cccl/include/." include
install "$work/12.9/nvidia/cuda_nvcc/bin/ptxas" bin
cp "$work/12.9/nvidia/cuda_runtime/lib/libcudart_static.a" lib
cat >bin/nvcc.profile <<'END'
TOP                = $(_HERE_)/..
CICC_PATH          = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH   += $(TOP)/nvvm/lib64:
PATH              += $(CICC_PATH):$(_HERE_):
INCLUDES          += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES         =+ $(_SPACE_) "-L$(TOP)/lib"
END
bin/nvcc --version
