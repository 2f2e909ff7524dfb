"""Every op of the library once, at a given size, on inputs that depend only on a seed: for the tests of threads and
devices. Run as a program, it is such a test in a new process:

    python tests/every_op.py threads     16 threads at once, each on a stream of its own, at mixed sizes
    python tests/every_op.py devices     all ops on cuda:0, then all on cuda:1, then both in turn
"""

import sys
import threading

import torch

import llmkernels  # noqa: F401, for its ops

THREADS = 16
# (rows, columns, sequences, keys, vocabulary); rows and keys on both sides of boundaries between plans
SIZES = [
    (1, 3584, 1, 40, 152064),
    (2, 64, 2, 513, 152064),
    (7, 1032, 3, 100, 1003),
    (33, 256, 8, 700, 32000),
    (64, 4096, 5, 2100, 5),
    (200, 8192, 1, 3000, 129280),
]

_op = torch.ops.llmkernels


def names() -> set[str]:
    """The names of all registered ops; `.no_grad` is the same op for calls without gradients."""
    every = {name.removesuffix(".no_grad") for name in torch._C._dispatch_get_all_op_names()}
    return {name.removeprefix("llmkernels::") for name in every if name.startswith("llmkernels::")}


def calls(size, device, dtype=torch.bfloat16, seed=0):
    """(name, arguments) of each op."""
    rows, cols, batch, keys, vocab = size
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim, ffn, hidden = 4, 2, 64, 384, 264

    def draw(*shape, scale=1.0, dtype=dtype):
        return torch.randn(*shape, generator=generator).mul_(scale).to(device, dtype)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    x, y, z, weight = draw(rows, cols), draw(rows, cols), draw(rows, cols), draw(cols)
    yield "rms_norm", (x, weight)
    yield "add_rms_norm", (x, y, weight)
    yield "rms_norm_add_", (x, y, weight, 1e-6, 0.0, True, 0.22)
    yield "rms_norm_backward", (x, y, weight, z, 1e-6, 0.0, True, True)

    yield "layer_norm", (x, weight, z[0])
    yield "add_layer_norm", (x, y, None, weight)
    yield "layer_norm_backward", (x, y, weight, z, 1e-5, True, True)

    angles = torch.outer(torch.arange(4096.0), 1e4 ** -(torch.arange(dim // 2) * 2 / dim))
    cos, sin = (torch.cat((t, t), -1).to(device, dtype) for t in (angles.cos(), angles.sin()))
    q, k = draw(1, rows, heads, dim), draw(1, rows, kv_heads, dim)
    for name in ("rope", "rope_"):
        yield name, (q, k, cos[:rows], sin[:rows])
    yield "rope_backward", (q, k, cos[:rows], sin[:rows], None, False, False, None)

    norms = (draw(dim), draw(dim))
    for name in ("rms_norm_rope", "rms_norm_rope_"):
        yield name, (q, k, *norms, cos[:rows], sin[:rows])
    of_norm = (1e-6, 0.0, True, False, False, False, None)
    yield "rms_norm_rope_backward", (q, k, q.neg(), k.neg(), *norms, cos[:rows], sin[:rows], None, *of_norm, True, True)

    packed = draw(rows, 2 * cols)
    yield "swiglu", (x, y)
    yield "geglu", (x, y, "tanh")
    yield "swiglu_packed", (packed,)
    yield "geglu_packed", (packed, "none")
    yield "swiglu_backward", (z, x, y)
    yield "geglu_backward", (z, x, y, "none")
    yield "swiglu_packed_backward", (z, packed)
    yield "geglu_packed_backward", (z, packed, "tanh")

    yield "softmax", (x, y, 0.5, True)
    yield "log_softmax", (x, 0.5)
    yield "softmax_backward", (x, y.softmax(-1), 0.5)
    yield "log_softmax_backward", (x, y.log_softmax(-1), 0.5)

    target, of_loss = torch.randint(cols, (rows,), generator=generator).to(device), draw(rows, dtype=torch.float32)
    loss_options = (-100, "none", 0.1, 1e-3, 10.0)
    yield "cross_entropy", (x, target, None, *loss_options, True)
    yield "cross_entropy_", (x, target, None, *loss_options)
    saved = target, None, x.float().logsumexp(-1), of_loss[:0]
    yield "cross_entropy_backward", (of_loss, x, *saved, *loss_options)
    yield "cross_entropy_backward_", (z.contiguous(), of_loss, x, *saved, *loss_options)
    yield "cross_entropy_scale_", (x.contiguous(), of_loss)
    head, lse = draw(37, cols, scale=cols**-0.5), draw(rows, dtype=torch.float32)
    budget = 37 * x.element_size() * max(rows // 3, 1)  # chunks
    classes = (target % 37, head[:, 0].contiguous(), None, -100)
    yield "linear_cross_entropy", (x, head, *classes, "mean", 0.1, 1e-3, 10.0, budget, False, True, True, True)
    yield (
        "linear_cross_entropy_backward",
        (of_loss, x, head, *classes[:3], lse + 9, -100, *loss_options[1:], budget, False, True, True, True),
    )
    yield "relu2_glu", (x, y)
    yield "relu2_glu_packed", (packed,)
    yield "relu2_glu_backward", (z, x, y)
    yield "relu2_glu_packed_backward", (z, packed)
    yield "bias_gelu", (x, weight, "none")
    yield "relu2", (x, weight)
    yield "bias_swiglu", (x, y, weight, z[0])
    yield "bias_geglu", (x, y, weight, z[0], "tanh")
    yield "bias_gelu_backward", (z, x, weight, "tanh", True)
    yield "relu2_backward", (z, x, weight, True)
    yield "bias_swiglu_backward", (z, x, y, weight, z[0], True, True)
    yield "bias_geglu_backward", (z, x, y, weight, z[0], "none", True, True)

    both = torch.cat((weight, z[0]))
    yield "bias_swiglu_packed", (packed, both)
    yield "bias_geglu_packed", (packed, both, "none")
    yield "bias_swiglu_packed_backward", (z, packed, both, True)
    yield "bias_geglu_packed_backward", (z, packed, both, "tanh", True)
    yield "glu_packed_backward", (z, packed, "silu")
    yield "glu_packed_backward_", (z, packed, "gelu")
    gate_up, down = draw(2 * ffn, cols, scale=cols**-0.5), draw(hidden, ffn, scale=ffn**-0.5)
    yield "gated_mlp", (x, gate_up, down)
    yield "gated_mlp", (x, gate_up, down, draw(2 * ffn), draw(hidden), "gelu", True)

    frozen, a = draw(hidden, cols, scale=cols**-0.5), draw(12, cols, scale=cols**-0.5, dtype=torch.float32)
    b, split = draw(hidden, 12, dtype=torch.float32), dtype == torch.bfloat16
    of_y, options = draw(rows, hidden), (0.7, split)
    yield "lora_linear", (x, frozen, a, b, None, *options)
    yield "add_lora", (of_y, x, a, b, *options)
    _, *parts = _op.add_lora(of_y, x, a, b, *options)
    yield "lora_linear_backward", (of_y, x, frozen, a, b, *parts, *options, True, True, True)

    logits, rng_state = draw(2, vocab, scale=3.0, dtype=torch.float32), torch.tensor([seed, 5], device=device)
    seen = torch.zeros(2, vocab, dtype=torch.bool, device=device)
    yield "scale_softcap", (logits, 0.5, 30.0)
    yield "sample", (logits, None, None, None, None, None, seen, rng_state, 0.9, 50, 0.9, 0.01, 1.1)

    def one(value, dtype=torch.float32):
        return torch.tensor([value], dtype=dtype, device=device)

    params = [draw(rows, cols), draw(cols, dtype=torch.float32), draw(17)]
    grads, averages = [z, *(p.neg() for p in params[1:])], [p.float() * 0.1 for p in params]
    squares = [p.float().square() for p in params]
    averages[1], squares[1] = averages[1].bfloat16(), squares[1].bfloat16()
    numbers = (one(0.1), one(2.0), one(0.0), one(7.0), one(0, torch.int32), seed, [0, 1, 5])
    lists = (params, grads, averages, squares, [], [one(3.0), one(0.0), one(1e4)])
    yield "adam_", (*lists, *numbers, 0.0, 0.9, 0.99, 1e-8, 0.1, 1.0, True, False)
    yield "grad_norm", (grads, 2.0)
    yield "clip_grads_", (grads, one(7.0), 1.0)

    w, bias, norm = draw(hidden, cols, scale=cols**-0.5), draw(hidden), weight
    yield "linear", (x, w, bias)
    yield "rms_norm_linear", (x, norm, w, bias)
    yield "linear_add_", (draw(rows, hidden), x, w, bias, 0.22)
    yield "glu_linear", (x, w, "gelu")
    yield "rms_norm_glu_linear", (x, norm, w)
    residual, following = draw(rows, hidden), draw(520, hidden, scale=hidden**-0.5)
    yield "linear_add_scale_", (residual, x, w, bias, following, bias, 1.0, 0.22, True)

    yield "fp8_quantize", (x, "block", "float8_e5m2", True)
    yield "rms_norm_fp8_quantize", (x, norm)
    yield "swiglu_fp8_quantize", (packed,)
    codes = [torch.randint(0x78, t.shape, generator=generator).to(device, torch.uint8) for t in (x, w)]
    scales = (draw(n, 1, dtype=torch.float32) for n in (rows, hidden))
    yield "fp8_linear", (*(t.view(torch.float8_e4m3fn) for t in codes), *scales, bias.bfloat16())

    lengths = ints(*(keys - 3 * i for i in range(batch)))
    q, new = draw(batch, 1, heads, dim), draw(batch, 1, 2 * kv_heads, dim)
    caches = [draw(batch, keys + 8, kv_heads, dim) for _ in range(2)]
    position = (lengths - 1)[:, None]
    yield "decode_attention", (q, *caches, lengths)
    new_tokens = (q, *new.split(kv_heads, 2), cos, sin, position, *caches, lengths)
    yield "rope_kv_write", new_tokens
    yield "rope_kv_write", (*new_tokens, None, False, *norms)
    row_norms = (draw(heads * dim), draw(kv_heads * dim), 1e-6, 0.0, True, True)
    yield "rope_kv_write", (*new_tokens, None, False, *row_norms)
    qkv = draw(batch, (heads + 2 * kv_heads) * dim)
    one_token = (qkv, cos, sin, lengths - 1, lengths, None, *caches, None, heads)
    yield "rope_decode_attention", one_token
    yield "rope_decode_attention", (*one_token, None, -1, 0.0, True, *norms)
    yield "rope_decode_attention", (*one_token, None, -1, 0.0, True, *row_norms)


def run(name, arguments) -> list[torch.Tensor]:
    """The results, and the arguments that the op has changed, in copies."""

    def fresh(value):
        if isinstance(value, list):
            return [fresh(element) for element in value]
        return value.clone() if isinstance(value, torch.Tensor) else value

    op = getattr(_op, name).default
    arguments = [
        fresh(value) if argument.alias_info is not None and argument.alias_info.is_write else value
        for argument, value in zip(op._schema.arguments, arguments, strict=False)
    ]
    result = op(*arguments)
    changed = [
        value
        for argument, value in zip(op._schema.arguments, arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if name == "linear_add_scale_" and result[1].numel() > 0:  # sums of the tokens there are; the rest is not written
        scaled, squares = result
        result = (scaled, squares[:-1, : len(scaled)], squares[-1, 0])
    flat = []
    for value in (result, *changed):
        flat += value if isinstance(value, list | tuple) else [value] * (value is not None)
    return flat


def results(size, device, seed=0):
    """By op, on the CPU."""
    return {name: [t.cpu() for t in run(name, arguments)] for name, arguments in calls(size, device, seed=seed)}


def differing(found, expected) -> list[str]:
    def wide(t):  # FP8 has few ops
        return (t.float() if t.is_floating_point() and t.element_size() == 1 else t).nan_to_num(7)

    def same(a, b):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(wide(a), wide(b))

    return [n for n in expected if not all(map(same, found[n], expected[n])) or len(found[n]) != len(expected[n])]


def from_threads() -> list[str]:
    """Each thread begins with another op and runs all of them; then all threads' work again, one after the other."""
    barrier, found, errors = threading.Barrier(THREADS), {}, []

    def work(index):
        try:
            size = SIZES[index % len(SIZES)]
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs = list(calls(size, "cuda", seed=index))
                inputs = inputs[2 * index :] + inputs[: 2 * index]
                torch.cuda.current_stream().synchronize()
                barrier.wait()
                rounds = [{name: run(name, arguments) for name, arguments in inputs} for _ in range(3)]
                found[index] = [
                    {name: [t.cpu() for t in tensors] for name, tensors in of_all.items()} for of_all in rounds
                ]
        except BaseException as error:
            errors.append(f"thread {index}: {error!r}")
            barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, rounds in found.items():
        expected = results(SIZES[index % len(SIZES)], "cuda", seed=index)
        errors += [f"thread {index}: {name} differs" for of_all in rounds for name in differing(of_all, expected)]
    return errors


def on_devices() -> list[str]:
    errors = []
    for size in (*SIZES, *reversed(SIZES)):
        expected = results(size, "cuda:0")
        found = results(size, "cuda:1")
        assert torch.cuda.current_device() == 0
        errors += [f"cuda:1, {size}: {name} differs" for name in differing(found, expected)]
    return errors


if __name__ == "__main__":
    wrong = {"threads": from_threads, "devices": on_devices}[sys.argv[1]]()
    print(*wrong, f"{sys.argv[1]}: {len(wrong)} wrong", sep="\n", flush=True)
    sys.exit(bool(wrong))
