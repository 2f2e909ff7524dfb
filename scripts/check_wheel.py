#!/usr/bin/env python3
"""Whether a wheel's tag is what `auditwheel show` says of its symbols, and all it links but the system is torch.

python scripts/check_wheel.py WHEEL
"""

import json
import subprocess
import sys

TORCH = {"libc10.so", "libtorch.so", "libtorch_cpu.so"}  # loaded already, by torch itself, when the library is


def check(wheel: str) -> None:
    show = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    shown = json.loads(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout)
    tag = shown["sym_tag"]
    print(f"{wheel}: auditwheel says {tag}, beside {', '.join(shown['external_libs'])}")
    if not wheel.endswith(f"-{tag}.whl") or shown["unsupported_isa"]:
        sys.exit(f"{wheel} has another tag than auditwheel gives it, {tag}")
    if others := set(shown["external_libs"]) - TORCH:
        sys.exit(f"{wheel} links what neither manylinux nor torch brings: {', '.join(sorted(others))}")


if __name__ == "__main__":
    check(sys.argv[1])
