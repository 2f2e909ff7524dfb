"""What the tests of torch.optim ask of Adam and AdamW, asked of ours: options, errors, groups, closures, hooks."""

import copy

import pytest
import torch

from llmkernels.optim import Adam, AdamW
from optim_cases import (
    TORCH,
    assert_close_lists,
    both,
    drawn,
    every_option,
    loss_of,
    model,
    parameters,
    run,
    same_weights,
    state_of,
    train,
)
from oracles import assert_same


@both
def test_it_learns(ours, device):
    network = model(device)
    losses = train(network, ours(network.parameters(), lr=0.02), 100)
    assert losses[-1] < 0.3 * losses[0]


@both
@every_option
def test_training_follows_torch(ours, options, device):
    network, other = model(device), model(device)
    train(network, ours(network.parameters(), **options), 10)
    train(other, TORCH[ours](other.parameters(), **options), 10)
    same_weights(network, other, rtol=2e-3, atol=2e-4)


def number(value, *shape):
    """An option as a tensor of one element."""
    return torch.tensor(value).reshape(shape)


SWITCHES = {
    "nothing": {},
    "foreach": {"foreach": True},
    "no_foreach": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "capturable_foreach": {"capturable": True, "foreach": True},
}
INPUTS = {
    "lr": {"lr": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "no_weight_decay": {"weight_decay": 0.0},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "amsgrad": {"weight_decay": 0.1, "amsgrad": True},
    "tensor_lr": {"lr": number(0.001), "amsgrad": True, "capturable": True},
    "tensor_lr_1d": {"lr": number(0.001, 1)},
    "tensor_lr_2d": {"lr": number(0.001, 1, 1), "maximize": True},
    "tensor_betas": {"lr": number(0.001), "betas": (number(0.9), number(0.99)), "capturable": True},
    "tensor_betas_nd": {"betas": (number(0.9, 1, 1, 1), number(0.99, 1, 1)), "amsgrad": True, "capturable": True},
}


@both
@pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_every_option_by_every_switch(ours, options, switches, device):
    """A long run in float64 on the CPU, in float32 on a GPU, beside PyTorch's step of one tensor after the other.

    Numbers in tensors are for PyTorch's those that they hold: it would divide them in float32.
    """
    dtype = torch.float32 if device == "cuda" else torch.float64
    plain = {name: x for name, x in options.items() if name != "capturable"}
    plain |= {name: float(x) for name, x in options.items() if isinstance(x, torch.Tensor)}
    plain |= {"betas": tuple(map(float, options["betas"]))} if "betas" in options else {}
    start, rounds = drawn(dtype=dtype, device=device), [drawn(dtype=dtype, device=device) for _ in range(40)]
    params, others = parameters(start), parameters(start)
    try:
        optimizer = ours(params, **options | switches)
    except ValueError as refused:  # numbers in tensors, by PyTorch's own rule
        assert "is not supported for capturable=False and foreach=True" in str(refused)
        with pytest.raises(ValueError, match="is not supported for capturable=False and foreach=True"):
            TORCH[ours](others, **options | switches)
        return
    found = run(optimizer, params, rounds)
    expected = run(other := TORCH[ours](others, foreach=False, **plain), others, rounds)
    tolerances = {"rtol": 1e-11, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert_close_lists(found, expected, **tolerances)
    for name in ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options.get("amsgrad", False):
        assert_close_lists(state_of(optimizer, name), state_of(other, name), **tolerances)
    assert {float(step) for step in state_of(optimizer, "step")} == {40.0}


@both
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_another_default_dtype(ours, default):
    """It is that of new tensors, and not of steps and moments."""
    start, rounds = drawn(), [drawn() for _ in range(3)]
    results = []
    for dtype in (torch.float32, default):
        params = parameters(start)
        optimizer = ours(params)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            results.append(tuple(run(optimizer, params, rounds)))
            loaded = ours(params)
            loaded.load_state_dict(optimizer.state_dict())
        finally:
            torch.set_default_dtype(before)
        for one in (optimizer, loaded):
            assert {step.dtype for step in state_of(one, "step")} == {torch.float32}
            assert {x.dtype for x in state_of(one, "exp_avg")} == {torch.float32}
    assert_same(*results)


@both
def test_many_dtypes_and_devices_in_one_group(ours, device):
    """As in float64, each to its own precision; gradients that come and go."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if device == "cpu" else []))
    start = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in ((4, 3), (), (17,))]
    places = [device if i % 2 else "cpu" for i in range(len(start))]
    params = parameters([x.to(place) for x, place in zip(start, places, strict=True)])
    exact = parameters(start, torch.float64)
    optimizer, other = ours(params, eps=1e-4), TORCH[ours](exact, eps=1e-4, foreach=False)
    for round in range(5):
        for i, (param, twin) in enumerate(zip(params, exact, strict=True)):
            grad = torch.randn(param.shape).to(param.dtype)
            param.grad = None if (i + round) % 4 == 0 else grad.to(param.device)
            twin.grad = None if (i + round) % 4 == 0 else grad.double()
        optimizer.step()
        other.step()
    for param, twin in zip(params, exact, strict=True):
        eps = torch.finfo(param.dtype).eps
        torch.testing.assert_close(param.detach().cpu().double(), twin.detach(), rtol=6 * eps, atol=6 * eps)
        assert optimizer.state[param]["step"].item() == other.state[twin]["step"].item()


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


@both
@every_option
def test_a_curved_valley(ours, options):
    """Each step as PyTorch's, over hundreds of them, also where only one of two numbers has a gradient at a time."""
    points = parameters([torch.tensor([1.5, 1.5], dtype=torch.float64)] * 2)
    optimizers = ours(points[:1], **options), TORCH[ours](points[1:], foreach=False, **options)
    begin = rosenbrock(points[0]).item()
    for i in range(300):
        for point, optimizer in zip(points, optimizers, strict=True):
            optimizer.zero_grad()
            rosenbrock(point).backward()
            if i > 200:
                point.grad[i % 2] = 0
            optimizer.step()
    torch.testing.assert_close(*points, rtol=1e-9, atol=1e-10)
    assert (rosenbrock(points[0]).item() > begin) == options.get("maximize", False)


@both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(ours, set_to_none):
    params = parameters([torch.ones(3), torch.ones(2)])
    params[0].grad = torch.ones(3)
    optimizer = ours(params)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert params[0].grad is None if set_to_none else not params[0].grad.any()
    assert params[1].grad is None


@both
@pytest.mark.parametrize("amsgrad", [False, True])
def test_gradients_of_zero(ours, amsgrad, device):
    """Nothing moves but by weight decay; the moments stay zero, and the steps count."""
    for weight_decay in (0.0, 0.1):
        start = torch.randn(5, device=device)
        (param,) = params = parameters([start])
        optimizer = ours(params, lr=0.1, weight_decay=weight_decay, amsgrad=amsgrad)
        (found,) = run(optimizer, params, [[torch.zeros_like(start)]] * 2)
        assert torch.equal(found, start) == (weight_decay == 0)
        assert optimizer.state[param]["step"].item() == 2
        assert bool(optimizer.state[param]["exp_avg_sq"].any()) == (weight_decay > 0 and ours is Adam)


@both
def test_it_is_printed_as_torchs(ours):
    """With ours at the end of each group."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.2)]
    found, expected = repr(ours(groups)), repr(TORCH[ours](groups))
    for line in expected.splitlines():
        assert line in found.splitlines()
    assert "state_dtype: None" in found and "stochastic_rounding: False" in found


@both
def test_a_profiler_sees_the_step(ours):
    optimizer = ours(params := parameters([torch.ones(3)]))
    with torch.profiler.profile(acc_events=True) as profile:
        run(optimizer, params, [[torch.ones(3)]])
    assert f"Optimizer.step#{ours.__name__}.step" in {event.key for event in profile.key_averages()}


@both
def test_defaults_are_those_of_torch(ours):
    param = [torch.nn.Parameter(torch.ones(2))]
    found, expected = ours(param).defaults, TORCH[ours](param).defaults
    assert {name: found[name] for name in expected} == expected
    assert found.keys() - expected.keys() == {"state_dtype", "stochastic_rounding", "rounding_seed"}
    assert isinstance(ours(param), TORCH[ours])


ONE, OTHER = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
NO_PARAMETERS = {
    "a tensor": torch.ones(2),
    "a parameter": ONE,
    "none": [],
    "a number": [1],
    "no leaf": [{"params": [torch.ones(2).requires_grad_().sin()]}],
    "a set": [{"params": {ONE}}],
    "in two groups": [{"params": ONE}, {"params": ONE}],
    "names for some": [("weight", ONE), OTHER],
    "names in some groups": [{"params": [ONE]}, {"params": [("weight", OTHER)]}],
}

WRONG = [
    {"lr": -1.0}, {"eps": -1e-8}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1.0},
    {"lr": torch.ones(2)}, {"lr": torch.tensor(0.1), "foreach": True}, {"betas": (0.9, torch.tensor(0.9))},
    {"fused": True, "foreach": True}, {"fused": True, "differentiable": True}, {"nonsense": 1},
    {"lr": float("nan")}, {"eps": float("nan")}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)},
    {"betas": (torch.tensor(0.9), 0.99)}, {"betas": (0, 0)},
    {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": True},
    {"betas": (torch.tensor([0.9, 0.9]), torch.tensor(0.99))}, {"betas": (torch.tensor(0.9), torch.ones(2) / 2)},
    {"betas": (torch.tensor(1.0), torch.tensor(0.99))}, {"lr": torch.tensor(-0.1)},
]  # fmt: skip


@both
@pytest.mark.parametrize("options", WRONG, ids=str)
def test_arguments_that_torch_refuses(ours, options):
    param = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises((ValueError, RuntimeError, TypeError)) as expected:
        TORCH[ours](param, **options)
    with pytest.raises(expected.type) as found:
        ours(param, **options)
    if expected.type is not TypeError:
        assert str(found.value) == str(expected.value)


@both
@pytest.mark.parametrize("params", NO_PARAMETERS.values(), ids=NO_PARAMETERS.keys())
def test_parameters_that_torch_refuses(ours, params):
    with pytest.raises((ValueError, TypeError)) as expected:
        TORCH[ours](params)
    with pytest.raises(expected.type) as found:
        ours(params)
    assert str(found.value) == str(expected.value)


@both
def test_a_parameter_twice_in_a_group(ours):
    """PyTorch warns, and so it is; the step is that of a parameter that comes once."""
    start, rounds = drawn([(3, 5), (7,)]), [drawn([(3, 5), (7,)]) for _ in range(3)]
    params, others = parameters(start), parameters(start)
    options = {"max_grad_norm": 0.1, "amsgrad": True}
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizer = ours([*params, params[0]], **options)
    other = ours(others, **options)
    assert_same(tuple(run(optimizer, params, rounds)), tuple(run(other, others, rounds)))
    assert_same(optimizer.grad_norm, other.grad_norm)
    assert [step.item() for step in state_of(optimizer, "step")] == [3, 3, 3]


@both
def test_groups_that_are_added(ours):
    """Options of their own or the defaults; the same refusals as at the beginning."""
    optimizer = ours([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(3)), "weight_decay": 0.25})
    added = optimizer.param_groups[1]
    assert (added["lr"], added["weight_decay"], added["stochastic_rounding"]) == (0.5, 0.25, False)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "state_dtype": torch.bfloat16})
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()
    assert [x.dtype for x in state_of(optimizer, "exp_avg")] == [torch.float32, torch.float32, torch.bfloat16]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [added["params"][0]]})
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {torch.nn.Parameter(torch.ones(3))}})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([torch.nn.Parameter(torch.ones(3))])


@both
def test_named_parameters(ours):
    """Their names are in the state dict, and may be those of another optimizer's."""
    networks = [model() for _ in range(3)]
    optimizer = ours(networks[0].named_parameters())
    other = TORCH[ours](networks[1].named_parameters())
    names = [name for name, _ in networks[0].named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names == optimizer.state_dict()["param_groups"][0]["param_names"]
    train(networks[0], optimizer)
    train(networks[1], other)
    same_weights(*networks[:2], rtol=1e-3, atol=1e-4)
    for source in (optimizer, other):
        unnamed = [kind(networks[2].parameters()) for kind in (ours, TORCH[ours])]
        for loaded in (optimizer, *unnamed):
            loaded.load_state_dict(source.state_dict())
        assert ["param_names" in one.param_groups[0] for one in unnamed] in ([True] * 2, [False] * 2)
    grouped = ours([{"params": networks[2][0].named_parameters()}, {"params": networks[2][2].named_parameters()}])
    assert [group["param_names"] for group in grouped.param_groups] == [["weight", "bias"]] * 2


@both
def test_param_groups(ours, device):
    """Each with its own options, and one that is added later."""
    networks, optimizers = [model(device) for _ in range(2)], []
    for network, kind in zip(networks, (ours, TORCH[ours]), strict=True):
        groups = [
            {"params": network[0].parameters(), "lr": 0.1, "weight_decay": 0.5, "maximize": True},
            {"params": [network[2].weight], "betas": (0.5, 0.6), "amsgrad": True},
        ]
        optimizers.append(kind(groups, lr=0.01))
        train(network, optimizers[-1], 3)
        optimizers[-1].add_param_group({"params": [network[2].bias], "eps": 0.1})
        train(network, optimizers[-1], 3)
    same_weights(*networks, rtol=1e-3, atol=1e-4)
    assert [step.item() for step in state_of(optimizers[0], "step")] == [6, 6, 6, 3]


@both
def test_parameters_without_gradients(ours, device):
    """Nothing happens to them; a step without any gradient is nothing at all."""
    params = parameters([torch.ones(3, device=device) for _ in range(3)])
    optimizer = ours(params, max_grad_norm=1.0)
    optimizer.step()
    assert not any(optimizer.state.values())
    params[1].grad = torch.ones(3, device=device)
    optimizer.step()
    params[2].grad = torch.ones(3, device=device)
    optimizer.step()
    assert torch.equal(params[0], torch.ones(3, device=device)) and not optimizer.state[params[0]]
    assert [optimizer.state[param]["step"].item() for param in params[1:]] == [2, 1]
    assert not torch.equal(params[1], params[2])


@both
def test_empty_tensors_alone(ours, device):
    param = torch.nn.Parameter(torch.empty(0, 4, device=device))
    optimizer = ours([param])
    for _ in range(2):
        param.grad = torch.empty_like(param)
        optimizer.step()
    assert optimizer.state[param]["step"].item() == 2


@both
def test_sparse_gradients_are_refused(ours):
    dense, param = parameters([torch.ones(3), torch.ones(3)])
    dense.grad, param.grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam"):
        ours([dense, param]).step()
    assert torch.equal(dense, torch.ones(3))


@both
@every_option
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters(ours, options, dtype, device):
    """As PyTorch's, and bit for bit as pairs of real numbers, among real parameters in the same list."""
    if device == "cuda" and dtype == torch.complex128:
        pytest.skip("float64 is for the CPU")
    start = [torch.randn(shape, dtype=dtype, device=device) for shape in ((5, 4), (), (0,), (33,))]
    start[0] = start[0].t()
    rounds = [[torch.randn_like(x) for x in start] for _ in range(4)]
    rounds[1][3] = rounds[1][3].conj()
    reals = torch.randn(7, dtype=dtype.to_real(), device=device)
    params, others = parameters([*start, reals]), parameters([*start, reals])
    pairs = parameters([torch.view_as_real(x) for x in start])
    optimizer = ours(params, max_grad_norm=1e6, **options)
    found = run(optimizer, params, [[*grads, reals] for grads in rounds])
    resolved = [[x.resolve_conj() for x in grads] for grads in rounds]
    expected = run(TORCH[ours](others, foreach=False, **options), others, [[*grads, reals] for grads in resolved])
    eps = torch.finfo(dtype).eps
    assert_close_lists(found, expected, rtol=100 * eps, atol=100 * eps)
    found_pairs = run(ours(pairs, **options), pairs, [[torch.view_as_real(x) for x in grads] for grads in resolved])
    assert_close_lists([torch.view_as_real(x) for x in found[:4]], found_pairs, rtol=100 * eps, atol=100 * eps)
    assert {x.dtype for x in state_of(optimizer, "exp_avg")[:4]} == {dtype}
    loaded = TORCH[ours](params)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = ours(params)
    back.load_state_dict(loaded.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same(tuple(state_of(back, name)), tuple(state_of(optimizer, name)))


@both
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_other_numbers_are_refused(ours):
    for dtype in (torch.int64, torch.complex32):
        param = torch.zeros(3, dtype=dtype)
        param.grad = torch.zeros(3, dtype=dtype)
        with pytest.raises(RuntimeError, match=rf"parameters must be floating-point numbers, got {dtype}"):
            ours([param]).step()


@both
def test_closure(ours):
    network, other = model(), model()
    optimizer, torchs = ours(network.parameters()), TORCH[ours](other.parameters())

    def closure(network, optimizer):
        optimizer.zero_grad()
        loss = loss_of(network)
        loss.backward()
        return loss

    for _ in range(3):
        with torch.no_grad():  # the closure needs gradients all the same
            found = optimizer.step(lambda: closure(network, optimizer))
        torch.testing.assert_close(found, torchs.step(lambda: closure(other, torchs)), rtol=1e-5, atol=1e-6)
    assert optimizer.step() is None


def test_betas_that_are_tensors():
    network, other = model(), model()
    train(network, AdamW(network.parameters(), betas=(torch.tensor(0.5), torch.tensor(0.75))))
    train(other, AdamW(other.parameters(), betas=(0.5, 0.75)))
    same_weights(network, other, rtol=0, atol=0)


@both
def test_hooks(ours):
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer, seen = ours([param]), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        optimizer.register_state_dict_post_hook(lambda optimizer, state: seen.append("saved")),
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("loading")),
        optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded")),
    ]
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "saved", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 5


@both
def test_hooks_that_change_what_they_see(ours):
    """A hook before the step may give it other arguments; those of state dicts may give other ones, in their order."""
    (param,) = params = parameters([torch.ones(2)])
    param.grad = torch.ones(2)
    optimizer = ours(params, lr=0.5)
    called = []

    def with_closure(optimizer, args, kwargs):
        return (args[0], lambda: called.append("closure")), {}

    optimizer.register_step_pre_hook(with_closure)
    optimizer.step()
    assert called == ["closure"]
    optimizer.register_state_dict_pre_hook(lambda optimizer: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": [1]})
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": [0]}, prepend=True)
    state = optimizer.state_dict()
    assert called == ["closure", "saving"] and state["more"] == [1]

    def faster(optimizer, state):
        return {**state, "param_groups": [{**group, "lr": 2.0} for group in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(faster)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append(optimizer.param_groups[0]["lr"]))
    optimizer.load_state_dict(state)
    assert called[-1] == 2.0 and state["param_groups"][0]["lr"] == 0.5
    assert optimizer.state[param]["step"].item() == 1


@both
def test_hooks_of_all_optimizers(ours):
    """Those for every optimizer come before its own ones ahead of a step, and behind them after it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
    ]
    try:
        orders = []
        for kind in (ours, TORCH[ours]):
            (param,) = params = parameters([torch.ones(2)])
            param.grad = torch.ones(2)
            optimizer = kind(params)
            optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
            optimizer.register_step_post_hook(lambda *_: seen.append("after"))
            optimizer.step()
            orders.append(tuple(seen))
            seen.clear()
    finally:
        for handle in handles:
            handle.remove()
    assert orders[0] == orders[1] and sorted(orders[0]) == ["after", "all after", "all before", "before"]
