"""Numbers of other libraries, measured in another run: drawn into the pictures as marks, never compared in a table.

Source: this project's survey of its peers on one H200 with torch 2.11 by the method of timing.py (CUDA graph over
rotated inputs, microseconds per call). quack 0.6.5 is CuTe DSL; FlashInfer is 0.7.2.
"""

NOTE = "measured in another run"
GPU = "NVIDIA H200"

# (op, pass, rows or tokens, cols or (heads, kv_heads)): {provider: time_us}
TIMES_US = {
    ("rms_norm", "fwd", 1, 3584): {"quack": 1.69, "flashinfer": 1.34},
    ("rms_norm", "fwd", 2048, 3584): {"quack": 9.16, "flashinfer": 8.63},
    ("rms_norm", "fwd", 16384, 3584): {"quack": 57.0, "flashinfer": 57.3},
    ("rms_norm", "fwd", 32768, 8192): {"quack": 256.0, "flashinfer": 261.0},
    ("rms_norm", "bwd", 16384, 3584): {"quack": 94.5},
    ("add_rms_norm", "fwd", 1, 3584): {"quack": 1.95, "flashinfer": 1.52},
    ("add_rms_norm", "fwd", 2048, 3584): {"quack": 16.3, "flashinfer": 16.2},
    ("add_rms_norm", "fwd", 16384, 3584): {"quack": 113.0, "flashinfer": 116.0},
    ("rope", "fwd", 8192, (32, 8)): {"quack": 44.1, "flashinfer": 49.4},
    ("swiglu", "fwd", 2048, 18944): {"flashinfer": 56.7},
}


def lookup(row: dict) -> dict[str, float]:
    """The references for the case of a row that was measured on the same chip by the same method."""
    if row.get("gpu") != GPU or row["timing"] != "graph" or row.get("in_place") or row.get("packed"):
        return {}
    if row["op"] == "rope":
        size = (row["tokens"], (row["heads"], row["kv_heads"]))
    else:
        size = (row.get("rows"), row.get("cols"))
    return TIMES_US.get((row["op"], row.get("pass"), *size), {})
