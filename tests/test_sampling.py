"""sample: the distribution against transformers' own warpers, draw by draw and by chi-squared; seeds, ties, values."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmkernels import sample
from oracles import DEVICES, DTYPES, LAYOUTS, SANITIZED_DTYPES, assert_same, laid_out

OPTIONS = {
    "plain": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "top_k_and_top_p": {"top_k": 50, "top_p": 0.9},
    "cold": {"temperature": 0.3, "top_p": 0.95},
    "hot": {"temperature": 7.0, "top_k": 100, "min_p": 0.7},
    "many": {"top_k": 3000, "top_p": 0.8},
    "penalty": {"repetition_penalty": 1.7, "top_k": 20},
    "everything": {"temperature": 0.8, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def state(seed=1234, offset=5, device="cpu") -> Tensor:
    return torch.tensor([seed, offset], device=device)


def penalised(logits: Tensor, seen: Tensor | None, repetition_penalty: float) -> Tensor:
    """In float64."""
    scores = logits.detach().cpu().double()
    if repetition_penalty == 1.0 or seen is None:
        return scores
    processor = RepetitionPenaltyLogitsProcessor(float(repetition_penalty))
    return torch.cat([processor(mask.nonzero().t(), row[None]) for mask, row in zip(seen.cpu(), scores, strict=True)])


def probabilities(
    logits: Tensor,
    seen: Tensor | None = None,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
) -> Tensor:
    """The distribution that transformers draws from, in float64."""
    scores = penalised(logits, seen, repetition_penalty)
    warpers = [TemperatureLogitsWarper(float(temperature))]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    # Which of several equal logits top-p keeps depends on the sort that transformers calls; the op's is a stable one.
    with mock.patch.object(torch, "sort", partial(torch.sort, stable=True)):
        for warper in warpers:
            scores = warper(None, scores)
    return scores.softmax(-1)


def uniforms(seed: int, offset: int, rows: int) -> Tensor:
    """The random number in [0, 1) of every row: Philox 4x32-10 with the seed as key and the counter (offset, row)."""
    mask = 2**32 - 1
    numbers = []
    for row in range(rows):
        key, counter = [seed & mask, seed >> 32], [offset & mask, offset >> 32, row & mask, row >> 32]
        for _ in range(10):
            first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [
                second >> 32 ^ counter[1] ^ key[0],
                second & mask,
                first >> 32 ^ counter[3] ^ key[1],
                first & mask,
            ]
            key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
        numbers.append((counter[1] << 32 | counter[0]) / 2**64)
    return torch.tensor(numbers, dtype=torch.float64)


def check_draws(tokens: Tensor, exact: Tensor, seed=1234, offset=5, tolerance=2e-6):
    """Every token is the one at which the exact cumulative distribution passes the random number, up to rounding."""
    tokens, exact = tokens.cpu(), exact.expand(len(tokens), -1)
    u = uniforms(seed, offset, len(tokens))
    end = exact.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    probability = exact.gather(1, tokens[:, None])[:, 0]
    assert (probability > 0).all(), "a token was drawn that transformers removes"
    assert (u >= end - probability - tolerance).all() and (u <= end + tolerance).all()


def make(rows, vocab, dtype, device, scale=2.0) -> Tensor:
    return (torch.randn(rows, vocab) * scale).to(dtype).to(device)


def make_seen(rows, vocab, device) -> Tensor:
    return (torch.rand(rows, vocab) < 0.3).to(device)


VOCABS = [1, 7, 1000, 32003, 152064]


@every_dtype
@every_option
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_those_of_transformers(device, vocab, options, dtype):
    rows = 3 if vocab > 10000 else 40
    logits, seen = make(rows, vocab, dtype, device), make_seen(rows, vocab, device)
    exact = probabilities(logits, seen, **options)
    check_draws(sample(logits, **options, seen=seen, rng_state=state(device=device)), exact)


@every_option
@pytest.mark.parametrize("vocab", [12, 1000])
def test_many_draws_from_one_row(device, vocab, options):
    """Enough draws to see the set of kept tokens: each of them is drawn, and no other."""
    rows = 20000
    logits = make(1, vocab, torch.float32, device)
    options = {**options, "temperature": options.get("temperature", 1.0) * 2}
    exact = probabilities(logits, **options)
    tokens = sample(logits.expand(rows, vocab), **options, rng_state=state(device=device))
    check_draws(tokens, exact)
    counts = tokens.cpu().bincount(minlength=vocab)
    assert (counts[exact[0] * rows > 30] > 0).all()
    assert chi_squared_sigmas(counts, exact[0]) < 4


@every_option
def test_chi_squared_of_a_large_vocabulary(device, options):
    rows, vocab = (20000, 152064) if device == "cuda" else (300, 152064)
    logits = make(1, vocab, torch.bfloat16, device)
    exact = probabilities(logits, **options)[0]
    tokens = sample(logits.expand(rows, vocab), **options, rng_state=state(device=device)).cpu()
    bins = torch.arange(vocab) * 64 // vocab
    counts = bins[tokens].bincount(minlength=64)
    assert chi_squared_sigmas(counts, torch.zeros(64).double().index_add_(0, bins, exact)) < 4


def chi_squared_sigmas(counts: Tensor, exact: Tensor) -> float:
    """How many standard deviations chi-squared lies above its mean; cells that expect less than 5 are merged."""
    expected = exact * counts.sum()
    large = expected >= 5
    counts = torch.cat((counts[large].double(), counts[~large].sum().double()[None]))
    expected = torch.cat((expected[large], expected[~large].sum()[None]))
    assert counts[-1] == 0 or expected[-1] > 0
    chi_squared = ((counts - expected).square() / expected.clamp_min(1e-9)).sum().item()
    freedom = max(1, len(expected) - 2)
    return (chi_squared - freedom) / (2 * freedom) ** 0.5


@every_dtype
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy(device, vocab, dtype):
    logits = make(5, vocab, dtype, device)
    logits[1] = 3.0
    logits[2, vocab // 2 :] = 100.0
    tokens = sample(logits, temperature=0.0, top_k=3, top_p=0.1)
    assert tokens.dtype == torch.int64 and tokens.device == logits.device
    first = [(row == row.max()).nonzero()[0].item() for row in logits.cpu()]
    assert tokens.tolist() == first


def test_greedy_with_a_penalty(device):
    logits = torch.tensor([[1.0, 1.5, -1.0], [-4.0, -3.0, -5.0]], device=device)
    seen = torch.tensor([[False, True, False], [False, True, False]], device=device)
    assert sample(logits, 0.0, repetition_penalty=2.0, seen=seen.clone()).tolist() == [0, 0]
    assert sample(logits, 0.0, repetition_penalty=1.2, seen=seen.clone()).tolist() == [1, 1]


def test_parameters_of_each_row(device):
    rows, vocab = 24, 5000
    logits, seen = make(rows, vocab, torch.float16, device), make_seen(rows, vocab, device)
    values = {
        "temperature": [0.0, 0.5, 1.0, 2.0],
        "top_k": [0, 1, 50, 4000],
        "top_p": [1.0, 0.5, 0.99],
        "min_p": [0.0, 0.2, 0.01],
        "repetition_penalty": [1.0, 1.5, 0.8],
    }
    columns = {
        name: [choices[row * (i + 1) % len(choices)] for row in range(rows)]
        for i, (name, choices) in enumerate(values.items())
    }
    tensors = {
        name: torch.tensor(column, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
        for name, column in columns.items()
    }
    together = sample(logits, **tensors, seen=seen.clone(), rng_state=state(device=device))
    for row in range(rows):
        numbers = {name: column[row] for name, column in columns.items()}
        alone = sample(logits, **numbers, seen=seen.clone(), rng_state=state(device=device))
        assert alone[row] == together[row], numbers


def test_a_row_does_not_depend_on_the_others(device):
    logits = make(70, 40000, torch.bfloat16, device)
    expected = sample(logits, top_p=0.9, rng_state=state(device=device))
    other = logits.clone()
    other[::2] = torch.randn_like(other[::2]) * 3
    assert_same(sample(other, top_p=0.9, rng_state=state(device=device))[1::2], expected[1::2])
    for rows in (1, 2, 5, 17, 40):  # other numbers of blocks per row
        assert_same(sample(logits[:rows], top_p=0.9, rng_state=state(device=device)), expected[:rows])


def test_random_state(device):
    logits = torch.zeros(64, 1000, device=device)
    rng_state = state(seed=7, offset=0, device=device)
    draws = [sample(logits, rng_state=rng_state) for _ in range(3)]
    assert rng_state.tolist() == [7, 3]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
    assert_same(sample(logits, rng_state=state(seed=7, offset=1, device=device)), draws[1])
    assert not torch.equal(sample(logits, rng_state=state(seed=8, offset=1, device=device)), draws[1])
    assert_same(sample(logits, rng_state=state(seed=2**40 + 7, offset=2**43 + 9, device=device)).shape, draws[0].shape)
    for seed, offset in ((7, 1), (2**62 + 5, 2**43 + 1)):
        tokens = sample(logits, rng_state=state(seed, offset, device))
        assert_same(tokens.cpu(), (uniforms(seed, offset, 64) * 1000).long())


def test_the_default_generator(device):
    logits = torch.zeros(64, 1000, device=device)
    torch.manual_seed(3)
    first, second = sample(logits), sample(logits)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert_same((sample(logits), sample(logits)), (first, second))


@pytest.mark.parametrize("generator_device", DEVICES)
def test_generators(device, generator_device):
    if device == "cpu" and generator_device == "cuda":
        pytest.skip("the generator is on the CPU or where the logits are")
    logits = torch.zeros(64, 1000, device=device)
    generator = torch.Generator(generator_device).manual_seed(11)
    first, second = (sample(logits, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert_same(sample(logits, generator=generator.manual_seed(11)), first)
    if generator_device == "cpu":
        assert_same(sample(logits.cpu(), generator=generator.manual_seed(11)), first.cpu())


def test_top_k_keeps_all_that_equal_the_kth(device):
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0, 3.0, 1.0, 0.5]], device=device)
    tokens = sample(logits.expand(2000, 7), top_k=3, temperature=5.0, rng_state=state(device=device))
    assert sorted(set(tokens.tolist())) == [1, 2, 3, 4, 5]
    check_draws(tokens, probabilities(logits, top_k=3, temperature=5.0))


@pytest.mark.parametrize("vocab", [7, 1000, 5000])
@pytest.mark.parametrize("top_p", [0.01307, 0.5037, 0.8503])
def test_top_p_keeps_the_last_of_equal_ones(device, vocab, top_p):
    """As with a stable ascending sort: exactly as many as are needed."""
    for logits in (torch.zeros(1, vocab), torch.arange(vocab)[None] % 3 * 1.0):
        logits = logits.to(device)
        exact = probabilities(logits, top_p=top_p)
        tokens = sample(logits.expand(4000, vocab), top_p=top_p, rng_state=state(device=device))
        check_draws(tokens, exact)
        check_draws(
            sample(logits.expand(4000, vocab), top_k=vocab - 1, top_p=top_p, rng_state=state(device=device)), exact
        )


@every_option
@pytest.mark.parametrize("vocab", [64, 32003])
def test_all_logits_equal(device, vocab, options):
    logits = torch.full((40, vocab), -3.25, device=device)
    options = {name: value for name, value in options.items() if name != "top_p"}  # a sum of 0.9 may or may not be 0.9
    check_draws(sample(logits, **options, rng_state=state(device=device)), probabilities(logits, **options))


@every_dtype
@pytest.mark.parametrize("vocab", [8, 3001])
def test_special_values(device, vocab, dtype):
    logits = torch.full((200, vocab), float("-inf"), dtype=dtype, device=device)
    assert sample(logits).tolist() == [0] * 200  # no token is left
    logits[:, 2::3] = float("nan")
    assert sample(logits, top_p=0.5).tolist() == [0] * 200
    logits[:, 5] = -1e4
    for options in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.5}, {"temperature": 0.0}, {"temperature": 1e-30}):
        assert sample(logits, **options).tolist() == [5] * 200, options
    logits[:, 6] = 1e4
    assert sample(logits, repetition_penalty=1e30, seen=torch.ones_like(logits, dtype=torch.bool)).tolist() == [6] * 200
    logits[:, 1] = logits[:, 7] = float("inf")
    assert set(sample(logits, top_k=1).tolist()) == {1, 7}
    assert set(sample(logits, top_p=0.4).tolist()) == {7}
    assert sample(logits, temperature=0.0).tolist() == [1] * 200


def test_elements_out_of_range(device):
    logits = make(5, 300, torch.float32, device)
    rng_state = state(device=device)

    def draw(**options):
        tensors = {
            name: torch.full((5,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
            for name, value in options.items()
        }
        return sample(logits, **tensors, rng_state=rng_state.clone())

    nan = float("nan")
    for off in (
        {"top_k": -3},
        {"top_k": 300},
        {"top_k": 2**31 - 1},
        {"top_p": 2.0},
        {"top_p": nan},
        {"min_p": -1.0},
        {"min_p": nan},
        {"repetition_penalty": -1.0},
    ):
        assert_same(draw(**off), draw())
    for greedy in ({"temperature": -1.0}, {"temperature": nan}, {"top_p": 0.0}, {"top_p": -1.0}, {"min_p": 5.0}):
        assert_same(draw(**greedy), logits.argmax(-1))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("vocab", [96, 4099])
def test_layouts(device, layout, vocab, dtype):
    logits = laid_out(make(9, vocab, dtype, device), layout)
    options = {"top_k": 20, "top_p": 0.8}
    drawn = sample(logits, **options, rng_state=state(device=device))
    assert_same(drawn, sample(logits.contiguous(), **options, rng_state=state(device=device)))


@every_dtype
@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 6, 7, 8, 9, 127, 1001, 4096, 33001])
def test_any_alignment(device, vocab, dtype):
    """Rows draw the same token wherever they start; the logits around them are larger than theirs."""
    rows = 5
    logits, seen = make(rows, vocab, dtype, device), make_seen(rows, vocab, device)
    cases = ({"temperature": 0.0}, {"top_p": 0.9}, {"temperature": 9.0}, OPTIONS["everything"])
    for options in cases:
        expected = sample(logits, **options, seen=seen.clone(), rng_state=state(device=device))
        for offset in range(8):
            stride = vocab + 8 + offset % 3
            memory = torch.full((rows * stride + 8,), 1e4, dtype=dtype, device=device)
            view = memory.as_strided((rows, vocab), (stride, 1), offset).copy_(logits)
            assert_same(sample(view, **options, seen=seen.clone(), rng_state=state(device=device)), expected)


def test_float64_on_the_cpu():
    logits = torch.randn(30, 500, dtype=torch.float64)
    check_draws(sample(logits, top_p=0.7, rng_state=state()), probabilities(logits, top_p=0.7))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_drawn_tokens_are_seen(device, dtype):
    logits = make(6, 100, torch.float32, device)
    seen = torch.zeros(6, 128, dtype=dtype, device=device)[:, :100]
    drawn = set()
    for _ in range(20):
        tokens = sample(logits, top_k=20, repetition_penalty=1e6, seen=seen)
        drawn |= {(row, token) for row, token in enumerate(tokens.tolist())}
        assert {tuple(place) for place in seen.nonzero().tolist()} == drawn
    assert len(drawn) == 120  # a token that was drawn is not drawn again


def test_no_rows(device):
    rng_state = state(device=device)
    assert sample(torch.ones(0, 5, device=device), rng_state=rng_state).shape == (0,)


def test_logits_with_a_gradient(device):
    logits = make(2, 50, torch.float32, device).requires_grad_()
    assert not sample(logits).requires_grad


@pytest.mark.parametrize("tensors", [False, True])
def test_opcheck(device, tensors):
    logits, row = make(4, 300, torch.float32, device), torch.ones(4, device=device)
    parameters = (row, (row * 20).int(), row / 2, row / 10, row) if tensors else (None,) * 5
    seen = make_seen(4, 300, device) if tensors else None
    args = (logits, *parameters, seen, state(device=device), 0.7, 50, 0.9, 0.1, 1.1)
    torch.library.opcheck(torch.ops.llmkernels.sample, args)


def test_compiled(device):
    logits = make(4, 300, torch.float32, device)
    compiled = torch.compile(lambda x, s: sample(x * 2, top_k=9, top_p=0.9, rng_state=s), fullgraph=True)
    rng_state, expected_state = state(device=device), state(device=device)
    for _ in range(3):
        assert_same(compiled(logits, rng_state), sample(logits * 2, top_k=9, top_p=0.9, rng_state=expected_state))
    assert_same(rng_state, expected_state)


ERRORS = {
    "logits must be float32, float16, bfloat16.* got Int": lambda x: sample(x.int()),
    r"logits must have shape \[rows, vocab\], got \[8\]": lambda x: sample(x[0]),
    r"logits must have from 1 to 2097152 columns, got 0": lambda x: sample(x[:, :0]),
    "temperature must be at least 0, got -1": lambda x: sample(x, temperature=-1.0),
    "top_k must be at least 0, got -2": lambda x: sample(x, top_k=-2),
    r"top_p must be in \(0, 1\], got 0": lambda x: sample(x, top_p=0.0),
    r"top_p must be in \(0, 1\], got 1.5": lambda x: sample(x, top_p=1.5),
    r"min_p must be in \[0, 1\], got 2": lambda x: sample(x, min_p=2.0),
    "repetition_penalty must be positive and finite, got 0": lambda x: sample(x, repetition_penalty=0.0),
    "temperature must be Float, got Int": lambda x: sample(x, temperature=torch.ones(2, device=x.device).int()),
    "top_k must be Int, got Long": lambda x: sample(x, top_k=torch.ones(2, device=x.device).long()),
    r"top_p must have shape \[2\] .* got \[3\]": lambda x: sample(x, top_p=torch.ones(3, device=x.device)),
    r"min_p must have shape \[2\] .* got \[2, 1\]": lambda x: sample(x, min_p=torch.ones(2, 1, device=x.device)),
    "seen must be Bool or Byte, got Float": lambda x: sample(x, seen=x.clone()),
    r"seen must have the shape of logits, \[2, 8\], got \[2, 7\]": lambda x: sample(x, seen=x[:, :7].bool()),
    "seen must have contiguous rows, got stride 2": lambda x: sample(x, seen=x.bool().t().contiguous().t()),
    r"rng_state must be a contiguous Long tensor of shape \[2\], got Float \[2, 8\]": lambda x: sample(
        x, rng_state=x.clone()
    ),
}


@pytest.mark.parametrize("message, call", ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_op_argument_and_what_was_got(device, message, call):
    with pytest.raises((RuntimeError, ValueError), match="sample: " + message):
        call(torch.ones(2, 8, device=device))


def test_a_generator_and_a_random_state():
    with pytest.raises(ValueError, match="sample: expected a generator or an rng_state, got both"):
        sample(torch.ones(2, 8), generator=torch.Generator(), rng_state=state())


@pytest.mark.gpu
def test_errors_about_devices():
    logits = torch.ones(2, 8, device="cuda")
    with pytest.raises(RuntimeError, match="sample: top_p must be on the device of logits"):
        sample(logits, top_p=torch.ones(2))
    with pytest.raises(RuntimeError, match="sample: rng_state must be on the device of logits"):
        sample(logits, rng_state=state())
    with pytest.raises(RuntimeError, match="sample: logits is float64, which is supported on the CPU only"):
        sample(logits.double())


@pytest.mark.gpu
@every_dtype
@every_option
@pytest.mark.parametrize("rows, vocab", [(1, 152064), (1, 151669), (9, 50257), (33, 32000), (140, 4097), (140, 151669)])
def test_gpu_and_cpu_draw_the_same(rows, vocab, options, dtype):
    logits, seen = make(rows, vocab, dtype, "cpu", scale=3.0), make_seen(rows, vocab, "cpu")
    expected = sample(logits, **options, seen=seen.clone(), rng_state=state())
    for _ in range(2):
        drawn = sample(logits.cuda(), **options, seen=seen.cuda(), rng_state=state(device="cuda"))
        assert_same(drawn.cpu(), expected)


@pytest.mark.gpu
@every_option
def test_replays_of_a_graph_draw_as_eager_calls_do(options):
    logits = make(5, 152064, torch.bfloat16, "cuda")
    rng_state, eager_state = state(device="cuda"), state(device="cuda")
    seen, eager_seen = (torch.zeros(5, 152064, dtype=torch.bool, device="cuda") for _ in range(2))
    expected = [sample(logits, **options, seen=eager_seen, rng_state=eager_state) for _ in range(6)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sample(logits, **options, rng_state=state(device="cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, **options, seen=seen, rng_state=rng_state)
    drawn = []
    for _ in range(6):
        graph.replay()
        drawn.append(tokens.clone())
    assert_same(tuple(drawn), tuple(expected))
    assert_same((rng_state, seen), (eager_state, eager_seen))
    assert len({tuple(d.tolist()) for d in drawn}) > 1


@pytest.mark.gpu
@every_option
def test_deterministic(options):
    logits = make(64, 152064, torch.bfloat16, "cuda")
    expected = sample(logits, **options, rng_state=state(device="cuda"))
    for _ in range(250):
        assert_same(sample(logits, **options, rng_state=state(device="cuda")), expected)


@pytest.mark.gpu
def test_a_row_stride_beyond_2_to_the_31():
    vocab, stride = 4096, 2**31 + 8
    memory = torch.zeros(stride + vocab, dtype=torch.float16, device="cuda")
    logits = memory.as_strided((2, vocab), (stride, 1))
    logits.copy_(make(2, vocab, torch.float16, "cuda"))
    options = {"top_p": 0.9, "rng_state": state(device="cuda")}
    drawn = sample(logits, **options)
    assert_same(drawn, sample(logits.contiguous(), top_p=0.9, rng_state=state(device="cuda")))


@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [7, 3000, 3001, 9000])
def test_every_path_once(device, vocab, dtype):
    logits, seen = make(3, vocab, dtype, device), make_seen(3, vocab, device)
    for options in (*OPTIONS.values(), {"top_k": 2000}, {"temperature": 99.0, "top_p": 0.9}):
        tokens = sample(logits, **options, seen=seen.clone(), rng_state=state(device=device))
        check_draws(tokens, probabilities(logits, seen, **options))
    for penalty in (1.0, 2.0):  # without rounding, so that equal scores stay equal in the op
        tokens = sample(logits, 0.0, repetition_penalty=penalty, seen=seen.clone())
        scores = penalised(logits, seen, penalty)
        assert tokens.tolist() == [(row == row.max()).nonzero()[0].item() for row in scores]
