"""PagedKVCache: pages are handed out, written and read."""

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmkernels import PagedKVCache
from llmkernels.hf import OutOfPages


def pages(**changes):
    options = {"layers": 2, "pages": 7, "page_size": 4, "kv_heads": 1, "head_dim": 2, "dtype": torch.float32}
    return PagedKVCache(**options | changes)


def keys_for(tokens, seed=0, batch=1):
    return torch.randn(batch, tokens, 1, 2, generator=torch.Generator().manual_seed(seed))


def test_pages_are_taken_and_given_back():
    cache = pages()
    a, b = cache.allocate(), cache.allocate()
    cache.append(a, 5)
    cache.append(b, 4)
    assert cache.free_pages == 4
    assert [len(cache.pages(s)) for s in (a, b)] == [2, 1]
    assert cache.cache_seqlens([b, a]).tolist() == [4, 5]
    table = cache.block_table([a, b])
    assert table.dtype == torch.int32
    assert table.tolist() == [list(cache.pages(a)), [*cache.pages(b), 0]]
    assert cache.block_table([a], width=4).shape == (1, 4)
    with pytest.raises(ValueError, match="width must be at least 2, got 1"):
        cache.block_table([a], width=1)
    cache.append(a, 3)
    assert cache.free_pages == 4
    with pytest.raises(TypeError, match=r"PagedKVCache.truncate: length must be an integer, got 2\.5"):
        cache.truncate(a, 2.5)
    cache.truncate(a, 4)
    assert cache.free_pages == 5
    cache.free(a)
    cache.free(b)
    assert cache.free_pages == 7
    assert cache.sequences == []
    with pytest.raises(KeyError):
        cache.append(a)


def test_out_of_pages_changes_nothing():
    cache = pages()
    a = cache.allocate()
    cache.append(a, 6)
    before = cache.pages(a), cache.length(a), cache.free_pages
    with pytest.raises(OutOfPages, match="sequence 0 must find 6 free pages for 23 more tokens, got 5 of 7"):
        cache.append(a, 23)
    assert (cache.pages(a), cache.length(a), cache.free_pages) == before
    cache.append(a, 22)
    assert cache.free_pages == 0
    fork = cache.fork(a)
    cache.truncate(fork, 27)
    with pytest.raises(OutOfPages, match="must find 1 free pages"):
        cache.append(fork)  # its last page belongs to both


def test_a_fork_of_an_unknown_sequence_makes_none():
    cache = pages()
    with pytest.raises(KeyError):
        cache.fork(3)
    assert cache.sequences == []
    assert cache.allocate() == 0


def test_what_is_written_is_read(device):
    cache = pages(device=device)
    a, b = cache.allocate(), cache.allocate()
    written = {s: torch.empty(0, 1, 2) for s in (a, b)}
    for step, tokens in enumerate((3, 4, 1, 1)):
        k = keys_for(tokens, step, 2)
        for s in (a, b):
            cache.append(s, tokens)
        cache.write(1, [a, b], k.to(device), -k.to(device))
        for s, new in zip((a, b), k, strict=True):
            written[s] = torch.cat([written[s], new])
    for s in (a, b):
        found = cache.read(1, s)
        assert torch.equal(found[0].cpu(), written[s])
        assert torch.equal(found[1].cpu(), -written[s])
        assert not any(x.any() for x in cache.read(0, s))
        # The same through the block table, as a kernel reads it.
        rows = cache.k[1][cache.block_table([s])[0].long()].flatten(0, 1)[: cache.length(s)]
        assert torch.equal(rows.cpu(), written[s])


def test_writing_needs_room_of_ones_own():
    cache = pages()
    a = cache.allocate()
    cache.append(a, 2)
    with pytest.raises(ValueError, match="sequence 0 must have 3 tokens, got 2; append first"):
        cache.write(0, [a], keys_for(3), keys_for(3))
    fork = cache.fork(a)
    with pytest.raises(ValueError, match="must be its own, got shared"):
        cache.write(0, [fork], keys_for(1), keys_for(1))
    for name in ("layers", "pages", "page_size", "kv_heads", "head_dim"):
        with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
            pages(**{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an integer, got 1.5"):
            pages(**{name: 1.5})


def test_writing_what_does_not_fit_changes_nothing():
    """A v of one token, head or sequence was broadcast, or raised after k had been written."""
    cache = pages()
    a = cache.allocate()
    cache.append(a, 2)
    k = keys_for(2)
    for name, wrong in (("v", k[:, :1]), ("v", k[..., :1]), ("v", k[0]), ("k", k[0]), ("k", torch.cat([k, k]))):
        with pytest.raises(RuntimeError, match=f"PagedKVCache.write: {name} must have shape"):
            cache.write(0, [a], **({"k": k, "v": k} | {name: wrong}))
    with pytest.raises(TypeError, match="v must be a tensor, got NoneType"):
        cache.write(0, [a], k, None)
    with pytest.raises(ValueError, match=r"sequences must differ, got \[0, 0\]"):
        cache.write(0, [a, a], torch.cat([k, k]), torch.cat([k, k]))
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        cache.append(a, -1)
    with pytest.raises(TypeError, match="tokens must be an integer, got 1"):
        cache.append(a, 1.5)
    assert not any(x.any() for x in cache.read(0, a))


def test_errors_name_what_is_wrong():
    """These were bare numbers, or what Python says of a list."""
    cache = pages()
    a = cache.allocate()
    cache.append(a, 2)
    k, unknown = keys_for(2), "sequence must be one that was allocated and is not free, got 9"
    for call in (cache.append, cache.free, cache.fork, cache.length, cache.pages, lambda s: cache.truncate(s, 0)):
        with pytest.raises(KeyError, match=unknown):
            call(9)
    for name in ("cache_seqlens", "block_table"):
        with pytest.raises(KeyError, match=unknown):
            getattr(cache, name)([a, 9])
        with pytest.raises(TypeError, match=f"PagedKVCache.{name}: sequences must be a list, got 0"):
            getattr(cache, name)(a)
    with pytest.raises(TypeError, match=r"PagedKVCache\.write: sequences must be a list, got 0"):
        cache.write(0, a, k, k)
    known = "be from -2 to 1"
    for kind, layer, words in ((IndexError, 2, known), (IndexError, -3, known), (TypeError, 0.5, "be an integer")):
        with pytest.raises(kind, match=f"PagedKVCache.write: layer must {words}, got {layer}"):
            cache.write(layer, [a], k, k)
        with pytest.raises(kind, match=f"PagedKVCache.read: layer must {words}, got {layer}"):
            cache.read(layer, a)
    with pytest.raises(TypeError, match=r"PagedKVCache\.block_table: width must be an integer, got 2\.0"):
        cache.block_table([a], width=2.0)
    assert cache.sequences == [a]
    assert not any(x.any() for x in cache.read(-1, a))


def test_copies_are_independent():
    cache = pages()
    a = cache.allocate()
    cache.append(a, 3)
    cache.write(0, [a], keys_for(3), keys_for(3))
    pickled = pickle.dumps(cache)
    assert b"itertools" not in pickled  # whose objects Python 3.14 does not copy
    for twin in (copy.deepcopy(cache), pickle.loads(pickled)):
        twin.append(twin.fork(a), 1)
        assert twin.sequences == [0, 1] and twin.free_pages == 5
        twin.k[0].zero_()
    assert cache.sequences == [0] and cache.free_pages == 6
    assert torch.equal(cache.read(0, a)[0], keys_for(3)[0])


def test_what_is_written_brings_no_graph():
    """The pages became a part of the graph of k, and decode_attention refused them from then on."""
    cache = pages()
    a = cache.allocate()
    cache.append(a, 2)
    k = keys_for(2).requires_grad_()
    for name in ("k", "v"):
        with pytest.raises(RuntimeError, match=f"PagedKVCache.write: {name} must not require a gradient"):
            cache.write(0, [a], **({"k": k.detach(), "v": k.detach()} | {name: k}))
    assert not any(x.any() for x in cache.read(0, a))
    with torch.no_grad():
        cache.write(0, [a], k, -k)
    assert not cache.k[0].requires_grad
    assert torch.equal(cache.read(0, a)[0], k[0])


class Pages(RuleBasedStateMachine):
    """Operations in any order: every sequence reads back what was written to it, and no page is lost."""

    def __init__(self):
        super().__init__()
        self.cache = pages()
        self.model = {}  # what each sequence must hold
        self.seed = 0

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def allocate(self):
        if len(self.model) < 4:
            self.model[self.cache.allocate()] = torch.empty(0, 1, 2)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def append(self, data, tokens):
        sequence = self.pick(data)
        try:
            self.cache.append(sequence, tokens)
        except OutOfPages:
            return
        self.seed += 1
        new = keys_for(tokens, self.seed)
        for layer in range(2):
            self.cache.write(layer, [sequence], new + layer, new - layer)
        self.model[sequence] = torch.cat([self.model[sequence], new[0]])

    @precondition(lambda self: self.model and len(self.model) < 4)
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.pick(data)
        self.model[self.cache.fork(sequence)] = self.model[sequence]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.pick(data)
        length = data.draw(st.integers(0, len(self.model[sequence])))
        self.cache.truncate(sequence, length)
        self.model[sequence] = self.model[sequence][:length]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.pick(data)
        self.cache.free(sequence)
        del self.model[sequence]

    @invariant()
    def holds(self):
        cache = self.cache
        assert sorted(cache.sequences) == sorted(self.model)
        used = {page for sequence in self.model for page in cache.pages(sequence)}
        assert len(used) + cache.free_pages == 7
        assert used.isdisjoint(cache._free)
        assert len(set(cache._free)) == cache.free_pages
        for sequence, expected in self.model.items():
            assert cache.length(sequence) == len(expected)
            assert len(cache.pages(sequence)) == -(-len(expected) // 4)
            for layer in range(2):
                k, v = cache.read(layer, sequence)
                assert torch.equal(k, expected + layer)
                assert torch.equal(v, expected - layer)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
