"""References of the ops: the formulas in eager PyTorch, in float64 for the exact result and in the dtype under test for
eager's own error; inputs; comparisons."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The sanitizers look at one type of two bytes: the other one takes the same code.
SANITIZED_DTYPES = [
    pytest.param(dtype, marks=[] if dtype == torch.float16 else pytest.mark.sanitizer) for dtype in DTYPES
]

ROWS = [0, 1, 2, 7, 255, 256, 257]
COLS = [1, 7, 8, 127, 3584, 18944]
# (device, rows, cols): the whole product on a GPU, a cross through it on the CPU.
SHAPES = [("cpu", rows, cols) for rows in ROWS for cols in COLS if rows == 7 or cols == 127]
SHAPES += [("cuda", rows, cols) for rows in ROWS for cols in COLS if "cuda" in DEVICES]


# Formulas, as Hugging Face writes them.


def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast_before_weight=True):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if cast_before_weight:  # LlamaRMSNorm, Qwen2RMSNorm
        return normed.to(x.dtype) * (weight + weight_offset if weight_offset else weight)
    return (normed * (weight_offset + weight.to(wide.dtype))).to(x.dtype)  # GemmaRMSNorm


def add_rms_norm(x, residual, weight=None, eps=1e-6, **options):
    total = x + residual
    return rms_norm(total, weight, eps, **options), total


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, weight_offset=0.0):
    weight = None if weight is None else weight + weight_offset
    is_autocast = x.is_cuda and torch.is_autocast_enabled("cuda")  # which gives all of them one dtype
    if is_autocast or x.dtype == torch.float64 or weight is None or weight.dtype == x.dtype:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], *wide, eps).to(x.dtype)


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, weight_offset=0.0):
    total = x + residual
    return layer_norm(total, weight, bias, eps, weight_offset=weight_offset), total


def swiglu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(gate) * up


def geglu(gate, up=None, *, approximate="none"):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.gelu(gate, approximate=approximate) * up


def softmax(x, mask=None, *, scale=1.0, causal=False):
    z, infinity = x * scale, float("inf")
    if mask is not None:
        z = z.masked_fill(~mask, -infinity) if mask.dtype == torch.bool else z + mask
    if causal:
        rows, cols = x.shape[-2:]
        z = z.masked_fill(~torch.ones(rows, cols, dtype=torch.bool, device=x.device).tril(cols - rows), -infinity)
    nothing = (z == -infinity).all(-1, keepdim=True)
    return z.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def log_softmax(x, *, scale=1.0):
    return (x * scale).log_softmax(-1)


def cross_entropy(logits, target, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0,
                  lse_square_scale=0.0, softcap=0.0):  # fmt: skip
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = z.new_ones(z.size(-1)) if weight is None else weight.to(z.dtype)
    z = softcap * torch.tanh(z / softcap) if softcap else z
    counts = target != ignore_index
    of_target, log_p = torch.where(counts, target, 0), z.log_softmax(-1)
    weights = weight[of_target] * counts
    losses = -(1 - label_smoothing) * weight[of_target] * log_p.gather(-1, of_target[..., None])[..., 0]
    if label_smoothing:
        losses = losses - label_smoothing / z.size(-1) * (weight * log_p).sum(-1)
    if lse_square_scale:
        losses = losses + lse_square_scale * z.logsumexp(-1).square()
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def relu2_glu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.relu(gate).square() * up


def biased(x, bias):
    return x if bias is None else x + bias


def bias_gelu(x, bias=None, *, approximate="none"):
    return F.gelu(biased(x, bias), approximate=approximate)


def relu2(x, bias=None):
    return F.relu(biased(x, bias)).square()


def bias_swiglu(gate, up=None, gate_bias=None, up_bias=None):
    if up is None:
        return swiglu(biased(gate, gate_bias))
    return swiglu(biased(gate, gate_bias), biased(up, up_bias))


def bias_geglu(gate, up=None, gate_bias=None, up_bias=None, *, approximate="none"):
    if up is None:
        return geglu(biased(gate, gate_bias), approximate=approximate)
    return geglu(biased(gate, gate_bias), biased(up, up_bias), approximate=approximate)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
}


def glu(gate, up=None, gate_bias=None, up_bias=None, *, activation="silu"):
    gate, up = biased(gate, gate_bias).chunk(2, -1) if up is None else (biased(gate, gate_bias), biased(up, up_bias))
    return ACTIVATIONS[activation](gate) * up


def bias_act(x, bias=None, *, activation):
    return ACTIVATIONS[activation](biased(x, bias))


def gated_mlp(x, gate_up_weight, down_weight, gate_up_bias=None, down_bias=None, *, activation="silu"):
    gate, up = F.linear(x, gate_up_weight, gate_up_bias).chunk(2, -1)
    return F.linear(ACTIVATIONS[activation](gate) * up, down_weight, down_bias)


def rope(q, k, cos, sin, position_ids=None, *, layout="bthd", interleaved=False, rotary_dim=None):
    rotary_dim = rotary_dim or cos.size(-1)
    if position_ids is not None:
        cos, sin = cos[position_ids.long()], sin[position_ids.long()]
    if cos.size(-1) < rotary_dim:  # one angle per pair
        cos, sin = ((t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)) for t in (cos, sin))
    cos, sin = (t.unsqueeze(-3 if layout == "bhtd" else -2) for t in (cos, sin))

    def rotate(x):
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def apply(x):
        turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat((turned * cos + rotate(turned) * sin, passed), -1)

    return apply(q), apply(k)


def rms_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids=None, *, eps=1e-6, weight_offset=0.0,
                  cast_before_weight=True, row_wise=False, layout="bthd", **options):  # fmt: skip
    def norm(x, weight):
        rows = x.transpose(1, 2) if layout == "bhtd" else x
        shape = rows.shape
        rows = rows.flatten(2) if row_wise else rows
        rows = rms_norm(rows, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight)
        rows = rows.reshape(shape)
        return rows.transpose(1, 2) if layout == "bhtd" else rows

    q, k = norm(q, q_weight), norm(k, k_weight)
    results = rope(q, k, cos, sin, position_ids, layout=layout, **options)
    return tuple(result.to(x.dtype) for result, x in zip(results, (q, k), strict=True))  # OLMo 2's is float32 before


# Inputs.


def scaled_rows(*shape, dtype=torch.float32, device="cpu") -> Tensor:
    """Normal numbers; every row has its own scale in [1/4, 8), far above eps, so that a wrong reduction shows."""
    scale = torch.exp2(torch.rand(*shape[:-1], 1, device=device) * 5 - 2)
    return (torch.randn(shape, device=device) * scale).to(dtype)


def angles(*shape, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of unrelated angles: the two halves differ, so that the backward must be the transpose."""
    angle = torch.randn(shape, device=device) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


LAYOUTS = ["row_strided", "row_strided_aligned", "transposed", "offset", "expanded", "every_other", "size_one"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of the (rows, cols) tensor `x` (of its first row, for some layouts) in another memory layout."""
    rows, cols = x.shape
    if layout == "row_strided":
        return x.new_zeros(rows, cols + 3)[:, :cols].copy_(x)
    if layout == "row_strided_aligned":
        return x.new_zeros(rows, cols + 32)[:, :cols].copy_(x)
    if layout == "transposed":
        return x.new_zeros(cols, rows).t().copy_(x)
    if layout == "offset":  # by one element, so that no vector load is aligned
        return x.new_zeros(rows * cols + 1)[1:].view(rows, cols).copy_(x)
    if layout == "expanded":
        return x[:1].clone().expand(rows, cols)
    if layout == "every_other":
        return x.new_zeros(rows, 2 * cols)[:, ::2].copy_(x)
    if layout == "size_one":
        return x[:1].clone().as_strided((1, cols), (2**40 + 3, 1))
    raise ValueError(layout)


# Comparisons.


def tensors(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def differentiate(function, inputs, grad_outputs, count=None) -> tuple:
    """The outputs of `function`, and the gradients of its first `count` inputs, whose strides are kept."""
    count = len(inputs) if count is None else count
    leaves = [t.detach().requires_grad_() for t in inputs[:count]]
    outputs = tensors(function(*leaves, *inputs[count:]))
    grads = torch.autograd.grad(outputs, leaves, grad_outputs)
    return (*(t.detach() for t in outputs), *grads)


def in_double(values) -> list:
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in values]


def check(ours, eager, inputs, count=None, scales=None, grad_outputs=None):
    """Outputs and gradients of `ours` are within twice the error of `eager`, both measured against float64.

    `scales`, one per output and per gradient, say what an error is relative to (see `assert_accurate`).
    """
    if grad_outputs is None:
        grad_outputs = [torch.randn_like(t) for t in tensors(eager(*inputs))]
    results = differentiate(ours, inputs, grad_outputs, count)
    rounded = differentiate(eager, inputs, grad_outputs, count)
    exact = differentiate(eager, in_double(inputs), in_double(grad_outputs), count)
    scales = scales or [None] * len(results)
    for index, (a, b, c, scale) in enumerate(zip(results, rounded, exact, scales, strict=True)):
        name = f"output {index}" if index < len(grad_outputs) else f"gradient {index - len(grad_outputs)}"
        assert_accurate(a, b, c, scale, name)


def check_norm(ours, eager, inputs, grad_layout=None, **options):
    """`check` for rms_norm and add_rms_norm, with errors relative to the size of what is summed up.

    A gradient can cancel to nothing (a row of one element has none), so its own size says little.
    """
    *rows, weight = inputs if inputs[-1].dim() == 1 else (*inputs, None)
    ours, eager = partial(ours, **options), partial(eager, **options)
    grad_outputs = [torch.randn_like(t) for t in tensors(eager(*inputs))]
    if grad_layout:
        grad_outputs = [laid_out(t, grad_layout) for t in grad_outputs]
    total = sum(in_double(rows))
    normed = rms_norm(total, eps=options.get("eps", 1e-6))
    rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + options.get("eps", 1e-6))
    grad_y = grad_outputs[0].double()
    weighted = grad_y if weight is None else grad_y * (options.get("weight_offset", 0.0) + weight.double())
    scales = [None] * len(grad_outputs)
    scales += [(weighted.abs() * rstd + sum(in_double(grad_outputs[1:]), torch.zeros_like(total)).abs())] * len(rows)
    scales = [s if s is None else s.amax(-1, keepdim=True) for s in scales]
    if weight is not None:
        terms = grad_y * normed
        scales.append(torch.maximum(terms.square().sum(0).sqrt(), terms.sum(0).abs()).max())
    check(ours, eager, inputs, scales=scales, grad_outputs=grad_outputs)


def check_rms_norm_rope(ours, eager, inputs, **options):
    """`check` for rms_norm_rope, with errors of the gradients relative to the size of what cancels."""
    ours, eager = partial(ours, **options), partial(eager, **options)
    grad_outputs = [torch.randn_like(t) for t in eager(*inputs)]
    head = 1 if options.get("layout", "bthd") == "bhtd" else 2
    row = (head, 3) if options.get("row_wise") else (3,)
    scales, weight_scales = [], []
    for x, weight, grad_y in zip(inputs[:2], inputs[2:4], grad_outputs, strict=True):
        x, size = x.double(), 2 * grad_y.double().abs()  # what is turned back has at most the sum of a pair
        size = size.amax(row, keepdim=True) if size.numel() else size
        rstd = (x.square().mean(row, keepdim=True) + options.get("eps", 1e-6)).rsqrt()
        reach = 1.0
        if weight is not None and weight.numel():
            reach = abs(options.get("weight_offset", 0.0)) + weight.double().abs().max()
        scales.append(size * reach * rstd)
        terms = (size * x * rstd).square().sum([d for d in range(4) if d not in row]).sqrt()
        weight_scales.append(terms.max() if terms.numel() else None)
    count = 2 if inputs[2] is None else 4
    scales = [None, None, *scales, *weight_scales[: count - 2]]
    check(ours, eager, inputs, count=count, scales=scales, grad_outputs=grad_outputs)


def check_layer_norm(ours, eager, rows, parameters, grad_layout=None, eps=1e-5, weight_offset=0.0):
    """`check` for layer_norm and add_layer_norm, with errors relative to what is summed up, as in `check_norm`.

    `parameters` has the weight, the bias, both or none, by name.
    """
    count = len(rows)

    def named(function):
        options = {"eps": eps, "weight_offset": weight_offset}
        return lambda *t: function(*t[:count], **dict(zip(parameters, t[count:], strict=True)), **options)

    inputs = (*rows, *parameters.values())
    grad_outputs = [torch.randn_like(t) for t in tensors(named(eager)(*inputs))]
    if grad_layout:
        grad_outputs = [laid_out(t, grad_layout) for t in grad_outputs]
    total, grad_y = sum(in_double(rows)), grad_outputs[0].double()
    rstd = torch.rsqrt((total - total.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + eps)
    weighted = grad_y * (weight_offset + parameters["weight"].double()) if "weight" in parameters else grad_y
    of_row = weighted.abs() * rstd + sum(in_double(grad_outputs[1:]), torch.zeros_like(total)).abs()
    scales = [None] * len(grad_outputs) + [of_row.amax(-1, keepdim=True)] * count
    if grad_y.numel():
        of_columns = {"weight": grad_y * layer_norm(total, eps=eps), "bias": grad_y}
        # Twice the deviation of the sum: our chunks of rows are longer than those of eager's pairwise sum.
        scales += [2 * of_columns[name].square().sum(0).sqrt().max() for name in parameters]
    else:
        scales += [None] * len(parameters)
    check(named(ours), named(eager), inputs, scales=scales, grad_outputs=grad_outputs)


def check_glu(ours, eager, inputs, grad_layout=None):
    """`check` for swiglu and geglu, with errors relative to the size of the product: the activation's zeros cancel."""
    gate, up = inputs if len(inputs) == 2 else inputs[0].chunk(2, -1)
    grad_y = torch.randn_like(eager(*inputs))
    if grad_layout:
        grad_y = laid_out(grad_y, grad_layout)
    pairs = [(gate, up), (grad_y, up), (grad_y, gate)]
    y, grad_gate, grad_up = ((a.double() * b.double()).abs().amax(-1, keepdim=True) for a, b in pairs)
    grads = [grad_gate, grad_up] if len(inputs) == 2 else [torch.maximum(grad_gate, grad_up)]
    check(ours, eager, inputs, scales=[y, *grads], grad_outputs=[grad_y])


def check_softmax(ours, eager, x, mask=None, grad_layout=None, **options):
    """`check` for softmax and log_softmax, with the errors of gradients relative to the size of what cancels."""
    ours, eager = partial(ours, **options), partial(eager, **options)
    inputs = (x,) if mask is None else (x, mask)
    grad_y = torch.randn_like(eager(*inputs))
    if grad_layout:
        grad_y = laid_out(grad_y, grad_layout)
    y, g = eager(*in_double(inputs)), grad_y.double()
    terms = (g * y).abs() + y.abs() * (g * y).sum(-1, keepdim=True).abs()
    if eager.func is log_softmax:
        size = torch.maximum(g.sum(-1, keepdim=True).abs(), g.square().sum(-1, keepdim=True).sqrt())
        terms = g.abs() + y.exp() * size  # a sum that cancels is as exact as its terms let it be
    scale = abs(options.get("scale", 1.0)) * terms
    if scale.size(-1):
        scale = scale.amax(-1, keepdim=True)
    check(ours, eager, inputs, count=1, scales=[None, scale], grad_outputs=[grad_y])


def check_cross_entropy(ours, inputs, **options):
    """`check` for cross_entropy, with errors relative to a loss of at least a guess and to a gradient of one."""
    ours, eager = partial(ours, **options), partial(cross_entropy, **{k: v for k, v in options.items() if k in _LOSS})
    loss, exact = eager(*inputs), eager(*in_double(inputs))
    grad_loss = torch.rand_like(loss) + 0.5
    vocab, divisor = inputs[0].size(-1), 1.0
    if options.get("reduction", "mean") == "mean" and exact.isfinite():
        divisor = (eager(*in_double(inputs), reduction="sum") / exact).abs() if exact else divisor
    counted = grad_loss.max().double() if loss.numel() else 1.0
    scales = [
        exact.abs() + torch.tensor(float(vocab)).log().clamp_min(1).to(exact),
        torch.ones_like(exact).max() * counted / divisor,
    ]
    check(ours, eager, inputs, count=1, scales=scales if loss.numel() else None, grad_outputs=[grad_loss])


_LOSS = ("ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap")


# Scalars of a (rows, cols) output whose gradient reaches the op with other strides: none at all, none between rows,
# zeros around a slice, rows of a wider tensor, columns before rows. opcheck and gradcheck pass none of these.
SCALARS = {
    "expanded": lambda y: y.sum(),
    "broadcast": lambda y: (y.sum(0) * torch.arange(y.size(1), device=y.device)).sum(),
    "sliced": lambda y: y[:, 1:5].square().sum(),
    "concatenated": lambda y: torch.cat((y, torch.ones_like(y)), -1).square().sum(),
    "transposed": lambda y: (y.t() * torch.arange(len(y), device=y.device)).sum(),
}


def check_scalar_gradients(ours, eager, inputs, scalar, least=0.0):
    """The gradients of scalar(ours(...)), against float64, to a few roundings of the largest of them, or of `least`."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    grads = torch.autograd.grad(scalar(ours(*leaves)), leaves)
    for a, b in zip(grads, torch.autograd.grad(scalar(eager(*exact)), exact), strict=True):
        tolerance = 10 * torch.finfo(a.dtype).eps * max(b.abs().max().item(), least)
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


def assert_accurate(ours: Tensor, eager: Tensor, exact: Tensor, scale=None, name="output"):
    """Largest and root-mean-square error of `ours` are at most twice those of `eager`, plus a few roundings.

    Errors are relative to `scale`; by default to the largest exact value in the row.
    """
    assert (ours.shape, ours.dtype, ours.device) == (eager.shape, eager.dtype, eager.device), name
    if ours.numel() == 0:
        return
    scale = (exact.abs().amax(-1, keepdim=True) if scale is None else scale).clamp_min(1e-30)
    errors = [(t.double() - exact) / scale for t in (ours, eager)]
    measured = [e.abs().max() for e in errors] + [e.square().mean().sqrt() for e in errors]
    ours_max, eager_max, ours_l2, eager_l2 = torch.stack(measured).tolist()
    # One rounding of a 16-bit result; in float32 the reciprocal root alone may be off by two units.
    eps = torch.finfo(ours.dtype).eps
    floor_max, floor_l2 = (eps, eps / 2) if ours.element_size() == 2 else (4 * eps, 4 * eps)
    floor_l2 = floor_max if ours.numel() == 1 else floor_l2  # of one error it is that error
    assert ours_max <= 2 * eager_max + floor_max, f"{name}: largest error {ours_max:.3g}, eager {eager_max:.3g}"
    assert ours_l2 <= 2 * eager_l2 + floor_l2, f"{name}: L2 error {ours_l2:.3g}, eager {eager_l2:.3g}"


def captured(step) -> tuple:
    """A CUDA graph of a function, which has run once before on another stream; and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_same(ours, expected, name="output"):
    """Equal bit for bit, but any NaN equals any other and -0 equals 0."""
    for index, (a, b) in enumerate(zip(tensors(ours), tensors(expected), strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name} {index}: {m}")  # noqa: B023


def assert_within_ulps(ours: Tensor, expected: Tensor, ulps: int, share=1.0):
    """No element is further than `ulps` representable numbers away, and at least `share` of them are equal."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    distance = (_ordinal(ours) - _ordinal(expected)).abs()
    distance[ours.isnan() & expected.isnan()] = 0
    equal = (distance == 0).double().mean().item()
    assert distance.max().item() <= ulps, f"{distance.max().item()} ulps apart"
    assert equal >= share or share == 1.0, f"only {equal:.2%} of the elements are equal"


def _ordinal(x: Tensor) -> Tensor:
    """Numbers the representable values in order, so that neighbours are 1 apart."""
    integer, sign = {2: (torch.int16, 1 << 15), 4: (torch.int32, 1 << 31)}[x.element_size()]
    bits = x.contiguous().view(integer).long()
    return torch.where(bits < 0, -(bits + sign), bits)
