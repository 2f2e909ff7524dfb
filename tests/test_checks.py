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
from registry import OPS, every_op, overload, small_calls, written

_CALLS = small_calls()


def valid(op: str) -> dict:
    """Arguments by name that the op takes, every tensor that is optional among them."""
    return tree_map_only(Tensor, torch.clone, _CALLS[op][0])


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
every_tensor = pytest.mark.parametrize("op, name, index", EVERY_TENSOR, ids=lambda x: "" if x is None else str(x))


def changed(op: str, name: str, index: int | None, change) -> dict:
    values = valid(op)
    if index is None:
        return values | {name: change(values[name])}
    return values | {name: [*values[name][:index], change(values[name][index])]}


def fakes(values: dict, mode: FakeTensorMode) -> dict:
    return tree_map_only(Tensor, mode.from_tensor, values)


def error_of(function, *args) -> tuple[type, str]:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        function(*args)
    return caught.type, str(caught.value)


# A longer last dimension fits what has none of its size prescribed, or may have more columns; there it is another
# dimension too many.
_ANY_LAST = {("add_adapters_", "y"), ("decode_attention", "block_table"), ("rope_kv_write", "block_table"),
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


@every_op
def test_float64_on_a_gpu(op):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        values = tree_map_only(Tensor, lambda x: x.to(torch.float64) if x.is_floating_point() else x, valid(op))
        values = tree_map_only(Tensor, lambda x: torch.empty_like(mode.from_tensor(x), device="cuda"), values)
        assert "is float64, which is supported on the CPU only" in error_of(call, op, values)[1]


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
    values = valid(op) | {name: None}
    error = error_of(call, op, values)
    assert error == (RuntimeError, f"{op}: {name} must be a tensor, got None")
    with FakeTensorMode() as mode:
        assert error_of(call, op, fakes(values, mode)) == error


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
        if name == "up" and op in ("swiglu", "geglu", "glu") and value is None:
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
     ("attention", "softcap", -1), ("attention", "window_left", -2), ("attention", "window_right", -2),
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
    with pytest.raises(ValueError, match=r"gated_mlp: activation must be 'silu', .* got 'relu6'"):
        llmkernels.gated_mlp(**public_values("gated_mlp") | {"activation": "relu6"})
    with pytest.raises(ValueError, match="rope: layout must be 'bthd' or 'bhtd', got 'thd'"):
        llmkernels.rope(**public_values("rope"), layout="thd")
    with pytest.raises(ValueError, match="rms_norm_rope: layout must be 'bthd' or 'bhtd', got 'thd'"):
        llmkernels.rms_norm_rope(**public_values("rms_norm_rope"), layout="thd")


_X, _ONES = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8)
_Q, _ANGLES = torch.ones(1, 3, 2, 8, dtype=torch.bfloat16), torch.ones(3, 8)
OTHER_DTYPES = {
    r"rms_norm: weight must have shape \[8\] .* got \[1\]": lambda: llmkernels.rms_norm(_X, _ONES[:1]),
    r"rms_norm: weight must be on cpu, got meta": lambda: llmkernels.rms_norm(_X, _ONES.to("meta")),
    r"rms_norm: weight_offset must be finite": lambda: llmkernels.rms_norm(_X, _ONES, weight_offset=math.inf),
    r"rms_norm: x must be float32": lambda: llmkernels.rms_norm(_X.int(), _ONES, cast_before_weight=False),
    r"add_rms_norm: weight must have shape \[8\]": lambda: llmkernels.add_rms_norm(_X, _X, _ONES.view(1, 8)),
    r"add_rms_norm: residual must have the shape of x, \[3, 8\]": lambda: llmkernels.add_rms_norm(_X, _X[0], _ONES),
    r"add_rms_norm: residual must be on the device": lambda: llmkernels.add_rms_norm(_X, _X.to("meta"), _ONES),
    r"add_layer_norm: residual must have the shape of x": lambda: llmkernels.add_layer_norm(_X, _X[:1], _ONES),
    r"rms_norm_linear: norm_weight must have shape \[8\]": lambda: llmkernels.rms_norm_linear(_X, _ONES[:1], _ANGLES),
    r"rms_norm_rope: k_weight must have shape \[8\] \(head_dim\)": lambda: llmkernels.rms_norm_rope(
        _Q, _Q, _ONES, _ONES[:1], _ANGLES, _ANGLES
    ),
    r"rms_norm_rope: q_weight must have shape \[16\] \(heads": lambda: llmkernels.rms_norm_rope(
        _Q, _Q, _ONES, _ONES, _ANGLES, _ANGLES, row_wise=True
    ),
    r"rms_norm_rope: k must have shape \(batch": lambda: llmkernels.rms_norm_rope(
        _Q, _Q[0], _ONES, _ONES, _ANGLES, _ANGLES, row_wise=True
    ),
    r"rms_norm_rope: q must be float32": lambda: llmkernels.rms_norm_rope(
        _Q.int(), _Q.int(), _ONES, _ONES, _ANGLES, _ANGLES
    ),
    r"rms_norm_rope: eps must be finite": lambda: llmkernels.rms_norm_rope(
        _Q, _Q, _ONES, _ONES, _ANGLES, _ANGLES, eps=-1.0
    ),
}


@pytest.mark.parametrize("message, call", OTHER_DTYPES.items(), ids=range(len(OTHER_DTYPES)))
def test_norm_weights_of_another_dtype_are_checked_too(message, call):
    """Such a norm is composed of two ops, the second one PyTorch's, which would broadcast."""
    with pytest.raises((RuntimeError, ValueError), match=message):
        call()


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_that_are_promoted_to_none(dtype):
    """The error names the argument of another dtype, and not what PyTorch can not promote."""
    x, other = torch.ones(2, 4), torch.ones(2, 4).to(dtype)
    calls = {
        "rms_norm: weight": lambda: llmkernels.rms_norm(x, other[0]),
        "layer_norm: bias": lambda: llmkernels.layer_norm(x, None, other[0]),
        "add_rms_norm: residual": lambda: llmkernels.add_rms_norm(x, other),
        "add_layer_norm: residual": lambda: llmkernels.add_layer_norm(x, other),
        "swiglu: up": lambda: llmkernels.swiglu(x, other),
        "bias_gelu: bias": lambda: llmkernels.bias_gelu(x, other[0]),
    }
    for what, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{what} must be float32, float16, bfloat16 or float64, got "):
            call()
