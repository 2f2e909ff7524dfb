"""Where the time of a model goes: `profile(model, input_ids)`.

kernels.py  the kind and the maker of a kernel, by its name
timing.py   calls of a model, timed and in PyTorch's profiler
limits.py   the rates of the device, and what products and attention take at them
result.py   the numbers, as tables and as a picture
"""

import copy
from collections import Counter, defaultdict

import torch
from torch import Tensor, nn

from llmkernels.hf import patch, unpatch
from llmkernels.hf.modules.replaced import Replaced

from .kernels import owner_of, short_name
from .limits import limits_ms, measure_rates, prefill_options
from .result import Call, Profile, Row
from .timing import PREFILL, STEP, Trace, phases

__all__ = ["Call", "Profile", "Row", "profile"]


def profile(model: nn.Module, input_ids: Tensor, *, new_tokens: int = 16) -> Profile:
    """Where the milliseconds of a prefill and of a decode step go, by kind of kernel, unpatched and patched.

    A prefill is one forward over the prompt, with a new cache and the logits of the last token. A step is what each
    further token takes in ``model.generate``. Each call is timed without the profiler, the median of 5, and run once in
    PyTorch's profiler for its kernels. The wall time of a step is that of a call with ``new_tokens`` tokens more minus
    that of a shorter one; its kernels are the last ones of the longer call, as many as it has more. Kinds are told by
    the names of kernels, elementwise ones of the unpatched model by the module that launches them. Where kernels
    overlap, their times add up to more than the GPU is busy.

    The limit of a product or an attention is what its operands and results take at the rates of this device, which are
    measured here: their bytes, or the operations (2 M N K; of attention for the keys that a query sees), whichever
    takes longer. They are counted on the unpatched model, a step behind the prompt. Of experts those count that have
    tokens. Products by ops of other libraries, as of quantized weights, are not counted. All else could be part of
    products and attention, as our kernels show, so its limit is 0.

    On a CPU the times are of PyTorch's ops, each without those that it calls, and the rates are the CPU's.

    The model is left as it was. One that is not patched is patched for a while. One that is patched stays so, with its
    options, and its report counts the calls made here; unpatched it is measured on a copy that shares the weights, but
    for those that the patch has packed, which take memory twice for as long.

    Args:
        model: a causal language model of transformers, patched or not.
        input_ids: int64 (B, T), the prompts, without padding, on the device of the model.
        new_tokens: over how many steps the time of one is measured.

    Returns: a :class:`Profile`: rows of numbers, which print as tables; ``.plot(path)``, ``.to_json()``.

    Raises: TypeError when model cannot generate or input_ids is no tensor of int64; ValueError for input_ids of another
        shape, on another device or with tokens that the model does not have, and for new_tokens below 1.

    >>> print(llmkernels.profile(model, torch.randint(0, 1000, (1, 512), device=model.device)))
    """
    _check(model, input_ids, new_tokens)
    device, dtype = input_ids.device, model.dtype
    is_patched = any(isinstance(module, Replaced) for module in model.modules())
    traces: dict[str, dict[str, Trace]] = {}
    not_patched = None
    with torch.no_grad():
        rates = measure_rates(device, dtype)
        plain = _unpatched_copy(model) if is_patched else model
        options = prefill_options(plain)
        limits = limits_ms(plain, input_ids, rates)
        traces["unpatched"] = phases(plain, input_ids, new_tokens, options, by_module=True)
        del plain
        try:
            handle = None if is_patched else patch(model)
        except ValueError as reason:
            not_patched = str(reason)
        else:
            try:
                traces["patched"] = phases(model, input_ids, new_tokens, options, by_module=False)
            finally:
                if handle:
                    handle.unpatch()
    calls, rows = [], []
    for phase in (PREFILL, STEP):
        for way, found in traces.items():
            trace, limit = found[phase], limits[phase]
            calls.append(Call(phase, way, trace.wall_ms, trace.busy_ms, sum(limit.values())))
            rows += _rows(phase, way, trace, limit)
    return Profile(
        model=getattr(type(model), "original", type(model)).__name__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        dtype=str(dtype).removeprefix("torch."),
        batch=input_ids.shape[0],
        tokens=input_ids.shape[1],
        bandwidth_gb_s=rates.bandwidth / 1e9,
        rate_tflop_s=rates.operations / 1e12,
        calls=tuple(calls),
        rows=tuple(rows),
        not_patched=not_patched,
    )


def _check(model: nn.Module, input_ids: Tensor, new_tokens: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile: model must be a torch.nn.Module, got {type(model).__name__}")
    if not callable(getattr(model, "generate", None)):
        raise TypeError(f"profile: model must be a causal language model with generate(), got {type(model).__name__}")
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"profile: input_ids must be a tensor, got {type(input_ids).__name__}")
    if input_ids.dtype != torch.int64:
        raise TypeError(f"profile: input_ids must be int64, got {input_ids.dtype}")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"profile: input_ids must be (batch, tokens), not empty, got {tuple(input_ids.shape)}")
    embedding = model.get_input_embeddings().weight
    if input_ids.device != embedding.device:
        raise ValueError(f"profile: input_ids must be on {embedding.device}, got one on {input_ids.device}")
    if not 0 <= input_ids.min() <= input_ids.max() < len(embedding):
        found = f"from {input_ids.min()} to {input_ids.max()}"
        raise ValueError(f"profile: input_ids must be from 0 to {len(embedding) - 1}, got tokens {found}")
    if new_tokens < 1:
        raise ValueError(f"profile: new_tokens must be at least 1, got {new_tokens}")


def _unpatched_copy(model: nn.Module) -> nn.Module:
    """Its parameters are others on the same memory, since `unpatch` gives packed ones memory of their own."""
    known = {}
    for parameter in model.parameters():
        shared = type(parameter) is nn.Parameter
        known[id(parameter)] = nn.Parameter(parameter.data, parameter.requires_grad) if shared else parameter
    found = copy.deepcopy(model, known)
    unpatch(found)
    return found


def _rows(phase: str, way: str, trace: Trace, limits: dict[str, float]) -> list[Row]:
    """By kind, the longest first."""
    times, launches, of_kernels = Counter(), Counter(), defaultdict(Counter)
    for run in trace.runs:
        times[run.kind] += run.time_us / 1e3 / trace.count
        launches[run.kind] += 1 / trace.count
        of_kernels[run.kind][run.name] += run.time_us
    rows = []
    for kind, time_ms in times.most_common():
        ((kernel, _),) = of_kernels[kind].most_common(1)
        limit, count = limits.get(kind, 0.0), round(launches[kind], 6)
        rows.append(Row(phase, way, kind, time_ms, count, limit, short_name(kernel), owner_of(kernel)))
    return rows
