"""Continuous batching by the decode step: batches of prompts, of chunks of them, and of single tokens."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

import llmkernels
from families import family_model
from generating import pad_batches, small_model
from hf_models import assert_close, rounding, tiny_inputs
from llmkernels.hf.callers import batches, forward
from llmkernels.hf.report import STEP, by_forward
from llmkernels.hf.step import batch, decode
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.program import Program, Programs

LENGTHS, NEW = (5, 17, 9, 1), 6
WINDOWS = ["mistral", "exaone4", "gemma3"]
# Biases; norms of q and k, or behind blocks; multipliers; heads rotated in part; branches side by side; embeddings of
# positions; weights by columns; a model of images, and one whose positions have rows for these.
NAMES = ["llama", "qwen2", "qwen3", "olmo2", "granite", "phi", "cohere", "gpt2", "llava", "qwen2_5_vl"]


@pytest.fixture(autouse=True)
def by_step(monkeypatch):
    monkeypatch.setattr(batches, "DEVICES", {"cpu", "cuda"})


@pytest.fixture(autouse=True)
def requests_are_there(monkeypatch):
    """The scheduler begins when all requests are there, and not while they come: its batches are the same each time."""
    start, add_requests = ContinuousBatchingManager.start, ContinuousBatchingManager.add_requests

    def add_and_start(manager, *arguments, **options):
        names = add_requests(manager, *arguments, **options)
        start(manager)
        return names

    monkeypatch.setattr(ContinuousBatchingManager, "start", lambda manager: None)
    monkeypatch.setattr(ContinuousBatchingManager, "add_requests", add_and_start)


def generated(model, tokens=64, new=NEW, **memory):
    """The tokens of each request, in batches of at most so many."""
    found = model.generate_batch(
        [tiny_inputs("cpu", 1, length, seed=length)[0].tolist() for length in LENGTHS],
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=tokens, **memory),
        progress_bar=False,
    )
    assert [request.error for request in found.values()] == [None] * len(LENGTHS)
    return [found[name].generated_tokens for name in sorted(found)]


@contextmanager
def noted():
    """How many batches ran as single tokens, and how many not."""
    ways = [mock.patch.object(batch, name, wraps=getattr(batch, name)) for name in ("_run_step", "_run_layers")]
    with ways[0] as steps, ways[1] as rows:
        yield lambda: (steps.call_count, rows.call_count)


@contextmanager
def forwards(model, is_patched, others=()):
    """What the forwards of a model were given, and their logits: of one that is not patched, or of one that runs by
    batches, where a hook would be another thing to do. Each returns the logits of `others`, if there are some, so that
    the texts stay the same."""
    found = []

    def note(given, output):
        copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        found.append((copies, output.logits.clone()))
        if others:
            output["logits"] = others[len(found) - 1][1]
        return output

    def by_batch(*arguments):
        return note(arguments[-1], batches.by_batch(*arguments))

    if is_patched:
        with mock.patch.object(forward, "by_batch", by_batch):
            yield found
    else:
        hooks = [
            model.register_forward_pre_hook(lambda *_: arguments_are_there()),
            model.register_forward_hook(lambda _, __, given, output: note(given, output), with_kwargs=True),
        ]
        yield found
        for hook in hooks:
            hook.remove()


def arguments_are_there():
    """Let the modules wait for what transformers writes in the default stream, and reads in another one."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


@pytest.mark.parametrize("name, tokens", [*((name, 64) for name in NAMES), ("llama", 8), ("gpt2", 8), ("phi", 8)])
def test_families(name, tokens):
    """With prompts at once, or in chunks."""
    model = family_model(name)
    with forwards(model, False) as expected:
        texts = generated(model, tokens)
    handle = llmkernels.patch(model)
    with noted() as ways, forwards(model, True) as found:
        assert generated(model, tokens) == texts
    assert sum(ways()) == len(found) == len(expected) and min(ways()) > 0
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    assert decoder(model).forwards == {STEP: len(found)}
    assert handle.report().decode[0].calls == {"by transformers: continuous batching": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 8], ids=["prompts at once", "chunks"])
@pytest.mark.parametrize("name", NAMES + WINDOWS)
def test_on_a_gpu(name, tokens):
    """In half precision, against float32; by graphs, in caches of two calls."""
    model, exact = family_model(name, "cuda", torch.bfloat16), family_model(name, "cuda", torch.float32)
    llmkernels.patch(model)
    with forwards(exact, False) as expected:
        generated(exact, tokens, 12)
    for _ in range(2):
        with noted() as ways, forwards(model, True, expected) as found:
            generated(model, tokens, 12)
        assert min(ways()) > 0 and decoder(model).forwards.keys() == {STEP}
        for (given, ours), (of_exact, theirs) in zip(found, expected, strict=True):
            assert torch.equal(given["input_ids"], of_exact["input_ids"])
            assert_close(ours.float(), theirs, 4 * rounding(torch.bfloat16))
    assert decoder(model).programs.graphs()


@pytest.mark.gpu
def test_arguments_that_are_still_written(monkeypatch):
    """In the default stream, while the forward is launched in another one."""
    model = family_model("llama", "cuda", torch.bfloat16)
    llmkernels.patch(model)
    texts = generated(model)
    make = ContinuousBatchingIOs.get_model_kwargs

    def late(*arguments, **options):
        given = make(*arguments, **options)
        names = "input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "logits_indices"
        written = [*(given[name] for name in names), *given["read_index"], *given["write_index"]]
        values = [x.clone() for x in written]
        torch._foreach_zero_(written)
        torch.cuda._sleep(50_000_000)
        torch._foreach_copy_(written, values)
        return given

    monkeypatch.setattr(ContinuousBatchingIOs, "get_model_kwargs", late)
    assert generated(model) == texts


def test_requests_that_repeat_the_first(device, monkeypatch):
    """A graph for more requests than there are, which write what the first one writes."""
    model = small_model(device=device).to(torch.float32 if device == "cpu" else torch.bfloat16)
    llmkernels.patch(model)
    texts = generated(model)
    monkeypatch.setattr(batch, "_rows", lambda count: count + 3)
    run = Program.run

    def look(program, *arguments, **options):
        for name in ("tokens", "positions", "seqlens 0", "block_table 0"):
            rows = program.buffers[name]
            assert len(rows) == len(LENGTHS) + 3 and (rows[len(LENGTHS) :] == rows[0]).all()
        return run(program, *arguments, **options)

    monkeypatch.setattr(Program, "run", look)
    found = generated(model)
    assert device != "cpu" or found == texts  # a GPU has other kernels for other numbers of rows


def test_logits_are_read_before_another_thread_may_overwrite_them(monkeypatch):
    model, made = small_model(), []
    texts = generated(model)
    llmkernels.patch(model)
    run, lend = Program.run, Programs.lend

    def note(*arguments, **options):
        made.append(run(*arguments, **options))
        return made[-1]

    @contextmanager
    def overwrite(*arguments):
        with lend(*arguments) as program:
            yield program
        made[-1].zero_()

    monkeypatch.setattr(Program, "run", note)
    monkeypatch.setattr(Programs, "lend", overwrite)
    assert generated(model) == texts and made


def test_rows_of_graphs():
    """Few sizes, each at most a quarter more than it has to be."""
    rows = {count: batch._rows(count) for count in range(1, 65)}
    assert all(count <= size <= max(count + 1, 1.25 * count) for count, size in rows.items())
    assert len(set(rows.values())) < 30


@pytest.mark.parametrize("block", [256, 4], ids=["a page", "pages"])
@pytest.mark.parametrize("tokens", [64, 8], ids=["prompts at once", "chunks"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, tokens, block):
    """Of all layers or some: pages that come round. Texts are longer than a window, and so are chunks."""
    model = family_model(name)
    with forwards(model, False) as expected:
        texts = generated(model, tokens, block_size=block)
    llmkernels.patch(model)
    with noted() as ways, forwards(model, True) as found:
        assert generated(model, tokens, block_size=block) == texts
    assert sum(ways()) == len(found) == len(expected) and min(ways()) > 0
    assert decoder(model).forwards == {STEP: len(found)}
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert_close(ours, theirs)


def test_softcaps_are_left_to_the_modules(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = family_model("gemma2", device, dtype)
    texts = generated(model)
    llmkernels.patch(model)
    found = generated(model)
    assert device != "cpu" or found == texts  # a GPU has other kernels for the norms
    reasons = "softcaps in continuous batching", "attention is computed by eager_paged_attention_forward"  # 5.23: eager
    assert [*decoder(model).forwards] in [[by_forward(reason)] for reason in reasons]


@pytest.mark.parametrize("name", ["mistral", "exaone4"])
def test_windows_of_one_token_are_left_to_the_modules(name):
    """There transformers lets a token of a prompt see all before it, and a step only its own: whatever it gives."""
    model = family_model(name, sliding_window=1)
    texts = generated(model)
    llmkernels.patch(model)
    assert generated(model) == texts
    assert [*decoder(model).forwards] == [by_forward("windows of one token in continuous batching")]


@pytest.mark.parametrize("tokens", [64, 8], ids=["prompts at once", "chunks"])
def test_padded_batches_are_left_to_the_modules(monkeypatch, tokens):
    """With as many requests as tokens, as for CUDA graphs of transformers, which have the results of the modules."""
    sizes = pad_batches(monkeypatch)
    model = small_model()
    texts = generated(model, tokens, **sizes)
    llmkernels.patch(model)
    assert generated(model, tokens, **sizes) == texts
    assert by_forward("batches padded for CUDA graphs of transformers") in decoder(model).forwards


def test_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small_model(), peft.LoraConfig(init_lora_weights=False, target_modules="all-linear"))
    texts = generated(model.base_model.model)
    llmkernels.patch(model)
    with noted() as ways:
        assert generated(model.base_model.model) == texts
    assert min(ways()) > 0


def test_weights_that_have_changed(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model, twin = small_model(device=device).to(dtype), small_model(device=device).to(dtype)
    llmkernels.patch(model)
    generated(model)
    with torch.no_grad():
        for one in (model, twin):
            one.lm_head.weight.copy_(one.lm_head.weight.flip(0))
    llmkernels.patch(twin)
    assert generated(model) == generated(twin)


def test_the_model_is_read_once_for_each_attention():
    """Which some versions of transformers switch when such a call begins and ends."""
    model, ids = small_model(), tiny_inputs("cpu")
    llmkernels.patch(model)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    with mock.patch.object(decode, "describe", wraps=decode.describe) as reads:
        for _ in range(3):
            generated(model)
            model.generate(ids, max_new_tokens=3, do_sample=False)
    assert reads.call_count <= 1 and set(decoder(model).forwards) == {STEP}


@pytest.fixture
def a_prompt():
    """A patched model, and the arguments of a forward of prompts alone."""
    model = small_model()
    llmkernels.patch(model)
    with forwards(model, True) as found:
        generated(model, new=1)
    decoder(model).forwards.clear()
    with torch.no_grad():
        yield model, found[0][0]


def test_ids_of_no_token(a_prompt):
    model, given = a_prompt
    with pytest.raises(IndexError, match="index out of range"):
        model(**given | {"input_ids": given["input_ids"] + 100_000})


def test_other_positions(a_prompt):
    model, given = a_prompt
    given |= {"position_ids": given["position_ids"] + 50}
    names = "input_ids", "position_ids", "attention_mask", "logits_to_keep"
    expected = small_model()(**{name: given[name] for name in names}, use_cache=False)
    assert_close(model(**given).logits, expected.logits)
    assert decoder(model).forwards == {STEP: 1}


def test_positions_ahead_of_the_tokens():
    """Of single tokens, whose step has cos and sin of as many positions as there are keys."""
    model = small_model()
    llmkernels.patch(model)
    with forwards(model, True) as found:
        generated(model)
    given = found[-1][0]
    model.set_attn_implementation("paged|sdpa")  # as during the call
    with torch.no_grad():
        model(**given | {"position_ids": given["position_ids"] + 50})
    assert by_forward("position_ids are not those of the last tokens") in decoder(model).forwards


def test_what_a_batch_does_not_take(a_prompt):
    model, given = a_prompt
    model(**given | {"output_hidden_states": True})
    assert decoder(model).forwards == {by_forward("output_hidden_states"): 1}
