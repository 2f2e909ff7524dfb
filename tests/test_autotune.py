"""Measured choices of kernels: tables, what a GPU refuses, which choice wins, and `llmkernels.autotune`."""

import itertools
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import llmkernels
from hf_models import LAYERS, assert_close, rounding, tiny_inputs, tiny_model
from linear_cases import add, compare, eager_add, eager_glu, eager_norm_glu, eager_norm_linear, make
from llmkernels import _explain, explain, linear, rms_norm_linear
from llmkernels._tune import autotune as tuning
from llmkernels._tune import files, measure, table
from llmkernels._tune.candidates import candidates, first_m, route
from llmkernels._tune.measure import FINALISTS, ROUNDS, Problem, finalists, is_faster, winner
from llmkernels._tune.table import RULE, Choice, Linear, Measured, merge
from route_cases import A100, B200, H200, facts_of

KB = 1024
QKV = Linear(4608, 3584, norm=True, in_step=True)
MMA = Choice("mma", 1, 2, 200 * KB, 96, 56)
WGMMA = Choice("wgmma", 2, 2, 200 * KB, 288, 56)
_op = torch.ops.llmkernels


def measured(linear=QKV, first=2, last=4, choice=MMA, time_us=9.0, rule_us=10.0):
    return Measured(linear, first, last, choice, time_us, rule_us)


@pytest.fixture
def module():
    return pytest.importorskip("llmkernels._C")


# ---- the table


def test_merge_replaces_the_same_tokens_of_the_same_linear():
    other = Linear(4608, 3584, in_step=True)
    old = [measured(first=1, last=8), measured(other), measured(first=9, last=16)]
    new = measured(first=3, last=4, choice=RULE)
    assert merge(old, [new]) == (
        measured(other),
        measured(first=1, last=2),
        new,
        measured(first=5, last=8),
        measured(first=9, last=16),
    )
    assert merge((), [new, new]) == (new,)
    assert merge([new], [measured(first=1, last=16)]) == (measured(first=1, last=16),)


def test_a_choice_is_for_the_tokens_of_the_same_code():
    sizes = [1, 2, 4, 8, 16, 32, 64]
    ranges = [(first_m(m, smaller), m) for smaller, m in zip([0, *sizes], sizes, strict=False)]
    assert ranges == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (49, 64)]
    assert [first_m(m, 0) for m in (5, 12, 20, 40, 65, 128, 129, 300)] == [2, 9, 17, 33, 65, 65, 129, 257]
    assert first_m(40, 36) == 37


def test_route_takes_the_measured_choice(module):
    """And says so, with the numbers of the entry; of kByRule the kernel is that of the rules."""
    ask = partial(module.linear_route, norm=True, in_step=True, **facts_of(H200))
    for choice, variant in ((MMA, "mma"), (RULE, "mma"), (Choice("library"), "library")):
        entry = measured(choice=choice).numbers
        for m in (2, 3, 4):
            found = ask(m, 4608, 3584, tuned=[entry])
            assert (found["variant"], found["tuned"]) == (variant, entry)
            by_rule = ask(m, 4608, 3584)
            assert (found["plan"] == by_rule["plan"]) == (choice == RULE) and by_rule["tuned"] is None
            assert ("measured" in found["reason"]) == (choice != RULE)


def test_what_a_choice_is_not_for(module):
    """Other tokens, weights, fused operations; what no kernel takes; a GPU that cannot run it."""
    entry = measured().numbers
    ask = partial(module.linear_route, 3, 4608, 3584, norm=True, in_step=True, tuned=[entry])
    same = facts_of(H200)
    assert ask(**same)["tuned"] == entry and ask(bias=True, dtype="float16", **same)["tuned"] == entry
    for options in ({"norm": False}, {"in_step": False}, {"residual": True}, {"glu": True}):
        assert ask(**{**options, **same})["tuned"] is None
    assert ask(dtype="float32", **same)["tuned"] is None and ask(aligned=False, **same)["tuned"] is None
    assert ask(**facts_of(A100))["tuned"] is None and ask(**{**same, "shared_bytes": 205000 - KB})["tuned"] is None
    for shape in ((1, 4608, 3584), (5, 4608, 3584), (3, 4608, 3592), (3, 4616, 3584)):
        found = module.linear_route(*shape, norm=True, in_step=True, tuned=[entry], **same)
        assert found["tuned"] is None


def test_many_entries_are_found(module):
    """Each by its own key, whatever the order that they come in."""
    entries = [
        measured(Linear(n, k, residual=residual), m, m, RULE).numbers
        for n, k, residual, m in itertools.product((64, 128, 4608), (64, 3584), (False, True), (1, 2, 3, 16))
    ]
    for entry in entries:
        found = module.linear_route(
            entry[1], entry[2], entry[3], residual=bool(entry[6]), tuned=entries[::-1], **facts_of(H200)
        )
        assert found["tuned"] == entry


@pytest.mark.parametrize(
    "entry, reason",
    [
        (measured(first=0), "first_m to last_m is not a range of tokens"),
        (measured(first=5), "first_m to last_m is not a range of tokens"),
        (measured(last=2**40), "first_m to last_m is not a range of tokens"),
        (measured(Linear(0, 64)), "n or k is not from 1 to"),
        (measured(Linear(7, 64, glu=True)), "n is odd with glu"),
        (measured(first=64, last=65, choice=RULE), "first_m to last_m crosses 64 tokens"),
        (measured(last=17), "mma is for 1 to 16 tokens"),
        (measured(choice=WGMMA), "wgmma is for 17 to 64 tokens"),
        (measured(choice=Choice("gemv")), "gemv is for one token"),
        (measured(Linear(8, 20488), 1, 1, Choice("gemv")), "k or the rows of the weight are too many for gemv"),
        (
            measured(Linear(132 * 2048 + 1, 64), 1, 1, Choice("gemv")),
            "k or the rows of the weight are too many for gemv",
        ),
        (measured(choice=Choice("gemm", columns=128)), "gemm is for more than 64 tokens"),
        (measured(first=65, last=128, choice=Choice("gemm", columns=160)), "gemm has no tiles of so many columns"),
        (
            measured(Linear(7168, 64, glu=True), 65, 128, Choice("gemm", columns=2128)),
            "gemm does not split K with a gated activation",
        ),
        (measured(choice=Choice("mma", 2, 3, 200 * KB, 96, 56)), "mma has clusters of one block"),
        (measured(first=17, last=32, choice=Choice("wgmma", 3, 2, 200 * KB, 96, 56)), "cluster is not 1, 2, 4 or 8"),
        (measured(first=17, last=32, choice=Choice("wgmma", 8, 2, 200 * KB, 96, 56)), "no clusters of so many blocks"),
        (measured(choice=Choice("mma", 1, 0, 200 * KB, 96, 56)), "max_chunks is not from 1 to 16"),
        (measured(choice=Choice("mma", 1, 3, 200 * KB, 8, 56)), "max_tile_rows is not from 16 to 384"),
        (measured(choice=Choice("mma", 1, 3, 200 * KB, 96, 0)), "prefetch_chunks is not from 1 to 56"),
        (measured(choice=Choice("mma", 1, 3, 2**60, 96, 56)), "max_shared_bytes is not from 0 to"),
        (measured(choice=Choice("mma", 1, 3, 228 * KB, 96, 56)), "a block has less shared memory"),
        (measured(choice=Choice("mma", 1, 3, 4 * KB, 96, 56)), "the ring does not fit max_shared_bytes"),
        (measured(choice=Choice("mma", 1, 3, 0, 96, 56)), "the ring does not fit max_shared_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(module, entry, reason):
    index, found = module.refused_tuned_linear([measured().numbers, entry.numbers], **facts_of(H200))
    assert index == 1 and reason in found


@pytest.mark.parametrize("gpu, choice", [(A100, MMA), (A100, Choice("gemv")), (B200, WGMMA), (B200, Choice("gemm"))])
def test_refused_by_other_gpus(module, gpu, choice):
    first, last = {"mma": (2, 4), "gemv": (1, 1), "wgmma": (17, 32), "gemm": (65, 128)}[choice.variant]
    index, reason = module.refused_tuned_linear([measured(QKV, first, last, choice).numbers], **facts_of(gpu))
    assert index == 0 and "compute capability 9.0" in reason
    for choice in (RULE, Choice("library")):
        assert module.refused_tuned_linear([measured(choice=choice).numbers], **facts_of(gpu)) is None


def test_two_entries_for_the_same_tokens_are_refused(module):
    ask = partial(module.refused_tuned_linear, **facts_of(H200))
    both = [measured(first=4, last=8).numbers, measured(first=2, last=4).numbers]
    assert ask(both) == (0, "another entry is for the same tokens of the same linear")
    assert ask([both[0], measured(first=2, last=3).numbers]) is None
    with pytest.raises(ValueError, match="refused_tuned_linear: an entry of tuned must be 15 numbers, got 3"):
        ask([(1, 2, 3)])


def test_a_kernel_that_is_not_chosen(module):
    numbers = [*measured().numbers]
    for variant in (4, 6, -2, 2**40):  # sm80 has no numbers to choose
        numbers[8] = variant
        assert module.refused_tuned_linear([numbers], **facts_of(H200)) == (
            0,
            "the variant is not one that can be chosen",
        )


# ---- candidates


@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 33, 64, 65, 2048])
@pytest.mark.parametrize("n, k", [(4608, 3584), (896, 72), (152064, 3584), (130, 18944)])
def test_candidates_can_all_run(module, m, n, k):
    """In all their tokens, with plans of their own; the first is that of the rules."""
    gpu = _explain.GPUS["H200"]
    for norm, in_step in itertools.product((False, True), repeat=2):
        of = Linear(n, k, norm=norm, in_step=in_step)
        found = candidates(gpu, of, m)
        entries = [measured(of, first_m(m, 0), m, choice).numbers for choice in found]
        assert found[0] == RULE and len(set(found)) == len(found) <= 80
        assert all(module.refused_tuned_linear([entry], **_explain.facts_of(gpu)) is None for entry in entries)
        assert (Choice("library") in found) <= (not in_step)
    assert len(found) > 1 or m > 64 or k == 72


@pytest.mark.parametrize("m", [1, 3, 16, 17, 48, 64, 300])
def test_plans_of_candidates_cover_the_result(module, m):
    gpu = _explain.GPUS["H200"]
    for n, k, glu in itertools.product((8, 144, 896, 37888), (8, 72, 3584, 18944), (False, True)):
        of = Linear(n, k, glu)
        for choice in candidates(gpu, of, m):
            plan = route(gpu, of, m, choice)["plan"]
            if plan:
                tiles = plan["output_tiles"] // (-(-m // 128) if m > 64 else 1)
                assert plan["tile_rows"] * tiles >= (n // 2 if glu else n), (of, choice, plan)
                assert 0 < plan["bytes_in_flight"] < plan["shared_bytes"] <= gpu.shared_bytes, (of, choice, plan)
                assert plan["stages"] > 0 and 0 < plan["blocks"] <= gpu.sm_count, (of, choice, plan)


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1])
def test_any_number_is_refused_or_can_run(module, number):
    for entry, place in itertools.product((measured(), measured(first=17, last=64, choice=WGMMA)), range(15)):
        numbers = [*entry.numbers]
        numbers[place] = number
        refused = module.refused_tuned_linear([numbers], **facts_of(H200))
        m = entry.last_m if place else entry.first_m
        found = module.linear_route(m, 4608, 3584, norm=True, in_step=True, tuned=[numbers], **facts_of(H200))
        assert refused is None or refused[1]
        plan = found["plan"] or {"shared_bytes": 1, "stages": 1}  # of the library
        assert 0 < plan["shared_bytes"] <= H200["shared_bytes"] and plan["stages"] > 0, numbers


def test_nothing_to_choose_without_tma(module):
    assert candidates(_explain.GPUS["A100"], QKV, 4) == [RULE]


# ---- which one wins


def test_noise_is_not_faster():
    rule = [10.0, 10.2, 9.9, 10.1]
    assert is_faster([9.7, 9.9, 9.6, 9.8], rule)
    assert not is_faster([9.85, 10.05, 9.75, 9.95], rule)  # 1.5 %
    assert not is_faster([9.0, 9.0, 10.5, 10.6], rule)  # in two rounds of four
    assert not is_faster(rule, rule)


def test_rounds_are_compared_one_by_one():
    """Where the clock falls, that of both does."""
    rule = [10.0, 12.0, 14.0, 16.0]
    assert is_faster([time * 0.95 for time in rule], rule) and not is_faster([time * 0.99 for time in rule], rule)


def test_winner():
    problem = Problem("rms_norm_linear", 4608, 3584, 4, 3, torch.bfloat16)
    other = Choice("mma", 1, 4, 200 * KB, 96, 56)
    samples = {RULE: [10.0] * 3, MMA: [9.0] * 3, other: [8.0] * 3}
    assert winner(problem, samples) == measured(QKV, 3, 4, other, 8.0, 10.0)
    assert winner(problem, {RULE: [10.0] * 3, MMA: [9.9] * 3}) == measured(QKV, 3, 4, RULE, 10.0, 10.0)
    assert winner(problem, {RULE: [10.0] * 3}).choice == RULE


CALLS = {  # one of each op
    "linear": (96, 64),
    "rms_norm_linear": (96, 64),
    "glu_linear": (96, 64),
    "rms_norm_glu_linear": (96, 64),
    "linear_add_": (64, 64),
}


class Clock:
    """Stands for the GPU: ops run on the CPU; the time of a graph is that of the choice that it was recorded with."""

    index, device = 0, torch.device("cpu")

    def __init__(self, monkeypatch, times):
        self.times, self.now = times, None
        self.recorded = []
        monkeypatch.setattr(measure.table, "only", self.only)
        monkeypatch.setattr(measure.graphs, "record", self.record)
        monkeypatch.setattr(measure.Calls, "time_us", lambda calls, choice: self.times[choice])

    def of(self, problem):
        return [torch.randn(problem.n, problem.k, dtype=problem.dtype) / 8 for _ in range(3)]

    @contextmanager
    def only(self, index, entries):
        assert index == 0 and len(entries) == 1
        self.now = entries[0].choice
        yield

    def record(self, function, device):
        function()
        self.recorded.append(self.now)
        return self.now, None


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("m, in_step", [(4, True), (16, False)])
def test_measure(module, monkeypatch, op, m, in_step):
    """All candidates are timed; the best ones once more, beside the choice of the rules."""
    n, k = CALLS[op]
    problem = Problem(op, n, k, m, 3, torch.bfloat16, bias=True, in_step=in_step)
    gpu = _explain.GPUS["H200"]
    choices = candidates(gpu, problem.linear, m)
    clock = Clock(monkeypatch, {choice: 10.0 - number for number, choice in enumerate(choices)})
    noted = []
    found = measure.measure(problem, clock, gpu, lambda: noted.append(1))
    assert found == Measured(problem.linear, 3, m, choices[-1], clock.times[choices[-1]], 10.0)
    assert len(noted) == len(choices) and clock.recorded[: len(choices)] == choices
    assert clock.recorded[len(choices) :] == [RULE, *choices[: -1 - FINALISTS : -1]][: len(choices)]


@pytest.mark.parametrize("wrong", [RuntimeError("no launch"), measure.graphs.NoGraph("no graph"), "a result"])
def test_a_choice_that_fails_is_left_out(module, monkeypatch, wrong):
    problem = Problem("linear", 4608, 64, 1, 1, torch.float16)
    gpu = _explain.GPUS["H200"]
    bad = candidates(gpu, problem.linear, 1)[1]
    clock = Clock(monkeypatch, dict.fromkeys(candidates(gpu, problem.linear, 1), 5.0) | {bad: 1.0})
    once = measure.Calls.once

    def fail(calls, weight=None):
        if clock.now != bad:
            return once(calls, weight)
        if isinstance(wrong, Exception):
            raise wrong
        return once(calls, weight) * 1.1

    monkeypatch.setattr(measure.Calls, "once", fail)
    with pytest.warns(UserWarning, match="llmkernels: linear .* is measured without Choice") as caught:
        assert measure.measure(problem, clock, gpu).choice == RULE
    assert len(caught) == 1
    bad = RULE
    if isinstance(wrong, Exception):
        with pytest.raises(RuntimeError, match=r"autotune: linear .* fails: no "):
            measure.measure(problem, clock, gpu)


def test_finalists():
    times = {Choice("mma", 1, chunks): float(chunks) for chunks in range(1, 9)}
    assert finalists({RULE: 99.0, **times}) == [RULE, *list(times)[:FINALISTS]]
    assert finalists({RULE: 1.0}) == [RULE] and ROUNDS >= 5


# ---- autotune


PRODUCTS = {  # of the tiny Qwen2 of the tests: hidden 112, heads 7 and 1 of 16, MLP 88, 97 tokens
    ("rms_norm_linear", 144, 112, True),
    ("linear_add_", 112, 112, False),
    ("rms_norm_glu_linear", 176, 112, False),
    ("linear_add_", 112, 88, False),
    ("rms_norm_linear", 97, 112, False),
}


def test_problems_of_a_model():
    model = tiny_model(dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"autotune: model must have a decode step, .*: .*not patched"):
        tuning.problems_of(model, (1,))
    with llmkernels.patch(model):
        found = tuning.problems_of(model, (16, 1, 4, 4))
    assert {(p.op, p.n, p.k, p.bias) for p in found} == PRODUCTS
    assert [(p.first_m, p.m) for p in found[:3]] == [(1, 1), (2, 4), (9, 16)] and len(found) == 3 * len(PRODUCTS)
    assert all(p.in_step and p.dtype == torch.bfloat16 for p in found) and LAYERS == 2
    assert found[0].linear == Linear(144, 112, norm=True, in_step=True)
    assert str(found[0]) == "rms_norm_linear (1, 112) x (144, 112) bfloat16"


def test_products_that_differ_in_the_bias_are_one_problem():
    products = [("linear", 64, 64, True), ("linear", 64, 64, False), ("linear", 64, 72, False)]
    assert len(tuning.problems_for(products, [4], torch.float16)) == 2


def test_raises():
    model = tiny_model(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"autotune: model must be a torch.nn.Module, got int"):
        llmkernels.autotune(1)
    with pytest.raises(RuntimeError, match=r"autotune: model must be on a GPU, whose kernels are .*, got one on cpu"):
        llmkernels.autotune(model)
    for sizes in ((), (0,), (65,), (1.5,)):
        with pytest.raises(ValueError, match="autotune: batch_sizes must be numbers from 1 to 64, got"):
            tuning.problems_of(model, sizes)
    wide = tiny_model()
    with llmkernels.patch(wide), pytest.raises(ValueError, match="model must be float16 or bfloat16, got float32"):
        tuning.problems_of(wide, (1,))


def test_text_of_a_tuning(tmp_path):
    found = tuning.Tuning("H200", (measured(), measured(first=1, last=1, choice=RULE)), tmp_path)
    assert found.faster == (measured(),)
    head, first, second, last = str(found).splitlines()
    assert first.split() == ["4608", "x", "3584", "2-4", "norm", "mma", "9.00", "10.00"]
    assert second.split()[3:7] == ["1", "norm", "as", "ruled"] and len({len(head), len(first), len(second)}) == 1
    assert last == f"1 of 2 are faster than by the rules on H200, in {tmp_path}"


def test_explain_says_measured(module, monkeypatch):
    gpu = _explain.Gpu(**{**vars(_explain.GPUS["H200"]), "tuned": (measured(), measured(first=5, last=8, choice=RULE))})
    monkeypatch.setitem(_explain.GPUS, "tuned", gpu)
    ask = partial(explain, "rms_norm_linear", in_step=True, device="tuned")
    found = ask((4, 3584), (4608, 3584))
    assert found.measured and found.reason == "measured to be the fastest on this GPU: 9.0 us, and 10.0 us by the rule"
    found = ask((8, 3584), (4608, 3584))
    assert found.measured
    assert found.reason == "up to 16 tokens; measured: 9.0 us, and nothing is more than 2% faster"
    assert not ask((9, 3584), (4608, 3584)).measured and not explain("linear", (4, 8), (8, 8), device="H200").measured


def tune(*arguments):
    script = Path(__file__).parents[1] / "scripts" / "tune.py"
    if not script.exists():
        pytest.skip("needs scripts/")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def test_script_lists_what_it_would_measure():
    pytest.importorskip("llmkernels._C")
    done = tune("--list", "--outside", "--models", "qwen2.5-0.5b")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "rms_norm_linear (64, 896) x (1152, 896) bfloat16" in lines  # q|k|v
    assert "linear (2048, 4864) x (896, 4864) bfloat16" in lines and len(lines) == len({*lines}) == 5 * 7 + 5 * 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_script_needs_a_gpu():
    done = tune("--models", "qwen2.5-0.5b")
    assert (done.returncode, done.stdout) == (1, "") and "tune.py: this machine has no GPU" in done.stderr


def test_public():
    assert llmkernels.autotune is tuning.autotune and "autotune" in llmkernels.__all__


# ---- on a GPU


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The current GPU, whose table is as it was afterwards; the cache is an empty folder."""
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path))
    index = torch.cuda.current_device()
    monkeypatch.setattr(files, "_loaded", {index})
    before = table.table_of(index)
    table.set_table(index, ())
    yield _explain.present_gpu("test", index)
    table.set_table(index, before)


OURS = {  # by op of a linear: ours, in PyTorch's ops, and which operands of make() it takes
    "linear": (linear, F.linear, "xwb"),
    "rms_norm_linear": (rms_norm_linear, eager_norm_linear, "xnwb"),
    "glu_linear": (_op.glu_linear, eager_glu, "xw"),
    "rms_norm_glu_linear": (_op.rms_norm_glu_linear, eager_norm_glu, "xnw"),
    "linear_add_": (add, eager_add, "rxwb"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("op", OURS)
@pytest.mark.parametrize("n, k", [(130, 72), (1000, 3592), (3584, 896)])
@pytest.mark.parametrize("m", [1, 3, 8, 13, 16, 17, 33, 48, 64, 200])
def test_every_candidate_is_right(gpu, op, m, n, k):
    """As accurate as PyTorch beside float64, and explain() names its kernel."""
    index = torch.cuda.current_device()
    (product,) = _explain.OPS[op]
    of = Linear(n, k, product.glu, product.norm, product.residual)
    x, norm_weight, weight, bias = make(m, n, k, torch.bfloat16, "cuda")
    operands = {"x": x, "n": norm_weight, "w": weight, "b": bias if product.bias else None}
    operands["r"] = torch.randn(m, n, device="cuda").bfloat16()
    ours, eager, letters = OURS[op]
    choices = candidates(gpu, of, m)
    for choice in choices:
        table.set_table(index, [measured(of, m, m, choice)])
        compare(ours, eager, [operands[letter] for letter in letters])
        found = explain(op, (m, k), (n, k))
        assert found.measured or len(choices) == 1
        assert choice == RULE or found.variant == choice.variant, choice


@pytest.mark.gpu
def test_a_choice_that_cannot_run_is_refused(gpu):
    index = torch.cuda.current_device()
    table.set_table(index, [measured(choice=RULE)])
    with pytest.raises(ValueError, match=r"cannot run: mma is for 1 to 16 tokens: Measured\("):
        table.set_table(index, [measured(), measured(first=17, last=32)])
    assert table.table_of(index) == (measured(choice=RULE),)


@torch.no_grad()
def logits_behind(model, ids, forced):
    """Those of steps behind a prompt, of given tokens."""
    cache, found = model(ids, use_cache=True).past_key_values, []
    for token in forced.unbind(1):
        output = model(token[:, None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits.float())
    return torch.cat(found, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, 20])
def test_autotune(gpu, batch):
    """The choices are used, are in the file and give the logits that there were before."""
    pytest.importorskip("llmkernels._C")
    model = tiny_model(device="cuda", dtype=torch.bfloat16, head_dim=64)
    ids, forced = tiny_inputs("cuda", batch), tiny_inputs("cuda", batch, 6, seed=2)
    with llmkernels.patch(model) as handle:
        before = logits_behind(model, ids, forced)
        llmkernels.generate(model, ids, max_new_tokens=8)
        done = llmkernels.autotune(model, (1, 4, 20), progress=False)
        assert handle.report().decode[0].graphs == 0  # they have the old kernels
        products = handle.report().decode[0].products
        assert sum(products.values()) == 4 * LAYERS + 1 and all("as measured" in name for name in products)
        assert_close(logits_behind(model, ids, forced), before, rounding(torch.bfloat16))
        assert llmkernels.generate(model, ids, max_new_tokens=8).shape == (batch, ids.shape[1] + 8)
    index = torch.cuda.current_device()
    assert {*files.read(done.path, files.identity_of(index))} == {*done.linears} <= {*table.table_of(index)}
    qkv = next(one.linear for one in done.linears if one.linear.norm and not one.linear.glu)
    found = explain("rms_norm_linear", (batch, qkv.k), (qkv.n, qkv.k), in_step=True)
    assert found.measured and "measured" in found.reason
