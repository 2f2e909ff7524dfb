"""The modules, against the functions that they wrap and against the modules of transformers that they replace."""

import contextlib
import copy
import io

import pytest
import torch
from torch import nn as torch_nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import llmkernels
from llmkernels import nn
from oracles import assert_same, scaled_rows


def copy_of(module, example):
    """`module` with the weights of `example`, on its device and in its dtype; their names must agree."""
    parameter = next(example.parameters())
    module.load_state_dict(example.state_dict())
    return module.to(parameter)


def forward_and_gradients(module, *inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = module(*leaves)
    return y, *torch.autograd.grad(y.square().sum(), [*leaves, *module.parameters()])


def assert_close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(b.abs().max().item(), 1))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_rms_norm_takes_the_place_of_the_one_in_transformers(device, family):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(modeling, f"{family.capitalize()}RMSNorm")(48, 1e-5).to(device)
    torch_nn.init.normal_(theirs.weight)
    options = {"weight_offset": 1.0, "cast_before_weight": False} if family == "gemma" else {}
    ours = copy_of(nn.RMSNorm(48, 1e-5, **options), theirs)
    x = scaled_rows(3, 5, 48, device=device)
    assert_close(forward_and_gradients(ours, x), forward_and_gradients(theirs, x))
    for dtype in (torch.bfloat16, torch.float16):
        y, expected = (module.to(dtype)(x.to(dtype)) for module in (ours, theirs))
        assert (y == expected).double().mean() > 0.99 and y.dtype == expected.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rope_equals_the_one_in_transformers_bit_for_bit(device, family, dtype):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    q, k = (torch.randn(2, 5, h, 32, device=device).to(dtype).transpose(1, 2) for h in (4, 2))
    angle = torch.randn(2, 5, 16, device=device).repeat(1, 1, 2) * 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert_same(llmkernels.rope(q, k, cos, sin, layout="bhtd"), modeling.apply_rotary_pos_emb(q, k, cos, sin))


@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_embedding_takes_the_place_of_the_one_in_transformers(device, dtype, base):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    config = transformers.Qwen2Config(
        hidden_size=128,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    ids = torch.stack((torch.arange(40), torch.arange(40) + 1000)).to(device)
    q, k = (torch.randn(2, h, 40, 32, device=device).to(dtype) for h in (4, 1))
    cos, sin = modeling.Qwen2RotaryEmbedding(config).to(device)(q, ids)
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    ours = nn.RotaryEmbedding(32, base=base, layout="bhtd").to(device)
    for a, b in zip(ours(q, k, ids), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-3 if dtype == torch.float32 else 4e-2)
    assert_same(ours(q, k, ids[0]), ours(q, k, ids[:1].expand(2, 40)))


def test_rotary_embedding_variants(device):
    ids = torch.arange(7, device=device)
    q, k = (torch.randn(2, 7, h, 32, device=device) for h in (4, 1))
    for options in ({}, {"rotary_dim": 16}, {"interleaved": True}, {"rotary_dim": 8, "interleaved": True}):
        module = nn.RotaryEmbedding(32, **options).to(device)
        turned, _ = module(q, k, ids)
        assert_same(turned[:, 0], q[:, 0])  # position 0 is not rotated
        rotary_dim = options.get("rotary_dim", 32)
        torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
        assert_same(turned[..., rotary_dim:], q[..., rotary_dim:])
        # Attention depends only on the distance of two positions.
        later, later_k = module(q, k, ids + 3)
        scores, later_scores = ((a * b).sum(-1) for a, b in ((turned, module(q, k, ids)[1]), (later, later_k)))
        torch.testing.assert_close(scores, later_scores, rtol=1e-4, atol=1e-4)
        bhtd = nn.RotaryEmbedding(32, layout="bhtd", **options).to(device)
        assert_same(bhtd(q.transpose(1, 2), k.transpose(1, 2), ids)[0].transpose(1, 2), turned)
    with pytest.raises(ValueError, match=r"RotaryEmbedding: rotary_dim must be even, .* got 7"):
        nn.RotaryEmbedding(32, rotary_dim=7)
    with pytest.raises(RuntimeError, match=r"RotaryEmbedding: q must have heads of 16, got shape \[2, 7, 4, 32\]"):
        nn.RotaryEmbedding(16).to(device)(q, k, ids)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_gated_mlp_takes_the_place_of_the_one_in_transformers(device, activation):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = modeling.LlamaConfig(hidden_size=24, intermediate_size=56, num_attention_heads=2, hidden_act=activation)
    theirs = modeling.LlamaMLP(config).to(device)
    ours = copy_of(nn.GatedMLP(24, 56, activation), theirs)
    x = torch.randn(3, 5, 24, device=device)
    y, grad_x, grad_gate, grad_up, grad_down = forward_and_gradients(theirs, x)
    assert_close(forward_and_gradients(ours, x), (y, grad_x, torch.cat((grad_gate, grad_up)), grad_down))


def test_gated_mlp_with_bias():
    assert {name for name, _ in nn.GatedMLP(8, 16, bias=True, dtype=torch.bfloat16).named_parameters()} == {
        f"{projection}_proj.{kind}" for projection in ("gate_up", "down") for kind in ("weight", "bias")
    }
    with pytest.raises(ValueError, match=r"GatedMLP: activation must be one of silu, .* got 'relu6'"):
        nn.GatedMLP(8, 16, "relu6")


def test_activations(device):
    gate, up = torch.randn(2, 5, 32, device=device)
    packed = torch.cat((gate, up), -1)
    for module, expected in (
        (nn.SwiGLU(), F.silu(gate) * up),
        (nn.GEGLU(), F.gelu(gate) * up),
        (nn.GEGLU("tanh"), F.gelu(gate, approximate="tanh") * up),
    ):
        torch.testing.assert_close(module(gate, up), expected)
        assert_same(module(packed), module(gate, up))


def test_activations_with_biases(device):
    gate, up = torch.randn(2, 5, 32, device=device)
    packed = torch.cat((gate, up), -1)
    for module, act in (
        (nn.BiasSwiGLU(32), F.silu),
        (nn.BiasGEGLU(32), F.gelu),
        (nn.BiasGEGLU(32, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    ):
        module = module.to(device)
        assert not module.bias.any()
        torch_nn.init.normal_(module.bias)
        of_gate, of_up = module.bias.chunk(2)
        expected = act(gate + of_gate) * (up + of_up)
        torch.testing.assert_close(module(packed), expected)
        assert_same(module(packed), module(gate, up))
        grads = [torch.autograd.grad(y.square().sum(), module.bias)[0] for y in (expected, module(packed))]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_add_rms_norm(device):
    module = nn.AddRMSNorm(32, 1e-5).to(device)
    torch_nn.init.normal_(module.weight)
    x, residual = scaled_rows(2, 5, 32, device=device)
    assert_same(module(x, residual), llmkernels.add_rms_norm(x, residual, module.weight, 1e-5))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}], ids=str)
@pytest.mark.parametrize("shape", [48, (48,), (4, 12)], ids=str)
def test_layer_norm_takes_the_place_of_torchs(device, shape, options):
    theirs = torch_nn.LayerNorm(shape, **options).to(device)
    for parameter in theirs.parameters():
        torch_nn.init.normal_(parameter)
    ours = nn.LayerNorm(shape, **options).to(device)
    ours.load_state_dict(theirs.state_dict())
    x, residual = scaled_rows(2, 3, 5, 48, device=device).unflatten(-1, shape if shape == (4, 12) else (48,))
    assert_close(forward_and_gradients(ours, x), forward_and_gradients(theirs, x))
    both = nn.AddLayerNorm(shape, **options).to(device)
    both.load_state_dict(theirs.state_dict())
    y, total = both(x, residual)
    torch.testing.assert_close(y, theirs(x + residual), rtol=1e-4, atol=1e-5)
    assert_same(total, x + residual)
    with pytest.raises(RuntimeError, match=r"LayerNorm: input must have shape \[\.\.\., (4, 12|48)\], got \[3, 7\]"):
        ours(torch.ones(3, 7, device=device))


LOSS_OPTIONS = [{}, {"reduction": "none"}, {"ignore_index": 3, "label_smoothing": 0.1, "reduction": "sum"}]


@pytest.mark.parametrize("options", LOSS_OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 7, 3), (2, 7, 3, 4)], ids=str)
def test_cross_entropy_loss_takes_the_place_of_torchs(device, shape, weighted, options):
    weight = torch.rand(7, device=device) if weighted else None
    theirs, ours = torch_nn.CrossEntropyLoss(weight, **options), nn.CrossEntropyLoss(weight, **options)
    ours.load_state_dict(theirs.state_dict())
    logits = torch.randn(shape, device=device)
    target = torch.randint(7, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    found, expected = (module(leaf, target) for module, leaf in zip((ours, theirs), leaves, strict=True))
    torch.testing.assert_close(found, expected)
    found.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(*(leaf.grad for leaf in leaves))
    likely = logits.softmax(0 if len(shape) == 1 else 1)
    if "ignore_index" not in options:  # torch refuses it
        assert_same(ours(logits, likely), theirs(logits, likely))
    with pytest.raises(RuntimeError, match="CrossEntropyLoss: target must be classes for lse_square_scale and softcap"):
        nn.CrossEntropyLoss(softcap=5.0)(logits, likely)


def test_cross_entropy_loss_hands_on_its_options(device):
    logits, target = torch.randn(5, 7, device=device), torch.randint(7, (5,), device=device)
    options = {"lse_square_scale": 0.1, "softcap": 5.0, "gradient_in_forward": False, "inplace_backward": False}
    assert_same(nn.CrossEntropyLoss(**options)(logits, target), llmkernels.cross_entropy(logits, target, **options))
    leaf = logits.clone().requires_grad_()
    given = leaf * 1
    nn.CrossEntropyLoss(inplace_backward=True)(given, target).backward()
    assert_same(given.detach(), leaf.grad)


@pytest.mark.parametrize("options", LOSS_OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_loss(device, bias, options):
    module = nn.LinearCrossEntropyLoss(8, 11, bias=bias, max_logits_bytes=100, device=device, **options)
    x, target = torch.randn(2, 3, 8, device=device), torch.randint(11, (2, 3), device=device)

    def composed(x):
        logits = module.linear(x).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), **options)

    def scalar(loss):
        return loss.sum(), *torch.autograd.grad(loss.square().sum(), list(module.parameters()))

    assert_close(scalar(module(x, target)), scalar(composed(x)))
    weighted = nn.LinearCrossEntropyLoss(8, 11, bias=bias, weight=torch.rand(11), softcap=5.0).to(device)
    linear, capped = weighted.linear, {"weight": weighted.weight, "softcap": 5.0}
    expected = llmkernels.linear_cross_entropy(x, linear.weight, target, linear_bias=linear.bias, **capped)
    assert_same(weighted(x, target), expected)


def test_linear_cross_entropy_loss_has_the_state_of_torchs(device):
    if not hasattr(torch_nn, "LinearCrossEntropyLoss"):
        pytest.skip("this torch has none")
    theirs = torch_nn.LinearCrossEntropyLoss(8, 11, bias=True, weight=torch.rand(11), device=device).to(device)
    ours = nn.LinearCrossEntropyLoss(8, 11, bias=True, weight=torch.rand(11), device=device).to(device)
    ours.load_state_dict(theirs.state_dict())
    x, target = torch.randn(5, 8, device=device), torch.randint(11, (5,), device=device)
    torch.testing.assert_close(ours(x, target), theirs(x, target))


@pytest.mark.parametrize("change", ["pruned", "weight_norm", "hook", "adapter"])
def test_a_head_that_is_more_than_its_weight(device, change):
    """These were left out: a pruned weight stayed as it was in the first step, and an adapter did nothing."""

    class Adapted(torch_nn.Linear):
        def forward(self, x):
            return super().forward(x) + x[..., :1]

    def changed(linear):
        torch.manual_seed(0)
        if change == "pruned":
            return prune.random_unstructured(linear, "weight", 0.5)
        if change == "weight_norm":
            return parametrizations.weight_norm(linear)
        if change == "hook":
            linear.register_forward_hook(lambda module, args, output: output * 2)
            return linear
        return copy_of(Adapted(8, 11), linear)

    module = nn.LinearCrossEntropyLoss(8, 11, bias=True, softcap=5.0, max_logits_bytes=100, device=device)
    expected = copy.deepcopy(module)
    module.linear, theirs = changed(module.linear), changed(expected.linear)
    x, target = torch.randn(3, 8, device=device), torch.randint(11, (3,), device=device)
    for _step in range(2):
        losses = module(x, target), F.cross_entropy(5 * torch.tanh(theirs(x) / 5), target)
        torch.testing.assert_close(*losses)
        for loss, linear in zip(losses, (module.linear, theirs), strict=True):
            loss.backward()
            torch.optim.SGD(linear.parameters(), lr=0.1).step()


def test_a_tied_head(device):
    """The embedding's gradient is the sum of both uses."""
    embedding, loss = torch_nn.Embedding(11, 8, device=device), nn.LinearCrossEntropyLoss(8, 11)
    loss.linear.weight = embedding.weight
    ids = torch.randint(11, (2, 4), device=device)
    loss(embedding(ids), ids).backward()
    (expected,) = torch.autograd.grad(
        F.cross_entropy((embedding(ids) @ embedding.weight.t()).flatten(0, 1), ids.flatten()), embedding.weight
    )
    torch.testing.assert_close(embedding.weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (5, -1), "softcap": 20.0}], ids=str)
def test_attention(device, dtype, options):
    """The functions, with a sink that is learned, and with slopes."""
    q, k, v = (torch.randn(2, 9, heads, 32, device=device, dtype=dtype) for heads in (4, 2, 2))
    begin, end = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3), (9, 7)))
    plain, sunk = nn.Attention(**options), nn.Attention(**options, num_sinks=4).to(device)
    assert not [*plain.parameters()]
    torch.nn.init.normal_(sunk.sinks)
    sinks = sunk.sinks.to(dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], device=device)
    sloping = nn.Attention(**options, alibi_slopes=slopes).to(device, dtype)
    assert not sloping.state_dict() and sloping.alibi_slopes.tolist() == slopes.tolist()
    mask = torch.rand(2, 1, 9, 9, device=device) < 0.7
    for module, of_heads in ((plain, {}), (sunk, {"sinks": sinks}), (sloping, {"alibi_slopes": slopes})):
        expected = llmkernels.attention(q, k, v, attn_mask=mask, **options, **of_heads)
        assert torch.equal(module(q, k, v, attn_mask=mask), expected)
        expected = llmkernels.attention(q, k, v, k_begin=begin, k_end=end, **options, **of_heads)
        assert torch.equal(module(q, k, v, k_begin=begin, k_end=end), expected)
        lengths = torch.tensor([0, 4, 18], dtype=torch.int32, device=device)
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        expected = llmkernels.attention_varlen(*rows, lengths, **options, **of_heads)
        assert torch.equal(module(*rows, cu_seqlens_q=lengths), expected)
        assert torch.equal(module(*rows, cu_seqlens_q=lengths, cu_seqlens_k=lengths), expected)
    sunk(q, k, v).float().sum().backward()
    assert sunk.sinks.grad.any() and sunk.sinks.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"Attention: cu_seqlens_k must be given with cu_seqlens_q"):
        plain(q, k, v, cu_seqlens_k=lengths)
    for name, value in {"k_begin": begin, "k_end": end, "attn_mask": mask}.items():
        with pytest.raises(
            RuntimeError, match=r"Attention: k_begin, k_end and attn_mask must not be given with cu_seq"
        ):
            plain(q, k, v, cu_seqlens_q=lengths, **{name: value})


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.AddRMSNorm])
def test_a_new_norm_only_normalizes(kind):
    x = scaled_rows(5, 32)
    inputs = (x,) if kind is nn.RMSNorm else (x, torch.zeros_like(x))
    for options in ({}, {"weight_offset": 1.0}):
        y = kind(32, **options)(*inputs)
        torch.testing.assert_close(y if kind is nn.RMSNorm else y[0], F.rms_norm(x, (32,), eps=1e-6))


@pytest.mark.parametrize(
    "module",
    [
        nn.RMSNorm(16),
        nn.AddRMSNorm(16, 1e-5),
        nn.LayerNorm((4, 16)),
        nn.AddLayerNorm(16),
        nn.GatedMLP(16, 32),
        nn.RotaryEmbedding(16),
        nn.Attention(causal=True, window_size=(8, -1), num_sinks=4),
        nn.Attention(alibi_slopes=torch.tensor([0.5, 0.25])),
        nn.GEGLU(),
        nn.CrossEntropyLoss(torch.ones(16)),
        nn.LinearCrossEntropyLoss(16, 32, bias=True),
        nn.BiasGEGLU(16, "tanh"),
    ],
    ids=repr,
)
def test_modules_can_be_saved_and_printed(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert repr(loaded) == repr(module)
    assert loaded.state_dict().keys() == module.state_dict().keys()
    assert "inv_freq" not in module.state_dict()  # as in transformers: computed, not stored


def test_modules_on_meta_and_in_other_dtypes():
    assert nn.RMSNorm(16, device="meta").weight.is_meta
    assert nn.GatedMLP(16, 32, device="meta", dtype=torch.bfloat16).gate_up_proj.weight.dtype == torch.bfloat16
    assert nn.RMSNorm(16, dtype=torch.float16).weight.dtype == torch.float16
    assert nn.RMSNorm(16).half()(torch.ones(2, 16).half()).dtype == torch.float16


def test_modules_from_meta_get_their_values_by_reset_parameters(device):
    for make in (
        lambda device: nn.RMSNorm(16, weight_offset=1.0, device=device),
        lambda device: nn.BiasSwiGLU(16, device=device),
        lambda device: nn.RotaryEmbedding(16, rotary_dim=8, base=500.0, device=device),
        lambda device: nn.Attention(num_sinks=2, alibi_slopes=torch.tensor([0.5, 0.25]), device=device),
    ):
        module = make("meta").to_empty(device=device)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.detach().fill_(7.0)
        module.reset_parameters()
        expected = make(device)
        assert_same((*module.parameters(), *module.buffers()), (*expected.parameters(), *expected.buffers()))


def test_a_rotation_on_meta():
    module, q = nn.RotaryEmbedding(16), torch.randn(2, 3, 4, 16, dtype=torch.bfloat16)
    found = module.to("meta")(q.to("meta"), q.to("meta"), torch.arange(3, device="meta"))
    assert all(t.is_meta and (t.shape, t.dtype) == (q.shape, q.dtype) for t in found)


def test_slopes_on_meta_are_printed():
    assert "alibi_slopes=tensor(" in repr(nn.Attention(alibi_slopes=torch.tensor([0.5, 0.25]), device="meta"))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_linear_behind_a_norm_without_rows(device):
    module = nn.RMSNormLinear(16, 0, device=device)
    assert module(torch.ones(2, 16, device=device)).shape == (2, 0) and module.norm_weight.shape == (16,)


def test_casts_leave_frequencies_and_slopes_in_float32(device):
    ids = torch.arange(5000, 5007, device=device)
    q, k = (torch.randn(1, 7, h, 32, device=device) for h in (2, 1))
    rotary, slopes = nn.RotaryEmbedding(32).to(device), torch.tensor([0.3, 0.7], device=device)
    expected = rotary(q, k, ids)
    assert_same(copy.deepcopy(rotary).to(torch.bfloat16)(q, k, ids), expected)
    attention = nn.Attention(num_sinks=2, alibi_slopes=slopes).to(device)
    expected = attention(q, k, k)
    attention.to(torch.bfloat16).to(device)
    assert attention.sinks.dtype == torch.bfloat16
    assert_same(attention(q, k, k), expected)
    assert rotary.to("meta").half().inv_freq.is_meta


def test_training_lowers_the_loss(device):
    """A small network of all modules, each parameter with a gradient, learns."""

    class Network(torch_nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.RMSNorm(32), nn.AddRMSNorm(32)
            self.qk, self.rotary = torch_nn.Linear(32, 48), nn.RotaryEmbedding(16)
            self.attention = nn.Attention(causal=True, num_sinks=2)
            self.mlp = nn.GatedMLP(32, 64)

        def forward(self, x):
            q, k = self.qk(self.first(x)).view(2, 6, 3, 16).split((2, 1), 2)
            q, k = self.rotary(q, k, torch.arange(6, device=x.device))
            y, total = self.second(self.attention(q, k, k).flatten(2), x)
            return total + self.mlp(y)

    network = Network().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    x, target = torch.randn(2, 2, 6, 32, device=device)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in network.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_modules_of_torch_take_its_names():
    """What derives from a module of PyTorch takes what is passed by the names that this one has."""
    x, target = torch.randn(3, 8), torch.tensor([1, 2, 3])
    options = ((None, None, 2), {"size_average": False}, {"reduce": False}, {"reduction": "sum"}, {})
    for option in options:
        args, named = (option, {}) if isinstance(option, tuple) else ((), option)
        with pytest.warns() if set(named) & {"size_average", "reduce"} else contextlib.nullcontext():
            ours, theirs = (kind(*args, **named) for kind in (nn.CrossEntropyLoss, torch_nn.CrossEntropyLoss))
        assert_close([ours(input=x, target=target)], [theirs(input=x, target=target)])
    assert_close([nn.LayerNorm(8)(input=x)], [torch_nn.LayerNorm(8)(input=x)])
    assert nn.RMSNormLinear(8, 4)(input=x).shape == (3, 4)


class Scaled(torch.Tensor):
    """A weight with a linear layer of its own, as those of torchao."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        if function is F.linear:
            return F.linear(plain[0], 2 * plain[1], *plain[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def test_linear_layers_that_have_to_be_called():
    """Those with a weight of a class of its own, and with hooks on all modules."""
    x, target = torch.randn(3, 8), torch.tensor([1, 2, 3])
    mlp, loss = nn.GatedMLP(8, 6), nn.LinearCrossEntropyLoss(8, 5)
    seen = []
    with torch_nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module))):
        mlp(x), loss(x, target)
    assert seen == [torch_nn.Linear] * 2 + [nn.GatedMLP, torch_nn.Linear, nn.LinearCrossEntropyLoss]
    for module, inputs in ((mlp.down_proj, (mlp, x)), (loss.linear, (loss, x, target))):
        doubled = copy.deepcopy(inputs[0])
        of_doubled = next(
            m for m in doubled.modules() if m.__class__ is torch_nn.Linear and m.weight.shape == module.weight.shape
        )
        with torch.no_grad():
            of_doubled.weight.mul_(2)
        module.weight = torch_nn.Parameter(module.weight.detach().as_subclass(Scaled), requires_grad=False)
        assert type(module.weight) is Scaled
        call, *args = inputs
        assert_close([call(*args)], [doubled(*args)])
