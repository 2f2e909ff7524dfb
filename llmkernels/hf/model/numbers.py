"""What was done to a tensor, by its numbers: rotations and windows as read.py asks for them."""

import torch
from torch import Tensor

from ..classes import layout
from ..classes.options import Rotation
from ..classes.recorder import Node
from ..errors import UnknownLayout
from .reference import WINDOW
from .template import Window


def is_close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    """Whether two tensors have the same numbers, in the same order, but for rounding."""
    if a.numel() != b.numel():
        return False
    a, b = a.flatten(), b.flatten()
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-3))


def tokens_first(x: Tensor, tokens: int) -> Tensor:
    """(1, T, heads * D), (1, T, heads, D) or (1, heads, T, D) as (T, heads * D)."""
    x = x.transpose(1, 2) if x.ndim == 4 and x.shape[1] != tokens else x
    return x[0].reshape(tokens, -1)


def rotation_of(before: Tensor, after: Tensor, tables: list[Node]) -> Rotation | None:
    """How (T, heads, D) was rotated, None if not."""
    if is_close(before, after):
        return None
    if len(tables) != 2 or tables[0].name != tables[1].name:
        raise UnknownLayout("has an attention that changes q or k by something else than a rotation")
    tables = sorted(tables, key=lambda node: node.options["index"])
    if any(node.value.numel() % before.shape[0] for node in tables):
        raise UnknownLayout("makes tables of a rotation of more than positions")
    cos, sin = (node.value.reshape(1, before.shape[0], -1) for node in tables)
    x = before.transpose(0, 1)[None]
    for rotation in layout.ROTATIONS:
        if rotation.table != "pairs" and cos.shape[-1] <= x.shape[-1]:
            found = layout.rotate(rotation, x, x, cos, sin)[0]
            if is_close(found[0].transpose(0, 1), after):
                return rotation
    raise UnknownLayout("has an attention with a rotation that has no kernel")


def window_of(mask: Tensor | None, tokens: int) -> Window | int:
    if mask is None:
        return -1
    seen = mask if mask.dtype is torch.bool else mask == 0
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    for window, expected in ((-1, distance >= 0), (Window(), (distance >= 0) & (distance < WINDOW))):
        if torch.equal(seen.expand(1, 1, tokens, tokens)[0, 0], expected):
            return window
    raise UnknownLayout("has an attention with a mask of an unknown form")


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, window: Window | int) -> Tensor:
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = scale * q @ k.transpose(2, 3)
    scores = cap * (scores / cap).tanh() if cap else scores
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = (distance < 0) | ((distance >= WINDOW) if isinstance(window, Window) else False)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2)
