"""That a description is right: the composed forward of a small model gives the logits that its modules give.

The small model has the class and the config of the model in question but for sizes (reference.py), and random weights.
Both run on the CPU, in float32, over more tokens than a window has, at the first positions and at the last for which
the description is meant: some families scale queries far behind. What a description can not read off a model is tried:
the first facts with which all logits agree.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .compose import Tokens, embed, forward, make_tables
from .description import Product, Trunk, with_products
from .guard import inspect_all
from .layout import UnknownLayout
from .reference import WINDOW, Reference, reference, small_model
from .trunk import Facts, read
from .trust import NoStep, formulas

_TOKENS = 2 * WINDOW + 2
_TOLERANCE = 1e-4  # of the largest logit; another formula is off by far more

_proofs: list[tuple[tuple, Facts | str]] = []  # facts, or why there are none


def facts(model: nn.Module, expected: Reference) -> Facts:
    """The facts under which the description of a model is right. Raises UnknownLayout where there are none."""
    key = type(expected.model), expected.config, formulas(expected.classes)
    found = next((found for known, found in _proofs if known == key), None)
    if found is None:
        try:
            found = _prove(model)
        except UnknownLayout as reason:
            found = str(reason)
        except NoStep:
            raise
        except Exception as error:  # this family does something in a way of its own
            found = f"has an unknown layout ({type(error).__name__}: {error})"
        _proofs.append((key, found))
    if isinstance(found, str):
        raise UnknownLayout(found)
    return found


def _candidates(config: Any) -> Iterator[Facts]:
    types = getattr(config, "layer_types", None) or []
    mixed = len(set(types)) > 1
    scales = (-1, 1) if getattr(config, "logits_scaling", None) not in (None, 1) else (-1,)
    softcaps = (True, False) if getattr(config, "attn_logit_softcapping", None) else (True,)
    for options in itertools.product((False, True) if mixed else (False,), softcaps, scales):
        yield Facts(*options)


def _prove(model: nn.Module) -> Facts:
    # Modes of the caller have nothing to see here.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        small = small_model(model)
        known = reference(small)
        inspect_all(small, known.root)
        ids = torch.arange(_TOKENS) * 7 % 61
        closest = float("inf")
        for candidate in _candidates(model.config):
            parts = read(small, known, candidate)
            starts = 0, max(0, len(parts.positions) - _TOKENS)
            errors = [_error(small, parts, ids, start) for start in starts]
            if all(error <= _TOLERANCE for error in errors):
                return candidate
            closest = min(closest, max(errors))
    raise UnknownLayout(f"computes something else than its description: logits differ by {closest:.1g} of the largest")


def _error(small: nn.Module, parts: Trunk, ids: Tensor, start: int) -> float:
    """How far logits differ, of the largest."""
    positions = torch.arange(start, start + len(ids))[None]
    target = small(ids[None], position_ids=positions, use_cache=False).logits[0]
    return float((_composed(parts, ids, start) - target).abs().max() / target.abs().max())


def _composed(parts: Trunk, ids: Tensor, start: int) -> Tensor:
    """The logits of each token, one at a time at first and then several. The first one has the position `start`."""
    parts = with_products(parts, _joined)
    tables = make_tables(parts, range(start, start + len(ids)))
    shapes = [(1, len(ids), layer.attention.kv_heads, layer.attention.head_dim) for layer in parts.layers]
    caches = [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    logits = []
    counts = [1] * WINDOW + [len(ids) - WINDOW - 3, 1, 2]
    for end, count in zip(itertools.accumulate(counts), counts, strict=True):
        hidden = torch.empty(count, parts.embedding.shape[1])
        embed(parts.embedding, parts.embed_scale, ids[end - count : end], hidden)
        positions = torch.arange(end - count, end, dtype=torch.int32)[None]  # rows of the tables
        seqlens = torch.tensor([end], dtype=torch.int32)
        logits.append(forward(parts, hidden, Tokens(1, count, positions, seqlens, None, tables), caches))
    return torch.cat(logits)


def _joined(product: Product) -> Product:
    weight, bias = (torch.cat(group) if group else None for group in (product.weights, product.biases))
    return Product(product.weights, product.biases, weight, bias)
