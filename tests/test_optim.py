"""optim.Adam and optim.AdamW: against torch.optim in float64 and by its error in each dtype; what ours has besides.

What the tests of torch.optim ask of its optimizers: test_optim_torch.py, test_optim_rates.py and test_optim_state.py.
"""

import itertools

import pytest
import torch

from llmkernels.optim import Adam, AdamW
from optim_cases import (
    FLOATS,
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
from oracles import assert_accurate, assert_same

# Numbers.


@both
@every_option
def test_float64_is_as_torch(ours, options):
    start, rounds = drawn(dtype=torch.float64), [drawn(dtype=torch.float64) for _ in range(6)]
    params, others = parameters(start), parameters(start)
    found = run(optimizer := ours(params, **options), params, rounds)
    expected = run(other := TORCH[ours](others, foreach=False, **options), others, rounds)
    assert_close_lists(found, expected, rtol=1e-12, atol=1e-14)
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options.get("amsgrad", False)
    for name in names:
        assert_close_lists(state_of(optimizer, name), state_of(other, name), rtol=1e-12, atol=1e-14)


@both
@every_option
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error_is_not_larger_than_that_of_torch(ours, options, dtype, device):
    if dtype == torch.float16:  # in which PyTorch's eps would be 0
        options = options | {"eps": max(options.get("eps", 0.0), 1e-4)}
    start, rounds = drawn(dtype=dtype, device=device), [drawn(dtype=dtype, device=device) for _ in range(6)]
    params, others, exact = parameters(start), parameters(start), parameters(start, torch.float64)
    found = run(ours(params, **options), params, rounds)
    eager = run(TORCH[ours](others, foreach=False, **options), others, rounds)
    reference = run(TORCH[ours](exact, foreach=False, **options), exact, rounds)
    assert_accurate(*(torch.cat([x.flatten() for x in one]) for one in (found, eager, reference)))


@both
def test_16_bit_states_are_rounded_once_per_step(ours, device):
    """bfloat16 moments: within the rounding of float32 ones, step by step."""
    for dtype in FLOATS:
        start = drawn(dtype=dtype, device=device)
        params = parameters(start)
        optimizer = ours(params, state_dtype=torch.bfloat16)
        run(optimizer, params, [drawn(dtype=dtype, device=device) for _ in range(3)])
        before = [{key: x.clone() for key, x in optimizer.state[param].items()} for param in params]
        others = parameters([param.detach() for param in params])
        other = ours(others)
        for param, state in zip(others, before, strict=True):
            other.state[param] = {key: x.float() for key, x in state.items()}
        rounds = [drawn(dtype=dtype, device=device)]
        found, expected = run(optimizer, params, rounds), run(other, others, rounds)
        for name in ("exp_avg", "exp_avg_sq"):
            assert all(x.dtype == torch.bfloat16 for x in state_of(optimizer, name))
            assert_same(tuple(state_of(optimizer, name)), tuple(x.bfloat16() for x in state_of(other, name)))
        assert_same(tuple(found), tuple(expected))


@both
def test_dtypes_and_sizes_in_one_list(ours, device):
    """As each for itself."""
    start = [x.to(dtype) for x in drawn(device=device) for dtype in FLOATS]
    rounds = [[torch.randn_like(x) for x in start] for _ in range(3)]
    together = parameters(start)
    alone = parameters(start)
    found = run(ours(together, amsgrad=True), together, rounds)
    expected = []
    for i, param in enumerate(alone):
        expected += run(ours([param], amsgrad=True), [param], [[grads[i]] for grads in rounds])
    assert_same(tuple(found), tuple(expected))


@pytest.mark.parametrize("count", [59, 60, 61, 523, 524, 525, 1100])
def test_lists_of_any_length(count, device):
    start = [torch.randn(i % 7, device=device) for i in range(count)]
    rounds = [[torch.randn_like(x) for x in start] for _ in range(2)]
    params, others = parameters(start), parameters(start)
    found = run(optimizer := AdamW(params), params, rounds)
    assert_close_lists(found, run(torch.optim.AdamW(others), others, rounds), rtol=1e-5, atol=1e-6)
    assert {step.item() for step in state_of(optimizer, "step")} == {2.0}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 1023, 1024, 1025, 40_001, 3_000_001])
def test_sizes_and_alignments(size, dtype, device):
    """Memory that begins between two words, and tails, give the bits of the same elements in an aligned tensor."""
    start, grad = torch.randn(2, size + 9, device=device).to(dtype)
    whole = parameters([start])
    (expected,) = run(AdamW(whole), whole, [[grad], [grad]])
    for offset in (0, 1):
        shifted = torch.empty(size + 1, dtype=dtype, device=device)[1:] if offset else start[:size].clone()
        param = torch.nn.Parameter(shifted.copy_(start[:size]))
        (found,) = run(AdamW([param]), [param], [[grad[:size]], [grad[:size]]])
        assert_same(found, expected[:size])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_values(dtype):
    """inf, NaN, 0, large and tiny gradients as in PyTorch, with moments in float32."""
    grad = torch.tensor([0.0, -0.0, 1e-4, 1e4, -1e4, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    start = torch.ones_like(grad)
    params, others = parameters([start]), parameters([start], torch.promote_types(dtype, torch.float32))
    (found,) = run(AdamW(params), params, [[grad]])
    (expected,) = run(torch.optim.AdamW(others), others, [[grad]])
    expected = expected.to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found.nan_to_num(), expected.nan_to_num(), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_an_infinite_parameter_without_weight_decay():
    param = torch.nn.Parameter(torch.tensor([float("inf"), 1.0]))
    (found,) = run(Adam([param]), [param], [[torch.ones(2)]])
    assert found[0] == float("inf") and found[1].isfinite()


@both
def test_equal_reruns(ours, device):
    start, rounds = drawn([(3000,), (70, 9)], device=device), [drawn([(3000,), (70, 9)], device=device)]
    results = []
    for _ in range(50):
        params = parameters(start)
        results.append(tuple(run(ours(params), params, rounds * 3)))
    for result in results[1:]:
        assert_same(result, results[0])


# Layouts.


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "grad_transposed", "grad_expanded", "gaps"])
def test_layouts(layout, device):
    start, grad = torch.randn(2, 4, 6, 5, 3, device=device)
    other = torch.nn.Parameter(start.clone())
    if layout == "gaps":
        param = torch.empty(4, 6, 5, 7, device=device)[..., :3].copy_(start)
    elif layout == "channels_last":
        param = start.clone(memory_format=torch.channels_last)
    else:
        param = start.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else start.clone()
    param = param.detach().requires_grad_()
    strides = param.stride()
    if layout == "grad_expanded":
        grad = grad[:1].expand_as(start)
    optimizer, torchs = AdamW([param], amsgrad=True), torch.optim.AdamW([other], amsgrad=True)
    for _ in range(3):
        param.grad = grad.transpose(0, 2).contiguous().transpose(0, 2) if layout == "grad_transposed" else grad
        other.grad = grad.clone()
        before = param.grad.clone()
        optimizer.step()
        torchs.step()
        assert torch.equal(param.grad, before)
    assert param.stride() == strides
    torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


# GradScaler, clipping within the step, stochastic rounding.


@both
def test_grad_scaler(ours, device):
    """Divides by the scale within the step; skips steps with infinite gradients, without counting them."""
    networks = [model(device) for _ in range(2)]
    results = []
    for network, kind in zip(networks, (ours, TORCH[ours]), strict=True):
        optimizer = kind(network.parameters(), lr=0.01, **({"fused": True} if kind is not ours else {}))
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=3)
        for i in range(8):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(network, i))
            loss.backward()
            if i in (0, 4):
                network[0].bias.grad[1] = float("inf")
            if i == 6:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append((scaler.get_scale(), [step.item() for step in state_of(optimizer, "step")]))
    assert results[0] == results[1] and set(results[0][1]) == {6.0}
    same_weights(*networks, rtol=1e-4, atol=1e-5)


@both
def test_clipping_within_the_step(ours, device):
    for max_norm in (0.01, 1e6):
        network, other = model(device), model(device)
        optimizer, torchs = ours(network.parameters(), max_grad_norm=max_norm), TORCH[ours](other.parameters())
        for i in range(4):
            for one in (network, other):
                one.zero_grad()
                loss_of(one, i).backward()
            grads = [param.grad.clone() for param in network.parameters()]
            optimizer.step()
            norm = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
            torchs.step()
            torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-3, atol=1e-6)
            assert_same(tuple(param.grad for param in network.parameters()), tuple(grads))
        same_weights(network, other, rtol=1e-3, atol=1e-4)


def test_clipping_within_the_step_of_scaled_gradients(device):
    """The scale is taken off before the norm is compared; groups have one norm."""
    results = []
    for scale in (1.0, 128.0):
        params = parameters([torch.ones(5, device=device), torch.ones(3, device=device)])
        optimizer = AdamW([{"params": [param]} for param in params], lr=0.1, eps=0.1, max_grad_norm=0.5)
        optimizer.grad_scale = torch.tensor(scale, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        results.append(run(optimizer, params, [[torch.full_like(x, 2 * scale) for x in params]]))
        expected = torch.tensor(scale * 2 * 8**0.5, device=device)
        torch.testing.assert_close(optimizer.grad_norm, expected)
    assert_close_lists(*results)
    assert abs(results[0][0][0].item() - 1) < 0.07  # 0.1 * (0.18 / (0.18 + 0.1)), where unclipped 2 / 2.1 stands


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-6, 3.1e-5])
def test_stochastic_rounding_is_right_on_average(dtype, value, device):
    """Updates of a fraction of the distance of two numbers: every result is one of the two, in the right proportion."""
    count, lr = 100_003, 0.0
    start = torch.full((count,), value, device=device).to(dtype)
    neighbour = torch.nextafter(start[0].cpu(), torch.tensor(0.0, dtype=dtype)).to(device)
    lr = 0.3 * (start[0] - neighbour).double().abs().item()
    param = torch.nn.Parameter(start.clone())
    optimizer = AdamW([param], lr=lr, weight_decay=0.0, eps=0.0, stochastic_rounding=True)
    (found,) = run(optimizer, [param], [[start.sign()]])  # the first step is lr
    moved = found != start
    assert bool((found[moved] == neighbour).all())
    assert abs(moved.float().mean().item() - 0.3) < 0.01
    assert abs(moved[::2].float().mean().item() - 0.3) < 0.015 and abs(moved[:1000].float().mean().item() - 0.3) < 0.08


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_of_the_rest(dtype, device):
    """What is not finite stays so, the largest numbers do not overflow, a seed repeats, float32 is not touched."""
    largest = torch.finfo(dtype).max
    start = torch.tensor([float("inf"), -float("inf"), float("nan"), largest, -largest, 0.0, 1.0], device=device)
    start = start.to(dtype).repeat(9)
    params, others = parameters([start, start.float()]), parameters([start, start.float()])
    rounds = [[torch.zeros_like(start), torch.ones_like(start)]] * 3
    found = run(AdamW(params, weight_decay=0.0, stochastic_rounding=True), params, rounds)
    assert_same(found[0].nan_to_num(7), start.nan_to_num(7))
    expected = run(AdamW(others, weight_decay=0.0), others, rounds)
    assert_same(found[1].nan_to_num(7), expected[1].nan_to_num(7))

    results, start = [], torch.randn(4001, device=device).to(dtype)
    for seed in (1, 1, 2):
        params = parameters([start, start])
        optimizer = AdamW(params, stochastic_rounding=True, rounding_seed=seed)
        results.append(run(optimizer, params, [[start, start]] * 2))
    assert_same(tuple(results[0]), tuple(results[1]))
    assert not torch.equal(results[0][0], results[2][0]) and not torch.equal(results[0][0], results[0][1])


def rounded_at_random(rank, rounds, groups, device, **options):
    """Parameters after these rounds on one of several ranks, whose generators differ."""
    torch.manual_seed(100 + rank)
    start = torch.linspace(-2, 2, 1003, device=device).bfloat16()
    params = [torch.nn.Parameter(start.clone()) for _ in range(4)]
    split = [{"params": params[begin:end]} for begin, end in groups]
    optimizer = AdamW(split, lr=1e-4, weight_decay=0.0, stochastic_rounding=True, **options)
    for i in range(rounds):
        for param in params:
            param.grad = torch.sin(start.float() + i).bfloat16()
        optimizer.step()
    return tuple(param.detach() for param in params)


def test_stochastic_rounding_is_the_same_on_all_ranks(device):
    """Whatever their generators, bit for bit; and whatever the groups, no two parameters draw the same."""
    expected = rounded_at_random(0, 50, [(0, 4)], device)
    assert_same(rounded_at_random(1, 50, [(0, 4)], device), expected)
    assert_same(rounded_at_random(2, 50, [(0, 1), (1, 3), (3, 4)], device), expected)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(expected, 2))
    assert not torch.equal(rounded_at_random(0, 50, [(0, 4)], device, rounding_seed=1)[0], expected[0])


def test_stochastic_rounding_of_steps_and_parameters(device):
    """Each step draws anew; a parameter draws the same whether or not those before it have a gradient."""
    start = torch.ones(4001, device=device).bfloat16()
    moved = []
    for has_grad in ((True, True), (False, True)):
        params = parameters([start, start])
        optimizer = AdamW(params, lr=2e-3, weight_decay=0.0, eps=0.0, stochastic_rounding=True)
        for _ in range(2):
            for param, has in zip(params, has_grad, strict=True):
                param.data.copy_(start)
                param.grad = torch.ones_like(start) if has else None
            optimizer.step()
            moved.append(params[1].detach() != start)
    assert_same(moved[2:], moved[:2])
    for mask in moved:
        assert 0.3 < mask.float().mean() < 0.7
    assert 0.4 < (moved[0] == moved[1]).float().mean() < 0.6


def test_options_out_of_range():
    param = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="Adam: max_grad_norm must be at least 0, got -1"):
        Adam(param, max_grad_norm=-1)
    for options, error, message in (
        ({"state_dtype": torch.float16}, ValueError, r"AdamW: state_dtype must be .* got torch\.float16"),
        ({"rounding_seed": 1.5}, ValueError, r"AdamW: rounding_seed must be an integer .* got 1\.5"),
        ({"rounding_seed": 2**63}, ValueError, "AdamW: rounding_seed must be an integer of 64 bits, got 92233"),
        ({"differentiable": True}, RuntimeError, "AdamW does not support differentiable"),
    ):
        with pytest.raises(error, match=message):
            AdamW(param, **options)
        with pytest.raises(error, match=message):
            AdamW([{"params": param, **options}])
        optimizer = AdamW(param)
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **options})
        assert len(optimizer.param_groups) == 1


def test_a_state_dict_continues_the_random_numbers(device):
    start, grad = torch.randn(1001, device=device).bfloat16(), torch.randn(1001, device=device).bfloat16()
    (param,) = parameters([start])
    optimizer = AdamW([param], lr=1e-3, stochastic_rounding=True, rounding_seed=2**40 + 3)
    run(optimizer, [param], [[grad]] * 3)
    (copy,) = parameters([param.detach()])
    other = AdamW([copy])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["rounding_seed"] == 2**40 + 3
    torch.manual_seed(9)
    assert_same(tuple(run(other, [copy], [[grad]] * 3)), tuple(run(optimizer, [param], [[grad]] * 3)))


def test_compiled_step():
    start, rounds = drawn([(9,), (33,)]), [drawn([(9,), (33,)]) for _ in range(3)]
    params, others = parameters(start), parameters(start)
    optimizer = AdamW(params, max_grad_norm=0.5, amsgrad=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for grads in rounds:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        step()
    assert_same(tuple(params), tuple(run(AdamW(others, max_grad_norm=0.5, amsgrad=True), others, rounds)))


# On a GPU.


GRAPH_OPTIONS = [{}, {"max_grad_norm": 0.1, "amsgrad": True}, {"stochastic_rounding": True}]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GRAPH_OPTIONS, ids=str)
def test_cuda_graph(options):
    """Captured steps count on, read the learning rate and draw new random numbers."""
    start, rounds = drawn(dtype=torch.bfloat16, device="cuda"), [drawn(device="cuda") for _ in range(6)]
    lr = torch.tensor(0.1, device="cuda")
    params = parameters(start)
    grads = [torch.zeros_like(x) for x in params]
    optimizer = AdamW(params, lr=lr, capturable=True, **options)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad

    def give(values):
        for grad, value in zip(grads, values, strict=True):
            grad.copy_(value)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        give(rounds[0])
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for i, values in enumerate(rounds[1:]):
        lr.fill_(0.1 / (i + 1))
        give(values)
        graph.replay()
    assert {step.item() for step in state_of(optimizer, "step")} == {6.0}
    others = parameters(start)
    other = AdamW(others, lr=0.1, **{name: x for name, x in options.items() if name != "stochastic_rounding"})
    run(other, others, rounds[:1])
    for i, values in enumerate(rounds[1:]):
        other.param_groups[0]["lr"] = 0.1 / (i + 1)
        run(other, others, [values])
    tolerance = 0.05 if options.get("stochastic_rounding") else 2**-8
    assert_close_lists(params, others, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_capture_without_capturable_is_refused():
    params = parameters([torch.ones(3, device="cuda")])
    optimizer = AdamW(params)
    run(optimizer, params, [[torch.ones(3, device="cuda")]])
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.gpu
def test_no_step_waits_for_the_device():
    network = model("cuda")
    optimizer = AdamW(network.parameters(), max_grad_norm=1.0)
    train(network, optimizer, 1)
    loss_of(network).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"stochastic_rounding": True}], ids=str)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_gpu_and_cpu_agree(options, state_dtype):
    start = [x.to(dtype) for x in drawn([(5,), (1031,), (64, 64), (0,)]) for dtype in FLOATS]
    rounds = [[torch.randn_like(x) for x in start] for _ in range(2)]
    params = {device: parameters([x.to(device) for x in start]) for device in ("cpu", "cuda")}
    found = {}
    for device, own in params.items():
        torch.manual_seed(0)
        optimizer = AdamW(own, state_dtype=state_dtype, max_grad_norm=1.0, **options)
        found[device] = run(optimizer, own, [[x.to(device) for x in grads] for grads in rounds])
    for a, b in zip(found["cuda"], found["cpu"], strict=True):
        eps = max(torch.finfo(a.dtype).eps, 2**-7 * 1e-3 if state_dtype else 0)
        torch.testing.assert_close(a.cpu(), b, rtol=4 * eps, atol=4 * eps)


@pytest.mark.gpu
def test_side_stream_and_consecutive_steps():
    """Steps right behind each other, and behind the kernel that writes the gradients late."""
    start, rounds = drawn(device="cuda"), [drawn(device="cuda") for _ in range(30)]
    params, others = parameters(start), parameters(start)
    expected = run(torch.optim.AdamW(others), others, rounds)
    optimizer = AdamW(params)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        found = run(optimizer, params, rounds)
        torch.cuda.current_stream().synchronize()
    assert_close_lists(found, expected, rtol=1e-4, atol=1e-5)
    assert {step.item() for step in state_of(optimizer, "step")} == {30.0}


@pytest.mark.two_gpus
def test_parameters_on_two_gpus():
    start = drawn()
    params = parameters([x.to(f"cuda:{i % 2}") for i, x in enumerate(start)])
    others = parameters(start)
    rounds = [drawn() for _ in range(3)]
    found = run(AdamW(params, max_grad_norm=0.5), params, [[g.to(p.device) for g, p in zip(gs, params, strict=True)]
                                                          for gs in rounds])  # fmt: skip
    expected = run(AdamW(others, max_grad_norm=0.5), others, rounds)
    assert_close_lists([x.cpu() for x in found], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.large(45)
def test_more_than_2_32_elements():
    count = 2**32 + 2**20 + 3
    param = torch.nn.Parameter(torch.zeros(count, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.ones_like(param)
    AdamW([param], lr=0.5, weight_decay=0.0, state_dtype=torch.bfloat16).step()
    assert bool((param.detach()[-5:] == -0.5).all()) and bool((param.detach()[: 2**20] == -0.5).all())
    assert int((param.detach() != -0.5).sum()) == 0


def test_every_pair_of_options_once():
    """All combinations of the switches run and agree with PyTorch."""
    start, rounds = drawn([(9,), (33,)]), [drawn([(9,), (33,)]) for _ in range(3)]
    for amsgrad, maximize, capturable, foreach in itertools.product([False, True], repeat=4):
        options = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "weight_decay": 0.1}
        params, others = parameters(start), parameters(start)
        found = run(AdamW(params, capturable=capturable, **options), params, rounds)
        expected = run(torch.optim.AdamW(others, **options), others, rounds)
        assert_close_lists(found, expected, rtol=1e-5, atol=1e-6)


@both
def test_backward_knows_of_the_write(ours):
    """A parameter that a graph has saved has changed since: autograd has to notice."""
    param = torch.nn.Parameter(torch.ones(3))
    loss = param.square().sum()
    param.grad = torch.ones(3)
    version = param._version
    ours([param]).step()
    assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
