"""gated_mlp and nn.GatedMLP: accuracy at both sides of every route, rounding, gradients, what the backward saves and
overwrites, modules, errors. The packed activations are in test_bias_act.py."""

from functools import partial

import pytest
import torch
from torch import nn as torch_nn
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import llmkernels
import oracles
from linear_cases import Sizes, every_dtype, every_m, every_narrow_dtype
from llmkernels import gated_mlp, nn
from oracles import LAYOUTS, assert_accurate, assert_same, differentiate, in_double, laid_out

_op = torch.ops.llmkernels
ACTIVATIONS = tuple(oracles.ACTIVATIONS)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_bias = pytest.mark.parametrize("biased", [False, True], ids=["no_bias", "bias"])


def make(m, k, f, n, dtype=torch.float32, device="cpu", biased=False):
    """Gates from the flat part of the activation to its linear part."""
    x = torch.randn(m, k, device=device).mul_(2).to(dtype)
    weights = [torch.randn(*shape, device=device).mul_(shape[1] ** -0.5).to(dtype) for shape in ((2 * f, k), (n, f))]
    biases = [torch.randn(size, device=device).to(dtype) for size in (2 * f, n)] if biased else []
    return x, *weights, *biases


class Magnitudes(Sizes):
    """Sizes of sums, and activations of a size no smaller than that of their arguments."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.silu, F.gelu):
            return args[0].abs()
        return super().__torch_function__(function, types, args, kwargs)


def compare(inputs, **options):
    """Outputs and gradients are as accurate as eager's, whose errors are of the size of what the sums add up."""

    def eager(x, *weights):  # PyTorch's own linear refuses a row of any stride if it has a bias
        return oracles.gated_mlp(x.clone(memory_format=torch.contiguous_format), *weights, **options)

    grad_y = [torch.randn_like(eager(*inputs))]
    results = [differentiate(partial(gated_mlp, **options), inputs, grad_y), differentiate(eager, inputs, grad_y)]
    exact = differentiate(eager, in_double(inputs), in_double(grad_y))
    with torch.no_grad():
        y = gated_mlp(*inputs, **options)
    with Magnitudes():
        size = eager(*(t.double().abs() for t in inputs))
    assert_accurate(y, results[1][0], exact[0], size.amax(-1, keepdim=True))
    for i, (ours, rounded, true) in enumerate(zip(*results, exact, strict=True)):
        scale = size.amax(-1, keepdim=True) if i == 0 else true.abs().max() if true.numel() else None
        assert_accurate(ours, rounded, true, scale, f"result {i}")


SHAPES = [("cpu", m, k, f, n) for m in (0, 1, 7, 65) for k, f, n in ((8, 5, 3), (72, 40, 130))]
SHAPES += [
    ("cuda", m, k, f, n)
    for m in (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65, 255, 2048)
    for k, f, n in ((8, 5, 3), (72, 40, 130), (896, 4864, 896), (3584, 1896, 3584), (264, 127, 7))
    if "cuda" in oracles.DEVICES
]


@every_dtype
@every_activation
@every_bias
@pytest.mark.parametrize("device, m, k, f, n", SHAPES)
def test_forward_and_backward(device, m, k, f, n, biased, activation, dtype):
    compare(make(m, k, f, n, dtype, device, biased), activation=activation)


@every_activation
@every_bias
@every_m
def test_with_and_without_a_gradient(device, m, biased, activation):
    """The routes differ for few tokens on a GPU, and so do roundings of a sum, but no more."""
    inputs = make(m, 72, 40, 130, torch.bfloat16, device, biased)
    plain = gated_mlp(*inputs, activation=activation)
    recorded = gated_mlp(*(t.requires_grad_() for t in inputs), activation=activation)
    assert recorded.requires_grad and not plain.requires_grad
    rtol, atol = (0, 0) if device == "cpu" else (0.02, 0.1)
    torch.testing.assert_close(plain, recorded, rtol=rtol, atol=atol)


@every_activation
@every_narrow_dtype
@pytest.mark.parametrize("m", [16, 80])
def test_rounds_where_eager_rounds(device, m, activation, dtype):
    """Small multiples of 1/8: g and u are exact, so only the roundings of act(g) and of the product count."""
    x = torch.randint(-4, 5, (m, 64), device=device).to(dtype) / 8
    weight = torch.randint(-1, 2, (128, 64), device=device).to(dtype)
    down = torch.eye(64, device=device, dtype=dtype)
    for biases in ((), (torch.ones(128, device=device, dtype=dtype), None)):
        y = gated_mlp(x, weight, down, *biases, activation=activation)
        expected = oracles.gated_mlp(x, weight, down, *biases, activation=activation)
        gate, up = F.linear(x, weight, biases[0] if biases else None).float().chunk(2, -1)
        size = expected.abs() + 1e-3 * (gate * up).abs()
        assert ((y - expected).abs() <= 2 * torch.finfo(dtype).eps * size).all()
        assert (y == expected)[gate >= 0].double().mean() > 0.98  # below, gelu cancels
        once = oracles.gated_mlp(*(t if t is None else t.float() for t in (x, weight, down, *biases)),
                                 activation=activation).to(dtype)  # fmt: skip
        is_exact = activation == "relu" or (activation == "relu2" and dtype == torch.float16)  # which holds the squares
        assert is_exact or (once != expected).double().mean() > 0.02, "this test can't tell one rounding from two"


@every_activation
@every_bias
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, biased, activation):
    for m in (9, 70):
        inputs = list(make(m, 64, 40, 24, torch.bfloat16, device, biased))
        inputs[0] = laid_out(inputs[0], layout)
        compare(inputs, activation=activation)
        if device == "cpu":  # on a GPU unaligned rows take another route
            plain = [t.contiguous() for t in inputs]
            assert_same(gated_mlp(*inputs, activation=activation), gated_mlp(*plain, activation=activation))


@pytest.mark.parametrize("layout", ["row_strided", "row_strided_aligned", "transposed", "offset", "every_other"])
def test_layouts_of_weights(device, layout):
    for m in (3, 70):
        x, *others = make(m, 64, 40, 24, torch.float32, device, biased=True)
        strided = [laid_out(t, layout) if t.dim() == 2 else laid_out(t[None], "every_other")[0] for t in others]
        torch.testing.assert_close(gated_mlp(x, *strided), gated_mlp(x, *others), rtol=1e-4, atol=1e-4)
        compare((x, *strided))


@every_bias
@pytest.mark.parametrize("shape", [(16,), (2, 3, 16), (2, 0, 16), (2, 1, 2, 1, 16)], ids=str)
def test_any_leading_shape(device, shape, biased):
    _, *others = make(1, 16, 8, 5, device=device, biased=biased)
    leaves = [t.requires_grad_() for t in (torch.randn(shape, device=device), *others)]
    y, expected = gated_mlp(*leaves), oracles.gated_mlp(*leaves)
    assert y.shape == (*shape[:-1], 5)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    grad_y = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(t, leaves, grad_y) for t in (y, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_bias
@pytest.mark.parametrize("m, k, f, n", [(0, 8, 4, 3), (3, 8, 0, 5), (3, 8, 4, 0), (0, 0, 0, 0), (3, 0, 4, 5)])
def test_empty_sizes(device, m, k, f, n, biased):
    inputs = [torch.randn(shape, device=device) for shape in ((m, k), (2 * f, k), (n, f))]
    inputs += [torch.randn(size, device=device) for size in (2 * f, n)] if biased else []
    grad_y = [torch.randn(m, n, device=device)]
    torch.testing.assert_close(gated_mlp(*inputs), oracles.gated_mlp(*inputs))
    for a, b in zip(*(differentiate(f, inputs, grad_y) for f in (gated_mlp, oracles.gated_mlp)), strict=True):
        torch.testing.assert_close(a, b)


@every_activation
@every_bias
def test_gradcheck(activation, biased):
    inputs = [t.requires_grad_() for t in make(3, 6, 5, 4, torch.float64, biased=biased)]
    assert gradcheck(partial(gated_mlp, activation=activation), inputs)


# What needs a gradient, and what the backward saves, computes and overwrites.


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("llmkernels::"))
        return function(*args, **(kwargs or {}))


@every_activation
@pytest.mark.parametrize("wanted", [(i,) for i in range(5)] + [(0, 3), (1, 2), (2, 4), (0, 1, 2, 3, 4)], ids=str)
def test_what_is_frozen_gets_no_gradient(device, wanted, activation):
    inputs = make(6, 16, 8, 5, device=device, biased=True)
    grad_y = torch.randn(6, 5, device=device)
    _, *expected = differentiate(partial(oracles.gated_mlp, activation=activation), inputs, [grad_y])
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    y = gated_mlp(*leaves, activation=activation)
    with Calls() as calls:
        grads = torch.autograd.grad(y, [leaves[i] for i in wanted], grad_y)
    for i, grad in zip(wanted, grads, strict=True):
        torch.testing.assert_close(grad, expected[i], rtol=1e-4, atol=1e-4)
    through = {0, 1, 3} & set(wanted)
    assert calls.names.count("aten::mm") == bool(through) + len({0, 1, 2} & set(wanted))
    assert sum("packed" in name for name in calls.names) == bool({0, 1, 2, 3} & set(wanted))


def saved_sizes(call) -> list:
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        call()
    return sizes


def test_saves_x_and_gate_up_only(device):
    leaves = [t.requires_grad_() for t in make(33, 16, 8, 5, device=device, biased=True)]
    assert sorted(saved_sizes(lambda: gated_mlp(*leaves))) == sorted([(33, 16), (33, 16), (16, 16), (5, 8)])


@every_activation
def test_overwrites_what_it_saved_only_in_the_last_backward(device, activation):
    leaves = [t.requires_grad_() for t in make(9, 16, 8, 5, device=device, biased=True)]
    y = gated_mlp(*leaves, activation=activation)
    grad_y = torch.randn_like(y)
    with Calls() as kept:
        first = [torch.autograd.grad(y, leaves, grad_y, retain_graph=True) for _ in range(2)]
    with Calls() as last:
        first.append(torch.autograd.grad(y, leaves, grad_y))
    assert kept.names.count("glu_packed_forward_backward") == 2 and "glu_packed_forward_backward_" not in kept.names
    assert "glu_packed_forward_backward_" in last.names and "glu_packed_forward_backward" not in last.names
    for grads in first[1:]:
        assert_same(grads, first[0])
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, leaves, grad_y)


def test_a_backward_that_fails_cannot_be_repeated(device):
    leaves = [t.requires_grad_() for t in make(9, 16, 8, 5, device=device)]
    y = gated_mlp(*leaves)

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if failing and function._schema.name == "aten::mm" and "glu_packed_forward_backward_" in calls.names:
                raise torch.OutOfMemoryError("full")
            return function(*args, **(kwargs or {}))

    failing = True
    with Full(), Calls() as calls, pytest.raises(torch.OutOfMemoryError):
        y.sum().backward()
    failing = False
    with pytest.raises(RuntimeError, match="gated_mlp: a backward that has failed"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, reentrant):
    leaves = [t.requires_grad_() for t in make(9, 16, 8, 5, device=device)]
    expected = torch.autograd.grad(gated_mlp(*leaves).square().sum(), leaves)
    checkpoint(gated_mlp, *leaves, use_reentrant=reentrant).square().sum().backward()
    assert_same(tuple(t.grad for t in leaves), expected)


def test_saved_tensors_on_the_host(device):
    leaves = [t.requires_grad_() for t in make(9, 16, 8, 5, device=device)]
    expected = torch.autograd.grad(gated_mlp(*leaves).square().sum(), leaves)
    with torch.autograd.graph.save_on_cpu():
        y = gated_mlp(*leaves)
    assert_same(torch.autograd.grad(y.square().sum(), leaves), expected)


@every_activation
@every_bias
def test_the_op_without_a_saved_gate_up_computes_it_again(device, activation, biased):
    """Whoever calls the op itself, or a compiler that cannot know what needs a gradient."""
    leaves = [t.requires_grad_() for t in make(9, 16, 8, 5, device=device, biased=biased)]
    expected = torch.autograd.grad(gated_mlp(*leaves, activation=activation).square().sum(), leaves)
    tensors = (*leaves, *[None] * (5 - len(leaves)))
    for is_saved in (False, True):
        y, gate_up = _op.gated_mlp(*tensors, activation, is_saved)
        assert gate_up.shape == (9, 16 * is_saved) and not gate_up.requires_grad
        before = gate_up.clone()
        grads = torch.autograd.grad(y.square().sum(), leaves)
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert_same(gate_up, before)  # it is the caller's


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_inside_of_autocast(device, inside):
    """Gradients have the dtypes of the forward, whichever of the two autocast is around."""
    leaves = [t.requires_grad_() for t in make(9, 16, 8, 5, device=device)]
    autocast = partial(torch.autocast, device, dtype=torch.bfloat16)
    with autocast(enabled=inside):
        y = gated_mlp(*leaves)
    assert y.dtype == (torch.bfloat16 if inside else torch.float32)
    grad_y = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, grad_y, retain_graph=True)
    with autocast():
        assert_same(torch.autograd.grad(y, leaves, grad_y), expected)
    assert all(t.dtype == torch.float32 for t in expected)


def test_activation_in_place_gives_the_bits_of_the_others(device):
    for dtype in oracles.DTYPES:
        for cols in (1, 7, 64, 600):
            grad_y, gate_up = (torch.randn(5, n, device=device).mul_(2).to(dtype) for n in (cols, 2 * cols))
            for activation in ACTIVATIONS:
                options = None, activation
                expected = (
                    _op.glu_packed(gate_up, *options),
                    _op.glu_packed_backward(grad_y, gate_up, *options, False)[0],
                )
                assert_same(_op.glu_packed_forward_backward(grad_y, gate_up, activation), expected)
                for layout in ("row_strided", "row_strided_aligned", "offset"):
                    targets = laid_out(grad_y, layout), laid_out(gate_up, layout)
                    _op.glu_packed_forward_backward_(*targets, activation)
                    assert_same(targets, expected)


@pytest.mark.gpu
@pytest.mark.sanitizer
@every_activation
@pytest.mark.parametrize("cols", [63, 64])
def test_every_kernel_path(activation, cols):
    grad_y, gate_up = (torch.randn(5, n).bfloat16().cuda() for n in (cols, 2 * cols))
    expected = _op.glu_packed_forward_backward(grad_y, gate_up, activation)
    _op.glu_packed_forward_backward_(grad_y, gate_up, activation)
    assert_same((grad_y, gate_up), expected)


@pytest.mark.gpu
@every_narrow_dtype
@pytest.mark.parametrize("m", [1, 16, 64, 65])
def test_launches(m, dtype):
    """Few tokens: one kernel up to the product, one down."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel takes fewer rows")
    inputs = make(m, 512, 1024, 512, dtype, "cuda")
    gated_mlp(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gated_mlp(*inputs)
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) <= (2 if m <= 16 else 3 if m <= 64 else 5), kernels  # cuBLAS may take two for a product
    assert any("glu_kernel" in name for name in kernels) == (m > 64), kernels


# The module.


def mlp_of(act_fn, bias=False, up_bias=None, **options):
    """As transformers' modules are."""
    module = torch_nn.Module()
    module.gate_proj = torch_nn.Linear(16, 24, bias=bias, **options)
    module.up_proj = torch_nn.Linear(16, 24, bias=bias if up_bias is None else up_bias, **options)
    module.down_proj = torch_nn.Linear(24, 16, bias=bias, **options)
    module.act_fn = act_fn
    return module


def run(mlp, x):
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))


ACT_FNS = {"silu": torch_nn.SiLU(), "gelu": torch_nn.GELU(), "gelu_pytorch_tanh": torch_nn.GELU("tanh")}


@every_bias
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name, act_fn", ACT_FNS.items(), ids=ACT_FNS)
def test_takes_over_the_weights(device, name, act_fn, copy, biased):
    theirs = mlp_of(act_fn, bias=biased, device=device).eval()
    values = {key: value.clone() for key, value in theirs.state_dict().items()}
    ours = nn.GatedMLP.from_transformers(theirs, copy=copy)
    assert ours.activation == name and not ours.training and (ours.down_proj.bias is not None) == biased
    x = torch.randn(3, 5, 16, device=device)
    torch.testing.assert_close(ours(x), run(theirs, x))
    assert_same(tuple(theirs.state_dict().values()), tuple(values.values()))
    assert (ours.down_proj.weight is theirs.down_proj.weight) != copy
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.neg_()
    found = {key: -value if not copy else value for key, value in values.items()}
    packed = torch.cat((found["gate_proj.weight"], found["up_proj.weight"]))
    assert_same(ours.gate_up_proj.weight, packed)
    assert_same(ours.down_proj.weight, found["down_proj.weight"])
    loaded = nn.GatedMLP(16, 24, name, bias=biased).to(device)
    loaded.load_state_dict(values)
    assert_same(loaded(x), nn.GatedMLP.from_transformers(mlp_loaded(theirs, values))(x))


def mlp_loaded(mlp, values):
    mlp.load_state_dict(values)
    return mlp


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "mistral"])
def test_takes_over_modules_of_transformers(device, family):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    configs = __import__(f"transformers.models.{family}.configuration_{family}", fromlist=[""])
    prefix = family.capitalize()
    config = getattr(configs, f"{prefix}Config")(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    theirs = getattr(modeling, f"{prefix}MLP")(config).to(device)
    x = torch.randn(7, 16, device=device, requires_grad=True)
    expected = theirs(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    ours = nn.GatedMLP.from_transformers(theirs, copy=True)
    y = ours(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], grad, rtol=1e-4, atol=1e-4)
    ours(x).sum().backward()
    assert all(p.grad is not None for p in ours.parameters()) and all(p.grad is None for p in theirs.parameters())


def test_keeps_what_is_frozen_and_the_dtype():
    theirs = mlp_of(torch_nn.SiLU(), dtype=torch.bfloat16)
    theirs.gate_proj.requires_grad_(False)
    theirs.up_proj.requires_grad_(False)
    ours = nn.GatedMLP.from_transformers(theirs)
    assert [(p.requires_grad, p.dtype) for p in ours.parameters()] == [(False, torch.bfloat16), (True, torch.bfloat16)]


REFUSED = {
    "gate_proj must be a torch.nn.Linear, got Identity": lambda mlp: setattr(mlp, "gate_proj", torch_nn.Identity()),
    "down_proj must be a torch.nn.Linear, got NoneType": lambda mlp: setattr(mlp, "down_proj", None),
    "act_fn must be one of SiLU.* got ReLU6": lambda mlp: setattr(mlp, "act_fn", torch_nn.ReLU6()),
    "the weight of mlp.up_proj must have the shape": lambda mlp: mlp.up_proj.half(),
    "the bias of mlp.up_proj must have the shape": lambda mlp: mlp.up_proj.register_parameter("bias", None),
    "the weight of mlp.up_proj must .* requires_grad": lambda mlp: mlp.up_proj.requires_grad_(False),
}


@pytest.mark.parametrize("message, change", REFUSED.items(), ids=range(len(REFUSED)))
def test_modules_that_are_refused(message, change):
    mlp = mlp_of(torch_nn.SiLU(), bias=True)
    change(mlp)
    with pytest.raises((TypeError, ValueError), match=rf"GatedMLP.from_transformers: .*{message}"):
        nn.GatedMLP.from_transformers(mlp)


@every_activation
def test_projections_that_are_more_than_a_linear_are_called(device, activation):
    module = nn.GatedMLP(16, 24, activation, bias=True).to(device)
    x = torch.randn(5, 16, device=device)
    expected, seen = module(x), []
    handle = module.down_proj.register_forward_hook(lambda *call: seen.append(call))
    torch.testing.assert_close(module(x), expected)
    assert len(seen) == 1
    handle.remove()

    class Doubled(torch_nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    doubled = Doubled(24, 16).to(device)
    doubled.load_state_dict(module.down_proj.state_dict())
    module.down_proj = doubled
    torch.testing.assert_close(module(x), 2 * expected)


def test_a_state_dict_inside_of_a_model(device):
    """Packed or not, by its prefix; a half is an error."""
    source = torch_nn.ModuleDict({"mlp": mlp_of(torch_nn.SiLU(), bias=True)}).to(device)
    target = torch_nn.ModuleDict({"mlp": nn.GatedMLP(16, 24, bias=True)}).to(device)
    values = source.state_dict()
    target.load_state_dict(values)
    assert "mlp.gate_proj.weight" in values  # the caller's
    x = torch.randn(5, 16, device=device)
    torch.testing.assert_close(target["mlp"](x), run(source["mlp"], x))
    again = torch_nn.ModuleDict({"mlp": nn.GatedMLP(16, 24, bias=True)}).to(device)
    again.load_state_dict(target.state_dict(), assign=True)
    assert_same(again["mlp"](x), target["mlp"](x))
    del values["mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"mlp\.gate_up_proj\.weight"):
        target.load_state_dict(values)


@every_activation
def test_the_module_compiles(device, activation):
    torch._dynamo.reset()
    module = nn.GatedMLP(16, 24, activation, bias=True).to(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 16, device=device)
    leaves = [x.requires_grad_(), *module.parameters()]
    grads = [torch.autograd.grad(f(x).square().sum(), leaves) for f in (module, compiled)]
    assert_same(grads[1], grads[0])
    with torch.no_grad():
        assert_same(compiled(x), module(x))


def test_an_exported_module_saves_nothing(device):
    module = nn.GatedMLP(16, 24).to(device)
    x = torch.randn(5, 16, device=device)
    exported = torch.export.export(module, (x,))
    (node,) = [node for node in exported.graph.nodes if "gated_mlp" in str(node.target)]
    assert node.args[6:] in ((), (False,))
    torch.testing.assert_close(exported.module()(x), module(x))


# Errors.

ERRORS = {
    "gated_mlp: x must be float32, float16, bfloat16.* got Int": lambda x, w, d, b: gated_mlp(x.int(), w, d),
    "gated_mlp: x must have at least one dimension": lambda x, w, d, b: gated_mlp(x[0, 0], w, d),
    r"gated_mlp: gate_up_weight must have shape \[2 F, 8\] .* got \[6, 7\]": lambda x, w, d, b: gated_mlp(
        x, w[:, :7], d
    ),
    r"gated_mlp: gate_up_weight must have shape \[2 F, 8\] .* got \[5, 8\]": lambda x, w, d, b: gated_mlp(x, w[:5], d),
    "gated_mlp: gate_up_weight must have the dtype of x, Float, got Half": lambda x, w, d, b: gated_mlp(x, w.half(), d),
    r"gated_mlp: down_weight must have shape \[N, 3\] .* got \[4, 2\]": lambda x, w, d, b: gated_mlp(x, w, d[:, :2]),
    r"gated_mlp: gate_up_bias must have shape \[6\] .* got \[4\]": lambda x, w, d, b: gated_mlp(x, w, d, b[:4]),
    r"gated_mlp: down_bias must have shape \[4\] .* got \[6\]": lambda x, w, d, b: gated_mlp(x, w, d, b, b),
    "gated_mlp: activation must be 'silu'.* got 'relu6'": lambda x, w, d, b: gated_mlp(x, w, d, activation="relu6"),
    r"glu_packed_forward_backward: grad_y must have shape \[2, 4\], got \[2, 3\]": lambda x, w, d, b: (
        _op.glu_packed_forward_backward(x[:, :3], x, "silu")
    ),
    "glu_packed_forward_backward_: grad_y must have contiguous columns": lambda x, w, d, b: (
        _op.glu_packed_forward_backward_(torch.ones(2, 8, device=x.device)[:, ::2], x, "silu")
    ),
}


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    shapes = ((2, 8), (6, 8), (4, 3), (6,))
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(*(torch.ones(shape, device=device) for shape in shapes))


def test_public_name():
    assert "gated_mlp" in llmkernels.__all__ and "GatedMLP" in nn.__all__


@pytest.mark.parametrize("gate, up", [((8, 8), (16, 8)), ((12, 9), (12, 8)), ((13, 8), (13, 8))], ids=str)
def test_state_dicts_of_other_shapes(gate, up):
    """They are told as any other module's, with the rest, and nothing of them is loaded."""
    module = nn.GatedMLP(8, 12)
    before = module.gate_up_proj.weight.detach().clone()
    weights = {"gate_proj.weight": torch.zeros(gate), "up_proj.weight": torch.zeros(up)}
    with pytest.raises(RuntimeError, match=r"size mismatch for gate_(proj|up_proj)\.weight"):
        module.load_state_dict(weights | {"down_proj.weight": torch.ones(8, 12)})
    assert_same(module.gate_up_proj.weight, before)
