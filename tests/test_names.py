"""Names of the public functions: one name has one meaning in all of them."""

import inspect
import typing

import pytest
import torch

import llmkernels

OPS = [getattr(llmkernels, name) for name in llmkernels.__all__]
OPS = [op for op in OPS if inspect.isfunction(op) and op.__module__.startswith("llmkernels.ops.")]
OWN_OPTIONS = ["state_dtype", "stochastic_rounding", "rounding_seed", "max_grad_norm"]  # of optimizers
MODULES = [getattr(llmkernels.nn, name) for name in llmkernels.nn.__all__]


def parameters():
    """(name, function, annotation without None, default) of each parameter."""
    for function in (*OPS, *MODULES, *(module.forward for module in MODULES)):
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in ("self", "bias"):  # a flag of modules and a tensor of functions, as in PyTorch
                kinds = set(typing.get_args(hints[name]) or [hints[name]]) - {type(None)}
                where = getattr(function, "__qualname__", function)
                of_layer_norm = name == "eps" and "layernorm" in where.lower().replace("_", "")
                yield name, where, kinds, 1e-6 if of_layer_norm else parameter.default  # 1e-5 in PyTorch, too


def test_one_type_and_one_default_for_each_name():
    seen = {}
    for name, function, kinds, default in parameters():
        first, expected, value = seen.setdefault(name, (function, kinds, default))
        assert kinds == expected, f"{name}: {kinds} in {function}, {expected} in {first}"
        required = inspect.Parameter.empty in (default, value)
        assert required or default == value, f"{name}: {default!r} in {function}, {value!r} in {first}"


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_constructors_of_optimizers(name):
    """Those of torch.optim, and behind them the same arguments in both."""
    ours, torchs = (inspect.signature(getattr(module, name)).parameters for module in (llmkernels.optim, torch.optim))
    own = inspect.signature(llmkernels.optim.Adam).parameters
    assert [*ours.values()][-4:] == [own[option] for option in OWN_OPTIONS]
    assert {option: (p.kind, p.default) for option, p in ours.items() if option not in OWN_OPTIONS} == {
        option: (p.kind, p.default) for option, p in torchs.items()
    }


def public_functions():
    """(name, function) of all that is public: functions, and the constructors, methods and properties of classes."""
    for module in (llmkernels, llmkernels.nn, llmkernels.optim, llmkernels.hf):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found):
                yield name, found
            for attribute, value in vars(found).items() if inspect.isclass(found) else ():
                value = getattr(value, "fget", getattr(value, "__func__", value))
                if inspect.isfunction(value) and (attribute == "__init__" or not attribute.startswith("_")):
                    yield f"{name}.{attribute}", value


def test_every_public_function_has_types():
    """Type checkers take what has none for Any; tests/public_types.py is what they make of the rest."""
    functions = dict(public_functions())
    assert {"rms_norm", "KVCache.capacity", "FP8Linear.from_linear", "AdamW.__init__"} <= {*functions}
    for name, function in functions.items():
        hints = typing.get_type_hints(function)
        wanted = {*inspect.signature(function).parameters, "return"} - {"self", "cls"}
        missing = wanted - hints.keys() - ({"return"} if name.endswith("__init__") else set())
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3)])
def test_position_ids_are_positions_of_tokens(shape):
    """(T,), (1, T) or (B, T) in every function; (N,) once meant tokens in one op and sequences in another."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 2, 8, generator=generator), torch.randn(2, 3, 1, 8, generator=generator)
    cos, sin = torch.randn(9, 8, generator=generator), torch.randn(9, 8, generator=generator)
    position_ids = torch.randint(9, shape, generator=generator)
    expected = llmkernels.rope(q, k, cos, sin, position_ids)
    full = position_ids.expand(2, 3)
    found = llmkernels.rope(q, k, cos[full], sin[full])
    assert all(map(torch.equal, found, expected))
    k_cache, v_cache = torch.zeros(2, 2, 3, 1, 8)
    lengths = torch.full((2,), 3, dtype=torch.int32)
    llmkernels.rope_kv_write(rotated := q.clone(), k, k, cos, sin, position_ids, k_cache, v_cache, lengths)
    assert torch.equal(rotated, expected[0]) and torch.equal(k_cache, expected[1])
    module = llmkernels.nn.RotaryEmbedding(8)
    assert all(map(torch.equal, module(q, k, position_ids), module(q, k, full)))


def test_positions_of_sequences_are_refused():
    q = torch.zeros(2, 3, 1, 8)
    with pytest.raises(RuntimeError, match="position_ids"):
        llmkernels.rope(q, q, torch.ones(9, 8), torch.ones(9, 8), torch.zeros(2, dtype=torch.long))
    with pytest.raises(RuntimeError, match="position_ids"):
        lengths, cache = torch.full((2,), 3, dtype=torch.int32), torch.zeros(2, 2, 3, 1, 8)
        llmkernels.rope_kv_write(
            q, q.clone(), q.clone(), *torch.ones(2, 9, 8), torch.zeros(2, dtype=torch.long), *cache, lengths
        )


def test_public_names():
    """Everything in __all__ is there; what a public class raises is public, too."""
    assert all(hasattr(llmkernels, name) for name in llmkernels.__all__)
    assert {"KVCache", "OutOfPages", "unpatch"} <= set(llmkernels.__all__)
