"""What the tests of rope and rms_norm_rope share: sizes, layouts, and what is asked of both."""

import pytest
import torch
from torch import Tensor

from oracles import DEVICES, DTYPES, angles, assert_same

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_order = pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
every_layout = pytest.mark.parametrize("layout", ["bhtd", "bthd"])
every_width = pytest.mark.parametrize("half_width", [False, True], ids=["full", "half"])
every_sharing = pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5)], ids=["shared", "batch of one", "batched"])
every_index_dtype = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
every_position_outside = pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
usual_sizes = pytest.mark.parametrize(
    "heads, kv_heads, dim", [(28, 4, 128), (14, 2, 64), (1, 1, 2), (3, 3, 6), (5, 1, 80)]
)
odd_sizes = pytest.mark.parametrize(
    "heads, kv_heads, dim", [(16, 1, 60), (33, 1, 62), (1, 1, 256), (64, 8, 8), (300, 1, 2), (7, 0, 16), (0, 7, 16)]
)
few_and_many_tokens = pytest.mark.parametrize(
    "device, tokens", [(device, t) for device in DEVICES for t in (0, 1, 7, 257 if device == "cuda" else 33)]
)

# Of q or k as (B, H, T, D).
VIEWS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a packed projection": lambda t: torch.cat((t, t, t), 1)[:, t.size(1) : 2 * t.size(1)],
    "padded heads": lambda t: torch.cat((t, t), -1)[..., : t.size(-1)],
    "misaligned": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
    "expanded over the batch": lambda t: t[:1].expand(t.shape),
    "head_dim not contiguous": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "every other token": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "batch of one, absurd stride": lambda t: t[:1].as_strided((1, *t.shape[1:]), (2**40 + 3, *t.stride()[1:])),
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
every_view_of_the_batch = pytest.mark.parametrize("view", list(VIEWS.values())[:-1], ids=list(VIEWS)[:-1])

# Scalars of the results, whose gradients autograd makes with layouts of its own.
SCALARS = {
    "expanded": lambda q, k: q.sum() + k.sum(),
    "sliced": lambda q, k: q[:, 1:, :, 3:9].square().sum() + k[:, :, -1].square().sum(),
    "concatenated": lambda q, k: torch.cat((q, k), 1).square().sum() + torch.cat((q, q), -1)[..., 5:].sum(),
    "transposed": lambda q, k: (q.transpose(2, 3).flatten(2) * k.transpose(2, 3).flatten(2)[:, :1]).sum(),
}
every_scalar = pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS.keys())


def shapes_of(batch, tokens, heads, kv_heads, dim, layout) -> list[tuple[int, ...]]:
    """Of q and k."""
    return [(batch, h, tokens, dim) if layout == "bhtd" else (batch, tokens, h, dim) for h in (heads, kv_heads)]


def misaligned(t: Tensor) -> Tensor:
    return VIEWS["misaligned"](t)


def assert_gradients(scalar, ours, eager, inputs, eps: int) -> None:
    """Those of `inputs`, for angles that have none, within `eps` roundings of the largest in float64."""
    dtype, device = inputs[0].dtype, inputs[0].device
    leaves = [t.requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    cos, sin = angles(5, 16, dtype=dtype, device=device)
    grads = torch.autograd.grad(scalar(*ours(*leaves, cos, sin)), leaves)
    expected = torch.autograd.grad(scalar(*eager(*exact, cos.double(), sin.double())), exact)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=eps * torch.finfo(dtype).eps * b.abs().max().item())


def assert_in_place(function, q, k, others, options) -> None:
    """The values of the call that is not in place, written into q and k, which come back."""
    expected = function(q, k, *others, **options)
    pointers = q.data_ptr(), k.data_ptr()
    result = function(q, k, *others, inplace=True, **options)
    assert result[0] is q and result[1] is k and (q.data_ptr(), k.data_ptr()) == pointers
    assert_same(result, expected)


def assert_counts_as_a_write(function, q, *others) -> None:
    """autograd must notice that a tensor it has saved was overwritten."""
    product = torch.ones_like(q, requires_grad=True) * q
    function(q, *others, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def assert_left_alone(function, inputs) -> None:
    copies = tuple(t.clone() for t in inputs)
    for out in function(*inputs):
        out.zero_()
    assert_same(inputs, copies)
