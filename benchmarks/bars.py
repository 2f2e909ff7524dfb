"""Limits that ops were to reach on an H200 and that some were close to; results/README.md shows which are missed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """`unit` is that of the limit: at most so many µs, at least so many TB/s, or so many times as fast as a peer."""

    file: str
    keys: dict[str, str | int]
    unit: str
    limit: float
    why: str = ""


BARS = (
    Bar("ops", {"op": "layer_norm", "rows": 16384, "cols": 3584, "pass": "fwd"}, "µs", 58),
    Bar("ops", {"op": "softmax", "rows": 2048, "cols": 4096, "pass": "fwd"}, "liger", 1),
    Bar("ops", {"op": "softmax", "rows": 16384, "cols": 131072, "pass": "fwd"}, "µs", 4200),
    Bar("ops", {"op": "fp8_quantize", "rows": 2048, "cols": 3584}, "TB/s", 3.2),
    Bar("decode_ops", {"op": "fp8_linear", "m": 2048, "n": 4608, "k": 3584}, "cublas", 1.5),
    Bar("decode_ops", {"op": "fp8_linear", "m": 2048, "n": 3584, "k": 3584}, "cublas", 1.5),
    Bar("ops", {"op": "adamw", "parameters": 10_000_000}, "µs", 70,
        "the next kernel no longer starts before this one has written the weights"),
)  # fmt: skip
ODD_LIMIT = 1.2  # times the aligned neighbour: rows of any width
