"""Builds the two artefacts of the package with ninja, so that only what has changed is compiled again:

    llmkernels/libllmkernels.so   every op; no Python in it; runs under torch 2.10 and newer
    llmkernels/_C.*.so            a pybind11 module with build information and launch plans; no torch in it

Switches, all from the environment:

    LLMKERNELS_CUDA=0|1           CPU only | with CUDA, or an error; unset: with CUDA where nvcc is found
    LLMKERNELS_REUSE_LIBRARY=1    take the llmkernels/libllmkernels.so that is there and build _C alone
    LLMKERNELS_LINEINFO=1         kernels with line numbers for profilers and compute-sanitizer; as fast
    TORCH_CUDA_ARCH_LIST          "8.0;9.0+PTX"; unset: the GPUs present, else what is written here
    CUDA_HOME, CXX, MAX_JOBS      the CUDA toolkit, the C++ compiler (nvcc's too), how many compile at once
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
from fingerprint import LIBRARY_SOURCES, fingerprint  # noqa: E402

CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "ninja"  # objects; setuptools' own folder is another one on every editable build
LIBRARY = "libllmkernels.so"
DEFAULT_ARCHITECTURES = ["sm_80", "sm_90a", "compute_90"]
OLDEST_ARCHITECTURE = 80
OLDEST_CUDA = (12, 0)  # the first with C++20 and sm_90a
OLDEST_DRIVER = {12: 525, 13: 580}  # by the major version of CUDA, whose minor versions all run on it
OLDEST_TORCH = "2.10"
# manylinux_2_X: the newest of glibc 2.X, libstdc++'s GLIBCXX_3.4.Y and CXXABI_1.3.Z, as X: (Y, Z). torch needs 2_28.
MANYLINUX = {
    28: (24, 11), 31: (28, 12), 34: (29, 13), 35: (30, 13), 36: (30, 13),
    38: (30, 13), 39: (33, 15), 40: (33, 15), 41: (33, 15),
}  # fmt: skip

CXX_FLAGS = "-std=c++20 -fPIC -fvisibility=hidden -Wall -Wextra"
NVCC_FLAGS = "-std=c++20 -O3 -Xcompiler -fPIC,-fvisibility=hidden"
# The CPU kernels promise which operations round, so nothing may be contracted; errno and traps only stop vectorisation.
CPU_FLAGS = "-O3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
# All symbols must be found at link time, or the library would fail to load on another machine; what comes in statically
# (cudart) stays inside, or its calls would end in the copy that torch has loaded.
LINK_FLAGS = "-shared -Wl,-z,defs -Wl,--as-needed -Wl,--exclude-libs,ALL"


def say(*parts):
    print("llmkernels:", *parts, flush=True)


def switch(name: str):
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        sys.exit(f"llmkernels: {name} must be 0, 1 or unset, got {value!r}")
    return None if value == "" else value == "1"


def output_of(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_platform():
    """Says in a sentence what the compiler would say in a hundred."""
    if sys.platform != "linux":
        here = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        hint = " (Windows: use WSL2)" if here == "Windows" else ""
        sys.exit(f"llmkernels: the kernels are built on Linux only, and this is {here}{hint}")
    if sys.maxsize < 2**32:
        sys.exit(f"llmkernels: the kernels need a 64-bit Python, and this one, on {platform.machine()}, has 32 bits")


# ---- CUDA: which toolkit, for which architectures


class Toolkit:
    """A folder with nvcc in it: NVIDIA's own, or as PyPI, conda or Debian lay it out."""

    def __init__(self, home: Path):
        self.home = home
        self.nvcc = home / "bin" / "nvcc"
        self.release = re.search(r"release [\d.]+, V([\d.]+)", output_of(self.nvcc, "--version")).group(1)
        self.version = tuple(int(part) for part in self.release.split(".")[:2])

    @property
    def include(self) -> Path:
        return self._folder_of("cuda_runtime.h", "include", "targets/{machine}-linux/include")

    @property
    def cudart(self) -> Path:
        name = "libcudart_static.a"
        return self._folder_of(name, "lib64", "lib", "targets/{machine}-linux/lib", "lib/{machine}-linux-gnu") / name

    @functools.cached_property
    def architectures(self) -> set[int]:
        """Those it can compile for: {80, 90, ...}."""
        return {int(number) for number in re.findall(r"compute_(\d+)", output_of(self.nvcc, "--list-gpu-arch"))}

    def _folder_of(self, name: str, *folders: str) -> Path:
        for folder in folders:
            path = self.home / folder.format(machine=platform.machine())
            if (path / name).exists():
                return path
        sys.exit(f"llmkernels: {self.home} has nvcc, but no {name}")


def find_toolkit() -> Toolkit | None:
    on_path = shutil.which("nvcc")
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path(on_path).resolve().parent.parent] if on_path else []
    homes += [Path("/usr/local/cuda")]
    # The PyPI packages nvidia-cuda-*; an isolated build sees the environment it is started from only by this path.
    for path in [sysconfig.get_path("purelib"), *sys.path]:
        homes += sorted(Path(path).glob("nvidia/cu[0-9]*"), reverse=True)
    for home in homes:
        if (home / "bin" / "nvcc").exists():
            toolkit = Toolkit(home)
            if toolkit.version >= OLDEST_CUDA:
                return toolkit
            say(f"passing over CUDA {toolkit.release} in {home}: {'.'.join(map(str, OLDEST_CUDA))} or newer is needed")
    return None


def choose_toolkit() -> Toolkit | None:
    wanted = switch("LLMKERNELS_CUDA")
    if wanted is False:
        say("CPU only, because of LLMKERNELS_CUDA=0")
        return None
    toolkit = find_toolkit()
    if toolkit:
        say(f"CPU and CUDA, with nvcc {toolkit.release} in {toolkit.home}")
        return toolkit
    if wanted:
        sys.exit(
            "llmkernels: LLMKERNELS_CUDA=1, but no nvcc in CUDA_HOME, on the PATH, in /usr/local/cuda or from PyPI "
            "(site-packages/nvidia/cu13); scripts/setup.sh installs one from PyPI"
        )
    say("no nvcc found, so this build is for the CPU ONLY; LLMKERNELS_CUDA=1 makes that an error")
    return None


def code_name(number: int, variant: str = "") -> str:
    """sm_90a for 90: wgmma is in no other code for Hopper. What the later ones have in the variants "a" and "f" no
    kernel uses, and their plain code runs on the whole generation."""
    return f"sm_{number}{variant or ('a' if number == 90 else '')}"


def parse_architectures(text: str, toolkit: Toolkit) -> list[str]:
    """torch's list, "7.5 8.0 9.0+PTX", as ["sm_80", "sm_90a", "compute_90"]. What is too old for the kernels or too new
    for nvcc is passed over with a line; PTX, which is for GPUs to come, is then of the newest that is left."""
    names, numbers, lost_ptx = [], [], False
    for item in re.findall(r"[^;,\s]+", text):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if not match:
            sys.exit(f"llmkernels: TORCH_CUDA_ARCH_LIST must look like '8.0;9.0+PTX', got {text!r}")
        number, variant, ptx = int(match[1] + match[2]), match[3], match[4]
        if number < OLDEST_ARCHITECTURE:
            say(f"passing over {item} of TORCH_CUDA_ARCH_LIST: the oldest architecture with kernels is 8.0")
        elif number not in toolkit.architectures or (variant == "f" and toolkit.version < (12, 9)):
            say(f"passing over {item} of TORCH_CUDA_ARCH_LIST: nvcc {toolkit.release} does not know it")
            lost_ptx = lost_ptx or bool(ptx)
        else:
            names += [code_name(number, variant)] + ([f"compute_{number}{variant}"] if ptx else [])
            numbers.append(number)
    if not names:
        sys.exit(f"llmkernels: nothing is left of TORCH_CUDA_ARCH_LIST={text!r} to compile for, see above")
    if lost_ptx:
        names.append(f"compute_{max(numbers)}")
    return list(dict.fromkeys(names))


def present_gpus() -> list[tuple[int, int]]:
    """(architecture, major version of the driver) of each GPU in this machine."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True).stdout
    found = re.findall(r"^(\d+)\.(\d), *(\d+)", answer, re.M)
    return [(int(major + minor), int(driver)) for major, minor, driver in found]


def present_architectures(gpus: list[tuple[int, int]], toolkit: Toolkit) -> list[str]:
    """Code for each GPU, and PTX of the newest for those to come."""
    numbers = {number for number, _ in gpus if number >= OLDEST_ARCHITECTURE}
    for number in sorted(numbers - toolkit.architectures):
        say(f"nvcc {toolkit.release} does not know the architecture of this machine's GPU, {number / 10}")
    known = sorted(numbers & toolkit.architectures)
    return [code_name(number) for number in known] + [f"compute_{number}" for number in known[-1:]]


def choose_architectures(toolkit: Toolkit) -> list[str]:
    gpus, needed = present_gpus(), OLDEST_DRIVER.get(toolkit.version[0], 0)
    if any(driver < needed for _, driver in gpus):
        say(
            f"WARNING: what CUDA {toolkit.release} builds needs a driver {needed} or newer, and this machine has an "
            "older one: the library will not run here. Take a newer driver, or an older CUDA in CUDA_HOME"
        )
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    names = parse_architectures(listed, toolkit) if listed else present_architectures(gpus, toolkit)
    names = names or DEFAULT_ARCHITECTURES
    say("architectures", ", ".join(names))
    return names


def included(source: Path, found: set[Path] | None = None) -> set[Path]:
    """A source and all files of ours that it includes."""
    found = set() if found is None else found
    found.add(source)
    for name in re.findall(r'#include "([^"]+)"', source.read_text()):
        path = next((path for path in (source.parent / name, CSRC / name) if path.exists()), None)
        if path and path.resolve() not in found:
            included(path.resolve(), found)
    return found


def gencodes(names: list[str], source: Path) -> list[str]:
    """What nvcc compiles a source for. Sources tell 8.x and 9.0 or later apart, so that all code from 9.0 on comes out
    of one PTX, which takes a third off the build. A source that asks for what only sm_90a has is compiled for it by
    itself; from the others, sm_90 and sm_90a have the same instructions."""
    needs_variant = any("__CUDA_ARCH_FEAT_" in path.read_text() for path in included(source.resolve()))
    names = names if needs_variant else [name.replace("90a", "90") for name in names]
    number_of = {name: int(name.split("_")[1]) for name in names if name[-1].isdigit()}
    lowest = min((number for number in number_of.values() if number >= 90), default=None)

    def ptx_of(name: str) -> str:
        shared = name.startswith("sm_") and number_of.get(name, 0) >= 90
        return f"compute_{lowest}" if shared else name.replace("sm_", "compute_")

    return [f"-gencode arch={ptx_of(name)},code={name}" for name in dict.fromkeys(names)]


# ---- what is built, and how


def build_info(version: str, cxx: str, toolkit: Toolkit | None) -> dict:
    return {
        "llmkernels": version,  # first: reused_info() looks for it
        "sources": fingerprint(LIBRARY_SOURCES),
        "cuda": ".".join(map(str, toolkit.version)) if toolkit else None,
        "architectures": choose_architectures(toolkit) if toolkit else [],
        "nvcc": toolkit.release if toolkit else None,
        "oldest_driver": OLDEST_DRIVER.get(toolkit.version[0]) if toolkit else None,
        "cxx": output_of(cxx, "--version").splitlines()[0],
        "platform": platform.machine(),
        "torch": importlib.metadata.version("torch"),
        "oldest_torch": OLDEST_TORCH,
    }


def reused_info() -> dict:
    """The build information inside the library that is already there, if it is one of these sources."""
    path = ROOT / "llmkernels" / LIBRARY
    if not path.exists():
        sys.exit(f"llmkernels: LLMKERNELS_REUSE_LIBRARY=1, but there is no {path}")
    match = re.search(rb'\{"llmkernels": [^\0]+\}(?=\0)', path.read_bytes())
    info = json.loads(match.group()) if match else {}
    now = fingerprint(LIBRARY_SOURCES)
    if info.get("sources") != now:
        sys.exit(
            f"llmkernels: LLMKERNELS_REUSE_LIBRARY=1, but {path} is stale: it was built from sources "
            f"{info.get('sources', 'unknown')[:12]}, and these are {now[:12]}; build it again"
        )
    say(f"reusing {path}, built with {info['cxx']} and {'CUDA ' + info['cuda'] if info['cuda'] else 'without CUDA'}")
    return info


def words(parts) -> str:
    """A command line; paths are quoted for the shell and for ninja."""
    return " ".join(shlex.quote(str(p)).replace("$", "$$") if isinstance(p, Path) else str(p) for p in parts)


def write_if_changed(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


class Ninja:
    """A build.ninja in the making: which object comes from which source by which rule."""

    def __init__(self, cxx: str, nvcc: Path | None, defines: list[str]):
        ccache = shutil.which("ccache") or ""
        common = words([*defines, "-I", CSRC, "-I", BUILD, "$flags -MD -MF $out.d -c $in -o $out"])
        self.lines = []
        self.rule("cxx", f"{ccache} {cxx} {CXX_FLAGS} {common}", "compiling $in")
        self.rule("nvcc", f"{ccache} {words([nvcc or 'nvcc'])} {NVCC_FLAGS} {common}", "compiling $in")
        self.rule("link", f"{cxx} {LINK_FLAGS} $in $flags -o $out", "linking $out")

    def rule(self, name: str, command: str, description: str):
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {description}"]
        self.lines += [] if name == "link" else ["  depfile = $out.d", "  deps = gcc"]

    def edge(self, rule: str, output: Path, inputs, flags) -> Path:
        paths = [re.sub(r"([ :$])", r"$\1", str(path)) for path in (output, *inputs)]
        self.lines += [f"build {paths[0]}: {rule} {' '.join(paths[1:])}", f"  flags = {words(flags)}"]
        return output

    def objects(self, rule: str, pattern: str, flags=(), folder: str = "library") -> list[Path]:
        """One object for each source that fits the pattern, so that a new op needs no change here."""
        return [self.object(rule, source, flags, folder) for source in sorted(CSRC.glob(pattern))]

    def object(self, rule: str, source: Path, flags=(), folder: str = "library") -> Path:
        return self.edge(rule, BUILD / folder / source.relative_to(CSRC).with_suffix(".o"), [source], flags)

    def run(self, targets):
        write_if_changed(BUILD / "build.ninja", "\n".join(self.lines) + "\n")
        try:
            from ninja import BIN_DIR

            ninja = Path(BIN_DIR) / "ninja"
        except ImportError:
            ninja = shutil.which("ninja") or sys.exit("llmkernels: the build needs ninja: pip install ninja")
        jobs = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
        if subprocess.run([ninja, "-C", BUILD, "-j", str(jobs), *targets]).returncode != 0:
            sys.exit("llmkernels: the build failed, see above")


def add_library(ninja: Ninja, toolkit: Toolkit | None, info: dict) -> Path:
    # Found without the seconds that importing it takes.
    torch = Path(importlib.util.find_spec("torch").origin).parent
    torch_flags = ["-O2", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", torch / "include"]
    # libtorch.so brings libtorch_cuda, where there is one, into the scope of the library's weak symbols.
    link_flags = ["-L", torch / "lib", "-ltorch_cpu", "-lc10 -Wl,--no-as-needed -ltorch -Wl,--as-needed"]
    if toolkit:
        if toolkit.include != Path("/usr/include"):  # which the compiler knows, and has to search last
            torch_flags += ["-isystem", toolkit.include]
        link_flags += [toolkit.cudart, "-lrt", "-lpthread", "-ldl"]
    objects = []
    if toolkit:  # first, since they take longest
        nvcc_flags = ["-lineinfo"] if switch("LLMKERNELS_LINEINFO") else []
        nvcc_flags += ["-ccbin", os.environ["CXX"]] if os.environ.get("CXX") else []
        for source in sorted(CSRC.glob("kernels/**/*.cu")):
            objects.append(ninja.object("nvcc", source, gencodes(info["architectures"], source) + nvcc_flags))
    objects += ninja.objects("cxx", "cpu/**/*.cpp", [CPU_FLAGS])
    objects += ninja.objects("cxx", "torch/**/*.cpp", torch_flags)
    objects += ninja.objects("cxx", "build_info.cpp")
    return ninja.edge("link", BUILD / LIBRARY, objects, link_flags)


def add_module(ninja: Ninja) -> Path:
    import pybind11

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    flags = ["-O2", "-isystem", Path(pybind11.get_include()), "-isystem", Path(sysconfig.get_path("include"))]
    folder = f"module{suffix}"  # one for each Python version
    objects = ninja.objects("cxx", "build_info.cpp", (), folder) + ninja.objects("cxx", "module.cpp", flags, folder)
    return ninja.edge("link", BUILD / f"_C{suffix}", objects, ["-Wl,-z,undefs"])  # the interpreter brings the rest


class Build(build_ext):
    """Both artefacts are extensions to setuptools, which puts them where they belong."""

    def get_ext_filename(self, name: str) -> str:
        filename = super().get_ext_filename(name)
        return str(Path(filename).with_name(LIBRARY)) if name.endswith(Path(LIBRARY).stem) else filename

    def build_extensions(self):
        check_platform()
        cxx = os.environ.get("CXX") or "g++"
        reuse = switch("LLMKERNELS_REUSE_LIBRARY")
        toolkit = None if reuse else choose_toolkit()
        info = reused_info() if reuse else build_info(self.distribution.get_version(), cxx, toolkit)
        text = json.dumps(json.dumps(info))  # a JSON string is a C string
        write_if_changed(BUILD / "build_info.h", f"#define LLMK_BUILD_INFO {text}\n")

        ninja = Ninja(cxx, toolkit and toolkit.nvcc, ["-DLLMK_CUDA=1"] if info["cuda"] else [])
        library = ROOT / "llmkernels" / LIBRARY if reuse else add_library(ninja, toolkit, info)
        module = add_module(ninja)
        ninja.run([module] if reuse else [library, module])
        for extension, built in zip(self.extensions, (module, library), strict=True):
            target = self.get_ext_fullpath(extension.name)
            self.mkpath(str(Path(target).parent))
            self.copy_file(str(built), target)


# ---- the wheel's name


def manylinux(symbols: str) -> str | None:
    """The tag that fits what `objdump -p` says of libraries; None where none does."""
    needed = [
        max((int(number) for number in re.findall(rf"\b{name}\.(\d+)", symbols)), default=0)
        for name in ("GLIBC_2", r"GLIBCXX_3\.4", r"CXXABI_1\.3")
    ]
    for glibc, (libstdcxx, abi) in MANYLINUX.items():
        if all(have >= need for have, need in zip((glibc, libstdcxx, abi), needed, strict=True)):
            return f"manylinux_2_{glibc}_{platform.machine()}"
    return None


class Wheel(bdist_wheel):
    """Its tag says how new a Linux it needs: by `linux` pip would install it on any, and indexes refuse it."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, name = super().get_tag()
        built = self.get_finalized_command("build_ext").get_outputs()
        if all(Path(path).exists() for path in built):  # not so for an editable wheel
            name = manylinux(output_of("objdump", "-p", *built)) or name
        return python, abi, name


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("llmkernels._C", []), Extension("llmkernels.libllmkernels", [])],
        cmdclass={"bdist_wheel": Wheel, "build_ext": Build},
    )
