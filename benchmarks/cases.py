"""What the benchmark of one op consists of: cases, inputs and the implementations to compare."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import Tensor

# The columns of every table and picture, in this order.
PEERS = ("eager", "torch", "compile", "triton", "liger", "cublas", "cudnn", "flash")
PROVIDERS = (*PEERS, "llmkernels_sm80", "llmkernels")
CPU_PROVIDERS = ("eager", "torch", "llmkernels")
OURS = "llmkernels"


@dataclass(frozen=True)
class Case:
    """One line of a table. `keys` are the case keys of the results format, `bytes` what an ideal kernel moves.

    `direction` is "fwd", "bwd" (the backward alone) or "fwd+bwd": a function that returns the gradients.
    """

    op: str
    keys: Mapping[str, int | bool]
    dtype: torch.dtype
    bytes: int
    direction: str = "fwd"
    quick: bool = False
    flops: int | None = None  # where the arithmetic may be the limit

    @property
    def title(self) -> str:
        keys = self.keys
        if "m" in keys:
            shape = f"{keys['m']} x {keys['n']}x{keys['k']}"
        elif self.op == "attention":
            shape = (
                f"batch {keys['batch']} {keys['tokens']} tokens {keys['heads']}+{keys['kv_heads']}x{keys['head_dim']}"
            )
            shape += "" if keys["causal"] else " all to all"
        elif "kv_tokens" in keys:
            heads = f"{keys['heads']}+{keys['kv_heads']}x{keys['head_dim']}"
            shape = f"batch {keys['batch']} {keys['kv_tokens']} keys of {heads} {keys['cache']}"
            shape += f" shortest {keys['shortest']}, {keys['tokens']} queries" if "tokens" in keys else ""
        elif "parameters" in keys:
            shape = f"{keys['parameters']} parameters in {keys['tensors']}"
        elif "vocab" in keys:
            shape = f"{keys['rows']}x{keys['vocab']}" + (f" of {keys['hidden']}" if "hidden" in keys else "")
        elif "tokens" in keys:
            shape = f"{keys['tokens']} tokens {keys['heads']}+{keys['kv_heads']} heads" + " in place" * keys["in_place"]
        else:
            shape = f"{keys['rows']}x{keys['cols']}" + " packed" * keys.get("packed", False)
        return f"{self.op} {shape} {str(self.dtype).removeprefix('torch.')} {self.direction}"

    @property
    def row(self) -> dict:
        """The keys that every row of this case has."""
        dtype = str(self.dtype).removeprefix("torch.")
        row = {"op": self.op, **self.keys, "dtype": dtype, "pass": self.direction, "bytes": self.bytes}
        return row | ({"flops": self.flops} if self.flops else {})


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    `forward()` imports what it needs and returns the function to time; `backward()` likewise a function of
    (gradients, outputs, *inputs), where the implementation has no autograd of its own. `mutates` names the passes in
    which it writes into what it was given: these are timed on copies, restored before every replay. `approximate`:
    it computes a part of the op only, for comparison, and its result is not checked.
    """

    forward: Callable[[], Callable]
    backward: Callable[[], Callable] | None = None
    mutates: tuple[str, ...] = ()
    approximate: bool = False


@dataclass(frozen=True)
class Op:
    """An op's entry: `inputs` are drawn afresh for every call that is timed, `shared` (weights, cos/sin) only once.

    `eager` is the plain PyTorch formula: it is the reference for what everybody computes, in float32. Where results are
    random, `error(outputs, inputs)` judges them instead.
    """

    name: str
    cases: tuple[Case, ...]
    inputs: Callable[[Case, torch.device], tuple[Tensor, ...]]
    eager: Callable
    providers: Callable[[Case], dict[str, Provider]]
    differentiable: int  # the first so many of (*inputs, *shared) get gradients
    shared: Callable[[Case, torch.device], tuple[Tensor, ...]] = lambda case, device: ()
    error: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], float] | None = None
    reference: Callable[[Case], Callable] | None = None  # instead of `eager`, where that depends on the case


def plain(function: Callable, **options) -> Provider:
    """A provider that needs no import."""
    return Provider(lambda: function, **options)


def compiled(function: Callable) -> Provider:
    def build():
        torch._functorch.config.donated_buffer = False  # a timed backward pass keeps its graph and runs many times
        return torch.compile(function, dynamic=False)

    return Provider(build)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
