"""The composed step: a forward of a few tokens, against the formula in float64 (decode_oracle.py) and eager's error."""

import dataclasses
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

import decode_oracle
from hf_models import count_ops
from llmkernels.hf.classes.options import NormOptions
from llmkernels.hf.model.description import MLP, Attention, Branch, Description, Layer, Norm, Product, map_tensors
from llmkernels.hf.step.attend import LayerCache, Tokens
from llmkernels.hf.step.compose import forward, make_tables
from oracles import assert_same

PAGE = 16
RMS_NORM, LAYER_NORM = NormOptions(), NormOptions(kind="layer_norm")
GEMMA_NORM = NormOptions(weight_offset=1.0, cast_before_weight=False)
STATE = ("hidden", "k_caches", "v_caches")  # what a forward changes


@dataclass
class Case:
    """The arguments of a forward."""

    parts: Description
    hidden: Tensor
    tokens: Tokens
    caches: list[LayerCache]

    def __call__(self) -> Tensor:
        return forward(self.parts, self.hidden, self.tokens, self.caches)

    def converted(self, change) -> "Case":
        """The same with other floating-point tensors."""
        tables = {name: tuple(map(change, pair)) for name, pair in self.tokens.tables.items()}
        tokens = dataclasses.replace(self.tokens, tables=tables)
        return Case(map_tensors(self.parts, change), change(self.hidden), tokens, self.changed(change))

    def copy(self) -> "Case":
        """The same with copies of what a forward changes."""
        return dataclasses.replace(self, hidden=copied(self.hidden), caches=self.changed(copied))

    def changed(self, change) -> list[LayerCache]:
        """The caches with other keys and values."""
        return [cache._replace(k=change(cache.k), v=change(cache.v)) for cache in self.caches]

    @property
    def seqlens(self) -> Tensor:
        """Those of all layers."""
        return self.caches[0].seqlens

    def place(self) -> tuple[Tensor, Tensor]:
        """The indices of the new tokens in a cache, (B, T) each."""
        tokens = self.tokens
        slots = self.seqlens.long()[:, None] + torch.arange(-tokens.count, 0, device=self.hidden.device)
        rows = torch.arange(tokens.batch, device=self.hidden.device)[:, None]
        if (table := self.caches[0].block_table) is None:
            return rows.expand_as(slots), slots
        return table.long()[rows, slots // PAGE], slots % PAGE

    def advance(self) -> None:
        """The next forward appends the tokens behind these."""
        self.tokens.positions.add_(self.tokens.count)
        self.seqlens.add_(self.tokens.count)


def make(
    batch,
    dtype,
    device,
    *,
    count=1,
    layers=2,
    heads=4,
    kv_heads=2,
    dim=64,
    hidden=264,
    ffn=384,
    vocab=1003,
    capacity=48,
    bias=True,
    mlp_bias=False,
    norm=RMS_NORM,
    eps=1e-6,
    pre=True,
    post=False,
    normed="",
    activation="silu",
    gated=True,
    parallel=False,
    multiplier=1.0,
    scale=None,
    windows=(-1,),
    softcap=0.0,
    rotated=(True,),
    rotary_dim=None,
    interleaved=False,
    logit_scale=1.0,
    logit_softcap=0.0,
    head_bias=None,
    lengths=None,
    leftpad=None,
    paged=False,
    seed=0,
):  # fmt: skip
    """A description and what it is run on. `normed`: whether q and k are normalized by "heads" or by "rows"; `windows`
    and `rotated` have an entry for each layer, the last one again and again. Lengths include the new tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0, shift=0.0):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(scale).add_(shift)
        return x.to(device, dtype)

    def make_norm(size, options=norm, scale=0.1):
        weight = draw(size, scale=scale, shift=1 - options.weight_offset)
        return Norm(options, weight, draw(size, scale=0.1) if options.kind == "layer_norm" else None, eps)

    def make_product(rows, columns, bias):
        return Product((), (), draw(rows, columns, scale=columns**-0.5), draw(rows, scale=0.1) if bias else None)

    def make_attention(index):
        def qk_norm(count):
            size = {"heads": dim, "rows": count * dim}.get(normed)
            return None if size is None else make_norm(size, RMS_NORM if norm.kind == "layer_norm" else norm, 0.5)

        return Attention(
            qkv=make_product((heads + 2 * kv_heads) * dim, hidden, bias),
            output=make_product(hidden, heads * dim, bias),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5 if scale is None else scale,
            window_left=windows[min(index, len(windows) - 1)],
            softcap=softcap,
            table="" if rotated[min(index, len(rotated) - 1)] else None,
            interleaved=interleaved,
            alternates=False,
            q_norm=qk_norm(heads),
            k_norm=qk_norm(kv_heads),
            row_norms=normed == "rows",
        )

    def make_layer(index):
        mlp = MLP(
            make_product((1 + gated) * ffn, hidden, mlp_bias), make_product(hidden, ffn, mlp_bias), activation, gated
        )
        branches = [
            Branch(block, make_norm(hidden) if pre else None, make_norm(hidden) if post else None, multiplier)
            for block in (make_attention(index), mlp)
        ]
        return Layer(tuple(branches), parallel)

    def rotary(x, positions):
        pairs = (rotary_dim or dim) // 2
        angles = torch.outer(positions[0].double(), 1e4 ** -(torch.arange(pairs, device=device).double() / pairs))
        angles = torch.cat((angles, angles), -1)[None]
        return angles.cos(), angles.sin()

    head = make_product(vocab, hidden, bias if head_bias is None else head_bias)
    parts = Description(
        embedding=head.weight,
        embed_scale=1.0,
        rotary=rotary,
        tables=("",) if any(rotated) else (),
        positions=range(capacity),
        layers=tuple(map(make_layer, range(layers))),
        norm=make_norm(hidden),
        head=head,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
    lengths = lengths or [max(count, (7 * b + 20) % capacity + 1) for b in range(batch)]
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions = seqlens[:, None] + torch.arange(-count, 0, dtype=torch.int32, device=device)
    leftpad = None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32, device=device)
    table, shape = None, (batch, capacity, kv_heads, dim)
    if paged:
        pages = capacity // PAGE
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int().to(device)
        shape = batch * pages, PAGE, kv_heads, dim
    tokens = Tokens(batch, count, positions, make_tables(parts, range(capacity)))
    caches = [LayerCache(draw(*shape), draw(*shape), seqlens, leftpad, table) for _ in range(layers)]
    # Random values average out over many keys; a few large ones show whether keys at the edge of a tile are lost.
    edges = [key for key in range(shape[1]) if key % 16 in (15, 0)]
    for cache in caches:
        cache.v[:, edges] *= 100
    return Case(parts, draw(batch * count, hidden), tokens, caches)


def one(**changes):
    return make(1, torch.bfloat16, "cuda", **changes)


def copied(x):
    """A copy with the strides of x, in storage of its own."""
    if x._base is None:
        return x.clone()
    return x._base.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def run(function, case):
    """(logits, hidden, all keys, all values) after a forward; the arguments stay unchanged."""
    case = case.copy()
    logits = function(case.parts, case.hidden, case.tokens, case.caches)
    keys, values, *_ = zip(*case.caches, strict=True)
    return logits, case.hidden, torch.stack(keys), torch.stack(values)


def check(case):
    """Returns the logits."""
    found, eager = run(forward, case), run(decode_oracle.forward, case)
    exact = run(decode_oracle.forward, case.converted(torch.Tensor.double))
    rows, slots = case.place()
    for index, (name, ours, theirs, wanted) in enumerate(zip(("logits", *STATE), found, eager, exact, strict=True)):
        assert ours.dtype == case.hidden.dtype and ours.shape == wanted.shape
        if name == "hidden" and len(ours) == 1 and case.parts.layers[0].branches[0].post:
            continue  # the sums went to tensors of their own
        if name in ("k_caches", "v_caches"):
            # Only the new tokens have changed.
            others, before = ours.clone(), torch.stack([cache[index - 2] for cache in case.caches])
            others[:, rows, slots] = before[:, rows, slots]
            assert torch.equal(others, before), name
            ours, theirs, wanted = (x[:, rows, slots] for x in (ours, theirs, wanted))
        error, allowed = ((x.double() - wanted).norm() / wanted.norm() for x in (ours, theirs))
        eps = torch.finfo(ours.dtype).eps
        assert error <= 2 * allowed + 2 * eps, f"{name}: relative error {error:.1e}, eager's {allowed:.1e}"
    return found[0]


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

GEMMA2 = {"norm": GEMMA_NORM, "post": True, "activation": "gelu_pytorch_tanh", "bias": False, "scale": 0.1,
          "windows": (7, -1), "softcap": 1.0, "logit_softcap": 2.0}  # fmt: skip
COHERE = {"norm": LAYER_NORM, "parallel": True, "interleaved": True, "bias": False, "logit_scale": 0.25}
# What families compute, each of a kind; scores and logits are about 1, so that caps of that size matter.
FORMS = {
    "llama": {},
    "biases": {"mlp_bias": True},
    "qk-norm": {"normed": "heads", "bias": False},
    "qk-norm of rows": {"normed": "rows", "bias": False},
    "window": {"windows": (7, -1)},
    "softcap": {"softcap": 1.0, "logit_softcap": 2.0},
    "softcap and qk-norm": {"softcap": 1.0, "normed": "heads", "windows": (-1, 7)},
    "parallel": {"parallel": True},
    "multipliers": {"multiplier": 0.22, "scale": 0.02, "logit_scale": 0.125},
    "not rotated": {"rotated": (True, False)},
    "never rotated": {"rotated": (False,)},
    "not rotated, interleaved": {"rotated": (True, False), "interleaved": True},
    "not rotated and qk-norm of rows": {"rotated": (False, True), "normed": "rows"},
    "qk-norm of rows, interleaved": {"normed": "rows", "interleaved": True},
    "partial": {"rotary_dim": 32},
    "partial and qk-norm": {"rotary_dim": 32, "normed": "heads"},
    "partial and qk-norm of rows": {"rotary_dim": 32, "normed": "rows", "interleaved": True},
    "partial, interleaved": {"rotary_dim": 32, "interleaved": True, "post": True},
    **{name: {"activation": name} for name in ("gelu", "relu2", "sigmoid", "relu")},
    "plain gelu": {"activation": "gelu", "gated": False, "mlp_bias": True, "norm": LAYER_NORM},
    "plain tanh": {"activation": "gelu_pytorch_tanh", "gated": False},
    "plain silu": {"activation": "silu", "gated": False, "mlp_bias": True},
    "nemotron": {"activation": "relu2", "gated": False, "norm": NormOptions("layer_norm", weight_offset=1.0)},
    "cohere": COHERE,
    "phi": {"norm": LAYER_NORM, "parallel": True, "activation": "gelu_pytorch_tanh", "gated": False, "mlp_bias": True,
            "rotary_dim": 24},
    "gemma2": GEMMA2,
    "gemma3": GEMMA2 | {"softcap": 0.0, "logit_softcap": 0.0, "normed": "heads"},
    "olmo2": {"pre": False, "post": True, "normed": "rows", "bias": False},
    "paged": {"paged": True},
    "paged and qk-norm of rows": {"paged": True, "normed": "rows", "heads": 8},
}  # fmt: skip
every_form = pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS.keys())


@every_dtype
@pytest.mark.parametrize("batch", [1, 3, 17, 64])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_against_float64(device, layers, batch, dtype):
    check(make(batch, dtype, device, layers=layers))


@every_dtype
@pytest.mark.parametrize("batch, count", [(1, 1), (3, 1), (2, 3), (17, 1), (8, 4)])
@every_form
def test_forms(device, changes, batch, count, dtype):
    check(make(batch, dtype, device, count=count, **changes))


@pytest.mark.parametrize("count", [1, 3])
@every_form
def test_float64(changes, count):
    case = make(2, torch.float64, "cpu", count=count, **changes)
    torch.testing.assert_close(run(forward, case), run(decode_oracle.forward, case))


# One token of one sequence in bfloat16.
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
    {"layers": 3, "bias": False},
    {"heads": 18},
    {"dim": 96},
    {"dim": 32},
    {"hidden": 260},
    {"ffn": 100},
    *(
        {"normed": by, "dim": dim, "heads": 2 * group}
        for by in ("heads", "rows")
        for dim in (64, 96, 128, 256, 32)
        for group in (1, 7, 9)
    ),
    {"normed": "rows", "dim": 128, "heads": 32, "kv_heads": 32, "hidden": 512},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_shapes(device, changes):
    check(make(1, torch.bfloat16, device, **changes))


@every_dtype
@pytest.mark.parametrize("batch", [17, 40, 64])
@pytest.mark.parametrize(
    "changes", [{"hidden": 2048, "ffn": 512}, {"hidden": 3592, "ffn": 1032, "bias": False}, {"hidden": 8}], ids=str
)
def test_shapes_for_many_sequences(device, changes, batch, dtype):
    check(make(batch, dtype, device, **changes))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 95, 96, 97, 500, 1000, 3000, 3072])
def test_lengths(device, length):
    for dim, heads in ((64, 14), (128, 4)):
        check(make(1, torch.bfloat16, device, dim=dim, heads=heads, capacity=3072, lengths=[length]))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("length", [40, 700])
def test_starts_and_windows(device, length, count):
    shape = {"count": count, "capacity": 704, "lengths": [length]}
    for start in (0, 3, 16, length - count - 1, length - count):
        check(make(1, torch.bfloat16, device, leftpad=[start], **shape))
        check(make(1, torch.bfloat16, device, leftpad=[start], windows=(7, -1), **shape))
    for left in (0, 15, 32, 599, 2**40):
        check(make(1, torch.bfloat16, device, windows=(-1, left), **shape))


@pytest.mark.parametrize(
    "options",
    [{"norm": GEMMA_NORM}, {"norm": NormOptions(weight_offset=0.5)},
     {"norm": NormOptions(cast_before_weight=False)}, {"eps": 0.5}, {"head_bias": False}, {"scale": 0.2}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("batch, normed", [(1, ""), (3, "heads")])
def test_options(device, batch, normed, options):
    check(make(batch, torch.bfloat16, device, normed=normed, **options))


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_activations_that_float16_holds_but_their_scaled_values_would_not(device, batch):
    case = make(batch, torch.float16, device, layers=3)
    case.hidden *= 4000
    for layer in case.parts.layers:
        for branch in layer.branches:
            branch.pre.weight.mul_(10)
    check(case)


@pytest.mark.parametrize("batch", [2, 17, 64])
def test_hidden_in_odd_places(device, batch):
    case = make(batch, torch.bfloat16, device, layers=3)
    rows, columns = case.hidden.shape
    place = torch.zeros(rows, columns + 3, dtype=torch.bfloat16, device=device)[:, 1:-2]
    assert copied(place).stride() == place.stride() != (columns, 1)
    check(dataclasses.replace(case, hidden=place.copy_(case.hidden)))


def test_layouts(device):
    """Caches that are views, with equal and with different strides; other tensors that are not contiguous."""
    case = make(1, torch.bfloat16, device)
    expected = run(forward, case)

    def spread(x, heads):  # between other heads, and followed by other tokens
        room = x.new_zeros(1, x.shape[1] + 3, x.shape[2] + heads, x.shape[3])[:, : x.shape[1], : x.shape[2]]
        return room.copy_(x)

    def with_caches(*heads):
        caches = [
            cache._replace(k=spread(cache.k, n), v=spread(cache.v, n))
            for cache, n in zip(case.caches, heads, strict=True)
        ]
        return run(forward, dataclasses.replace(case, caches=caches))

    def transposed(x):
        return x.t().contiguous().t() if x.dim() == 2 else torch.stack([x, x], 1)[:, 0]

    def misaligned(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)

    assert_same(with_caches(2, 2), expected)
    others = {"unequal caches": with_caches(1, 2)}
    for change in (transposed, misaligned):
        others[change.__name__] = run(forward, dataclasses.replace(case, parts=map_tensors(case.parts, change)))
    tables = {"": tuple(map(transposed, case.tokens.tables[""]))}
    tokens = dataclasses.replace(case.tokens, tables=tables)
    others["tables"] = run(forward, dataclasses.replace(case, tokens=tokens))
    slot = case.seqlens.item() - 1
    for way, found in others.items():
        for name, ours, wanted in zip(("logits", *STATE), found, expected, strict=True):
            if name in ("k_caches", "v_caches"):
                ours, wanted = ours[:, :, slot], wanted[:, :, slot]
            error = (ours.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < 0.02, f"{way}, {name}: {error:.1e} from the other layout's"  # rounding makes 0.01 at most


@pytest.mark.parametrize("batch, count", [(1, 1), (3, 1), (2, 4)])
def test_what_lies_beyond_the_live_length_does_not_matter(device, batch, count):
    case = make(batch, torch.bfloat16, device, count=count, lengths=[9, 48, 30][:batch])
    expected = run(forward, case)
    poisoned = case.copy()
    for cache in poisoned.caches:
        for sequence, length in enumerate(case.seqlens.tolist()):
            for buffer in (cache.k, cache.v):
                buffer[sequence, length - count :] = torch.nan  # the places of the new tokens too
    assert_same(run(forward, poisoned)[:2], expected[:2])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [0, 49, 1048])
def test_a_token_that_has_no_place_is_not_written(device, batch, length):
    """Before the beginning or after the end of the cache."""
    case = make(batch, torch.bfloat16, device)
    room = [[torch.full((batch + 1, 48, 2, 64), 7.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
            for _ in case.caches]  # fmt: skip
    case.seqlens.fill_(length)
    case.caches = [cache._replace(k=k[:batch], v=v[:batch]) for cache, (k, v) in zip(case.caches, room, strict=True)]
    if device == "cpu" and length > 0:
        with pytest.raises(RuntimeError, match=r"cache_seqlens must lie in \[0, 48\]"):
            case()
    else:
        assert case().isfinite().all()
    assert all((buffer == 7).all() for buffers in room for buffer in buffers)


@pytest.mark.gpu
@pytest.mark.parametrize("position", [-1, 48])
def test_a_position_outside_of_the_tables_makes_nan(position):
    case = one()
    case.tokens.positions.fill_(position)
    assert case().isnan().all()


@pytest.mark.parametrize(
    "changes",
    [{}, {"normed": "heads"}, {"normed": "rows"}, {"rotated": (False,)}, {"rotated": (False,), "interleaved": True},
     {"rotary_dim": 32}, {"rotary_dim": 32, "normed": "rows"}, {"rotary_dim": 32, "interleaved": True}],
    ids=str,
)  # fmt: skip
def test_ops_of_attention(device, changes):
    """One op, and two for a rotation of neighbours."""
    few, many = (Counter(count_ops(make(2, torch.bfloat16, device, layers=n, **changes))) for n in (2, 3))
    two = "interleaved" in changes and "rotated" not in changes
    attention = ["rope_kv_write", "decode_attention"] if two else ["rope_decode_attention"]
    linears = ["rms_norm_linear", "linear_add_scale_", "linear_add_scale_", "rms_norm_glu_linear"]
    assert many - few == Counter(linears + attention)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not sm_90")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "batch, changes",
    [(1, {}), (2, {"normed": "heads"}), (16, {}), (17, {"normed": "heads"}), (64, {}), (1, {"normed": "rows"}),
     (17, {"normed": "rows"}), (1, {"rotated": (False,)}), (64, {"rotated": (False,)})],
    ids=str,
)  # fmt: skip
def test_a_layer_is_five_launches(batch, changes, dtype):
    def launches(layers):
        case = make(batch, dtype, "cuda", layers=layers, **changes)
        case()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case()
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
        return Counter("ours" if "llmk" in name else name for name in kernels)

    assert launches(3) - launches(1) == Counter(ours=2 * 5)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "changes",
    [{}, {"dim": 128, "heads": 14, "hidden": 64, "vocab": 40, "bias": False}, {"dim": 256, "normed": "heads"}],
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
    """More rows than SMs can keep, behind a norm that the last linear_add_scale_ has done most of."""
    check(make(batch, torch.bfloat16, "cuda", capacity=16, vocab=40000, layers=1))


LARGE = {"hidden": 2048, "ffn": 5504, "heads": 16, "dim": 128, "capacity": 3072, "lengths": [3000]}
SMALL = {"hidden": 64, "ffn": 64, "vocab": 40, "heads": 2, "kv_heads": 1, "layers": 3}


@pytest.mark.gpu
def test_deterministic():
    many = [make(batch, torch.bfloat16, "cuda", hidden=2048, ffn=512) for batch in (17, 64)]
    few = [make(3, torch.bfloat16, "cuda", count=count, **FORMS[name])
           for count in (1, 4) for name in ("qk-norm", "qk-norm of rows")]  # fmt: skip
    for case in (one(**LARGE), one(**SMALL), one(**GEMMA2), *few, *many):
        expected = run(forward, case)
        for _ in range(250):
            assert_same(run(forward, case), expected)


def test_inputs_take_turns(device):
    """A step does not take the workspace of the previous one, of equal size at the same address, for its own."""
    case = make(1, torch.bfloat16, device, **LARGE)
    both = [case, dataclasses.replace(case, hidden=case.hidden.flip(-1))]
    expected = [(check(case), run(forward, case)) for case in both]
    for _ in range(20 if device == "cuda" else 1):
        for case, (logits, wanted) in zip(both, expected, strict=True):
            found = run(forward, case)
            assert_same(found, wanted)
            assert torch.equal(found[0], logits)


@pytest.mark.gpu
def test_models_take_turns():
    """Steps of models of different sizes in turn: none finds state that another has left on the device."""
    models = [one(**LARGE), one(**SMALL), one(dim=128, kv_heads=4, heads=28, capacity=704, lengths=[700])]
    expected = [run(forward, case) for case in models]
    for turn in range(30):
        for index in (0, 1, 0, 2, 1) if turn % 2 else (2, 0, 0, 1):
            assert_same(run(forward, models[index]), expected[index])


@pytest.mark.gpu
def test_graphs_on_two_streams_at_once():
    captured, expected = [], []
    for case in (one(**LARGE), one(**SMALL)):
        expected.append(run(forward, case)[:2])
        graph, case = torch.cuda.CUDAGraph(), case.copy()
        with torch.cuda.graph(graph):
            hidden = case.hidden.clone()
            logits = dataclasses.replace(case, hidden=hidden)()
        captured.append((graph, torch.cuda.Stream(), (logits, hidden), case))
    for _ in range(10):
        for _ in range(20):
            for graph, stream, *_ in captured:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, _, found, _), wanted in zip(captured, expected, strict=True):
            assert_same(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, GEMMA2, FORMS["olmo2"], COHERE], ids=["llama", "gemma2", "olmo2", "cohere"])
@pytest.mark.parametrize("batch, count", [(1, 1), (3, 1), (17, 1), (64, 1), (2, 3)])
def test_graph_follows_growing_lengths(batch, count, changes):
    """Captured once and replayed with other tokens and lengths; equal to calls without a graph."""
    lengths = ([92, 5, 20] * batch)[:batch]
    case = make(batch, torch.bfloat16, "cuda", count=count, capacity=176, lengths=lengths, **changes)
    other = case.copy()
    case.copy()()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = other()
    for _ in range(20):
        graph.replay()
        assert torch.equal(logits, case())
        assert torch.equal(other.hidden, case.hidden)
        for ours, wanted in zip(other.caches, case.caches, strict=True):
            assert_same(ours[:2], wanted[:2])
        case.advance()  # and the other one: they share their tokens
