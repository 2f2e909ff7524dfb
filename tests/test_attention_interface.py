"""`attn_implementation="llmkernels"`: every family gives what it gives by transformers' eager attention."""

from unittest import mock

import pytest
import torch
import transformers

import llmkernels
from families import FAMILIES, WINDOW, family_model
from generating import pad_batches
from hf_models import tiny_inputs
from llmkernels.hf import attention as interface
from llmkernels.hf import attention_paged as paged

TOKENS = 3 * WINDOW - 1
_LEFT_OUT = {"qwen2_5_vl", "gemma3_image", "llava"}  # which take more than text
_LEFT_OUT |= {"gpt_neo", "gptj", "codegen", "bloom", "mpt", "falcon"}  # which have an attention of their own
TEXT = [name for name in FAMILIES if name not in _LEFT_OUT]
every_family = pytest.mark.parametrize("name", TEXT)

llmkernels.register_attention()


def implemented(model, name):
    model.set_attn_implementation(name)
    return model


def counted():
    """The ops that the layers call, each counted."""
    return [mock.patch.object(interface, name, wraps=getattr(interface, name)) for name in ("attention", "_by_torch")]


def both(model, call):
    """What call() gives by our attention, and by the eager one; and how often the kernel and PyTorch ran."""
    implemented(model, interface.NAME)
    (ours, torchs) = counted()
    with ours as of_kernel, torchs as of_torch, torch.no_grad():
        found = call()
        counts = of_kernel.call_count, of_torch.call_count
    implemented(model, "eager")
    with torch.no_grad():
        return found, call(), counts


def assert_close(found, expected, where=None):
    if where is not None:
        found, expected = found[where], expected[where]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * expected.abs().max().item())


def padded(ids, side):
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    return mask


@every_family
def test_prompt(name):
    model, ids = family_model(name), tiny_inputs("cpu", 2, TOKENS)
    found, expected, (kernel, by_torch) = both(model, lambda: model(input_ids=ids).logits)
    assert_close(found, expected)
    assert (kernel > 0, by_torch) == (True, 0)


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name, side):
    model, ids = family_model(name), tiny_inputs("cpu", 2, TOKENS)
    mask = padded(ids, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call = lambda: model(input_ids=ids, attention_mask=mask, position_ids=positions).logits  # noqa: E731
    found, expected, (kernel, by_torch) = both(model, call)
    assert_close(found, expected, mask.bool())
    assert (kernel > 0, by_torch) == (True, 0)


@every_family
def test_generate(name):
    new = 4 if "original_max_position_embeddings" in FAMILIES[name].options else 9  # LongRoPE's tables stay as they are
    model, ids = family_model(name), tiny_inputs("cpu", 2, 11)
    mask = padded(ids, "left")
    call = lambda: model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False)  # noqa: E731
    found, expected, (kernel, by_torch) = both(model, call)
    assert torch.equal(found, expected)
    assert (kernel > 0, by_torch) == (True, 0)


its_own = pytest.mark.skipif(not paged.is_supported(), reason="this transformers has no other attention there")


@its_own
@pytest.mark.parametrize("tokens", [64, 16, 8], ids=["prompts at once", "chunks", "padded chunks"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "exaone4", "gpt_oss"])
def test_continuous_batching(device, name, tokens, monkeypatch):
    """Requests of several lengths, by steps in pages and by tokens in a row: each gets the text that it gets alone."""
    if name not in FAMILIES:
        pytest.skip("this transformers has none")
    model, new = family_model(name, device=device), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    prompts = [row[: 5 + 3 * index] for index, row in enumerate(tiny_inputs(device, 4, TOKENS))]
    implemented(model, "eager")
    alone = [model.generate(ids[None], pad_token_id=0, **new)[0, len(ids) :].tolist() for ids in prompts]
    implemented(model, interface.NAME)
    graphs = device == "cuda" and name != "gpt_oss"  # whose experts in float32 can not be recorded
    sizes = pad_batches(monkeypatch, graphs) if tokens == 8 else {}
    calls = [mock.patch.object(paged, op, wraps=getattr(paged, op)) for op in ("attention_varlen", "decode_attention")]
    with calls[0] as in_a_row, calls[1] as in_pages:
        found = model.generate_batch(
            [ids.tolist() for ids in prompts],
            generation_config=transformers.GenerationConfig(pad_token_id=0, **new),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=32, max_batch_tokens=tokens, **sizes
            ),
            progress_bar=False,
        )
    assert [found[key].generated_tokens for key in sorted(found)] == alone
    is_in_pages = not sizes and name in ("llama", "gemma2", "exaone4")
    assert in_a_row.call_count and (in_pages.call_count > 0) == is_in_pages


@its_own
def test_pages_without_their_cache():
    model = implemented(family_model("llama"), f"paged|{interface.NAME}")
    with pytest.raises(ValueError, match="cache must be that of continuous batching, got None"):
        model(tiny_inputs("cpu"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_chunks_on_a_cache(name):
    model, ids = family_model(name), tiny_inputs("cpu", 2, TOKENS)

    def call():
        cache = transformers.DynamicCache(config=model.config)
        return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in ids.split(7, 1)], 1)

    found, expected, (_, by_torch) = both(model, call)
    assert_close(found, expected)
    assert by_torch == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_static_cache(name):
    """PyTorch takes its masks, but the kernel does with a softcap or sinks."""
    model, ids = family_model(name), tiny_inputs("cpu", 2, 11)
    call = lambda: model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation="static")  # noqa: E731
    found, expected, (_, by_torch) = both(model, call)
    assert torch.equal(found, expected)
    assert (by_torch > 0) == (name == "llama")


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "gemma3"])
@pytest.mark.parametrize("tokens", [11, WINDOW - 1])
def test_masks_that_generate_makes(name, tokens, side):
    """For a static cache, as long as the prompt where there is one new token, or shorter because of a window: ours was
    taken for the padding then."""
    model, ids = family_model(name), tiny_inputs("cpu", 2, tokens)
    mask = torch.ones_like(ids)
    mask[0, : 3 if side == "left" else 0] = 0
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for new in (1, 5):
        options |= {"max_new_tokens": new, "cache_implementation": "static", "attention_mask": mask}
        found, expected, _ = both(model, lambda: model.generate(ids, **options))  # noqa: B023
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_cache_with_other_keys_than_the_mask(side):
    """As one has that was reset by transformers up to 5.17 behind a window: PyTorch's attention raises there, too."""
    model, ids = implemented(family_model("mistral"), interface.NAME), tiny_inputs("cpu", 2, TOKENS)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for layer in cache.layers:
            layer.cumulative_length = 0
        with pytest.raises(RuntimeError, match=f"must be for {TOKENS + WINDOW - 1} keys, got {TOKENS}"):
            model(ids, attention_mask=padded(ids, side) if side == "left" else None, past_key_values=cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padding_amid_the_tokens(name):
    model, ids = family_model(name), tiny_inputs("cpu", 2, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, 4:7] = mask[1, 0] = mask[1, 5] = 0
    found, expected, (_, by_torch) = both(model, lambda: model(input_ids=ids, attention_mask=mask).logits)
    assert_close(found, expected, mask.bool())
    assert (by_torch > 0) == (name == "llama")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_packed_sequences(name):
    model, ids = family_model(name), tiny_inputs("cpu", 1, TOKENS)
    positions = torch.cat([torch.arange(8), torch.arange(TOKENS - 8)])[None]
    call = lambda: model(input_ids=ids, position_ids=positions, use_cache=False).logits  # noqa: E731
    found, expected, (kernel, by_torch) = both(model, call)
    assert_close(found, expected)
    assert (kernel > 0, by_torch) == (True, 0)
    model.set_attn_implementation(interface.NAME)
    with torch.no_grad():
        alone = [model(input_ids=part).logits for part in (ids[:, :8], ids[:, 8:])]
    assert_close(found, torch.cat(alone, 1))


def test_padding_amid_the_tokens_goes_to_torch():
    model, ids = family_model("llama"), tiny_inputs("cpu", 2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, 3:6] = 0
    found, expected, counts = both(model, lambda: model(input_ids=ids, attention_mask=mask).logits)
    assert_close(found, expected, mask.bool())
    assert counts[0] == 0 < counts[1]


def test_a_mask_of_one_sequence_for_several():
    q, k, v = torch.randn(3, 4, 2, 9, 8)
    mask = mask_of()[:1]
    interface._attach_ranges(mask)
    assert interface._ranges(mask) is not None
    y, _ = interface.attention_forward(torch.nn.Module(), q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(y.transpose(1, 2), expected, rtol=0, atol=1e-5)


def mask_of(function=None, padding=None, tokens=9):
    options = {"mask_function": function, "attention_mask": padding, "allow_is_causal_skip": False}
    return interface.attention_mask(2, tokens, tokens, **options)


def test_ranges_of_masks():
    """They say what the mask says, or there are none."""
    from transformers import masking_utils

    none, keys = torch.zeros(2, dtype=torch.int64), torch.arange(9)
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 5 + [1] * 4])
    causal = masking_utils.causal_mask_function
    taken = [
        (masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(packed)), None),
        (masking_utils.chunked_causal_mask_function(4, none), None),
        (masking_utils.or_masks(causal, lambda b, h, q, k: k < 4), None),
        (masking_utils.bidirectional_mask_function, keys.expand(2, 9) < torch.tensor([[5], [9]])),
        (causal, keys.expand(2, 9) < torch.tensor([[5], [9]])),
    ]
    for function, padding in taken:
        mask = mask_of(function, padding)
        begin, end = interface._ranges(mask)
        assert begin.dtype == end.dtype == torch.int32
        assert torch.equal(mask[:, 0], (keys >= begin[..., None]) & (keys < end[..., None]))
        assert interface._ranges(mask.clone()) is interface._ranges(mask[..., :8]) is None
        with torch.inference_mode():
            assert interface._ranges(mask_of(function, padding)) is None
        mask[0, 0, 8, 0] = False  # whoever writes to it may break them
        assert interface._ranges(mask) is None
    left = [
        (masking_utils.and_masks(causal, lambda b, h, q, k: k != 3), None),
        (lambda b, h, q, k: k >= 8 - q, None),  # begins fall
        (causal, keys.expand(2, 9) != 4),
    ]
    for function, padding in left:
        assert interface._ranges(mask_of(function, padding)) is None


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_training_of_packed_sequences(device, name):
    model, ids = family_model(name, device).train(), tiny_inputs(device, 1, TOKENS)
    lengths = [5, 1, TOKENS - 6]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    grads = []
    for implementation in (interface.NAME, "eager"):
        implemented(model, implementation).zero_grad()
        (ours, torchs) = counted()
        with ours as of_kernel, torchs as of_torch:
            model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        assert (of_kernel.call_count > 0, of_torch.call_count) == (implementation == interface.NAME, 0)
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * expected.abs().max().item() + 1e-7)


@every_family
def test_training(device, name):
    """Gradients by our kernels are those by eager attention."""
    model, ids = family_model(name, device).train(), tiny_inputs(device, 2, TOKENS)
    mask = padded(ids, "left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 5] = -100  # it would be predicted from padding, which sees nothing
    grads = []
    for implementation in (interface.NAME, "eager"):
        implemented(model, implementation).zero_grad()
        (ours, torchs) = counted()
        with ours as of_kernel, torchs as of_torch:
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        assert (of_kernel.call_count > 0, of_torch.call_count) == (implementation == interface.NAME, 0)
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * expected.abs().max().item() + 1e-7)


def test_gradients_of_few_tokens(device):
    """Which a kernel without gradients would take, if nobody wanted them."""
    model, ids = family_model("llama", device), tiny_inputs(device, 2, 5)
    grads = []
    for implementation in (interface.NAME, "eager"):
        implemented(model, implementation).zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * expected.abs().max().item() + 1e-7)


def test_autocast(device):
    """A rotation in float32 leaves q and k so, and v not: autocast casts them, as it does for PyTorch's attention."""
    model, ids = family_model("llama", device=device), tiny_inputs(device, 2, TOKENS)
    results = []
    for name in (interface.NAME, "sdpa"):
        implemented(model, name)
        (ours, torchs) = counted()
        with ours as of_kernel, torchs as of_torch, torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        results.append((loss, *torch.autograd.grad(loss, model.parameters())))
        assert (of_kernel.call_count > 0, of_torch.call_count) == (name == interface.NAME, 0)
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-2 * expected.abs().max().item() + 1e-6)


def test_dropout_goes_to_torch():
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=64,
        attention_dropout=0.5,
    )
    model, ids = (
        implemented(transformers.LlamaForCausalLM(config), interface.NAME).train(),
        torch.randint(0, 64, (2, 9)),
    )
    (ours, torchs) = counted()
    with ours as of_kernel, torchs as of_torch:
        model(input_ids=ids, labels=ids).loss.backward()
    assert (of_kernel.call_count, of_torch.call_count) == (0, 2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_mask_of_the_caller(name):
    """It lets a query see two keys after its own, which no other mask does. With a softcap the kernel takes it."""
    model, ids = family_model(name), tiny_inputs("cpu", 2, 5)
    keys = torch.arange(5)
    mask = (keys <= keys[:, None] + 2).expand(2, 1, 5, 5)
    mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    found, expected, counts = both(model, lambda: model(input_ids=ids, attention_mask=mask).logits)
    assert_close(found, expected)
    assert [count > 0 for count in counts] == ([False, True] if name == "llama" else [True, False])


def test_a_model_that_sees_all_tokens():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(2, 64, (2, 13))
    found, expected, (kernel, by_torch) = both(model, lambda: model(input_ids=ids).last_hidden_state)
    assert_close(found, expected)
    assert (kernel > 0, by_torch) == (True, 0)
    mask = padded(ids, "right")
    found, expected, _ = both(model, lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state)
    assert_close(found, expected, mask.bool())


def test_a_chunked_mask_is_not_taken_for_a_window():
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    none = torch.zeros(2, dtype=torch.int64)
    assert interface._sees_window(sliding_window_causal_mask_function(4), 4)
    assert not interface._sees_window(sliding_window_causal_mask_function(5), 4)
    assert not interface._sees_window(chunked_causal_mask_function(4, none), 4)
    assert not interface._sees_window(sliding_window_causal_mask_function(4), None)


def test_another_default_device():
    """What is asked of a mask function is asked on the CPU: on a device without memory it was an error."""
    model, ids = implemented(family_model("mistral"), interface.NAME), tiny_inputs("cpu", 2, TOKENS)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with torch.device("meta"):
            assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_patched_models_take_it_too():
    model, ids = family_model("llama"), tiny_inputs("cpu", 2, TOKENS)
    implemented(model, interface.NAME)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with llmkernels.patch(model):
            assert_close(model(input_ids=ids).logits, expected)
            steps = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(steps, model.generate(ids, max_new_tokens=5, do_sample=False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss", "phi3"])
def test_on_a_gpu(name):
    """In bfloat16, no further from float32 than by PyTorch's attention, twice over."""
    ids = tiny_inputs("cuda", 2, TOKENS)
    exact = implemented(family_model(name, "cuda"), "eager")
    model = family_model(name, "cuda", torch.bfloat16)
    mask = padded(ids, "left")
    with torch.no_grad():
        expected, errors = exact(input_ids=ids, attention_mask=mask).logits[mask.bool()], []
        for implementation in (interface.NAME, "eager"):
            logits = implemented(model, implementation)(input_ids=ids, attention_mask=mask).logits[mask.bool()]
            errors.append((logits.float() - expected).square().mean().sqrt().item())
    assert errors[0] <= 2 * errors[1], errors
