"""The ops within PyTorch: registration, checkpointing, torch.compile, torch.export, autocast."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import llmkernels
from cases import every_case
from oracles import DEVICES, angles, assert_same, scaled_rows, tensors
from registry import DIFFERENTIABLE, SMALL, every_op, overload, small_calls, variants


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


every_dynamic = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


# Registration: schema, fake, autograd and dynamic shapes of every op, as opcheck tests them. The calls here are those
# that cannot be made of registry.py's: with options that say how other arguments look.


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


def lora_calls(device):
    """Parts of 16 bits, and a vector. Integers, whose sums no order of cuBLAS's rounds."""
    x, weight = (torch.randint(-3, 4, size, device=device).float() for size in ((3, 4, 16), (7, 16)))
    a, b, y = torch.randn(2, 16, device=device), torch.randn(7, 2, device=device), torch.randn(3, 4, 7, device=device)
    yield "lora_linear", (x.bfloat16().transpose(0, 1), weight.bfloat16(), a, b, weight[:, 0].bfloat16(), 0.5, True)
    yield "add_lora", (y.transpose(0, 1), x.bfloat16().transpose(0, 1), a, b, 2.0)
    yield "add_lora", (y[0, 0].bfloat16(), x[0, 0].bfloat16(), a, b, 2.0, True)


def lora_backward_calls(device):
    for index, (name, arguments) in enumerate(lora_calls(device)):
        y, *parts = getattr(torch.ops.llmkernels, name)(*arguments)
        x, weight = arguments[:2] if name == "lora_linear" else (arguments[1], None)
        scaling, split = ((0.5, True), (2.0, False), (2.0, True))[index]
        needs = index != 0, index != 1, index != 2
        yield "lora_linear_backward", (y, x, weight, *arguments[2:4], *parts, scaling, split, *needs)


def differentiable_calls(device):
    x, mask = torch.randn(2, 3, 4, 16, device=device), torch.rand(2, 1, 16, device=device) > 0.3
    yield "softmax", (x.transpose(0, 1), mask, 0.5, True)
    yield "softmax", (x[..., :15], torch.zeros(4, 1, device=device))
    target = torch.randint(16, (2, 3), device=device)
    yield "cross_entropy", (x[:, :, 0], target)
    inputs = x[:, :, 0], torch.randn(16, 16, device=device), target
    yield "linear_cross_entropy", inputs
    options = 5, "none", 0.1, 1e-3, 5.0, 100, False, False, False
    yield "linear_cross_entropy", (*inputs, torch.randn(16, device=device), None, *options)
    yield from (("rope", arguments) for arguments in rope_arguments(device))
    yield from rms_norm_rope_calls(device)
    yield from lora_calls(device)


def other_calls(device):
    x = torch.randn(3, 4, 160, device=device)
    yield "rms_norm_add_", (x[0, 0].clone(), x[1, 0])
    yield "cross_entropy_scale_", (x.clone(), x[0, 0, 0].clone())
    for arguments in rope_arguments(device):
        yield "rope_backward", arguments
        if arguments[1].stride(-1) == 1:
            yield "rope_", arguments
    yield from rms_norm_rope_other_calls(device)
    yield from lora_backward_calls(device)
    yield "fp8_quantize", (x, "tensor", "float8_e5m2", True)
    yield "rms_norm_fp8_quantize", (x.transpose(0, 1), x[0, 0], 1e-6, 0.0, True, "tensor")
    for granularity in ("block", "tensor"):
        yield "swiglu_fp8_quantize", (x, None, granularity)
        yield "swiglu_fp8_quantize", (x, x.neg(), granularity)
    yield "rms_norm_fp8_quantize", (x.transpose(0, 1), x[0, 0], 1e-6, 0.0, True, "block")


# The arguments that take gradients: not cos, sin, masks, targets, scales.
TAKES_GRADIENT = {
    "rope": (0, 1),
    "rms_norm_rope": (0, 1, 2, 3),
    "softmax": (0,),
    "cross_entropy": (0,),
    "linear_cross_entropy": (0, 1),
    "int8_linear": (0, 3),
}


def leaves(op, arguments, requires_grad) -> tuple:
    return tuple(
        a.detach().requires_grad_(requires_grad and a.is_floating_point() and i in TAKES_GRADIENT.get(op, range(5)))
        if isinstance(a, torch.Tensor)
        else a
        for i, a in enumerate(arguments)
    )


EVERY_CALL = [(op, index) for op, calls in small_calls().items() for index in range(len(calls))]
VARIANTS = [(op, name) for op, (arguments, *_) in small_calls().items() for name in variants(op, arguments)]


def check_registered(op, arguments, may_require_grad=(False, True)):
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    checks += ["test_schema"] if op != "fp8_linear" else []  # which multiplies the inputs, and torch no FP8 numbers
    # Not where the backward writes to a gradient that the forward has returned.
    is_differentiable = op in DIFFERENTIABLE and not arguments.get("gradient_in_forward")
    for requires_grad in {may and is_differentiable for may in may_require_grad}:
        values = leaves(op, arguments.values(), requires_grad)
        opcheck(overload(op), (), dict(zip(arguments, values, strict=True)), test_utils=checks)


@pytest.mark.parametrize("op, index", EVERY_CALL)
def test_opcheck_of_every_op(device, op, index):
    check_registered(op, small_calls(device)[op][index])


@pytest.mark.parametrize("op, name", VARIANTS)
def test_opcheck_of_variants(device, op, name):
    check_registered(op, variants(op, small_calls(device)[op][0])[name], may_require_grad=[True])


@every_op
def test_opcheck_without_rows(device, op):
    arguments = small_calls(device, replace(SMALL, batch=0))[op][0]
    if arguments.get("reduction") == "mean":  # which is NaN
        arguments["reduction"] = "sum"
    check_registered(op, arguments, may_require_grad=[True])


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


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("op", sorted(DIFFERENTIABLE))
def test_checkpointing(device, op, create_graph):
    """What a backward under checkpointing reads twice is an error."""
    arguments = small_calls(device)[op][0]

    def run(*values):
        return overload(op)(**dict(zip(arguments, values, strict=True)))

    def gradients(forward):
        values = leaves(op, arguments.values(), True)
        wanted = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
        loss = sum(y.square().sum() for y in tensors(forward(*values)) if y.requires_grad)
        return torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)

    found = gradients(lambda *values: checkpoint(run, *values, use_reentrant=False))
    for grad, expected in zip(found, gradients(run), strict=True):
        assert (grad is None and expected is None) or torch.equal(grad, expected)


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


@pytest.mark.parametrize("op", sorted(DIFFERENTIABLE))
def test_gradients_of_meta_tensors(op):
    for arguments in small_calls()[op]:
        on_meta = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments.values())
        values = leaves(op, on_meta, True)
        results = tensors(overload(op)(**dict(zip(arguments, values, strict=True))))
        wanted = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
        loss = sum(y.sum() for y in results if y.requires_grad)
        for x, grad in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True):
            assert grad is None or (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)


@every_case
def test_gradients_of_meta_tensors_to_the_functions(case):
    inputs = [t.to("meta") for t in case.inputs()]
    found = case.differentiate(inputs, tuple(torch.empty_like(t) for t in tensors(case.ours(*inputs))))
    assert all(t.is_meta for t in found)


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
