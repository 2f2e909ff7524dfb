"""What `profile` returns: numbers, which print as tables and are drawn as a picture."""

import dataclasses
import json
from dataclasses import dataclass
from os import PathLike
from typing import Any

from llmkernels import _profile_tables


@dataclass(frozen=True)
class Row:
    """The kernels of one kind in a prefill or a step; on a CPU the ops.

    Attributes:
        phase: "prefill" or "step".
        way: "unpatched" or "patched".
        kind: "attention"; "product", GEMMs and GEMVs with the quantization of their operands; "norm"; "rotation", of
            q and k, with the cache write and the copies of attention's layouts; "activation"; "sampling"; "copies",
            also of dtypes, and fills; "other", elementwise kernels and embeddings. "training" is of losses, gradients
            and optimizers, which no prefill has.
        time_ms: of all of them.
        launches: how many. Of a step a mean, which need not be whole.
        limit_ms: what their operands take at the measured rates; 0 but for products and attention.
        kernel: the name of the one that took most of the time.
        owner: who made that one: "llmkernels", "cuBLAS", "cuDNN", "PyTorch", "Triton", "CUDA" or "unknown".
    """

    phase: str
    way: str
    kind: str
    time_ms: float
    launches: float
    limit_ms: float
    kernel: str
    owner: str

    @property
    def left_ms(self) -> float:
        """What is left to win."""
        return max(0.0, self.time_ms - self.limit_ms)


@dataclass(frozen=True)
class Call:
    """A whole prefill or step.

    Attributes:
        phase: "prefill" or "step".
        way: "unpatched" or "patched".
        wall_ms: its time without the profiler. That of a step is a difference of two calls, which noise may turn
            negative where the model is tiny.
        busy_ms: in which the GPU runs a kernel, in the profiler; on a CPU the time in ops.
        limit_ms: the sum over all kinds.
    """

    phase: str
    way: str
    wall_ms: float
    busy_ms: float
    limit_ms: float

    @property
    def idle_ms(self) -> float:
        """In which the GPU waits for the host; on a CPU the time between ops."""
        return max(0.0, self.wall_ms - self.busy_ms)

    @property
    def left_ms(self) -> float:
        """What is left to win, of the wall time."""
        return max(0.0, self.wall_ms - self.limit_ms)


@dataclass(frozen=True)
class Profile:
    """What `llmkernels.profile` found. As text it is a table of the prefill and one of a step.

    Attributes:
        model: its class.
        device: the name of the GPU, or "CPU".
        dtype: of the model, as "bfloat16".
        batch: sequences.
        tokens: of each prompt.
        bandwidth_gb_s: of a copy (read plus written) or a read of this device, the faster.
        rate_tflop_s: of a product of large matrices in that dtype.
        calls: the whole of each phase.
        rows: the kinds of kernels of each phase, the longest first.
        not_patched: why there is nothing to patch, or None.
    """

    model: str
    device: str
    dtype: str
    batch: int
    tokens: int
    bandwidth_gb_s: float
    rate_tflop_s: float
    calls: tuple[Call, ...]
    rows: tuple[Row, ...]
    not_patched: str | None = None

    def __str__(self) -> str:
        return _profile_tables.text(self)

    def find(self, phase: str, way: str, kind: str) -> Row | None:
        """The row of a kind, or None where it has no kernels."""
        return next((row for row in self.rows if (row.phase, row.way, row.kind) == (phase, way, kind)), None)

    def to_json(self) -> str:
        """The same as JSON, with what is left to win and the idle time."""
        data = dataclasses.asdict(self)
        data["calls"] = [dataclasses.asdict(x) | {"idle_ms": x.idle_ms, "left_ms": x.left_ms} for x in self.calls]
        data["rows"] = [dataclasses.asdict(x) | {"left_ms": x.left_ms} for x in self.rows]
        return json.dumps(data, indent=2)

    def print(self, console: Any = None) -> None:
        """Print the tables to a rich.console.Console, by default to standard output."""
        _profile_tables.show(self, console)

    def plot(self, path: str | PathLike[str]) -> None:
        """Write a picture, in the format that the path ends in: a bar for each way, with a part for each kind.

        Raises: ModuleNotFoundError without matplotlib.
        """
        _profile_tables.draw(self, path)
