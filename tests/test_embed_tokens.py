"""embed_tokens_: embeddings as PyTorch has them, scaled or not; counters and positions of a cache."""

import pytest
import torch
import torch.nn.functional as F

import llmkernels  # noqa: F401, the op
from oracles import DTYPES, assert_same

_op = torch.ops.llmkernels
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
VOCAB = 37


def table(cols, dtype, device, vocab=VOCAB):
    generator = torch.Generator().manual_seed(cols)
    return torch.randn(vocab, cols, generator=generator).to(device, dtype)


def embedded(embedding, ids, *args, **named):
    hidden = embedding.new_full((ids.numel(), embedding.shape[1]), 7.0)
    _op.embed_tokens_(hidden, embedding, ids, *args, **named)
    return hidden


@every_dtype
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("cols", [1, 7, 8, 64, 896, 1001, 9000])
@pytest.mark.parametrize("rows", [1, 2, 129])
def test_embeddings(device, rows, cols, ids_dtype, dtype):
    embedding = table(cols, dtype, device)
    ids = torch.arange(rows, device=device).mul(5).remainder(VOCAB).to(ids_dtype)
    assert_same(embedded(embedding, ids), F.embedding(ids, embedding))
    for scale in (3.0, 0.22):
        assert_same(embedded(embedding, ids, scale), F.embedding(ids, embedding) * scale)


@every_dtype
@pytest.mark.parametrize("rows, cols", [(1, 7), (3, 64), (129, 1001)])
def test_added_to_what_is_there(device, rows, cols, dtype):
    """As embeddings of positions are."""
    embedding, ids = table(cols, dtype, device), torch.arange(rows, device=device).remainder(VOCAB).int()
    hidden = table(cols, dtype, device, vocab=rows).neg() * 3
    for scale in (1.0, 0.22):
        found = hidden.clone()
        _op.embed_tokens_(found, embedding, ids, scale, accumulate=True)
        assert_same(found, hidden + F.embedding(ids, embedding) * scale)
    _op.embed_tokens_(hidden, embedding, ids + VOCAB, accumulate=True)
    assert hidden.isnan().all()


@every_dtype
def test_scale_of_a_tensor(device, dtype):
    """As Gemma has it: cast to the dtype of the embeddings."""
    embedding, ids = table(64, dtype, device), torch.arange(9, device=device)
    scale = torch.tensor(2304**0.5).to(dtype)
    expected = F.embedding(ids, embedding) * scale.to(device)
    assert_same(embedded(embedding, ids, float(scale)), expected)


def test_float64():
    embedding, ids = table(50, torch.float64, "cpu"), torch.tensor([3, 0, 36])
    assert_same(embedded(embedding, ids, 0.1), F.embedding(ids, embedding) * 0.1)


@every_dtype
@pytest.mark.parametrize("start", [0, 1, 8], ids=lambda start: f"from_{start}")
@pytest.mark.parametrize("more", [0, 1, 8], ids=lambda more: f"{more}_apart")
def test_rows_anywhere(device, more, start, dtype):
    """Of embeddings and results; one token, too, whose row may begin at any address."""
    wide = table(64 + more + start, dtype, device)
    embedding = wide[:, start : start + 64]
    for ids in (torch.tensor([5], device=device), torch.tensor([[1, 36], [1, 0]], device=device).t()):
        around = torch.zeros(ids.numel() + 2, 64 + more + start, dtype=dtype, device=device)
        hidden = around[1:-1, start : start + 64]
        _op.embed_tokens_(hidden, embedding, ids)
        assert_same(hidden, F.embedding(ids.flatten(), embedding))
        assert around.count_nonzero() == hidden.count_nonzero()  # nothing else was written


@every_dtype
def test_ids_of_no_token(device, dtype):
    """NaN, whatever is behind the embeddings."""
    embedding = table(40, dtype, device, vocab=80)[:VOCAB]
    ids = torch.tensor([-1, 0, VOCAB, 36, 2**40, -(2**40)], device=device)
    hidden = embedded(embedding, ids)
    assert hidden.isnan().all(1).tolist() == [True, False, True, False, True, True]
    assert_same(hidden[[1, 3]], embedding[[0, 36]])


def test_no_tokens(device):
    assert embedded(table(8, torch.float32, device), torch.zeros(0, dtype=torch.long, device=device)).shape == (0, 8)


@pytest.mark.parametrize("counts", [2, 3])
@pytest.mark.parametrize("batch, tokens", [(1, 1), (3, 1), (1, 5), (4, 700), (64, 9)])
def test_counters_and_positions(device, batch, tokens, counts):
    embedding, ids = table(16, torch.float32, device), torch.zeros(batch * tokens, dtype=torch.long, device=device)
    before = torch.arange(counts * batch, dtype=torch.int32, device=device).view(counts, batch) * 3 - 1
    counters, positions = before.clone(), torch.full((batch, tokens), -9, dtype=torch.int32, device=device)
    embedded(embedding, ids, counters=counters, advance=tokens, positions=positions)
    assert_same(counters, before + tokens)
    assert_same(positions, before[0][:, None] + 1 + torch.arange(tokens, dtype=torch.int32, device=device))
    only = before.clone()
    embedded(embedding, ids, counters=only, advance=11)  # that is not the number of tokens, as packed ones have it
    assert_same(only, before + 11)


def test_positions_of_padding(device):
    """Those before the first token are 0, and none is larger than the last one that there is a rotation for."""
    ids = torch.zeros(2, 6, dtype=torch.long, device=device)
    counters = torch.tensor([[-4, 3], [0, 0]], dtype=torch.int32, device=device)
    positions = torch.zeros(2, 6, dtype=torch.int32, device=device)
    embedded(table(8, torch.float32, device), ids, 1.0, counters, 6, positions, 7)
    assert positions.tolist() == [[0, 0, 0, 0, 1, 2], [4, 5, 6, 7, 7, 7]]
    assert counters.tolist() == [[2, 9], [6, 6]]


def test_what_it_refuses(device):
    embedding, ids = table(8, torch.float32, device), torch.zeros(6, dtype=torch.long, device=device)
    hidden, counters = embedding.new_zeros(6, 8), torch.zeros(2, 2, dtype=torch.int32, device=device)
    cases = {
        r"hidden must have shape \[6, 8\]": (hidden[:5], embedding, ids),
        "hidden must have contiguous columns": (hidden.new_zeros(8, 6).t(), embedding, ids),
        "embedding must have shape": (hidden, embedding[0], ids),
        "ids must be int32 or int64": (hidden, embedding, ids.float()),
        "scale must be finite": (hidden, embedding, ids, float("nan")),
        "counters must be int32": (hidden, embedding, ids, 1.0, counters.long()),
        "counters must be a contiguous matrix": (hidden, embedding, ids, 1.0, counters.t()),
        "counters must have a row": (hidden, embedding, ids, 1.0, counters[:0]),
        "advance must be from 0": (hidden, embedding, ids, 1.0, counters, -1),
        "positions must come with counters": (hidden, embedding, ids, 1.0, None, 0, counters),
        r"positions must have shape \[2, tokens\]": (hidden, embedding, ids, 1.0, counters, 1, counters.clone()),
        "max_position must be from 0": (hidden, embedding, ids, 1.0, counters, 1, None, -1),
        "hidden must not share memory": (embedding[:6], embedding, ids),
    }
    for message, arguments in cases.items():
        with pytest.raises(RuntimeError, match="embed_tokens_: " + message):
            _op.embed_tokens_(*arguments)
    assert not hidden.any() and not counters.any()


@pytest.mark.gpu
def test_in_a_graph_that_is_pointed_elsewhere():
    """The counters of another cache, as those of the keys and values."""
    from llmkernels.hf.step import graphs

    embedding, ids = table(64, torch.bfloat16, "cuda"), torch.tensor([3, 4], device="cuda")
    hidden, positions = embedding.new_zeros(2, 64), torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    first, second = (torch.full((2, 1), start, dtype=torch.int32, device="cuda") for start in (10, 20))
    graph, _ = graphs.record(lambda: _op.embed_tokens_(hidden, embedding, ids, 1.0, first, 2, positions), hidden.device)
    graph.replay()
    assert (first.flatten().tolist(), positions.tolist()) == ([12, 12], [[11, 12]])
    graph.point([first.data_ptr()], [second.data_ptr()])
    ids.fill_(5)
    graph.replay()
    assert (first.flatten().tolist(), second.flatten().tolist()) == ([12, 12], [22, 22])
    assert positions.tolist() == [[21, 22]]
    assert_same(hidden, embedding[[5, 5]])


@pytest.mark.gpu
def test_positions_in_a_graph_that_is_pointed_elsewhere():
    """Those of the cache, whose embeddings are added."""
    from llmkernels.hf.step import graphs

    embedding, hidden = table(64, torch.bfloat16, "cuda"), torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda")
    first, second = (torch.full((2,), start, dtype=torch.int32, device="cuda") for start in (10, 20))
    graph, _ = graphs.record(lambda: _op.embed_tokens_(hidden, embedding, first, accumulate=True), hidden.device)
    graph.replay()
    assert_same(hidden, embedding[[10, 10]])
    graph.point([first.data_ptr()], [second.data_ptr()])
    hidden.zero_()
    graph.replay()
    assert_same(hidden, embedding[[20, 20]])
