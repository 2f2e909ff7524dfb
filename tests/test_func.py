"""torch.func: first derivatives of every op and of a patched model, alone, nested and batched, against eager; second
ones and forward mode are refused at any depth."""

import warnings

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils import _pytree

import llmkernels
import oracles
from cases import CASES, Case, every_case
from hf_models import CountOps, tiny_inputs, tiny_model
from oracles import scaled_rows, tensors
from registry import DIFFERENTIABLE


@pytest.fixture(autouse=True)
def _no_fallback_of_vmap():
    """torch warns where an op has no rule for a batch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule for llmkernels")
        yield


def inputs_of(case, device) -> list:
    dtype = torch.float64 if device == "cpu" else torch.float32
    return [t.to(dtype) if t.is_floating_point() else t for t in case.inputs(3, 8, device=device)]


def argnums(case, inputs) -> tuple:
    return tuple(range(min(case.differentiable, len(inputs))))


def loss(function):
    return lambda *inputs: sum(t.sin().sum() for t in tensors(function(*inputs)))


def batches(inputs) -> list:
    """As vmap takes them: (inputs, in_dims) with all of them batched, each in turn, and along the last dimension."""
    stacked = [torch.stack([t, t.flip(-1), t], -1) for t in inputs]
    yield stacked, -1
    for i in range(len(inputs)):
        dims = [-1 if j == i else None for j in range(len(inputs))]
        yield [a if dim else b for a, b, dim in zip(stacked, inputs, dims, strict=True)], tuple(dims)


def assert_close(results, expected, tolerance=None):
    results, expected = _pytree.tree_leaves(results), _pytree.tree_leaves(expected)
    for a, b in zip(results, expected, strict=True):
        wide = tolerance or (2e-4 if b.dtype == torch.float32 else 1e-10)
        torch.testing.assert_close(a, b, rtol=wide, atol=wide)


# Tested here and in their own files: rows are not all that counts in their shapes.
PRODUCTS = {"linear", "rms_norm_linear", "int8_linear", "linear_cross_entropy", "lora_linear", "add_lora", "attention"}


def test_every_differentiable_op_is_in_a_case():
    with CountOps() as counter:
        for case in CASES:
            case.ours(*case.inputs())
    assert counter.ops >= DIFFERENTIABLE - PRODUCTS


@every_case
def test_grad_vjp_and_jacrev(case, device):
    inputs = inputs_of(case, device)
    wanted = argnums(case, inputs)
    assert_close(grad(loss(case.ours), wanted)(*inputs), grad(loss(case.eager), wanted)(*inputs))
    assert_close(jacrev(case.ours, wanted)(*inputs), jacrev(case.eager, wanted)(*inputs))

    def pull_back(function):
        outputs, pull = vjp(lambda *leaves: function(*leaves, *inputs[len(wanted) :]), *(inputs[i] for i in wanted))
        return pull(outputs)

    assert_close(pull_back(case.ours), pull_back(case.eager))


@every_case
def test_vmap_and_gradients_of_samples(case, device):
    inputs = inputs_of(case, device)
    wanted = argnums(case, inputs)
    for batch, dims in batches(inputs):
        assert_close(vmap(case.ours, dims)(*batch), vmap(case.eager, dims)(*batch))
        ours, eager = (vmap(grad(loss(function), wanted), dims)(*batch) for function in (case.ours, case.eager))
        assert_close(ours, eager)
        ours, eager = (
            grad(lambda *batch, function=function: vmap(loss(function), dims)(*batch).sum(), wanted)(*batch)  # noqa: B023
            for function in (case.ours, case.eager)
        )
        assert_close(ours, eager)


@every_case
def test_vmap_over_an_empty_batch(case, device):
    inputs = inputs_of(case, device)
    wanted = argnums(case, inputs)

    def scalar(function):  # vmap cannot add a number to the results of an empty batch, as `loss` does
        return lambda *inputs: torch.cat([t.sin().flatten() for t in tensors(function(*inputs))]).sum()

    for full, dims in batches(inputs):
        of_each = dims if isinstance(dims, tuple) else (dims,) * len(full)
        batch = [t if dim is None else t[..., :0] for t, dim in zip(full, of_each, strict=True)]
        for function in (lambda f: f, lambda f: grad(scalar(f), wanted)):
            expected = _pytree.tree_map(lambda t: t[:0], vmap(function(case.eager), dims)(*full))
            assert_close(vmap(function(case.ours), dims)(*batch), expected)
        found = grad(lambda *batch: vmap(scalar(case.ours), dims)(*batch).sum(), wanted)(*batch)  # noqa: B023
        assert_close(found, tuple(torch.zeros_like(batch[i]) for i in wanted))


def test_vmap_over_an_empty_batch_of_products(device):
    x, target = torch.randn(3, 5, 8, device=device), torch.zeros(3, 5, dtype=torch.int64, device=device)
    weight, low = torch.randn(3, 8, 8, device=device), torch.randn(3, 2, 8, device=device)
    q = torch.randn(3, 1, 5, 2, 8, device=device)
    for function, batch in (
        (llmkernels.linear, (x, weight)),
        (llmkernels.linear_cross_entropy, (x, weight, target)),
        (lambda x, w, a: llmkernels.lora_linear(x, w, a, a.mT), (x, weight, low)),
        (lambda q: llmkernels.attention(q, q, q), (q,)),
    ):
        empty = [t[:0] for t in batch]
        assert vmap(function)(*empty).shape == (0, *vmap(function)(*batch).shape[1:])
        gradient = vmap(grad(lambda *inputs, function=function: function(*inputs).sum()))(*empty)
        assert gradient.shape == empty[0].shape


@every_case
def test_a_jacobian_without_rows(case, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    inputs = [t.to(dtype) if t.is_floating_point() else t for t in case.inputs(0, 8, device=device)]
    assert_close(jacrev(case.ours)(*inputs), jacrev(case.eager)(*inputs))


@pytest.mark.parametrize("bias", [False, True])
def test_linears(device, bias):
    x, norm_weight = scaled_rows(5, 16, device=device), torch.randn(16, device=device)
    weight, bias = torch.randn(8, 16, device=device), torch.randn(8, device=device) if bias else None

    def eager(x, norm_weight, weight, bias=None):
        return torch.nn.functional.linear(oracles.rms_norm(x, norm_weight), weight, bias)

    inputs = (x, norm_weight, weight) if bias is None else (x, norm_weight, weight, bias)
    norm_then_linear = Case("rms_norm_linear", llmkernels.rms_norm_linear, eager, None, (), differentiable=4)
    linear = Case("linear", llmkernels.linear, torch.nn.functional.linear, None, (), differentiable=3)
    for case, given in ((norm_then_linear, inputs), (linear, (x, *inputs[2:]))):
        wanted = argnums(case, given)
        assert_close(jacrev(case.ours, wanted)(*given), jacrev(case.eager, wanted)(*given))
        assert_close(*(batched_jacobian(function, given, len(wanted)) for function in (case.ours, case.eager)))
        for batch, dims in batches(given):
            ours, eager = (vmap(grad(loss(function), wanted), dims)(*batch) for function in (case.ours, case.eager))
            assert_close(ours, eager)


def test_int8_linear(device):
    x, bias = torch.randn(5, 16, device=device), torch.randn(8, device=device)
    inputs = (x, bias, *llmkernels.int8_quantize(torch.randn(8, 16, device=device)))

    def ours(x, bias, weight, scale):
        return llmkernels.int8_linear(x, weight, scale, bias)

    def eager(x, bias, weight, scale):
        return torch.nn.functional.linear(x, weight * scale[:, None], bias)

    wanted = (0, 1)
    assert_close(jacrev(ours, wanted)(*inputs), jacrev(eager, wanted)(*inputs))
    assert_close(*(batched_jacobian(function, inputs, len(wanted)) for function in (ours, eager)))
    for batch, dims in batches(inputs):
        found, expected = (vmap(grad(loss(function), wanted), dims)(*batch) for function in (ours, eager))
        assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"gradient_in_forward": False}], ids=str)
def test_linear_cross_entropy(device, options):
    """Gradients of samples, whose means have divisors of their own, and of a recorded call."""
    x, head, bias = (torch.randn(*shape, device=device) for shape in ((5, 8), (11, 8), (11,)))
    target = torch.tensor([1, -100, 10, 0, -100], device=device)

    def ours(x, head, bias, target):
        return llmkernels.linear_cross_entropy(x, head, target, linear_bias=bias, max_logits_bytes=99, **options)

    def eager(x, head, bias, target):
        logits = torch.nn.functional.linear(x, head, bias)
        return oracles.cross_entropy(logits, target, reduction=options.get("reduction", "mean"))

    wanted, inputs = (0, 1, 2), (x, head, bias, target)
    assert_close(jacrev(ours, wanted)(*inputs), jacrev(eager, wanted)(*inputs))
    for batch, dims in batches(inputs):
        found, expected = (vmap(grad(loss(function), wanted), dims)(*batch) for function in (ours, eager))
        assert_close(found, expected)
    assert_close(*(batched_jacobian(function, inputs, len(wanted)) for function in (ours, eager)))
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        jacrev(jacrev(loss(ours)))(*inputs)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(ours)(leaf, *inputs[1:]), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        first.sum().backward()


@every_case
def test_inside_another_transform(case, device):
    """The gradient comes out of a transform that differentiates something else, to torch.func and to backward()."""
    inputs = inputs_of(case, device)

    def scaled(function):
        def outer(x):
            outputs = tensors(function(x, *inputs[1:]))
            inner = lambda factor: sum((t * factor).sin().sum() for t in outputs)  # noqa: E731
            return grad(inner)(torch.ones((), device=device, dtype=x.dtype))

        return outer

    def inside(function):
        def outer(x):
            inner = lambda factor: sum((t * factor).sum() for t in tensors(function(x, *inputs[1:])))  # noqa: E731
            return grad(inner)(torch.ones((), device=device, dtype=x.dtype))

        return outer

    for nest in (scaled, inside):
        expected = grad(nest(case.eager))(inputs[0])
        assert_close(grad(nest(case.ours))(inputs[0]), expected)
        leaf = inputs[0].detach().requires_grad_()
        nest(case.ours)(leaf).backward()
        assert_close(leaf.grad, expected)


def batched_jacobian(function, inputs, wanted):
    """Of the first inputs, by one backward for all outputs: a batch of autograd's own, which knows fewer operations."""
    leaves, others = tuple(inputs[:wanted]), inputs[wanted:]
    return torch.autograd.functional.jacobian(lambda *leaves: function(*leaves, *others), leaves, vectorize=True)


@every_case
def test_batched_gradients_of_a_recorded_call(case, device):
    inputs = inputs_of(case, device)
    wanted = len(argnums(case, inputs))
    assert_close(*(batched_jacobian(function, inputs, wanted) for function in (case.ours, case.eager)))


@every_case
def test_second_derivatives_and_forward_mode_are_refused(case, device):
    inputs = inputs_of(case, device)
    scalar = loss(case.ours)
    for second in (grad(lambda *x: grad(scalar)(*x).sum()), jacrev(jacrev(scalar)), hessian(scalar)):
        with pytest.raises(RuntimeError, match=r"can be differentiated once|forward-mode differentiation is not"):
            second(*inputs)
    with pytest.raises(RuntimeError, match="forward-mode"):
        jvp(lambda x: case.ours(x, *inputs[1:]), (inputs[0],), (inputs[0],))


def test_rope_has_no_gradient_for_its_angles_inside_vmap(device):
    q = torch.randn(2, 1, 3, 2, 8, device=device)

    def rotated(angle):
        return vmap(lambda q: llmkernels.rope(q, q, angle, angle)[0])(q).sum()

    with pytest.raises(RuntimeError, match="cos and sin must not require a gradient"):
        grad(rotated)(torch.ones(3, 8, device=device))


def attend(q):
    lengths = torch.ones(1, dtype=torch.int32, device=q.device)
    cache = torch.ones(1, 4, 1, 8, device=q.device, dtype=q.dtype)
    return llmkernels.decode_attention(q, cache, cache, lengths)


def rotate_in_place(q):
    angle = torch.ones(1, 8, device=q.device, dtype=q.dtype)
    return llmkernels.rope(q.clone(), torch.zeros_like(q), angle, angle, inplace=True)[0]


def write(q):
    angle, position = (
        torch.ones(1, 8, device=q.device, dtype=q.dtype),
        torch.zeros(1, dtype=torch.int64, device=q.device),
    )
    cache = torch.zeros(2, 1, 4, 1, 8, device=q.device, dtype=q.dtype)
    lengths = torch.ones(1, dtype=torch.int32, device=q.device)
    q = q.clone()
    llmkernels.rope_kv_write(
        q, *torch.zeros_like(q)[:, :, :1].expand(2, -1, -1, -1, -1), angle, angle, position, *cache, lengths
    )
    return q


@pytest.mark.parametrize("function", [attend, rotate_in_place, write])
def test_what_has_no_gradient_says_so(device, function):
    """Also where a vmap hides from it that a gradient is wanted, and in forward mode."""
    q = torch.randn(2, 1, 1, 2, 8, device=device)
    for wanted in (grad(lambda q: function(q[0]).sum()), grad(lambda q: vmap(function)(q).sum())):
        with pytest.raises((RuntimeError, ValueError), match="a gradient"):
            wanted(q)
    with pytest.raises(RuntimeError, match="forward-mode"):
        jvp(function, (q[0],), (q[0],))


@every_case
@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), vmap], ids=["grad", "vmap-grad", "vmap"])
def test_compiled(case, device, transform):
    inputs = [torch.stack([t, t]) for t in case.inputs(3, 8, device=device)]
    inputs = [t[0] for t in inputs] if transform is grad else inputs
    torch._dynamo.reset()  # which counts what it compiled for the other cases
    compiled = torch.compile(transform(loss(case.ours)), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs), transform(loss(case.eager))(*inputs))


WITHOUT_GRADIENT = {  # with an argument that has none, which is a float all the same
    "softmax": (lambda x, mask: llmkernels.softmax(x, mask), (4, 8)),
    "cross_entropy": (lambda x, weight: llmkernels.cross_entropy(x, torch.arange(4, device=x.device), weight), (8,)),
    "linear_cross_entropy": (
        lambda x, weight: llmkernels.linear_cross_entropy(
            x, torch.eye(8, device=x.device), torch.arange(4, device=x.device), weight=weight
        ),
        (8,),
    ),
    "int8_linear": (
        lambda x, scale: llmkernels.int8_linear(x, torch.ones(8, 8, dtype=torch.int8, device=x.device), scale),
        (8,),
    ),
}


@pytest.mark.parametrize("function, shape", WITHOUT_GRADIENT.values(), ids=WITHOUT_GRADIENT.keys())
def test_compiled_with_arguments_without_a_gradient(device, function, shape):
    """Those are arguments of transforms like others; a gradient of them is an error, also one that a vmap hides."""
    x, other = torch.randn(2, 4, 8, device=device), torch.rand(shape, device=device)
    scalar = loss(function)

    def compiled(transformed):
        torch._dynamo.reset()
        return torch.compile(transformed, fullgraph=True, backend="aot_eager")

    for transformed, given in ((grad(scalar), x[0]), (vmap(grad(scalar), (0, None)), x), (vmap(scalar, (0, None)), x)):
        assert_close(compiled(transformed)(given, other), transformed(given, other))
    for wanted in (
        grad(lambda other: scalar(x[0], other)),
        grad(lambda other: vmap(lambda x: scalar(x, other))(x).sum()),
    ):
        for run in (wanted, compiled(wanted)):
            with pytest.raises(RuntimeError, match="must not require a gradient"):
                run(other)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_patched_model(device, family):
    """Gradients of its parameters by functional_call, those of each sample, and a Jacobian of its embeddings."""
    plain, patched = (tiny_model(family, device, torch.float64 if device == "cpu" else torch.float32) for _ in range(2))
    llmkernels.hf.patch(patched)
    ids = tiny_inputs(device, 3, 5)

    def objective(model):
        def run(parameters, ids):
            return functional_call(model, parameters, (ids,), {"use_cache": False}).logits.logsumexp(-1).sum()

        return run

    def transformed(model):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        yield grad(objective(model))(parameters, ids)
        yield vmap(grad(objective(model)), (None, 0))(parameters, ids[:, None])
        embedded = model.get_input_embeddings()(ids[:1]).detach()
        yield jacrev(lambda x: model(inputs_embeds=x, use_cache=False).logits.logsumexp(-1))(embedded)

    for ours, eager in zip(transformed(patched), transformed(plain), strict=True):
        assert_close(ours, eager, tolerance=1e-4)  # transformers' norm is in float32


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "rms_norm", "layer_norm", "linear", "int8_linear"])
def test_a_batch_of_scalars_is_no_row(name):
    """A sample is refused as it is alone: the batch is no dimension of it."""
    weights = {"linear": (torch.ones(6, 5),), "int8_linear": (torch.ones(6, 5, dtype=torch.int8), torch.ones(6))}
    op = getattr(llmkernels, name)
    with pytest.raises(RuntimeError, match=f"{name}: x must have at least one dimension, got a scalar"):
        vmap(lambda x: op(x, *weights.get(name, ())))(torch.randn(5))


def test_a_mask_is_not_one_for_the_batch():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    with pytest.raises(RuntimeError, match=r"softmax: mask must have a shape that broadcasts .* \[3\], got \[2, 3\]"):
        vmap(lambda x: llmkernels.softmax(x, mask))(torch.randn(2, 3))
