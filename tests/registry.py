"""Calls of every registered op, at any size, on inputs that depend only on a seed. A new op is a line of `calls`, and
with it in the tests that are the same for all ops:

    every_op.py      from many threads, on several devices
    test_checks.py   what the op, its fakes and its public function refuse
    test_compile.py  schema, fake and gradient, as opcheck tests them, in other layouts and with other options, too
    test_memory.py   that results do not depend on what was in memory; that nothing behind them is written
    test_fuzz.py     the first of these at any size

Functions that have a formula in eager PyTorch and gradients are a line of cases.py as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from llmkernels.ops.activation import ACTIVATIONS

_names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("llmkernels::")]
OPS = sorted(name for name in _names if "." not in name)
DIFFERENTIABLE = {name.removesuffix(".no_grad") for name in _names if "." in name}  # that for calls without gradients
every_op = pytest.mark.parametrize("op", OPS)
HEADS, KV_HEADS = 4, 2


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.llmkernels, op).default


def written(op: str) -> list[str]:
    """The arguments that the schema says are written to."""
    return [argument.name for argument in overload(op)._schema.arguments if argument.is_write]


@dataclass(frozen=True)
class Size:
    """Of x (batch, tokens, cols), of caches of `sequences` with so many keys, and of the other matrices."""

    batch: int
    tokens: int
    cols: int
    sequences: int
    keys: int
    vocab: int
    head_dim: int = 64
    ffn: int = 384
    hidden: int = 264
    classes: int = 37


SMALL = Size(2, 3, 8, sequences=2, keys=3, vocab=10, head_dim=8, ffn=5, hidden=6, classes=7)


def small_calls(device="cpu", size=SMALL) -> dict[str, list[dict]]:
    """The arguments of all calls, small and in float32, by op."""
    found = {op: [] for op in OPS}
    for op, arguments in calls(size, device, torch.float32):
        found[op].append(arguments)
    missing = [op for op in OPS if not found[op]]
    assert not missing, f"registry.py has no call of {missing}"
    return found


# Options that other arguments have to change with.
_TIED = {"split", "row_wise", "heads_first", "scaled", "squares", "lora_linear_backward.x"}
_TIED |= {"embed_tokens_.counters", "cross_entropy_backward.weight", "cross_entropy_backward_.weight"}


def variants(op: str, arguments: dict) -> dict[str, dict]:
    """Calls like this one, by what is different: the layout of what the op only reads; a tensor that is left out; a
    flag that is turned."""

    def in_layout(layout):
        kept = {*written(op), "scaled", "squares"}
        return {
            name: layout(x) if isinstance(x, torch.Tensor) and name not in kept else x for name, x in arguments.items()
        }

    found = {"transposed": in_layout(_transposed), "rows_apart": in_layout(_rows_apart)}
    for argument in overload(op)._schema.arguments:
        name, value = argument.name, arguments.get(argument.name, argument.default_value)
        needs = op in DIFFERENTIABLE and name.startswith("needs_")  # says what requires a gradient
        if needs or {name, f"{op}.{name}"} & _TIED:
            continue
        if isinstance(value, bool):
            found[f"{name}={not value}"] = arguments | {name: not value}
        elif isinstance(value, torch.Tensor) and isinstance(argument.type, torch.OptionalType):
            found[f"{name}=None"] = arguments | {name: None}
    return found


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 2 else x


def _rows_apart(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x), -1)[..., : x.size(-1)] if x.dim() > 1 else x


def calls(size: Size, device, dtype=torch.bfloat16, seed=0) -> Iterator[tuple[str, dict]]:
    """(op, arguments by name); the first call of an op has all of its tensors, where it takes them at this size."""
    batch, tokens, cols, sequences, keys, hidden = (
        size.batch, size.tokens, size.cols, size.sequences, size.keys, size.hidden)  # fmt: skip
    rows, dim, heads, kv_heads = batch * tokens, size.head_dim, HEADS, KV_HEADS
    generator = torch.Generator().manual_seed(seed)

    def call(op, *values, **named):
        names = (argument.name for argument in overload(op)._schema.arguments)
        return op, dict(zip(names, values, strict=False)) | named

    def draw(*shape, scale=1.0, dtype=dtype):
        return torch.randn(*shape, generator=generator).mul_(scale).to(device, dtype)

    def draw_int(end, *shape):
        return torch.randint(end, shape, generator=generator).to(device)

    def positive(*shape):
        return draw(*shape, dtype=torch.float32).abs() + 0.1

    def int32(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    x, y, z = (draw(batch, tokens, cols) for _ in range(3))
    weight, bias = draw(cols), draw(cols)
    yield call("rms_norm", x, weight)
    yield call("add_rms_norm", x, y, weight)
    yield call("rms_norm_add_", x, y, weight, 1e-6, 0.0, True, 0.22)
    yield call("rms_norm_backward", x, y, weight, z, 1e-6, 0.0, True, True)

    yield call("layer_norm", x, weight, bias)
    yield call("layer_norm", x, weight, bias, weight_offset=1.0)
    yield call("add_layer_norm", x, y, weight, bias)
    yield call("add_layer_norm", x, y, None, weight)
    yield call("layer_norm_backward", x, y, weight, z, 1e-5, 1.0, True, True)

    table = torch.outer(torch.arange(max(tokens, keys) + 8.0), 1e4 ** -(torch.arange(dim // 2) * 2 / dim))
    cos, sin = (torch.cat((t, t), -1).to(device, dtype) for t in (table.cos(), table.sin()))
    q, k = draw(batch, tokens, heads, dim), draw(batch, tokens, kv_heads, dim)
    norms = draw(dim), draw(dim)
    of_norm = 1e-6, 0.0, True, False
    for ids, heads_first in ((draw_int(tokens, batch, tokens), False), (None, False), (None, True)):
        if heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        angles, of_rope = (cos[:tokens], sin[:tokens], ids), (heads_first, heads_first, None)  # in pairs, too
        for op in ("rope", "rope_", "rope_backward"):
            yield call(op, q, k, *angles, *of_rope)
        for op in ("rms_norm_rope", "rms_norm_rope_"):
            yield call(op, q, k, *norms, *angles, *of_norm, *of_rope)
        wanted = True, True
        yield call("rms_norm_rope_backward", q, k, q.neg(), k.neg(), *norms, *angles, *of_norm, *of_rope, *wanted)

    packed = draw(batch, tokens, 2 * cols)
    both = torch.cat((weight, bias))
    for activation in ACTIVATIONS:
        for biases in ((weight, bias), (None, None)):
            yield call("glu", x, y, *biases, activation)
            yield call("glu_backward", z, x, y, *biases, activation, True, True)
        for bias_of_both in (both, None):
            yield call("glu_packed", packed, bias_of_both, activation)
            yield call("glu_packed_backward", z, packed, bias_of_both, activation, True)
        yield call("bias_act", x, weight, activation)
        yield call("bias_act_backward", z, x, weight, activation, True)
    yield call("glu_packed_forward_backward", z, packed, "silu")
    yield call("glu_packed_forward_backward_", z, packed, "gelu")

    yield call("softmax", x, y, 0.5, True)
    yield call("log_softmax", x, 0.5)
    yield call("softmax_backward", x, y.softmax(-1), 0.5)
    yield call("log_softmax_backward", x, y.log_softmax(-1), 0.5)

    target, of_loss = draw_int(cols, batch, tokens), draw(batch, tokens, dtype=torch.float32)
    options, lse = (-100, "none", 0.1, 1e-3, 10.0), x.float().logsumexp(-1)
    for of_classes, sums in ((positive(cols), positive(2)), (None, of_loss.flatten()[:0])):
        saved = target, of_classes, lse, sums, *options
        yield call("cross_entropy", x, target, of_classes, *options, True)
        yield call("cross_entropy_", x, target, of_classes, *options)
        yield call("cross_entropy_backward", of_loss, x, *saved)
        yield call("cross_entropy_backward_", z, of_loss, x, *saved)
    yield call("cross_entropy_scale_", x, of_loss)
    head, head_bias = draw(size.classes, cols, scale=cols**-0.5), draw(size.classes)
    budget = size.classes * x.element_size() * max(rows // 3, 1)  # chunks
    for of_classes in (positive(size.classes), None):
        inputs = x, head, target % size.classes, head_bias, of_classes
        wanted = budget, False, True, True, True
        yield call("linear_cross_entropy", *inputs, -100, "mean", *options[2:], *wanted)
        yield call("linear_cross_entropy_backward", of_loss, *inputs, of_loss + 9, *options, *wanted)

    gate_up, down = draw(2 * size.ffn, cols, scale=cols**-0.5), draw(hidden, size.ffn, scale=size.ffn**-0.5)
    yield call("gated_mlp", x, gate_up, down, draw(2 * size.ffn), draw(hidden), "gelu", True)
    yield call("gated_mlp", x, gate_up, down)

    w, w_bias, residual = draw(hidden, cols, scale=cols**-0.5), draw(hidden), draw(batch, tokens, hidden)
    a, b = draw(12, cols, scale=cols**-0.5, dtype=torch.float32), draw(hidden, 12, dtype=torch.float32)
    options = 0.7, dtype == torch.bfloat16  # scaling, split
    yield call("lora_linear", x, w, a, b, w_bias, *options)
    yield call("lora_linear", x, w, a, b, None, *options)
    yield call("add_lora", residual, x, a, b, *options)
    yield call("add_adapters_", residual, x, [a, a[:5]], [b, b[:-3, :5].contiguous()], [0, 3], [0.7, -2.0])
    _, *parts = torch.ops.llmkernels.add_lora(residual, x, a, b, *options)
    yield call("lora_linear_backward", residual, x, w, a, b, *parts, *options, True, True, True)

    yield call("linear", x, w, w_bias)
    # Made up, for the checks: kernels for more rows would read it.
    handoff = {"scaled": x.flatten(0, 1), "squares": positive(2, 128)} if rows <= 16 else {}
    yield call("rms_norm_linear", x, weight, w, w_bias, **handoff)
    yield call("rms_norm_linear", x, weight, w, w_bias)
    added = torch.zeros_like(x), x, y, weight, 1e-6, 0.0, True, 0.22
    yield call("rms_norm_add_linear", *added, w, w_bias, "", True, weight)
    yield call("rms_norm_add_linear", *added, w, None, "gelu")
    yield call("linear_add_", residual, x, w, w_bias, 0.22)
    yield call("glu_linear", x, w, "gelu")
    yield call("rms_norm_glu_linear", x, weight, w, **handoff)
    yield call("rms_norm_glu_linear", x, weight, w)
    following = draw(2 * hidden - 8, hidden, scale=hidden**-0.5)
    yield call("linear_add_scale_", residual, x, w, w_bias, following, w_bias, 1.0, 0.22, True)
    yield call("linear_add_scale_", residual, x, w, None, following, w_bias, next_glu=True)

    yield call("fp8_quantize", x)
    yield call("fp8_quantize", x, "block", "float8_e5m2", True)
    yield call("rms_norm_fp8_quantize", x, weight)
    yield call("swiglu_fp8_quantize", x, y)
    yield call("swiglu_fp8_quantize", packed)
    codes = [draw_int(0x78, *t.shape).to(torch.uint8).view(torch.float8_e4m3fn) for t in (x, w)]
    scales = draw(batch, tokens, 1, dtype=torch.float32), draw(hidden, 1, dtype=torch.float32)
    yield call("fp8_linear", *codes, *scales, w_bias.bfloat16())

    of_int8 = draw_int(256, hidden, cols).sub(128).to(torch.int8), positive(hidden).mul_(0.01)
    yield call("int8_linear", x, *of_int8, w_bias)

    logits, rng_state = draw(2, size.vocab, scale=3.0, dtype=torch.float32), torch.tensor([seed, 5], device=device)
    seen = torch.zeros(2, size.vocab, dtype=torch.bool, device=device)
    yield call("scale_softcap", logits, 0.5, 30.0)
    ids, counters = draw_int(size.classes, batch, tokens), draw_int(50, 3, batch).int()
    yield call("embed_tokens_", x.flatten(0, 1), draw(size.classes, cols), ids, 3.0, counters, 2, ids.int())
    yield call("embed_tokens_", x.flatten(0, 1), draw(size.classes, cols), ids)
    yield call("embed_tokens_", x.flatten(0, 1), draw(size.classes, cols), ids, accumulate=True)
    of_rows = positive(2), int32(50, 3), *(torch.full((2,), p, device=device) for p in (0.9, 0.01, 1.1))
    yield call("sample", logits, *of_rows, seen, rng_state)
    yield call("sample", logits, *[None] * 5, seen, rng_state, 0.9, 50, 0.9, 0.01, 1.1)

    def one(value, dtype=torch.float32):
        return torch.tensor([value], dtype=dtype, device=device)

    params = [draw(rows, cols), draw(cols, dtype=torch.float32), draw(17)]
    grads, averages = [z.flatten(0, 1), *(p.neg() for p in params[1:])], [p.float() * 0.1 for p in params]
    squares = [p.float().square() for p in params]
    averages[1], squares[1] = averages[1].bfloat16(), squares[1].bfloat16()
    numbers = one(0.1), one(2.0), one(0.0), one(7.0), one(0, torch.int32), seed, [0, 1, 5]
    for largest in ([t * 2 for t in squares], []):
        lists = params, grads, averages, squares, largest, [one(3.0), one(0.0), one(1e4)]
        yield call("adam_", *lists, *numbers, 0.0, 0.9, 0.99, 1e-8, 0.1, 1.0, True, False)
    yield call("grad_norm", grads, 2.0)
    yield call("clip_grads_", grads, one(7.0), 1.0)

    lengths = int32(*(max(keys - 3 * i, 1) for i in range(sequences)))
    q, new = draw(sequences, 1, heads, dim), draw(sequences, 1, 2 * kv_heads, dim)
    caches = [draw(sequences, keys + 8, kv_heads, dim) for _ in range(2)]
    pages, padding = int32(*range(sequences))[:, None], int32(*[0] * sequences)
    row_norms = draw(heads * dim), draw(kv_heads * dim), 1e-6, 0.0, True, True
    yield call("decode_attention", q, *caches, lengths, padding, pages)
    yield call("decode_attention", q, *caches, lengths)
    new_tokens = q, *new.split(kv_heads, 2), cos, sin, (lengths - 1)[:, None], *caches, lengths
    yield call("rope_kv_write", *new_tokens, pages, False, *norms)
    yield call("rope_kv_write", *new_tokens)
    yield call("rope_kv_write", *new_tokens, None, False, *norms)
    yield call("rope_kv_write", *new_tokens, None, False, *row_norms)
    part = dim // 2  # of each head
    some = q, *new.split(kv_heads, 2), cos[:, :part], sin[:, :part], (lengths - 1)[:, None], *caches, lengths
    yield call("rope_kv_write", *some, None, False, *row_norms, part)
    qkv = draw(sequences, (heads + 2 * kv_heads) * dim)
    one_token, options = (qkv, cos, sin, lengths - 1, lengths), (heads, None, -1, 0.0, True)
    yield call("rope_decode_attention", *one_token, padding, *caches, pages, *options, *norms)
    for found in ((), norms, row_norms):
        yield call("rope_decode_attention", *one_token, None, *caches, None, *options, *found)
    some = qkv, cos[:, :part], sin[:, :part], lengths - 1, lengths
    yield call("rope_decode_attention", *some, None, *caches, None, *options, *row_norms, part)

    q, k, v = (draw(sequences, tokens, n, dim) for n in (heads, kv_heads, kv_heads))
    sinks, options = draw(heads), (0.3, tokens // 2, 0, 20.0)
    bias = draw(sequences, 1, tokens, tokens), positive(heads)
    for of_call in ((padding, lengths, sinks, *options, *bias), (None, None, None, None, -1, -1, 0.0)):
        yield call("attention", q, k, v, *of_call)
        y, lse = torch.ops.llmkernels.attention(q, k, v, *of_call)
        grad_lse = None if of_call[0] is None else lse.sin()
        yield call("attention_backward", y.cos(), grad_lse, q, k, v, y, lse, *of_call)
