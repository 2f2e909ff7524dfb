"""Where a decode step's time goes: each of its launches alone, the same one of every layer in one graph.

So no weight is in the cache, as in a step.
"""

from collections.abc import Callable
from functools import partial

import torch

import llmkernels
from benchmarks import steps_patched, timing
from benchmarks.run import Run

BATCHES, CONTEXT = (1, 8, 64), 512
WHOLE_STEP = "step"  # a decode_part that the others make up


@torch.no_grad()
def measure(run: Run) -> list[dict]:
    if not run.on_gpu or not run.wants("llmkernels"):
        return []
    bench = Bench(run)
    with llmkernels.patch(bench.model):
        return [row for batch in BATCHES for row in bench.parts(batch)]


class Bench(steps_patched.Bench):
    def parts(self, batch: int) -> list[dict]:
        found = []
        self.run.begin(f"parts of a step, batch {batch}")
        for part, calls in self.launches(self.cache(batch, CONTEXT)).items():
            with timing.side_stream(self.device):
                graph = timing.capture(calls, laps=2)
                times = timing.time_graphs({part: timing.Subject(calls, None, graph)}, 2, timing.QUICK)[part]
            row = {"op": "decode_part", "part": part, "model": self.name, "batch": batch, "context": CONTEXT}
            row |= {"dtype": self.dtype, "provider": "llmkernels", "timing": "graph", "launches": len(calls)}
            found.append(row | timing.summary(times))
        self.clear()
        return found

    def launches(self, cache) -> dict[str, list[Callable]]:
        """The calls that `decode_step` is composed of, for every layer, and the op itself.

        For more than 16 sequences a norm is a launch of its own in these calls, which it is not within the op.
        """
        ops = torch.ops.llmkernels
        batch = cache.layers[0].k.shape[0]
        cache.begin(torch.full((batch,), cache.get_seq_length() - 1, device=self.device), None)
        calls = {name: [] for name in ("q|k|v", "attention", "o", "gate|up", "down", "head")}
        hidden = torch.randn(batch, self.model.config.hidden_size, dtype=self.model.dtype, device=self.device)
        given = self.step(cache).arguments
        norm = [given[name] for name in ("eps", "weight_offset", "cast_before_weight")]
        places = [given[name] for name in ("cos", "sin", "positions", "cache_seqlens", "cache_leftpad")]
        lists = ("input_norms", "qkv_weights", "qkv_biases", "o_weights", "o_biases", "post_norms", "gate_up_weights",
                 "down_weights", "k_caches", "v_caches", "windows_left")  # fmt: skip
        none = [None] * len(given["windows_left"])
        for layer in zip(*(given[name] or none for name in lists), strict=True):
            input_norm, qkv, qkv_bias, o, o_bias, post_norm, gate_up, down, k, v, left = layer
            packed = ops.rms_norm_linear(hidden, input_norm, qkv, qkv_bias, *norm)
            attention = partial(ops.rope_decode_attention, packed, *places, k, v, None, given["heads"],
                                given["softmax_scale"], left, 0.0, True)  # fmt: skip
            attended = attention()
            activated = ops.rms_norm_glu_linear(hidden, post_norm, gate_up, "silu", *norm)
            calls["q|k|v"].append(partial(ops.rms_norm_linear, hidden, input_norm, qkv, qkv_bias, *norm, True))
            calls["attention"].append(attention)
            calls["o"].append(partial(ops.linear_add_, hidden, attended, o, o_bias, 1.0, True))
            calls["gate|up"].append(partial(ops.rms_norm_glu_linear, hidden, post_norm, gate_up, "silu", *norm, True))
            calls["down"].append(partial(ops.linear_add_, hidden, activated, down, None, 1.0, True))
        head = [given[name] for name in ("norm", "head", "head_bias")]
        calls["head"].append(partial(ops.rms_norm_linear, hidden, *head, *norm, True))
        calls[WHOLE_STEP] = [partial(ops.decode_step, **given | {"hidden": hidden})]
        return calls
