"""What type checkers see of the package: mypy reads this file (scripts/lint.sh), nothing runs it.

Each `type: ignore` is a mistake of a caller that has to be found: one that is not makes the comment an error.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import llmkernels
from llmkernels import nn, optim
from llmkernels.hf import PatchHandle


def ops(x: Tensor, weight: Tensor, target: Tensor, generator: torch.Generator) -> None:
    assert_type(llmkernels.rms_norm(x, weight, eps=1e-5), Tensor)
    assert_type(llmkernels.add_rms_norm(x, x, weight), tuple[Tensor, Tensor])
    assert_type(llmkernels.rope(x, x, x, x, layout="bhtd"), tuple[Tensor, Tensor])
    assert_type(llmkernels.swiglu(x), Tensor)
    assert_type(llmkernels.linear(x, weight), Tensor)
    assert_type(llmkernels.softmax(x, causal=True), Tensor)
    assert_type(llmkernels.cross_entropy(x, target, ignore_index=-1), Tensor)
    assert_type(llmkernels.linear_cross_entropy(x, weight, target), Tensor)
    assert_type(llmkernels.fp8_quantize(x), tuple[Tensor, Tensor])
    assert_type(llmkernels.int8_quantize(x), tuple[Tensor, Tensor])
    assert_type(llmkernels.int8_linear(x, x, x), Tensor)
    assert_type(llmkernels.attention(x, x, x, causal=True), Tensor)
    assert_type(llmkernels.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(llmkernels.attention_varlen(x, x, x, target), Tensor)
    assert_type(llmkernels.attention_varlen(x, x, x, target, return_lse=True), tuple[Tensor, Tensor])
    assert_type(llmkernels.decode_attention(x, x, x, target), Tensor)
    assert_type(llmkernels.sample(x, temperature=0.5, generator=generator), Tensor)

    llmkernels.rms_norm(x, weight, epsilon=1e-5)  # type: ignore[call-arg]
    llmkernels.rms_norm(x, 1.0)  # type: ignore[arg-type]
    llmkernels.swiglu()  # type: ignore[call-arg]
    llmkernels.swish(x)  # type: ignore[attr-defined]


def modules(x: Tensor, target: Tensor, linear: torch.nn.Linear) -> None:
    assert_type(nn.RMSNorm(8).forward(x), Tensor)
    assert_type(nn.AddLayerNorm(8).forward(x, x), tuple[Tensor, Tensor])
    assert_type(nn.GatedMLP(8, 16).forward(x), Tensor)
    assert_type(nn.CrossEntropyLoss().forward(x, target), Tensor)
    assert_type(nn.FP8Linear.from_linear(linear), nn.FP8Linear)
    assert_type(nn.Int8Linear.from_linear(linear), nn.Int8Linear)

    nn.RMSNorm("8")  # type: ignore[arg-type]


def patching(model: torch.nn.Module, ids: Tensor) -> None:
    with llmkernels.patch(model, training=True) as handle:
        assert_type(handle, PatchHandle)
        assert_type(handle.report()["rms_norm"].patched, list[str])
        assert_type(handle.report().decode[0].steps, int)
    assert_type(llmkernels.generate(model, ids, max_new_tokens=4, top_p=0.9), Tensor)
    assert_type(llmkernels.KVCache(model, capacity=64).cache_seqlens, Tensor)
    assert_type(llmkernels.PagedKVCache(layers=1, pages=2, page_size=4, kv_heads=1, head_dim=8).allocate(), int)

    profile = llmkernels.profile(model, ids)
    assert_type(profile.rows[0].time_ms, float)
    assert_type(profile.to_json(), str)

    explanation = llmkernels.explain("linear", (4, 64), (64, 64), device="H200")
    assert_type(explanation.reason, str)
    assert_type(explanation.plan, dict[str, int])

    tuning = llmkernels.autotune(model, (1, 4), save=False)
    assert_type(tuning.linears[0].time_us, float)

    llmkernels.patch(model, rms_norms=False)  # type: ignore[call-arg]
    llmkernels.generate(model)  # type: ignore[call-arg]


def optimizers(model: torch.nn.Module, state: dict[str, Any]) -> None:
    optimizer = optim.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
    assert_type(optimizer.step(), float | Tensor | None)
    assert_type(optim.clip_grad_norm_(model.parameters(), 1.0), Tensor)
    optim.Adam(model.parameters(), stochastic_rounding=True).load_state_dict(state)

    optim.AdamW(model.parameters(), state_dtype="bfloat16")  # type: ignore[arg-type]
