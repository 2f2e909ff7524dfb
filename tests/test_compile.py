"""The ops within PyTorch: registration, torch.compile, torch.export, autocast."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

import llmkernels
from cases import every_case
from oracles import DEVICES, angles, assert_same, scaled_rows, tensors
from registry import DIFFERENTIABLE, overload, small_calls


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


every_dynamic = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


# Registration: schema, fake, autograd and dynamic shapes of every op, as opcheck tests them. The calls here add other
# layouts and options to those of registry.py.


def norm_calls(device):
    x, weight = scaled_rows(3, 4, 16, device=device), torch.randn(16, device=device)
    strided = scaled_rows(3, 4, 32, device=device)[..., :16]
    yield "rms_norm", (x,)
    yield "rms_norm", (strided.transpose(0, 1), weight, 1e-5, 1.0, False)
    yield "rms_norm", (x[:0], weight)
    yield "add_rms_norm", (x, strided)
    yield "add_rms_norm", (x, strided, weight, 1e-5, 1.0, False)


def layer_norm_calls(device):
    x, parameters = scaled_rows(3, 4, 16, device=device), torch.randn(2, 16, device=device)
    strided = scaled_rows(3, 4, 32, device=device)[..., :16]
    yield "layer_norm", (x,)
    yield "layer_norm", (strided.transpose(0, 1), *parameters)
    yield "layer_norm", (x, None, parameters[0], 1e-3)
    yield "layer_norm", (x[:0], *parameters)
    yield "add_layer_norm", (x, strided)
    yield "add_layer_norm", (x, strided, *parameters)


def norm_backward_calls(device):
    x, weight = scaled_rows(3, 4, 16, device=device), torch.randn(16, device=device)
    for given_weight, grad_sum, wanted in ((weight, x, (True, True)), (weight, None, (False, True)),
                                           (None, x, (True, False)), (None, None, (False, False))):  # fmt: skip
        yield "layer_norm_backward", (x, x, given_weight, grad_sum, 1e-5, *wanted)
    for given_weight in (weight, None):
        for grad_sum in (x, None):
            for needs_grad_weight in (True, False):
                yield "rms_norm_backward", (x, x, given_weight, grad_sum, 1e-6, 0.0, True, needs_grad_weight)


def rope_arguments(device):
    q, k = torch.randn(2, 4, 5, 16, device=device), torch.randn(2, 5, 1, 16, device=device).transpose(1, 2)
    ids = torch.arange(10, device=device).view(2, 5)
    yield q, k, *angles(5, 16, device=device), None, True, False, None
    yield q, k, *angles(2, 5, 4, device=device), None, True, True, 8
    yield q, k, *angles(10, 16, device=device), ids, True, False, None
    yield q.transpose(1, 2), k.transpose(1, 2), *angles(5, 16, device=device), ids[0].int(), False, False, None
    yield q, k.transpose(2, 3).contiguous().transpose(2, 3), *angles(5, 16, device=device), None, True, False, None


def rms_norm_rope_calls(device):
    """The op, and below the backward, each with a layout of its own."""
    for q, k, cos, sin, ids, *options in rope_arguments(device):
        heads_axis = 1 if options[0] else 2
        for row_wise in (False, True):
            sizes = [x.size(3) * (x.size(heads_axis) if row_wise else 1) for x in (q, k)]
            weights = [torch.randn(size, device=device) for size in sizes]
            yield "rms_norm_rope", (q, k, *weights, cos, sin, ids, 1e-6, 1.0, False, row_wise, *options)


def rms_norm_rope_other_calls(device):
    for index, (_, (q, k, q_weight, k_weight, *options)) in enumerate(rms_norm_rope_calls(device)):
        if k.stride(-1) == 1:
            yield "rms_norm_rope_", (q, k, q_weight, k_weight, *options)
        weights = (None, k_weight) if index % 3 == 0 else (q_weight, k_weight)
        grads = (torch.randn_like(q), torch.randn_like(k))
        yield "rms_norm_rope_backward", (*grads, q, k, *weights, *options, True, index % 2 == 0)


def bias_act_calls(device):
    gate, up = torch.randn(2, 3, 4, 16, device=device)
    biases = torch.randn(2, 16, device=device)
    yield "bias_act", (gate, None, "gelu")
    yield "bias_act", (gate.transpose(0, 1), biases[0], "gelu_pytorch_tanh")
    yield "glu", (gate, up)
    yield "glu", (gate, up.transpose(0, 1).contiguous().transpose(0, 1), *biases)
    yield "glu", (gate[:0], up[:0], *biases, "gelu_pytorch_tanh")
    yield "glu", (gate, up, None, biases[0], "gelu")


def bias_act_backward_calls(device):
    grad_y, gate, up = torch.randn(3, 3, 4, 16, device=device)
    biases = torch.randn(2, 16, device=device)
    for wanted in (True, False):
        yield "bias_act_backward", (grad_y, gate, biases[0], "gelu", wanted)
        yield "bias_act_backward", (grad_y, gate, None, "relu2", wanted)
        yield "glu_backward", (grad_y, gate, up, *biases, "silu", wanted, True)
        yield "glu_backward", (grad_y, gate, up, *biases, "gelu_pytorch_tanh", True, wanted)
        yield "glu_backward", (grad_y, gate, up, None, None, "silu", wanted, wanted)


def packed_calls(device):
    """Of glu_packed, gated_mlp."""
    x, bias = torch.randn(3, 4, 16, device=device), torch.randn(16, device=device)
    yield "glu_packed", (x, bias)
    yield "glu_packed", (x.transpose(0, 1),)
    yield "glu_packed", (x[:0], bias, "gelu_pytorch_tanh")
    gate_up, down = torch.randn(10, 16, device=device), torch.randn(7, 5, device=device)
    for is_saved in (True, False):
        yield "gated_mlp", (x, gate_up, down, None, None, "silu", is_saved)
        yield "gated_mlp", (x.transpose(0, 1), gate_up, down, bias[:10], bias[:7], "gelu", is_saved)


def packed_backward_calls(device):
    x, bias = torch.randn(3, 4, 16, device=device), torch.randn(16, device=device)
    for wanted in (True, False):
        yield "glu_packed_backward", (x[..., :8], x, bias, "silu", wanted)
        yield "glu_packed_backward", (x[..., :8], x, None, "gelu", wanted)
    yield "glu_packed_forward_backward", (x[..., :8].transpose(0, 1), x.transpose(0, 1), "gelu")
    yield "glu_packed_forward_backward_", (x[..., :8].contiguous(), x, "silu")


def lora_calls(device):
    x, weight = torch.randn(3, 4, 16, device=device), torch.randn(7, 16, device=device)
    a, b, y = torch.randn(2, 16, device=device), torch.randn(7, 2, device=device), torch.randn(3, 4, 7, device=device)
    yield "lora_linear", (x, weight, a, b)
    yield "lora_linear", (x.bfloat16().transpose(0, 1), weight.bfloat16(), a, b, weight[:, 0].bfloat16(), 0.5, True)
    yield "add_lora", (y.transpose(0, 1), x.bfloat16().transpose(0, 1), a, b, 2.0)
    yield "add_lora", (y[0, 0].bfloat16(), x[0, 0].bfloat16(), a, b, 2.0, True)


def lora_backward_calls(device):
    for index, (name, arguments) in enumerate(lora_calls(device)):
        y, *parts = getattr(torch.ops.llmkernels, name)(*arguments)
        x, weight = arguments[:2] if name == "lora_linear" else (arguments[1], None)
        scaling, split = ((), (0.5, True), (2.0, False), (2.0, True))[index] or (1.0, False)
        needs = index != 1, index != 2, index != 3
        yield "lora_linear_backward", (y, x, weight, *arguments[2:4], *parts, scaling, split, *needs)


def softmax_calls(device):
    x = torch.randn(2, 3, 4, 16, device=device)
    yield "softmax", (x,)
    yield "softmax", (x.transpose(0, 1), torch.rand(2, 1, 16, device=device) > 0.3, 0.5, True)
    yield "softmax", (x[..., :15], torch.zeros(4, 1, device=device))


def loss_calls(device):
    logits, target = torch.randn(2, 3, 16, device=device), torch.randint(16, (2, 3), device=device)
    yield "cross_entropy", (logits, target)
    yield "cross_entropy", (logits, target, None, 5, "none", 0.1, 1e-3, 5.0, False)


def linear_loss_calls(device):
    x, weight, bias = torch.randn(2, 3, 8, device=device), torch.randn(16, 8, device=device), torch.randn(16)
    target, options = torch.randint(16, (2, 3), device=device), (5, "none", 0.1, 1e-3, 5.0, 100, False, False, False)
    yield "linear_cross_entropy", (x, weight, target)
    yield "linear_cross_entropy", (x, weight, target, bias.to(device), None, *options)


def loss_backward_calls(device):
    (_, (logits, target)), (_, (*_, ignore, kind, smoothing, scale, cap, _early)) = loss_calls(device)
    options, weight = (ignore, kind, smoothing, scale, cap), torch.rand(16, device=device)
    saved = target, weight, logits.logsumexp(-1), weight[:2]
    yield "cross_entropy_backward_", (logits.neg(), logits[..., 0], None, *saved, *options)
    yield "cross_entropy_scale_", (logits, logits[0, 0, 0].clone())
    _, (_, (x, head, target, bias, _, *options, _, _, _)) = linear_loss_calls(device)
    saved = x, head, target, bias, weight, x.sum(-1)
    yield "linear_cross_entropy_backward", (logits[..., 0], *saved, *options, False, True, True, False)


def rms_norm_add_calls(device):
    residual, x, weight = (torch.randn(shape, device=device) for shape in ((2, 3, 16), (3, 2, 16), (16,)))
    yield "rms_norm_add_", (residual, x.transpose(0, 1), weight, 1e-5, 1.0, False, 0.5)
    yield "rms_norm_add_", (residual[0, 0], x[0, 0])


def fp8_calls(device):
    x, weight = torch.randn(3, 4, 160, device=device), torch.randn(160, device=device)
    for granularity in ("token", "block", "tensor"):
        yield "fp8_quantize", (x, granularity, "float8_e5m2", True)
        yield "rms_norm_fp8_quantize", (x.transpose(0, 1), weight, 1e-6, 0.0, True, granularity)
        yield "swiglu_fp8_quantize", (x, None, granularity)
        yield "swiglu_fp8_quantize", (x, x.neg(), granularity)
    yield "fp8_quantize", (x[:0],)


def adam_calls(device):
    lists = [[torch.rand(size, device=device) for size in ((3, 5), (7,))] for _ in range(4)]
    steps, counter = [torch.ones(1, device=device) for _ in range(2)], torch.zeros(1, dtype=torch.int32, device=device)
    numbers = 0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, True, False
    yield "adam_", (*lists, [], steps, *[None] * 4, counter, None, [], *numbers)


def differentiable_calls(device):
    yield from norm_calls(device)
    yield from softmax_calls(device)
    yield from loss_calls(device)
    yield from linear_loss_calls(device)
    yield from layer_norm_calls(device)
    yield from (("rope", arguments) for arguments in rope_arguments(device))
    yield from rms_norm_rope_calls(device)
    yield "glu", torch.randn(2, 3, 4, 16, device=device).transpose(1, 2).unbind()
    yield from bias_act_calls(device)
    yield from packed_calls(device)
    yield from lora_calls(device)


def other_calls(device):
    yield from norm_backward_calls(device)
    yield from rms_norm_add_calls(device)
    yield "scale_softcap", (torch.randn(3, 2, 16, device=device).transpose(0, 1), 0.5, 30.0)
    grad_y, y = torch.randn(2, 2, 3, 16, device=device).transpose(1, 2)
    yield "log_softmax_backward", (grad_y, y.log_softmax(-1), 0.5)
    yield from loss_backward_calls(device)
    for arguments in rope_arguments(device):
        yield "rope_backward", arguments
        if arguments[1].stride(-1) == 1:
            yield "rope_", arguments
    yield from rms_norm_rope_other_calls(device)
    yield from bias_act_backward_calls(device)
    yield from packed_backward_calls(device)
    yield from lora_backward_calls(device)
    yield from adam_calls(device)
    yield from fp8_calls(device)


# Arguments before this one take gradients: not cos, sin, masks, targets.
TAKES_GRADIENT = {"rope": 2, "rms_norm_rope": 4, "softmax": 1, "cross_entropy": 1, "linear_cross_entropy": 2}


def leaves(op, arguments, requires_grad) -> tuple:
    return tuple(
        a.detach().requires_grad_(requires_grad and a.is_floating_point() and i < TAKES_GRADIENT.get(op, 5))
        if isinstance(a, torch.Tensor)
        else a
        for i, a in enumerate(arguments)
    )


EVERY_CALL = [(op, index) for op, calls in small_calls().items() for index in range(len(calls))]


@pytest.mark.parametrize("op, index", EVERY_CALL)
def test_opcheck_of_every_op(device, op, index):
    arguments = small_calls(device)[op][index]
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    checks += ["test_schema"] if op != "fp8_linear" else []  # which multiplies the inputs, and torch no FP8 numbers
    # Not where the backward writes to a gradient that the forward has returned.
    is_differentiable = op in DIFFERENTIABLE and not arguments.get("gradient_in_forward")
    for requires_grad in {False, is_differentiable}:
        values = leaves(op, arguments.values(), requires_grad)
        opcheck(overload(op), (), dict(zip(arguments, values, strict=True)), test_utils=checks)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("index", range(len(list(differentiable_calls("cpu")))))
def test_opcheck(device, index, requires_grad):
    op, arguments = list(differentiable_calls(device))[index]
    opcheck(overload(op), leaves(op, arguments, requires_grad))


@pytest.mark.parametrize("index", range(len(list(other_calls("cpu")))))
def test_opcheck_of_ops_without_a_gradient(device, index):
    op, arguments = list(other_calls(device))[index]
    opcheck(overload(op), arguments)


@every_case
def test_no_graph_is_recorded_without_need(case, device):
    inputs = case.inputs(device=device)
    with torch.inference_mode():
        assert_same(case.ours(*inputs), case.ours(*(t.clone() for t in inputs)))
    leaves = [t.requires_grad_() if t.is_floating_point() and i < case.differentiable else t
              for i, t in enumerate(inputs)]  # fmt: skip
    with torch.no_grad():
        assert not any(t.requires_grad for t in tensors(case.ours(*leaves)))
    assert all(t.requires_grad for t in tensors(case.ours(*leaves)))


@every_case
def test_a_second_derivative_is_refused(case, device):
    """The ops are differentiable once. A second derivative must be an error, not zero."""
    inputs = case.inputs(device=device)
    leaves = [t.requires_grad_() for t in inputs[: case.differentiable]]
    outputs = tensors(case.ours(*leaves, *inputs[case.differentiable :]))
    (grad,) = torch.autograd.grad(sum(t.square().sum() for t in outputs), leaves[0], create_graph=True)
    # Also where the op is only a part of the function.
    for penalty in (grad.square().sum(), grad.square().sum() + sum(t.sum() for t in outputs)):
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            torch.autograd.grad(penalty, leaves[0], retain_graph=True)


@every_case
def test_forward_mode_is_refused(case, device):
    inputs = case.inputs(device=device)
    with forward_ad.dual_level():
        first = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(RuntimeError, match="forward-mode"):
            case.ours(first, *inputs[1:])


@every_case
def test_meta_tensors_beside_real_ones_are_refused(case):
    inputs = case.inputs()
    tensors_at = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)]
    if len(tensors_at) < 2:
        pytest.skip("one tensor")
    mixed = [t.to("meta") if i == tensors_at[-1] else t for i, t in enumerate(inputs)]
    with pytest.raises(RuntimeError, match="device"):
        case.ours(*mixed)


@every_case
def test_meta_tensors(case):
    inputs = case.inputs()
    for ours, meta in zip(
        tensors(case.ours(*inputs)), tensors(case.ours(*(t.to("meta") for t in inputs))), strict=True
    ):
        assert (ours.shape, ours.dtype, ours.stride()) == (meta.shape, meta.dtype, meta.stride())


# torch.compile


@every_case
@every_dynamic
def test_fullgraph(case, device, dynamic):
    """Forward and backward have no graph break, and the same bits as without compilation."""
    compiled = torch.compile(case.ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 9):
        inputs = case.inputs(rows, device=device)
        assert_same(compiled(*inputs), case.ours(*inputs))
        grad_outputs = case.grad_outputs(inputs)
        expected = case.differentiate(inputs, grad_outputs)
        leaves = [t.detach().requires_grad_() for t in inputs[: case.differentiable]]
        outputs = tensors(compiled(*leaves, *inputs[case.differentiable :]))
        assert_same((*outputs, *torch.autograd.grad(outputs, leaves, grad_outputs)), expected)


def test_in_place_rope_compiles(device):
    def rotate(q, k, cos, sin):
        q, k = q * 2, k * 2
        llmkernels.rope(q, k, cos, sin, layout="bhtd", inplace=True)
        return q, k

    inputs = *torch.randn(2, 1, 4, 5, 16, device=device), *angles(5, 16, device=device)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs), rotate(*inputs))
    graph_input = torch.compile(
        lambda *t: llmkernels.rope(*t, layout="bhtd", inplace=True), fullgraph=True, backend="aot_eager"
    )
    expected = llmkernels.rope(*inputs, layout="bhtd")
    graph_input(*inputs)
    assert_same(inputs[:2], expected)


@every_case
def test_no_recompile_storm(case, device):
    """One graph for the first number of rows, one for any other; PyTorch has more for 0 and 1."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(case.ours, fullgraph=True, backend=counter)
    for rows in (4, 5, 8, 13, 64, 100, 257):
        inputs = case.inputs(rows, device=device)
        assert_same(compiled(*inputs), case.ours(*inputs))
    assert counter.frame_count <= 2


def block(x, residual, weight, q, k, cos, sin, gate, up):
    """Every op between arithmetic, which the compiler may fuse, but not with the op."""
    y, total = llmkernels.add_rms_norm(x * 2, residual, weight)
    z = llmkernels.rms_norm(y + total, weight, weight_offset=1.0, cast_before_weight=False)
    q, k = llmkernels.rope(q + 1, k, cos, sin, layout="bhtd")
    h = llmkernels.swiglu(gate * 0.5, up) + llmkernels.geglu(torch.cat((gate, up), -1))
    return z.float(), q * 2, k, h


def block_inputs(device, rows=12, dtype=torch.float32):
    x, residual, gate, up = (scaled_rows(rows, 64, dtype=dtype, device=device) for _ in range(4))
    q, k = torch.randn(2, 1, rows, 4, 32, device=device).to(dtype).transpose(2, 3)
    return (
        x,
        residual,
        torch.randn(64, device=device).to(dtype),
        q,
        k,
        *angles(rows, 32, device=device, dtype=dtype),
        gate,
        up,
    )


def run_block(function, inputs):
    """Outputs and gradients; cos and sin have none."""
    leaves = [t.detach().requires_grad_(i not in (5, 6)) for i, t in enumerate(inputs)]
    outputs = function(*leaves)
    grads = torch.autograd.grad(sum(t.square().sum() for t in outputs), [t for t in leaves if t.requires_grad])
    return *outputs, *grads


# Compiling C++ takes long, so on the CPU once, with dynamic shapes.
@pytest.mark.parametrize(
    "device, dynamic", [("cpu", True)] + [("cuda", dynamic) for dynamic in (False, True) if "cuda" in DEVICES]
)
def test_inductor(device, dynamic):
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (12, 20) if dynamic else (12,):
        inputs = block_inputs(device, rows)
        for ours, expected in zip(run_block(compiled, inputs), run_block(block, inputs), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_reduce_overhead():
    """With CUDA graphs; every call has other values."""
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):  # warm-up, recording, then replays
        inputs = block_inputs("cuda")
        torch.compiler.cudagraph_mark_step_begin()
        results = [t.clone() for t in run_block(compiled, inputs)]
        for ours, expected in zip(results, run_block(block, inputs), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@every_case
def test_export(case, device):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return case.ours(*inputs)

    rows = torch.export.Dim("rows", min=2, max=1024)
    shapes = tuple(None if dim is None else {dim: rows} for dim in case.row_dims)
    exported = torch.export.export(Module(), case.inputs(6, device=device), dynamic_shapes=(shapes,))
    assert any("llmkernels" in str(node.target) for node in exported.graph.nodes)
    for rows in (6, 31):
        inputs = case.inputs(rows, device=device)
        assert_same(exported.module()(*inputs), case.ours(*inputs))


@every_case
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "mixed"])
def test_autocast_does_what_eager_does(case, device, dtypes):
    """Under autocast the result has the dtype and the values of the eager formula."""
    inputs = case.inputs(dtype=torch.bfloat16 if dtypes == "bfloat16" else torch.float32, device=device)
    if dtypes == "mixed":
        inputs = (inputs[0].bfloat16(), *inputs[1:])
    with torch.autocast(device, dtype=torch.bfloat16):
        ours, eager = tensors(case.ours(*inputs)), tensors(case.eager(*inputs))
    for a, b in zip(ours, eager, strict=True):
        assert a.dtype == b.dtype
        # Eager may round to the narrower dtype on the way; the op does not.
        eps = torch.finfo(a.dtype if dtypes == "float32" else torch.bfloat16).eps
        torch.testing.assert_close(a, b, rtol=2 * eps, atol=1e-5)
