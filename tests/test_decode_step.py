"""One token through all layers and the head, against the formula in float64 (tests/decode_oracle.py) and eager's own
error."""

from collections import Counter

import pytest
import torch
from torch.autograd import DeviceType

import decode_oracle
import llmkernels  # noqa: F401, for its ops

STATE = ("hidden", "k_caches", "v_caches")  # what the op changes


def make(
    batch,
    dtype,
    device,
    *,
    layers=2,
    heads=4,
    kv_heads=2,
    dim=64,
    hidden=264,
    ffn=384,
    vocab=1003,
    capacity=48,
    bias=True,
    half_width=False,
    lengths=None,
    seed=0,
    normed="",
):
    """Arguments of the op, lengths including the new token. `normed`: which heads are normalized, of "q" and "k"."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0, shift=0.0):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(scale).add_(shift)
        return x.to(device, dtype)

    def each_layer(*shape, **options):
        return [draw(*shape, **options) for _ in range(layers)]

    width = heads * dim
    rows = width + 2 * kv_heads * dim
    lengths = torch.tensor(lengths or [(7 * b + 20) % capacity + 1 for b in range(batch)]).int().to(device)
    angles = torch.outer(torch.arange(capacity).double(), 1e4 ** -(torch.arange(dim // 2) * 2 / dim).double())
    angles = angles if half_width else torch.cat((angles, angles), -1)
    # Random values average out over many keys; a few large ones show whether keys at the edge of a tile are lost.
    values = each_layer(batch, capacity, kv_heads, dim)
    edges = [key for key in range(capacity) if key % 16 in (15, 0)]
    for cache in values:
        cache[:, edges] *= 100
    return {
        "hidden": draw(batch, hidden),
        "input_norms": each_layer(hidden, scale=0.1, shift=1),
        "qkv_weights": each_layer(rows, hidden, scale=hidden**-0.5),
        "qkv_biases": each_layer(rows, scale=0.1) if bias else [],
        "o_weights": each_layer(hidden, width, scale=width**-0.5),
        "o_biases": each_layer(hidden, scale=0.1) if bias else [],
        "post_norms": each_layer(hidden, scale=0.1, shift=1),
        "gate_up_weights": each_layer(2 * ffn, hidden, scale=hidden**-0.5),
        "down_weights": each_layer(hidden, ffn, scale=ffn**-0.5),
        "norm": draw(hidden, scale=0.1, shift=1),
        "head": draw(vocab, hidden, scale=hidden**-0.5),
        "head_bias": draw(vocab, scale=0.1) if bias else None,
        "cos": angles.cos().to(device, dtype),
        "sin": angles.sin().to(device, dtype),
        "positions": lengths - 1,
        "cache_seqlens": lengths,
        "cache_leftpad": None,
        "k_caches": each_layer(batch, capacity, kv_heads, dim),
        "v_caches": values,
        "heads": heads,
        "eps": 1e-6,
        "weight_offset": 0.0,
        "cast_before_weight": True,
        "softmax_scale": None,
        "windows_left": [-1] * layers,
        "q_norms": each_layer(dim, scale=0.5, shift=1) if "q" in normed else None,
        "k_norms": each_layer(dim, scale=0.5, shift=1) if "k" in normed else [],
    }


def one(**changes):
    return make(1, torch.bfloat16, "cuda", **changes)


def step(values):
    return torch.ops.llmkernels.decode_step(*values.values())


def mapped(function, value):
    """Applies `function` to the value, or to each in the list, if it is a float tensor."""
    if isinstance(value, list):
        return [mapped(function, x) for x in value]
    return function(value) if torch.is_tensor(value) and value.is_floating_point() else value


def copy(x, dtype):
    """A copy with the strides of x, in storage of its own."""
    if x._base is None:
        return x.to(dtype, copy=True)
    return x._base.to(dtype, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def copied(values, dtype=None):
    """The arguments, with copies of what the op changes, or with all tensors in another dtype."""
    return {
        name: mapped(lambda x: copy(x, dtype or x.dtype), value) if dtype or name in STATE else value
        for name, value in values.items()
    }


def run(function, values, dtype=None):
    """(logits, hidden, all k_caches, all v_caches) after the op; the arguments stay unchanged."""
    values = copied(values, dtype)
    logits = function(*values.values())
    return logits, values["hidden"], torch.stack(values["k_caches"]), torch.stack(values["v_caches"])


def check(values):
    """Returns the logits."""
    found = run(torch.ops.llmkernels.decode_step, values)
    exact = run(decode_oracle.decode_step, values, torch.float64)
    eager = run(decode_oracle.decode_step, values)
    sequences = torch.arange(len(values["hidden"]))
    slots = values["cache_seqlens"].long().cpu() - 1
    for name, ours, wanted, theirs in zip(("logits", *STATE), found, exact, eager, strict=True):
        assert ours.dtype == values["hidden"].dtype and ours.shape == wanted.shape
        if name in ("k_caches", "v_caches"):
            # Only the new token has changed.
            others, before = ours.clone(), torch.stack(values[name])
            others[:, sequences, slots] = before[:, sequences, slots]
            assert torch.equal(others, before)
            ours, wanted, theirs = (x[:, sequences, slots] for x in (ours, wanted, theirs))
        error, allowed = ((x.double() - wanted).norm() / wanted.norm() for x in (ours, theirs))
        eps = torch.finfo(ours.dtype).eps
        assert error <= 2 * allowed + 2 * eps, f"{name}: relative error {error:.1e}, eager's {allowed:.1e}"
    return found[0]


def assert_same(found, expected):
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One sequence in bfloat16.
SHAPES = [
    *({"dim": dim, "heads": 2 * group} for dim in (64, 128) for group in (1, 2, 4, 7, 8)),
    {"heads": 9, "kv_heads": 9},
    {"heads": 8, "kv_heads": 1, "dim": 128},
    {"hidden": 264, "ffn": 1048},
    {"hidden": 1032, "ffn": 264, "vocab": 4099},
    {"hidden": 64, "ffn": 64, "vocab": 40, "heads": 2, "kv_heads": 1},  # fewer columns than a GPU has SMs
    {"hidden": 8, "ffn": 8, "vocab": 40, "heads": 1, "kv_heads": 1},
    {"hidden": 2048, "ffn": 5504, "heads": 16, "dim": 128},
    {"bias": False},
    {"half_width": True},
    {"half_width": True, "dim": 128},
    {"layers": 1},
    {"layers": 3, "bias": False},
    {"heads": 18},
    {"dim": 96},
    {"dim": 32},
    {"hidden": 260},
    {"ffn": 100},
    *({"normed": "qk", "dim": dim, "heads": 2 * group} for dim in (64, 96, 128, 256, 32) for group in (1, 7, 9)),
    {"normed": "q"},
    {"normed": "k", "half_width": True},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3, 17, 64])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_against_float64(device, layers, batch, dtype):
    check(make(batch, dtype, device, layers=layers))


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_activations_that_float16_holds_but_their_scaled_values_would_not(device, batch):
    values = make(batch, torch.float16, device, layers=3)
    values["hidden"] *= 4000
    for name in ("input_norms", "post_norms"):
        for weight in values[name]:
            weight *= 10
    check(values)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not sm_90")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch, normed", [(1, ""), (2, "qk"), (16, ""), (17, "qk"), (64, "")])
def test_a_layer_is_five_launches(batch, normed, dtype):
    def launches(layers):
        values = make(batch, dtype, "cuda", layers=layers, normed=normed)
        step(values)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(values)
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
        return Counter("ours" if "llmk" in name else name for name in kernels)

    assert launches(3) - launches(1) == Counter(ours=2 * 5)


def test_float64():
    values = make(2, torch.float64, "cpu", normed="qk")
    found, expected = (run(f, values) for f in (torch.ops.llmkernels.decode_step, decode_oracle.decode_step))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_shapes(device, changes):
    check(make(1, torch.bfloat16, device, **changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [17, 40, 64])
@pytest.mark.parametrize(
    "changes", [{"hidden": 2048, "ffn": 512}, {"hidden": 3592, "ffn": 1032, "bias": False}, {"hidden": 8}], ids=str
)
def test_shapes_for_many_sequences(device, changes, batch, dtype):
    check(make(batch, dtype, device, **changes))


@pytest.mark.parametrize("batch", [2, 17, 64])
def test_hidden_in_odd_places(device, batch):
    values = make(batch, torch.bfloat16, device, layers=3)
    rows, columns = values["hidden"].shape
    place = torch.zeros(rows, columns + 3, dtype=torch.bfloat16, device=device)[:, 1:-2]
    assert copy(place, torch.float64).stride() == place.stride() != (columns, 1)
    check(values | {"hidden": place.copy_(values["hidden"])})


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 95, 96, 97, 500, 1000, 3000, 3072])
def test_lengths(device, length):
    for dim, heads in ((64, 14), (128, 4)):
        check(make(1, torch.bfloat16, device, dim=dim, heads=heads, capacity=3072, lengths=[length]))


@pytest.mark.parametrize("length", [40, 700])
def test_starts_and_windows(device, length):
    values = make(1, torch.bfloat16, device, capacity=704, lengths=[length])
    for start in (0, 3, 16, length - 2, length - 1):
        starts = torch.tensor([start], dtype=torch.int32, device=device)
        check(values | {"cache_leftpad": starts})
        check(values | {"cache_leftpad": starts, "windows_left": [7, -1]})
    for left in (0, 15, 32, 599, 2**40):
        check(values | {"windows_left": [-1, left]})


@pytest.mark.parametrize(
    "options",
    [
        {"weight_offset": 1.0},
        {"weight_offset": 0.5},
        {"cast_before_weight": False},
        {"softmax_scale": 0.2},
        {"eps": 0.5},
        {"head_bias": None},
        {"qkv_biases": []},
        {"o_biases": []},
    ],
    ids=str,
)
def test_options(device, options):
    for batch in (1, 3):
        check(make(batch, torch.bfloat16, device, normed="qk" if batch == 3 else "") | options)


def test_no_layers(device):
    values = make(1, torch.bfloat16, device)
    values = {name: [] if isinstance(value, list) else value for name, value in values.items()}
    expected = torch.ops.llmkernels.rms_norm_linear(
        values["hidden"], values["norm"], values["head"], values["head_bias"]
    )
    assert torch.equal(step(values), expected)


def test_layouts(device):
    """Caches that are views, with equal and with different strides; other tensors that are not contiguous."""
    values = make(1, torch.bfloat16, device)
    expected = run(torch.ops.llmkernels.decode_step, values)

    def spread(x, heads):  # between other heads, and followed by other tokens
        room = x.new_zeros(1, x.shape[1] + 3, x.shape[2] + heads, x.shape[3])[:, : x.shape[1], : x.shape[2]]
        return room.copy_(x)

    def spread_in_run(heads):
        changed = copied(values)
        for name in ("k_caches", "v_caches"):
            changed[name] = [spread(x, n) for x, n in zip(changed[name], heads, strict=True)]
        return step(changed), changed["hidden"], torch.stack(changed["k_caches"]), torch.stack(changed["v_caches"])

    assert_same(spread_in_run((2, 2)), expected)
    others = {"unequal caches": spread_in_run((1, 2))}
    for name in ("qkv_weights", "o_weights", "gate_up_weights", "down_weights"):
        changed = [x.t().contiguous().t() for x in values[name]]
        others[name] = run(torch.ops.llmkernels.decode_step, values | {name: changed})
    for name in ("head", "cos", "sin"):
        others[name] = run(torch.ops.llmkernels.decode_step, values | {name: values[name].t().contiguous().t()})
    for name in ("norm", "head_bias"):
        others[name] = run(torch.ops.llmkernels.decode_step, values | {name: torch.stack([values[name]] * 2, 1)[:, 0]})
    misaligned = torch.cat([values["head"].flatten()[:1], values["head"].flatten()])[1:].view_as(values["head"])
    others["misaligned"] = run(torch.ops.llmkernels.decode_step, values | {"head": misaligned})
    slot = values["cache_seqlens"].item() - 1
    for way, found in others.items():
        for name, ours, wanted in zip(("logits", *STATE), found, expected, strict=True):
            if name in ("k_caches", "v_caches"):
                ours, wanted = ours[:, :, slot], wanted[:, :, slot]
            error = (ours.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < 0.02, f"{way}, {name}: {error:.1e} from the other layout's"  # rounding makes 0.01 at most


@pytest.mark.parametrize("batch", [1, 3])
def test_what_lies_beyond_the_live_length_does_not_matter(device, batch):
    values = make(batch, torch.bfloat16, device, lengths=[9, 48, 30][:batch])
    expected = run(torch.ops.llmkernels.decode_step, values)
    poisoned = copied(values)
    for cache in (*poisoned["k_caches"], *poisoned["v_caches"]):
        for sequence, length in enumerate(values["cache_seqlens"].tolist()):
            cache[sequence, length - 1 :] = torch.nan  # that of the new token too
    assert_same(run(torch.ops.llmkernels.decode_step, poisoned)[:2], expected[:2])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [0, 49, 1048])
def test_a_token_that_has_no_place_is_not_written(device, batch, length):
    """Before the beginning or after the end of the cache."""
    values = make(batch, torch.bfloat16, device)
    room = {name: [torch.full((batch + 1, 48, 2, 64), 7.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
            for name in ("k_caches", "v_caches")}  # fmt: skip
    values |= {name: [cache[:batch] for cache in caches] for name, caches in room.items()}
    values |= {"cache_seqlens": torch.full_like(values["cache_seqlens"], length)}
    if device == "cpu" and length > 0:
        with pytest.raises(RuntimeError, match=r"cache_seqlens must lie in \[0, 48\]"):
            step(values)
    else:
        assert step(values).isfinite().all()
    assert all((cache == 7).all() for caches in room.values() for cache in caches)


@pytest.mark.gpu
@pytest.mark.parametrize("position", [-1, 48])
def test_a_position_outside_of_the_tables_makes_nan(position):
    values = one()
    values["positions"] = torch.full_like(values["positions"], position)
    assert step(values).isnan().all()


@pytest.mark.parametrize(
    "name",
    ["qkv_weights", "qkv_biases", "o_weights", "o_biases", "post_norms", "gate_up_weights", "down_weights", "k_caches",
     "v_caches", "windows_left", "q_norms", "k_norms"],
)  # fmt: skip
def test_lists_of_other_lengths(device, name):
    values = make(1, torch.bfloat16, device, normed="qk")
    may_be_none = name in ("qkv_biases", "o_biases", "q_norms", "k_norms")
    expected = r"\(2\) or none, got 1" if may_be_none else r"\(2\), got 1"
    kind = "number" if name == "windows_left" else "tensor"
    with pytest.raises(RuntimeError, match=f"^decode_step: {name} must have one {kind} per layer {expected}$"):
        step(values | {name: values[name][:1]})


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("hidden", lambda x: x[0], "hidden must have shape"),
        ("hidden", lambda x: x[:, :-8], r"input_norms\[0\] must have shape"),
        ("input_norms", lambda x: x[:-8], r"input_norms\[1\] must have shape"),
        ("qkv_weights", lambda x: x[:-8], r"qkv_weights\[1\] must have shape"),
        ("qkv_weights", lambda x: x[:, :-8], r"qkv_weights\[1\] must have shape"),
        ("qkv_biases", lambda x: x[:-1], r"qkv_biases\[1\] must have shape"),
        ("o_weights", lambda x: x[:, :-8], r"o_weights\[1\] must have shape"),
        ("o_weights", lambda x: x[:-8], r"o_weights\[1\] must have shape"),
        ("o_biases", lambda x: x[:, None], r"o_biases\[1\] must have shape"),
        ("post_norms", lambda x: x.float(), r"post_norms\[1\] must have the dtype of"),
        ("gate_up_weights", lambda x: x[:-1], r"gate_up_weights\[1\] must have an even number of rows"),
        ("gate_up_weights", lambda x: x[:-16], r"down_weights\[1\] must have shape"),
        ("down_weights", lambda x: x[:, :-8], r"down_weights\[1\] must have shape"),
        ("down_weights", lambda x: x.half(), r"down_weights\[1\] must have the dtype of"),
        ("norm", lambda x: x[:8], "norm must have shape"),
        ("head", lambda x: x[:, :8], "head must have shape"),
        ("head_bias", lambda x: x[:8], "head_bias must have shape"),
        ("cos", lambda x: x[:, :8], "cos must be a table"),
        ("sin", lambda x: x[:8], "sin must have the shape of cos"),
        ("positions", lambda x: x.long().float(), "position"),
        ("cache_seqlens", lambda x: x.long(), "cache_seqlens must be int32"),
        ("cache_seqlens", lambda x: x[:0], "cache_seqlens must have shape"),
        ("cache_leftpad", lambda x: torch.zeros(2).int(), "cache_leftpad must"),
        ("k_caches", lambda x: x[0], r"k_caches\[1\] must have"),
        ("k_caches", lambda x: x[..., :-8], r"qkv_weights\[1\] must have shape"),
        ("k_caches", lambda x: x[:0], r"v_caches\[1\] must have the shape"),
        (
            "k_caches",
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
            r"k_caches\[1\] must be contiguous along head_dim",
        ),
        ("v_caches", lambda x: x[:, :-1], r"v_caches\[1\] must have the shape"),
        ("heads", lambda x: 3, r"qkv_weights\[0\] must have shape"),
        ("heads", lambda x: -4, "heads must be finite and at least 0"),
        ("windows_left", lambda x: -2, "window_left must be at least -1"),
        ("q_norms", lambda x: x[:-1], r"q_norms\[1\] must have shape \[64\] \(head_dim\), got \[63\]"),
        ("k_norms", lambda x: x.float(), r"k_norms\[1\] must have the dtype of"),
    ],
)
def test_errors(device, name, change, message):
    values = make(1, torch.bfloat16, device, normed="qk")
    wrong = [*values[name][:-1], change(values[name][-1])] if isinstance(values[name], list) else change(values[name])
    before = values["hidden"].clone(), values["k_caches"][0].clone()
    with pytest.raises((RuntimeError, ValueError), match="^decode_step: " + message):
        step(values | {name: wrong})
    assert_same((values["hidden"], values["k_caches"][0]), before)  # a wrong last layer is found before the first runs


@pytest.mark.gpu
def test_tensors_on_another_device():
    values = one()
    for name in ("qkv_weights", "o_biases", "down_weights", "v_caches", "head", "norm", "cos", "cache_seqlens"):
        value = values[name]
        wrong = [value[0], value[1].cpu()] if isinstance(value, list) else value.cpu()
        with pytest.raises(RuntimeError, match="must be on the device of"):
            step(values | {name: wrong})


@pytest.mark.parametrize("batch", [1, 2])
def test_opcheck(device, batch):
    for bias in (False, True):
        values = make(batch, torch.bfloat16, device, bias=bias, normed="qk" if bias else "")
        torch.library.opcheck(torch.ops.llmkernels.decode_step.default, tuple(values.values()))


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "changes",
    [{}, {"dim": 128, "heads": 14, "hidden": 64, "vocab": 40, "bias": False}, {"dim": 256, "normed": "qk"}],
    ids=str,
)
def test_one_step(changes):
    check(one(capacity=704, lengths=[700], **changes))


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [17, 64])
def test_one_step_of_many(batch, dtype):
    check(make(batch, dtype, "cuda", capacity=16))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 33, 48, 64])
def test_a_large_vocabulary(batch):
    """More rows than SMs can keep, behind a norm that the last linear_add_ has done most of."""
    check(make(batch, torch.bfloat16, "cuda", capacity=16, vocab=40000, layers=1))


LARGE = {"hidden": 2048, "ffn": 5504, "heads": 16, "dim": 128, "capacity": 3072, "lengths": [3000]}
SMALL = {"hidden": 64, "ffn": 64, "vocab": 40, "heads": 2, "kv_heads": 1, "layers": 3}


@pytest.mark.gpu
def test_deterministic():
    many = [make(batch, torch.bfloat16, "cuda", hidden=2048, ffn=512) for batch in (17, 64)]
    for values in (one(**LARGE), one(**SMALL), make(3, torch.bfloat16, "cuda", normed="qk"), *many):
        expected = run(torch.ops.llmkernels.decode_step, values)
        for _ in range(250):
            assert_same(run(torch.ops.llmkernels.decode_step, values), expected)


def test_inputs_take_turns(device):
    """A step does not take the workspace of the previous one, of equal size at the same address, for its own."""
    values = make(1, torch.bfloat16, device, **LARGE)
    both = [values, values | {"hidden": values["hidden"].flip(-1)}]
    expected = [(check(inputs), run(torch.ops.llmkernels.decode_step, inputs)) for inputs in both]
    for _ in range(20 if device == "cuda" else 1):
        for inputs, (logits, wanted) in zip(both, expected, strict=True):
            found = run(torch.ops.llmkernels.decode_step, inputs)
            assert_same(found, wanted)
            assert torch.equal(found[0], logits)


@pytest.mark.gpu
def test_models_take_turns():
    """Steps of models of different sizes in turn: none finds state that another has left on the device."""
    models = [one(**LARGE), one(**SMALL), one(dim=128, kv_heads=4, heads=28, capacity=704, lengths=[700])]
    expected = [run(torch.ops.llmkernels.decode_step, values) for values in models]
    for turn in range(30):
        for index in (0, 1, 0, 2, 1) if turn % 2 else (2, 0, 0, 1):
            assert_same(run(torch.ops.llmkernels.decode_step, models[index]), expected[index])


@pytest.mark.gpu
def test_graphs_on_two_streams_at_once():
    captured, expected = [], []
    for values in (one(**LARGE), one(**SMALL)):
        expected.append(run(torch.ops.llmkernels.decode_step, values)[:2])
        graph, values = torch.cuda.CUDAGraph(), copied(values)
        with torch.cuda.graph(graph):
            hidden = values["hidden"].clone()
            logits = step(values | {"hidden": hidden})
        captured.append((graph, torch.cuda.Stream(), (logits, hidden), values))
    for _ in range(10):
        for _ in range(20):
            for graph, stream, *_ in captured:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, _, found, _), wanted in zip(captured, expected, strict=True):
            assert_same(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 17, 64])
def test_graph_follows_growing_lengths(batch):
    """Captured once and replayed with other tokens and lengths; equal to calls without a graph."""
    values = make(batch, torch.bfloat16, "cuda", capacity=128, lengths=([92, 5, 20] * batch)[:batch])
    other = {name: x.clone() if torch.is_tensor(x) else x for name, x in copied(values).items()}
    step(copied(other))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(other)
    for _ in range(20):
        graph.replay()
        assert torch.equal(logits, step(values))
        assert torch.equal(other["hidden"], values["hidden"])
        for name in ("k_caches", "v_caches"):
            assert_same(other[name], values[name])
        for arguments in (values, other):
            for name in ("positions", "cache_seqlens"):
                arguments[name] += 1
