"""The least time that products and attention take at the rates of a device, measured once in about a second."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from llmkernels.hf._private import TorchDispatchMode

from .kernels import kind_of
from .timing import PREFILL, STEP, timed_ms

_CACHES = ("past_key_values", "cache_params")  # the names of transformers


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a copy (read plus written) or a read, the faster, and operations per second of a product."""

    bandwidth: float
    operations: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    size, side = 1 << 26, 1024
    if device.type == "cuda":
        size, side = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 8), 8192
    source = torch.randint(2**30, (size // 4,), dtype=torch.int32, device=device)
    target, reading = torch.empty_like(source), source.view(torch.float32)
    a = torch.randn(side, side, device=device).to(dtype)

    def rate_of(amount: float, call: Callable[[], object]) -> float:
        call()
        return amount / min(timed_ms(device, lambda: [call() for _ in range(8)]) / 8e3 for _ in range(3))

    copy = rate_of(2 * source.nbytes, lambda: target.copy_(source))
    read = rate_of(source.nbytes, reading.amax)
    return Rates(max(copy, read), rate_of(2 * side**3, lambda: a @ a))


def limits_ms(model: nn.Module, input_ids: Tensor, rates: Rates) -> dict[str, dict[str, float]]:
    """Milliseconds of an unpatched model's products and attention, by phase and kind."""
    with _Counted(rates) as prefill:
        output = model(input_ids, **prefill_options(model))
    cache = {name: output[name] for name in _CACHES if output.get(name) is not None}
    with _Counted(rates) as step:
        model(input_ids[:, -1:], use_cache=True, **cache)
    return {PREFILL: dict(prefill.ms), STEP: dict(step.ms)}


def prefill_options(model: nn.Module) -> dict[str, Any]:
    """Arguments by which a forward fills a cache and computes the logits of the last token alone, if it can."""
    takes_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"use_cache": True} | ({"logits_to_keep": 1} if takes_it else {})


class _Counted(TorchDispatchMode):
    """Milliseconds of each product and attention: of its bytes or of its operations, whichever takes longer."""

    def __init__(self, rates: Rates):
        super().__init__()
        self.rates = rates
        self.ms: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        op = getattr(function, "_overloadpacket", function)
        moved = sum(tensor.nbytes for tensor in _tensors((args, result)))
        if "scaled_dot_product" in str(op):
            self._add("attention", moved, _operations_of_attention(_named(function, args, kwargs)))
        elif "grouped_mm" in str(op):
            operations, unread = _grouped(_named(function, args, kwargs))
            self._add("product", moved - unread, operations)
        elif op in flop_registry and kind_of(str(op)) == "product":
            self._add("product", moved, flop_registry[op](*args, **kwargs, out_val=result))
        return result

    def _add(self, kind: str, moved: float, operations: float) -> None:
        self.ms[kind] += 1e3 * max(moved / self.rates.bandwidth, operations / self.rates.operations)


def _operations_of_attention(named: dict[str, Any]) -> float:
    """Those of q k^T and of the product with v, (B, H, T, D) each, for the keys that a query sees."""
    q, k = named["query"], named["key"]
    mask = named["attn_bias"] if named.get("attn_bias") is not None else named.get("attn_mask")
    seen = 1.0
    if mask is not None:
        seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).float().mean().item()
    elif named.get("is_causal"):
        seen = 0.5 + 0.5 / q.shape[2]
    return 4 * q.numel() * k.shape[2] * seen


def _grouped(named: dict[str, Any]) -> tuple[float, float]:
    """Operations of a product of experts, (M, K) with (E, K, N), and the bytes of those that have no rows."""
    x, weights, ends = named["self"], named["mat2"], named["offs"]
    rows = torch.diff(ends, prepend=ends.new_zeros(1))
    return 2 * x.numel() * weights.shape[-1], weights.nbytes * (rows == 0).float().mean().item()


def _named(function: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip([argument.name for argument in function._schema.arguments], args, strict=False)) | kwargs


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
