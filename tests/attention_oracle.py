"""Attention over prompts by its formula, and its inputs: for test_attention.py and its like."""

import contextlib
import ctypes
import math

import pytest
import torch
from torch import Tensor

from conftest import DEVICES
from llmkernels import _library

ALL = (-1, -1)  # window_size: no window
PORTABLE = pytest.param("portable", marks=pytest.mark.gpu, id="cuda-portable")


@pytest.fixture(name="device", params=[*DEVICES, PORTABLE])
def every_device(request):
    """Also a GPU that takes the kernels for compute capability 8.0."""
    with portable_kernels() if request.param == "portable" else contextlib.nullcontext():
        yield "cuda" if request.param == "portable" else request.param


@contextlib.contextmanager
def portable_kernels():
    library = ctypes.CDLL(str(_library.PATH))
    library.llmk_flash_attention_portable(1)
    try:
        yield
    finally:
        library.llmk_flash_attention_portable(0)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def visible(q_tokens, k_tokens, device, causal=False, window_size=ALL, k_begin=None, k_end=None):
    """(B or 1, Tq, Tk): which keys a query sees."""
    left, right = window_size
    key = torch.arange(k_tokens, device=device)
    distance = key - (torch.arange(q_tokens, device=device) + k_tokens - q_tokens)[:, None]
    seen = torch.ones(1, q_tokens, k_tokens, dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (distance >= -left)
    if right >= 0 or causal:
        seen = seen & (distance <= (0 if causal else right))
    if k_begin is not None:
        seen = seen & (key >= k_begin.long().view(len(k_begin), -1, 1))
    if k_end is not None:
        seen = seen & (key < k_end.long().view(len(k_end), -1, 1))
    return seen


def make(device, dtype, q_tokens, k_tokens, heads=4, kv_heads=2, head_dim=64, batch=2):
    """q, k, v."""
    q = torch.randn(batch, q_tokens, heads, head_dim, device=device)
    k, v = torch.randn(2, batch, k_tokens, kv_heads, head_dim, device=device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def probabilities(
    q, k, softmax_scale=None, softcap=0.0, sinks=None, attn_mask=None, alibi_slopes=None, **mask
) -> tuple[Tensor, Tensor]:
    """(B, H, Tq, Tk), and lse, by a softmax in float32 at least; zeros and -inf where there is no score."""
    q, k = q.transpose(1, 2), k.repeat_interleave(q.size(2) // k.size(2), 2).transpose(1, 2)
    scores = (q @ k.transpose(-1, -2)) * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.size(2), k.size(2), q.device, **mask)[:, None]
    if alibi_slopes is not None:
        position = torch.arange(q.size(2), device=q.device)[:, None] + k.size(2) - q.size(2)
        distance = (position - torch.arange(k.size(2), device=q.device)).abs()
        scores = scores - alibi_slopes.view(-1, q.size(1), 1, 1) * distance
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen, scores = seen & (attn_mask.double() >= -1e30), scores + attn_mask
    scores = scores.masked_fill(~seen, -math.inf).to(torch.promote_types(q.dtype, torch.float32))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., : k.size(2)].nan_to_num(), scores.logsumexp(-1)


def weighted(weights, v) -> Tensor:
    """(B, Tq, H, D)"""
    return (weights @ v.repeat_interleave(weights.size(1) // v.size(2), 2).transpose(1, 2)).transpose(1, 2)
