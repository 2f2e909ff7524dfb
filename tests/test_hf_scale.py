"""Accuracy, training, CUDA graphs and compiled decoding at the widths of Qwen2.5-7B, or smaller ones on the CPU."""

import copy

import pytest
import torch
from transformers import StaticCache

import llmkernels
from hf_models import OPS, assert_close, count_ops, logits_of, rounding, tiny_inputs, tiny_model
from llmkernels.hf import unpatch

SHAPE = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


def wide_model(device, dtype=torch.float32, **changes):
    shape = SHAPE if device == "cuda" else {"intermediate_size": 472}
    return tiny_model(device=device, dtype=dtype, max_position_embeddings=512, **shape | changes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_and_choices_against_float32(dtype, device):
    model, ids = wide_model(device, dtype), tiny_inputs(device, tokens=300)
    oracle = logits_of(copy.deepcopy(model).float(), ids)
    unpatched = logits_of(model, ids)
    llmkernels.patch(model)
    assert count_ops(model, ids, return_dict=False) == OPS  # by the modules, on a GPU too
    patched = logits_of(model, ids)
    error, allowed = ((x - oracle).norm() / oracle.norm() for x in (patched, unpatched))
    assert error <= 1.25 * allowed
    agrees, may_agree = ((x.argmax(-1) == oracle.argmax(-1)).float().mean() for x in (patched, unpatched))
    assert agrees >= may_agree - 0.02


def test_rows_of_a_batch_do_not_change_each_other(device):
    model, ids = wide_model(device), tiny_inputs(device, batch=3, tokens=64)
    llmkernels.patch(model)
    together = logits_of(model, ids)
    for row in range(3):
        assert_close(together[row], logits_of(model, ids[[row]])[0])


def test_loss_curve_of_20_steps_under_autocast(device):
    curves = []
    for patched in (False, True):
        model = wide_model(device, num_hidden_layers=1).train()
        if patched:
            llmkernels.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        losses = []
        for step in range(20):
            ids = tiny_inputs(device, tokens=64, seed=step % 2)
            with torch.autocast(device, torch.bfloat16):
                loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves.append(torch.stack(losses))
    expected, found = curves
    assert expected[-2:].mean() < 0.8 * expected[:2].mean()  # it learns
    assert_close(found, expected, 0.02)


@pytest.mark.gpu
def test_cuda_graph_of_a_decode_step():
    model = wide_model("cuda", torch.bfloat16)
    llmkernels.patch(model)
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids, other = tiny_inputs("cuda", tokens=9), tiny_inputs("cuda", tokens=9, seed=8)
    token, positions = ids[:, -1:].clone(), torch.full((2, 1), 8, device="cuda")
    mask = {"full_attention": torch.ones(1, 1, 1, 32, dtype=torch.bool, device="cuda").tril(8)}

    def prefill(ids):
        cache.reset()
        logits_of(model, ids[:, :-1], past_key_values=cache)

    def step():
        with torch.no_grad():
            return model(token, past_key_values=cache, position_ids=positions, attention_mask=mask).logits

    prefill(ids)
    step()
    prefill(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for changed in (ids, other):
        prefill(changed)
        token.copy_(changed[:, -1:])
        graph.replay()
        with torch.no_grad():  # by the modules, else the weights are packed, and move
            expected = model(changed, return_dict=False)[0][:, -1:].float()
        assert_close(captured.float(), expected, rounding(torch.bfloat16))
    unpatch(model)
    assert_close(captured.float(), logits_of(model, other)[:, -1:], rounding(torch.bfloat16))


@pytest.mark.gpu
def test_reduce_overhead():
    model = wide_model("cuda", torch.bfloat16)
    prompts = [tiny_inputs("cuda", seed=seed) for seed in range(4)]
    expected = [logits_of(model, ids) for ids in prompts]
    llmkernels.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for ids, logits in zip(prompts, expected, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(logits_of(compiled, ids, use_cache=False), logits, rounding(torch.bfloat16))


@pytest.mark.gpu
def test_generate_compiles_the_decode_step():
    """generate() with a static cache compiles the forward on a GPU, with CUDA graphs."""
    model = tiny_model(device="cuda")
    options = {"max_new_tokens": 10, "do_sample": False}
    prompts = [tiny_inputs("cuda", tokens=tokens) for tokens in (9, 6)]
    expected = [model.generate(ids, **options) for ids in prompts]
    llmkernels.patch(model)
    torch._dynamo.reset()
    for ids, text in zip(prompts, expected, strict=True):
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), text)
