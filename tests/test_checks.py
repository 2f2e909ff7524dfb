"""Every op refuses what does not fit, by name: each tensor and number of each op in turn, taken from its schema.

A fake (meta, FakeTensorMode, torch.compile, torch.export) has to raise what the op raises with real tensors.
"""

import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import llmkernels
from oracles import angles

BATCH, HEADS, KV_HEADS, DIM, CAPACITY, VOCAB = 2, 4, 2, 8, 6, 10

_F32, _I32 = torch.float32, torch.int32


def _per_sequence(value: int) -> Tensor:
    return torch.full((BATCH,), value, dtype=_I32)


def valid(op: str) -> dict:
    """Arguments by name that the op takes, every tensor that is optional among them."""
    x, weight = torch.ones(BATCH, 3, 8), torch.ones(8)
    q, k = torch.ones(BATCH, 3, HEADS, DIM), torch.ones(BATCH, 3, KV_HEADS, DIM)
    cos, sin = angles(5, DIM)
    norm_options = {"eps": 1e-6, "weight_offset": 0.0}
    rope = {"q": q, "k": k, "cos": cos, "sin": sin, "position_ids": torch.arange(3).expand(BATCH, 3)}
    qk_norm = {"q": q, "k": k, "q_weight": torch.ones(DIM), "k_weight": torch.ones(DIM), **dict(list(rope.items())[2:]),
               **norm_options}  # fmt: skip
    head_norms = {"q_norm_weight": torch.ones(DIM), "k_norm_weight": torch.ones(DIM), **norm_options}
    rotation = {"cos": cos, "sin": sin, "positions": _per_sequence(1), "cache_seqlens": _per_sequence(2)}
    caches = {name: torch.ones(BATCH, CAPACITY, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
    pages = {"block_table": torch.arange(BATCH, dtype=_I32)[:, None], "softmax_scale": 0.5, "window_left": 4}
    lengths = {"cache_seqlens": _per_sequence(3), "cache_leftpad": _per_sequence(0)}
    rows = {"norm_weight": weight, "weight": torch.ones(6, 8)}
    handoff = {"scaled": torch.ones(BATCH * 3, 8), "squares": torch.ones(2, 64)}
    add = {"residual": torch.ones(BATCH, 3, 6), "x": x, "weight": torch.ones(6, 8), "bias": torch.ones(6), "alpha": 0.5}
    loss = {"logits": x, "target": torch.ones(BATCH, 3, dtype=torch.long), "weight": weight, "ignore_index": -100,
            "reduction": "mean", "label_smoothing": 0.1, "lse_square_scale": 0.0, "softcap": 0.0}  # fmt: skip
    saved_loss = {**loss, "reduction": "none", "lse": torch.ones(BATCH, 3), "sums": torch.ones(2)}
    linear_loss = {"x": x, "linear_weight": torch.ones(6, 8), "linear_bias": torch.ones(6),
                   **{name: value for name, value in loss.items() if name != "logits"}, "weight": torch.ones(6),
                   "max_logits_bytes": 100, "at_once": False}  # fmt: skip
    adapter = {"lora_a": torch.ones(2, 8), "lora_b": torch.ones(6, 2), "scaling": 0.5}
    one = torch.ones(1)
    lists = {name: [torch.ones(2, 3), torch.ones(5)] for name in
             ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")}  # fmt: skip
    values = {
        "rms_norm": {"x": x, "weight": weight, **norm_options},
        "add_rms_norm": {"x": x, "residual": x.clone(), "weight": weight, **norm_options},
        "rms_norm_add_": {"residual": x, "x": x.clone(), "weight": weight, **norm_options, "alpha": 0.5},
        "rms_norm_backward": {"grad_y": x, "x": x, "weight": weight, "grad_sum": x, **norm_options,
                              "cast_before_weight": True, "needs_grad_weight": True},
        "layer_norm": {"x": x, "weight": weight, "bias": weight, "eps": 1e-5},
        "add_layer_norm": {"x": x, "residual": x.clone(), "weight": weight, "bias": weight, "eps": 1e-5},
        "layer_norm_backward": {"grad_y": x, "x": x, "weight": weight, "grad_sum": x, "eps": 1e-5,
                                "needs_grad_weight": True, "needs_grad_bias": True},
        "rope": rope,
        "rope_": rope,
        "rope_backward": {"grad_q": q, "grad_k": k, **dict(list(rope.items())[2:]), "heads_first": False,
                          "interleaved": False, "rotary_dim": DIM},
        "rms_norm_rope": qk_norm,
        "rms_norm_rope_": qk_norm,
        "rms_norm_rope_backward": {"grad_q": q, "grad_k": k, **qk_norm, "cast_before_weight": True, "row_wise": False,
                                   "heads_first": False, "interleaved": False, "rotary_dim": DIM,
                                   "needs_grad_q_weight": True, "needs_grad_k_weight": True},
        "swiglu": {"gate": x, "up": x},
        "swiglu_backward": {"grad_y": x, "gate": x, "up": x},
        "swiglu_packed": {"gate_up": x},
        "swiglu_packed_backward": {"grad_y": x[..., :4], "gate_up": x},
        "geglu": {"gate": x, "up": x},
        "geglu_backward": {"grad_y": x, "gate": x, "up": x, "approximate": "none"},
        "geglu_packed": {"gate_up": x},
        "geglu_packed_backward": {"grad_y": x[..., :4], "gate_up": x, "approximate": "none"},
        "softmax": {"x": x, "mask": torch.ones(3, 8), "scale": 0.5, "causal": True},
        "softmax_backward": {"grad_y": x, "y": x, "scale": 0.5},
        "log_softmax": {"x": x, "scale": 0.5},
        "log_softmax_backward": {"grad_y": x, "y": x, "scale": 0.5},
        "cross_entropy": loss,
        "cross_entropy_": loss,
        "cross_entropy_backward": {"grad_loss": torch.ones(BATCH, 3), **saved_loss},
        "cross_entropy_backward_": {"grad": x.clone(), "grad_loss": torch.ones(BATCH, 3), **saved_loss},
        "linear_cross_entropy": linear_loss,
        "linear_cross_entropy_backward": {"grad_loss": torch.ones(BATCH, 3), **linear_loss,
                                          "lse": torch.ones(BATCH, 3), "reduction": "none", "needs_x": True,
                                          "needs_weight": True, "needs_bias": True},
        "cross_entropy_scale_": {"grad": x, "grad_loss": torch.ones(BATCH, 3)},
        "relu2_glu": {"gate": x, "up": x},
        "relu2_glu_backward": {"grad_y": x, "gate": x, "up": x},
        "relu2_glu_packed": {"gate_up": x},
        "relu2_glu_packed_backward": {"grad_y": x[..., :4], "gate_up": x},
        "bias_gelu": {"x": x, "bias": weight},
        "bias_gelu_backward": {"grad_y": x, "x": x, "bias": weight, "approximate": "none", "needs_grad_bias": True},
        "relu2": {"x": x, "bias": weight},
        "relu2_backward": {"grad_y": x, "x": x, "bias": weight, "needs_grad_bias": True},
        "bias_swiglu": {"gate": x, "up": x, "gate_bias": weight, "up_bias": weight},
        "bias_swiglu_backward": {"grad_y": x, "gate": x, "up": x, "gate_bias": weight, "up_bias": weight,
                                 "needs_grad_gate_bias": True, "needs_grad_up_bias": True},
        "bias_geglu": {"gate": x, "up": x, "gate_bias": weight, "up_bias": weight},
        "bias_geglu_backward": {"grad_y": x, "gate": x, "up": x, "gate_bias": weight, "up_bias": weight,
                                "approximate": "tanh", "needs_grad_gate_bias": True, "needs_grad_up_bias": True},
        "bias_swiglu_packed": {"gate_up": x, "bias": weight},
        "bias_swiglu_packed_backward": {"grad_y": x[..., :4], "gate_up": x, "bias": weight, "needs_grad_bias": True},
        "bias_geglu_packed": {"gate_up": x, "bias": weight},
        "bias_geglu_packed_backward": {"grad_y": x[..., :4], "gate_up": x, "bias": weight, "approximate": "tanh",
                                       "needs_grad_bias": True},
        "glu_packed_backward": {"grad_y": x[..., :4], "gate_up": x, "activation": "silu"},
        "glu_packed_backward_": {"grad_y": x[..., :4], "gate_up": x, "activation": "gelu"},
        "gated_mlp": {"x": x, "gate_up_weight": torch.ones(10, 8), "down_weight": torch.ones(6, 5),
                      "gate_up_bias": torch.ones(10), "down_bias": torch.ones(6)},
        "lora_linear": {"x": x, "weight": torch.ones(6, 8), **adapter, "bias": torch.ones(6)},
        "add_lora": {"y": torch.ones(BATCH, 3, 6), "x": x, **adapter},
        "lora_linear_backward": {"grad_y": torch.ones(BATCH, 3, 6), "x": x, "weight": torch.ones(6, 8), **adapter,
                                 "h": torch.ones(BATCH * 3, 2), "a_parts": torch.ones(0), "b_parts": torch.ones(0),
                                 "split": False, "needs_x": True, "needs_a": True, "needs_b": True},
        "scale_softcap": {"logits": x, "scale": 0.5, "softcap": 30.0},
        "sample": {"logits": torch.ones(BATCH, VOCAB), "temperature": torch.ones(BATCH), "top_k": _per_sequence(2),
                   "top_p": torch.ones(BATCH), "min_p": torch.zeros(BATCH), "repetition_penalty": torch.ones(BATCH),
                   "seen": torch.zeros(BATCH, VOCAB, dtype=torch.bool), "rng_state": torch.zeros(2).long(),
                   "temperature_value": 1.0, "top_p_value": 1.0, "min_p_value": 0.0, "repetition_penalty_value": 1.0},
        "linear": {"x": x, "weight": torch.ones(6, 8), "bias": torch.ones(6)},
        "rms_norm_linear": {"x": x, **rows, "bias": torch.ones(6), **norm_options, **handoff},
        "linear_add_": add,
        "linear_add_scale_": {**add, "next_weight": torch.ones(10, 6), "next_norm_weight": torch.ones(6),
                              "next_weight_offset": 0.0},
        "glu_linear": {"x": x, "weight": torch.ones(6, 8)},
        "rms_norm_glu_linear": {"x": x, **rows, **norm_options, **handoff},
        "fp8_quantize": {"x": x},
        "rms_norm_fp8_quantize": {"x": x, "weight": weight, **norm_options},
        "swiglu_fp8_quantize": {"gate": x, "up": x},
        "fp8_linear": {"x": x.to(torch.float8_e4m3fn), "weight": torch.ones(6, 8).to(torch.float8_e4m3fn),
                       "x_scale": torch.ones(BATCH, 3, 1), "weight_scale": torch.ones(6, 1),
                       "bias": torch.ones(6).bfloat16()},
        "decode_attention": {"q": q, **caches, **lengths, **pages, "softcap": 0.0},
        "rope_kv_write": {**rope, "v": k.clone(), **caches, "cache_seqlens": _per_sequence(3),
                          "block_table": pages["block_table"], **head_norms},
        "rope_decode_attention": {"qkv": torch.ones(BATCH, (HEADS + 2 * KV_HEADS) * DIM), **rotation,
                                  "cache_leftpad": _per_sequence(0), **caches, **pages, "heads": HEADS,
                                  "softcap": 0.0, **head_norms},
        "adam_": {**lists, "steps": [one, one], "lr": one, "grad_scale": one, "found_inf": torch.zeros(1),
                  "grad_norm": one, "counter": torch.zeros(1, dtype=_I32), "rounding_seed": 5, "indices": [0, 3],
                  "lr_value": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0,
                  "decoupled_weight_decay": True, "maximize": False},
        "grad_norm": {"grads": lists["grads"], "norm_type": 2.0},
        "clip_grads_": {"grads": lists["grads"], "norm": one, "max_norm": 1.0},
    }  # fmt: skip
    return tree_map_only(Tensor, torch.clone, values[op])


OPS = sorted(name.removeprefix("llmkernels::") for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("llmkernels::") and not name.endswith(".no_grad"))  # fmt: skip


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.llmkernels, op).default


def call(op: str, values: dict):
    return overload(op)(**values)


def tensors_of(op: str) -> list[tuple[str, int | None]]:
    """The name of every tensor argument, and the last index of a list."""
    return [
        (name, len(value) - 1 if isinstance(value, list) else None)
        for name, value in valid(op).items()
        if isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))
    ]


EVERY_TENSOR = [(op, name, index) for op in OPS for name, index in tensors_of(op)]
every_op = pytest.mark.parametrize("op", OPS)
every_tensor = pytest.mark.parametrize("op, name, index", EVERY_TENSOR, ids=lambda x: "" if x is None else str(x))


def changed(op: str, name: str, index: int | None, change) -> dict:
    values = valid(op)
    if index is None:
        return values | {name: change(values[name])}
    return values | {name: [*values[name][:index], change(values[name][index])]}


def written(op: str) -> list[str]:
    """The arguments that the schema says are written to."""
    return [argument.name for argument in overload(op)._schema.arguments if argument.is_write]


def fakes(values: dict, mode: FakeTensorMode) -> dict:
    return tree_map_only(Tensor, mode.from_tensor, values)


def error_of(function, *args) -> tuple[type, str]:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        function(*args)
    return caught.type, str(caught.value)


# A longer last dimension fits what has none of its size prescribed; there it is another dimension too many.
_ANY_LAST = {("decode_attention", "block_table"), ("rope_kv_write", "block_table"),
             ("rope_decode_attention", "block_table")}  # fmt: skip


# Lists of whatever shapes.
_ANY_SHAPE = {("grad_norm", "grads"), ("clip_grads_", "grads")}


def wrong_shape(op: str, name: str):
    if (op, name) in _ANY_LAST:
        return lambda x: x[None]
    if (op, name) in (
        ("log_softmax", "x"),
        ("scale_softcap", "logits"),
        ("cross_entropy_scale_", "grad"),
        ("fp8_quantize", "x"),
    ):  # any shape but a scalar
        return lambda x: x.flatten()[0]
    return lambda x: x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)


@every_op
def test_the_values_are_valid(op, device):
    call(op, tree_map_only(Tensor, lambda x: x.to(device), valid(op)))
    call(op, tree_map_only(Tensor, lambda x: x.to("meta"), valid(op)))
    assert {argument.name for argument in overload(op)._schema.arguments if "Tensor" in str(argument.type)} == {
        name for name, _ in tensors_of(op)
    }


@pytest.mark.parametrize("kind", ["dtype", "shape"])
@every_tensor
def test_fakes_refuse_what_the_op_refuses(op, name, index, kind):
    if kind == "shape" and (op, name) in _ANY_SHAPE:
        pytest.skip("any shape fits")
    change = (lambda x: x.to(torch.int16)) if kind == "dtype" else wrong_shape(op, name)
    values = changed(op, name, index, change)
    before = tree_map_only(Tensor, torch.clone, values)
    error = error_of(call, op, values)
    assert error[0] is RuntimeError and error[1].startswith(f"{op}: ")
    if kind == "dtype":
        assert name.removesuffix("s") in error[1] or "gate" in error[1] or op.endswith("backward")
    for argument in written(op):
        torch.testing.assert_close(values[argument], before[argument], rtol=0, atol=0)
    assert error_of(call, op, tree_map_only(Tensor, lambda x: x.to("meta"), values)) == error
    with FakeTensorMode() as mode:
        assert error_of(call, op, fakes(values, mode)) == error


@every_tensor
def test_tensors_on_two_devices(op, name, index):
    first = next(iter(tensors_of(op)))[0]
    if name == first and len(tensors_of(op)) == 1:
        pytest.skip("one tensor")
    values = changed(op, name, index, lambda x: x.to("meta"))
    error = error_of(call, op, values)
    schema_names = [argument.name for argument in overload(op)._schema.arguments]
    first = next(argument for argument in schema_names if argument in values)
    first_is_list = isinstance(values[first], list)
    if name == first and not first_is_list:
        assert re.fullmatch(rf"{op}: \S+ must be on the device of {first}, meta, got cpu", error[1])
    else:
        where = name if index is None else f"{name}[{index}]"
        first += "[0]" * first_is_list
        assert error[1] == f"{op}: {where} must be on the device of {first}, cpu, got meta"


def write_to_views() -> None:
    """Calls every op that writes with each of its tensors as a view that is resolved when it is read."""
    views = {"negated": lambda x: torch._neg_view(x.neg()), "conjugated": lambda x: x.to(torch.complex64).conj()}
    for op, name, index in EVERY_TENSOR:
        first = changed(op, name, index, torch.clone)[name]
        if not written(op) or not (first if index is None else first[index]).is_floating_point():
            continue
        for kind, view in views.items():
            print(op, name, kind, flush=True)  # the last line, should the process end
            values = changed(op, name, index, view)
            if name in written(op):
                where = name if index is None else f"{name}[{index}]"
                assert error_of(call, op, values)[1].startswith(f"{op}: {where} must not be a view that is negated or")
            elif kind == "negated":
                expected = tree_map_only(Tensor, lambda x: x.clone().resolve_neg(), values)
                call(op, expected)
                call(op, values)
                for argument in written(op):
                    torch.testing.assert_close(values[argument], expected[argument], rtol=0, atol=0)


def test_writing_to_views():
    """In a process of its own, which torch's fallback would end."""
    command = [sys.executable, "-c", "import test_checks; test_checks.write_to_views()"]
    folders = Path(llmkernels.__file__).parent.parent, Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]
    assert "rope_ q negated" in done.stdout and "adam_ params negated" in done.stdout


@pytest.mark.parametrize(
    "name", ["add_rms_norm", "rope", "decode_attention", "rope_decode_attention", "linear_add_", "sample"]
)
def test_float64_on_a_gpu(name):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        values = tree_map_only(Tensor, lambda x: x.to(torch.float64) if x.is_floating_point() else x, valid(name))
        values = tree_map_only(Tensor, lambda x: torch.empty_like(mode.from_tensor(x), device="cuda"), values)
        assert "is float64, which is supported on the CPU only" in error_of(call, name, values)[1]


@every_op
def test_dynamic_shapes(op):
    """Sizes without a value are checked when the op runs; those with one as they are in the example."""
    torch._dynamo.reset()
    name, index = tensors_of(op)[-1]
    compiled = torch.compile(lambda values: call(op, values), fullgraph=True, dynamic=True, backend="eager")
    compiled(valid(op))
    error = error_of(call, op, changed(op, name, index, lambda x: x.to(torch.int16)))
    with pytest.raises(Exception, match=re.escape(error[1].split(",")[0])):
        compiled(changed(op, name, index, lambda x: x.to(torch.int16)))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_nobody_knows():
    """What a mask leaves: checked when the op runs."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, mask, weight: llmkernels.rms_norm(x[mask], weight), fullgraph=True, backend="aot_eager"
    )
    x, mask = torch.randn(5, 8), torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(compiled(x, mask, torch.ones(8)), llmkernels.rms_norm(x[mask], torch.ones(8)))
    with pytest.raises(Exception, match=r"rms_norm: weight must have shape \[8\]"):
        compiled(x, mask, torch.ones(7))


class Calls(torch.nn.Module):
    def __init__(self, op: str):
        super().__init__()
        self.op = op

    def forward(self, values):
        return call(self.op, values)


@every_op
def test_export(op):
    name, index = tensors_of(op)[-1]
    fits = (op, name) in _ANY_SHAPE
    values = changed(op, name, index, (lambda x: x.to(torch.int16)) if fits else wrong_shape(op, name))
    error = error_of(call, op, values)
    torch.export.export(Calls(op), (valid(op),))
    with pytest.raises(Exception, match=re.escape(error[1])):
        torch.export.export(Calls(op), (values,))


# None and other kinds of Python objects.


@every_tensor
def test_none_for_a_tensor(op, name, index):
    argument = next(argument for argument in overload(op)._schema.arguments if argument.name == name)
    if "Optional" in str(argument.type) or index is not None or len(tensors_of(op)) == 1:
        pytest.skip("may be None, or torch names it")
    error = error_of(call, op, valid(op) | {name: None})
    assert error == (RuntimeError, f"{op}: {name} must be a tensor, got None")
    with FakeTensorMode() as mode:
        assert error_of(call, op, fakes(valid(op) | {name: None}, mode)) == error


def public_values(op: str) -> dict:
    names = inspect.signature(getattr(llmkernels, op)).parameters
    return {name: value for name, value in valid(op).items() if name in names}


PUBLIC = [op for op in OPS if hasattr(llmkernels, op)]
PARAMETERS = [
    (op, name, parameter.annotation)
    for op in PUBLIC
    for name, parameter in inspect.signature(getattr(llmkernels, op)).parameters.items()
    if parameter.annotation is not bool  # torch takes the truth of any object
]


@pytest.mark.parametrize("op, name, annotation", PARAMETERS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_kinds_of_objects(op, name, annotation):
    public = getattr(llmkernels, op)
    public(**public_values(op))
    is_tensor = "Tensor" in str(annotation)
    wrong = [b"", *(() if "None" in str(annotation) or name == "layout" else (None,)), *([[1.0]] if is_tensor else [])]
    for value in wrong:
        if name == "up" and op in ("swiglu", "geglu") and value is None:
            continue
        kind = "layout must be" if name == "layout" else rf"{op}: {name} must be an? "
        with pytest.raises((TypeError, ValueError) if name == "layout" else TypeError, match=kind):
            public(**public_values(op) | {name: value})


# Numbers.

NUMBERS = [
    (op, argument.name)
    for op in OPS
    for argument in overload(op)._schema.arguments
    if str(argument.type) in ("float", "Optional[float]")
]


def check_number(op: str, name: str, number) -> None:
    """The op, its fake and its public function, if it has one, all refuse the number by name."""
    values = {key: None if key + "_value" == name else value for key, value in valid(op).items()} | {name: number}
    error = error_of(call, op, values)
    argument = name.removesuffix("_value")
    assert error[0] is RuntimeError and re.match(rf"{op}: {argument} must .*, got {re.escape(str(number))}$", error[1])
    with FakeTensorMode() as mode:
        assert error_of(call, op, fakes(values, mode)) == error
    if op in PUBLIC and argument in inspect.signature(getattr(llmkernels, op)).parameters:
        with pytest.raises(ValueError, match=re.escape(error[1])):
            getattr(llmkernels, op)(**public_values(op) | {argument: number})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op, name", NUMBERS)
def test_numbers_that_are_none(op, name, number):
    if name == "temperature_value" and number == math.inf:
        pytest.skip("the limit of a high temperature: all tokens are as likely")
    if name in ("max_norm", "norm_type") and number == math.inf:
        pytest.skip("a norm")
    check_number(op, name, number)


@pytest.mark.parametrize(
    "op, name, number",
    [("rms_norm", "eps", -1e-6), ("layer_norm", "eps", -1e-6), ("decode_attention", "softcap", -1),
     ("decode_attention", "window_left", -2),
     ("rope", "rotary_dim", 3), ("rope", "rotary_dim", 0), ("rope", "rotary_dim", 10),
     ("rms_norm_rope", "eps", -1e-6), ("rms_norm_rope", "rotary_dim", 3), ("sample", "top_k_value", -1),
     ("sample", "temperature_value", -0.5), ("sample", "top_p_value", 0), ("sample", "min_p_value", 1.5),
     ("sample", "repetition_penalty_value", 0),
     ("sample", "repetition_penalty_value", 1e-50), ("sample", "repetition_penalty_value", 1e50),
     ("cross_entropy", "label_smoothing", 1.5), ("cross_entropy", "lse_square_scale", -1),
     ("cross_entropy_", "softcap", -1), ("scale_softcap", "softcap", -1),
     ("rope_decode_attention", "heads", -1), ("rope_decode_attention", "window_left", -2),
     ("rope_kv_write", "eps", -1e-6), ("rope_decode_attention", "eps", -1e-6),
     ("adam_", "lr_value", -0.5), ("adam_", "beta1", 1),
     ("adam_", "beta2", -0.1), ("adam_", "eps", -1e-8), ("adam_", "weight_decay", -0.5), ("adam_", "max_norm", -0.5),
     ("grad_norm", "norm_type", 1), ("clip_grads_", "max_norm", -0.5)],
)  # fmt: skip
def test_numbers_out_of_range(op, name, number):
    check_number(op, name, number)


def test_words_that_are_unknown():
    gate = torch.ones(2, 8)
    for arguments in ((gate, gate), (gate,)):
        with pytest.raises(ValueError, match=r"geglu(_packed)?: approximate must be 'tanh' or 'none'.*, got 'erf'"):
            llmkernels.geglu(*arguments, approximate="erf")
    with pytest.raises(ValueError, match=r"gated_mlp: activation must be 'silu', 'gelu' .*, got 'relu'"):
        llmkernels.gated_mlp(**public_values("gated_mlp"), activation="relu")
    with pytest.raises(ValueError, match="rope: layout must be 'bthd' or 'bhtd', got 'thd'"):
        llmkernels.rope(**public_values("rope"), layout="thd")
    with pytest.raises(ValueError, match="rms_norm_rope: layout must be 'bthd' or 'bhtd', got 'thd'"):
        llmkernels.rms_norm_rope(**public_values("rms_norm_rope"), layout="thd")


def test_integers_beyond_64_bits():
    logits = torch.ones(2, 8)
    assert llmkernels.sample(logits, 0.0, top_k=2**40).tolist() == [0, 0]  # more than there are: off
    with pytest.raises(ValueError, match="sample: top_k must fit in 64 bits"):
        llmkernels.sample(logits, top_k=2**70)
    values = public_values("decode_attention")
    with pytest.raises(ValueError, match="decode_attention: window_size must fit in 64 bits"):
        llmkernels.decode_attention(**values, window_size=(2**70, 0))


# Memory that is shared.

WRITTEN = [(op, name) for op in OPS for name in written(op)]


def elements(value) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("op, name", WRITTEN)
def test_targets_that_overlap_themselves(op, name):
    def expand(x: Tensor) -> Tensor:
        return x[:1].expand_as(x)

    values = valid(op)
    index = len(values[name]) - 1 if isinstance(values[name], list) else None
    if elements(values[name])[-1].numel() == 1:
        pytest.skip("one element")
    where = name if index is None else f"{name}[{index}]"
    values = changed(op, name, index, expand)
    error = error_of(call, op, values)
    assert error[0] is RuntimeError and f"{op}: {where} must not overlap itself" in error[1]
    with FakeTensorMode() as mode:
        assert error_of(call, op, fakes(values, mode)) == error


@pytest.mark.parametrize("op, name", WRITTEN)
def test_targets_that_overlap_another_tensor(op, name, device):
    """Shares the last bytes of the target with the first ones of each other tensor in turn."""
    for other, index in tensors_of(op):
        values = tree_map_only(Tensor, lambda x: x.to(device), valid(op))
        target, shared = elements(values[name])[0], elements(values[other])[index or 0]
        if target is shared:
            continue
        offset = (target.nbytes - 1) // 8 * 8  # a multiple of every element size
        memory = torch.zeros(max(offset + shared.nbytes, target.nbytes), dtype=torch.uint8, device=device)
        for x, start in ((target, 0), (shared, offset)):
            memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)

        def at(x, start, memory=memory):
            return memory[start : start + x.nbytes].view(x.dtype).view(x.shape)

        def replaced(value, x, start, at=at):
            if isinstance(value, list):
                return [at(y, start) if y is x else y for y in value]
            return at(value, start)

        values[name] = replaced(values[name], target, 0)
        values[other] = replaced(values[other], shared, offset)
        error = error_of(call, op, values)
        assert error[0] is RuntimeError and "must not share memory with" in error[1]
        assert name in error[1] and other in error[1]


@pytest.mark.parametrize("seed", range(60))
def test_overlap_is_exact(seed):
    """Against a count of the addresses, for random strides: through linear_add_, whose residual may be any matrix."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    memory = torch.zeros(200)
    rows, cols, k = draw(1, 5), draw(1, 5), draw(1, 5)

    def place(*sizes):
        strides = [draw(1, 12) for _ in sizes]
        return memory.as_strided(sizes, strides, draw(0, 60))

    residual, x = place(rows, cols), place(rows, k)
    addresses = [[t.storage_offset() + i * t.stride(0) + j * t.stride(1) for i in range(t.shape[0])
                  for j in range(t.shape[1])] for t in (residual, x)]  # fmt: skip
    itself, each_other = len(set(addresses[0])) < len(addresses[0]), bool({*addresses[0]} & {*addresses[1]})
    arguments = residual, x, torch.ones(cols, k)
    if not itself and not each_other:
        torch.ops.llmkernels.linear_add_(*arguments)
        return
    expected = "residual must not overlap itself" if itself else "residual must not share memory with x"
    with pytest.raises(RuntimeError, match=expected):
        torch.ops.llmkernels.linear_add_(*arguments)
