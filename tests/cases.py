"""One entry per op and variant, for the tests that are the same for every op: determinism, streams, graphs, memory,
compilation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import llmkernels
import oracles
from oracles import angles, scaled_rows, tensors


@dataclass(frozen=True)
class Case:
    """`ours` and `eager` on the tensors that `make(rows, cols, dtype, device)` returns."""

    name: str
    ours: Callable
    eager: Callable
    make: Callable
    row_dims: tuple  # which dimension of each input counts rows; None: none, all rows share this input
    out_row_dim: int = 0
    differentiable: int = 2  # how many inputs, from the first on, take gradients
    batch_invariant: bool = True  # not where PyTorch's matmul computes a part

    def inputs(self, rows=7, cols=64, dtype=torch.float32, device="cpu") -> tuple:
        return self.make(rows, cols, dtype, device)

    def grad_outputs(self, inputs) -> tuple:
        return tuple(torch.randn_like(t) for t in tensors(self.eager(*inputs)))

    def differentiate(self, inputs, grad_outputs) -> tuple:
        """Outputs, then gradients."""
        return oracles.differentiate(self.ours, inputs, grad_outputs, self.differentiable)

    def one_row(self, inputs, index) -> tuple:
        return tuple(
            t if dim is None else t.narrow(dim, index, 1).clone() for t, dim in zip(inputs, self.row_dims, strict=True)
        )


def _norm_inputs(rows, cols, dtype, device):
    return scaled_rows(rows, cols, dtype=dtype, device=device), torch.randn(cols, device=device).to(dtype)


def _unweighted_inputs(rows, cols, dtype, device):
    return (scaled_rows(rows, cols, dtype=dtype, device=device),)


def _add_norm_inputs(rows, cols, dtype, device):
    x, weight = _norm_inputs(rows, cols, dtype, device)
    return x, scaled_rows(rows, cols, dtype=dtype, device=device), weight


def _layer_norm_inputs(rows, cols, dtype, device, added=False):
    """Rows with a mean that is not zero."""
    x, weight = _norm_inputs(rows, cols, dtype, device)
    residual = (scaled_rows(rows, cols, dtype=dtype, device=device),) if added else ()
    return x + 1, *residual, weight, torch.randn(cols, device=device).to(dtype)


def _glu_inputs(rows, cols, dtype, device):
    return tuple(torch.randn(rows, cols, device=device).mul_(2).to(dtype) for _ in range(2))


def _packed_inputs(rows, cols, dtype, device):
    return (torch.randn(rows, 2 * cols, device=device).mul_(2).to(dtype),)


def _masked_inputs(rows, cols, dtype, device):
    mask = torch.rand(rows, cols, device=device) > 0.3
    return scaled_rows(rows, cols, dtype=dtype, device=device), mask


def _loss_inputs(rows, cols, dtype, device):
    return scaled_rows(rows, cols, dtype=dtype, device=device), torch.randint(cols, (rows,), device=device)


def _biased_inputs(rows, cols, dtype, device, matrices):
    rows = tuple(torch.randn(rows, cols, device=device).mul_(2).to(dtype) for _ in range(matrices))
    return *rows, *(torch.randn(cols, device=device).to(dtype) for _ in range(matrices))


def _bias_act_case(name, function, matrices, **options):
    return Case(
        name,
        partial(getattr(llmkernels, function), **options),
        partial(getattr(oracles, function), **options),
        partial(_biased_inputs, matrices=matrices),
        row_dims=(0,) * matrices + (None,) * matrices,
        differentiable=2 * matrices,
    )


def _biased_packed_inputs(rows, cols, dtype, device):
    packed = torch.randn(rows, 2 * cols, device=device).mul_(2).to(dtype)
    return packed, torch.randn(2 * cols, device=device).to(dtype)


def _bias_packed_case(name, function, **options):
    def packed(function):
        return lambda gate_up, bias: function(gate_up, None, bias, **options)

    functions = (packed(getattr(module, function)) for module in (llmkernels, oracles))
    return Case(name, *functions, _biased_packed_inputs, row_dims=(0, None))


def _mlp_inputs(rows, cols, dtype, device, biased, out=24):
    """`cols` are those of x and of the gate."""
    weights = [torch.randn(n, cols, device=device).mul_(cols**-0.5).to(dtype) for n in (2 * cols, out)]
    biases = [torch.randn(n, device=device).to(dtype) for n in (2 * cols, out)] if biased else []
    return torch.randn(rows, cols, device=device).to(dtype), *weights, *biases


def _mlp_case(name, biased=False, **options):
    return Case(
        name,
        partial(llmkernels.gated_mlp, **options),
        partial(oracles.gated_mlp, **options),
        partial(_mlp_inputs, biased=biased),
        row_dims=(0, *[None] * (4 if biased else 2)),
        differentiable=5 if biased else 3,
        batch_invariant=False,
    )


def _rope_inputs(rows, cols, dtype, device, with_positions=False):
    """q with 4 heads, k with 1, as views of one packed projection; `cols` is head_dim, made even, up to 128."""
    dim = min(max(cols // 2 * 2, 2), 128)
    packed = torch.randn(2, rows, 5, dim, device=device).to(dtype).transpose(1, 2)
    if not with_positions:
        return packed[:, :4], packed[:, 4:], *angles(rows, dim, dtype=dtype, device=device)
    table = angles(512, dim, dtype=dtype, device=device)
    return packed[:, :4], packed[:, 4:], *table, torch.randint(512, (rows,), device=device)


def _rope_case(name, with_positions=False, **options):
    return Case(
        name,
        partial(llmkernels.rope, layout="bhtd", **options),
        partial(oracles.rope, layout="bhtd", **options),
        partial(_rope_inputs, with_positions=with_positions),
        row_dims=(2, 2, None, None, 0) if with_positions else (2, 2, 0, 0),
        out_row_dim=2,
    )


def _rms_norm_rope_inputs(rows, cols, dtype, device, row_wise=False, with_positions=False):
    """q and k of 4 and 1 heads, of many scales, and their weights."""
    q, k, *rotation = _rope_inputs(rows, cols, dtype, device, with_positions)
    q, k = (scaled_rows(*x.shape, dtype=dtype, device=device) for x in (q, k))
    sizes = [x.size(-1) * (x.size(1) if row_wise else 1) for x in (q, k)]
    return q, k, *(torch.randn(size, device=device).to(dtype) for size in sizes), *rotation


def _rms_norm_rope_case(name, row_wise=False, with_positions=False, **options):
    options |= {"layout": "bhtd", "row_wise": row_wise}
    return Case(
        name,
        partial(llmkernels.rms_norm_rope, **options),
        partial(oracles.rms_norm_rope, **options),
        partial(_rms_norm_rope_inputs, row_wise=row_wise, with_positions=with_positions),
        row_dims=(2, 2, None, None, None, None, 0) if with_positions else (2, 2, None, None, 0, 0),
        out_row_dim=2,
        differentiable=4,
    )


def _norm_case(name, **options):
    return Case(
        name,
        partial(llmkernels.rms_norm, **options),
        partial(oracles.rms_norm, **options),
        _norm_inputs,
        row_dims=(0, None),
    )


def _glu_case(name, function, packed=False, **options):
    return Case(
        name,
        partial(getattr(llmkernels, function), **options),
        partial(getattr(oracles, function), **options),
        _packed_inputs if packed else _glu_inputs,
        row_dims=(0,) if packed else (0, 0),
        differentiable=1 if packed else 2,
    )


def _softmax_case(name, make=_unweighted_inputs, **options):
    function = name.removesuffix("_masked")
    return Case(
        name,
        partial(getattr(llmkernels, function), **options),
        partial(getattr(oracles, function), **options),
        make,
        row_dims=(0,) if make is _unweighted_inputs else (0, 0),
        differentiable=1,
    )


def _loss_case(name, gradient_in_forward=True, **options):
    return Case(
        name,
        partial(llmkernels.cross_entropy, reduction="none", gradient_in_forward=gradient_in_forward, **options),
        partial(oracles.cross_entropy, reduction="none", **options),
        _loss_inputs,
        row_dims=(0, 0),
        differentiable=1,
    )


CASES = [
    _norm_case("rms_norm"),
    _norm_case("rms_norm_gemma", weight_offset=1.0, cast_before_weight=False),
    Case(
        "rms_norm_unweighted",
        llmkernels.rms_norm,
        oracles.rms_norm,
        _unweighted_inputs,
        row_dims=(0,),
        differentiable=1,
    ),
    Case(
        "add_rms_norm",
        llmkernels.add_rms_norm,
        oracles.add_rms_norm,
        _add_norm_inputs,
        row_dims=(0, 0, None),
        differentiable=3,
    ),
    Case(
        "layer_norm",
        llmkernels.layer_norm,
        oracles.layer_norm,
        _layer_norm_inputs,
        row_dims=(0, None, None),
        differentiable=3,
    ),
    Case(
        "layer_norm_unweighted",
        llmkernels.layer_norm,
        oracles.layer_norm,
        _unweighted_inputs,
        row_dims=(0,),
        differentiable=1,
    ),
    Case(
        "add_layer_norm",
        llmkernels.add_layer_norm,
        oracles.add_layer_norm,
        partial(_layer_norm_inputs, added=True),
        row_dims=(0, 0, None, None),
        differentiable=4,
    ),
    _rope_case("rope"),
    _rope_case("rope_interleaved", interleaved=True),
    _rope_case("rope_positions", with_positions=True),
    _rms_norm_rope_case("rms_norm_rope"),
    _rms_norm_rope_case("rms_norm_rope_gemma", weight_offset=1.0, cast_before_weight=False, interleaved=True),
    _rms_norm_rope_case("rms_norm_rope_row_wise", row_wise=True, with_positions=True, cast_before_weight=False),
    _glu_case("swiglu", "swiglu"),
    _glu_case("swiglu_packed", "swiglu", packed=True),
    _glu_case("geglu_tanh", "geglu", approximate="tanh"),
    _glu_case("geglu_erf_packed", "geglu", packed=True),
    _softmax_case("softmax"),
    _softmax_case("softmax_masked", _masked_inputs, scale=0.5),
    _softmax_case("log_softmax"),
    _loss_case("cross_entropy", label_smoothing=0.1),
    _loss_case("cross_entropy_in_backward", gradient_in_forward=False, softcap=5.0),
    _glu_case("relu2_glu", "relu2_glu"),
    _glu_case("relu2_glu_packed", "relu2_glu", packed=True),
    _bias_act_case("bias_gelu", "bias_gelu", 1),
    _bias_act_case("relu2", "relu2", 1),
    _bias_act_case("bias_swiglu", "bias_swiglu", 2),
    _bias_act_case("bias_geglu_tanh", "bias_geglu", 2, approximate="tanh"),
    _bias_packed_case("bias_swiglu_packed", "bias_swiglu"),
    _bias_packed_case("bias_geglu_packed", "bias_geglu"),
    _mlp_case("gated_mlp"),
    _mlp_case("gated_mlp_biased_tanh", biased=True, activation="gelu_pytorch_tanh"),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def case_named(name) -> Case:
    return next(case for case in CASES if case.name == name)
