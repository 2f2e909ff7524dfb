"""What tests of routes share: facts of GPUs, and the program that asks csrc/kernels/*/route.h."""

import json
import subprocess
from contextlib import contextmanager

import pytest

from stub_cuda import CSRC, compile_stub

H200 = {"compute_capability": 90, "wgmma": 1, "sm_count": 132, "shared_bytes": 232448, "clusters2": 66}
A100 = {"compute_capability": 80, "wgmma": 0, "sm_count": 108, "shared_bytes": 166912, "clusters2": 0}
B200 = {"compute_capability": 100, "wgmma": 0, "sm_count": 148, "shared_bytes": 232448, "clusters2": 74}
RTX_5090 = {"compute_capability": 120, "wgmma": 0, "sm_count": 170, "shared_bytes": 101376, "clusters2": 85}
RTX_2080 = {"compute_capability": 75, "wgmma": 0, "sm_count": 46, "shared_bytes": 65536, "clusters2": 0}


@contextmanager
def asking(folder):
    """Asks the routes, compiled by themselves: a word and numbers for an answer."""
    path = compile_stub("routes", folder)
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(kind, values, options):
            assert not options.keys() - values.keys()
            numbers = (values | options).values()
            process.stdin.write(" ".join(map(str, [kind, *numbers])) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        assert process.wait() == 0


def source_of(family):
    path = CSRC / "kernels" / family / "route.h"
    if not path.exists():
        pytest.skip("needs csrc")
    return path.read_text()


def facts_of(gpu):
    facts = {name: gpu[name] for name in ("compute_capability", "sm_count", "shared_bytes")}
    return {**facts, "clusters": {2: gpu["clusters2"]}}
