"""Sampling of tokens from logits: public function, fake. Kernels: csrc/kernels/sampling, csrc/cpu/sampling.cpp."""

import torch
from torch import Tensor

from llmkernels.ops._common import public, register_fake

_sample = torch.ops.llmkernels.sample.default

_OFFSETS = 1 << 43  # the op counts up from here to 2^44
_OFF = (1.0, 0, 1.0, 0.0, 1.0)


@public
def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    repetition_penalty: float | Tensor = 1.0,
    seen: Tensor | None = None,
    generator: torch.Generator | None = None,
    *,
    rng_state: Tensor | None = None,
) -> Tensor:
    r"""Draw one token per row of logits, in one launch and without the host waiting for it.

    In the order of transformers: of the tokens in ``seen``, the logit l becomes l / penalty if positive, else
    l * penalty. Then

    .. math:: p = \mathrm{softmax}(l / \mathrm{temperature})

    of which top-k keeps the k largest, and all equal to the k-th; top-p the most probable that together reach ``top_p``
    of what is left, with the one that crosses it, and of equal ones those with the highest index; min-p all of at
    least ``min_p`` times the largest. One of those that are left is drawn, with probabilities in proportion to p.

    Args:
        logits: (B, V), V up to 2^21; float32, float16 or bfloat16, on the CPU also float64 (rounded to float32).
        temperature: 0 takes the token with the largest logit, of equal ones the first.
        top_k: 0 and V are off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
        repetition_penalty: positive; 1 is off, and so is every penalty without ``seen``.
        seen: (B, V) bool or uint8, rows contiguous: which tokens the penalty applies to. The drawn token is added to
            it, so a buffer that is filled with the prompt's tokens once follows a generation by itself.
        generator: where the seed comes from, on the CPU or on the device of ``logits``; default: the default generator
            of that device. Every call takes two numbers from it.
        rng_state: instead of a generator: a seed and an offset, int64 (2,) on the device of ``logits``. The op adds 1
            to the offset, which must be in [0, 2^44). In a CUDA graph, this gives every replay new tokens.

    ``temperature`` to ``repetition_penalty`` are a number for all rows, or a tensor (B,) on the device of ``logits``,
    ``top_k`` of int32 and the others of float32. A number out of range raises; a tensor is not looked at on the host,
    and an element out of range counts as the nearest in range, NaN as off (as a temperature: 0).

    Returns:
        Tokens (B,), int64.

    Values: a token with a logit of -inf is never drawn. NaN counts as -inf, inf as the largest finite number. Where
        nothing else is left, the token is 0. A probability below 2^-42 of the largest counts as 0.
    Layout: rows any constant distance apart are read in place, rows shared by ``expand`` too; other layouts are copied.
    Arithmetic: logits and temperature in float32, l / penalty as l * (1 / penalty). Thresholds are exact, by logit,
        before the temperature can round two into one. Probabilities are 43-bit integers, right to 3e-7 or so and summed
        exactly. The random number has 64 bits: Philox 4x32-10 of (seed; offset, row).
    Differentiable: no.
    Deterministic: for given logits and random state, also between CPU and GPU, with whatever batch around the row (the
        row's number counts, though).
    Matches: ``RepetitionPenaltyLogitsProcessor``, ``TemperatureLogitsWarper``, ``TopKLogitsWarper``,
        ``TopPLogitsWarper`` and ``MinPLogitsWarper`` of transformers, in this order, then ``softmax`` and
        ``multinomial``: the same distribution, other random numbers. (Which of equal logits top-p keeps depends there
        on a sort that need not be stable; here it is as if it were.)
    Raises: RuntimeError for shapes, dtypes, devices and tensors that share memory with ``seen`` or ``rng_state``;
        ValueError for numbers out of range, and for both a generator and a random state.
    Source: Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al. 2019 (the penalty), Salmon et al.
        2011 (Philox).

    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0)
    tensor([1])
    """
    if rng_state is None:
        device = logits.device if generator is None else generator.device
        rng_state = torch.randint(_OFFSETS, (2,), generator=generator, device=device)
        if rng_state.device != logits.device:
            rng_state = rng_state.to(logits.device, non_blocking=True)
    elif generator is not None:
        raise ValueError("sample: expected a generator or an rng_state, got both")
    if logits.requires_grad:
        logits = logits.detach()
    given = (temperature, top_k, top_p, min_p, repetition_penalty)
    tensors = [value if isinstance(value, Tensor) else None for value in given]
    numbers = [off if isinstance(value, Tensor) else value for value, off in zip(given, _OFF, strict=True)]
    return _sample(logits, *tensors, seen, rng_state, *numbers)


register_fake(
    "sample", lambda logits, *others, **named: logits.new_empty(logits.size(0), dtype=torch.int64), overloads=("",)
)
