"""What a forward of a patched model takes on the host besides the kernels of its step: a user's own loop over it.

The model has as many layers as a real one, and small ones, and its step is not run: whoever asks for it gets the logits
of the time before. So this can be measured without a GPU.

    loop      a whole turn: the forward behind a cache, and argmax of its logits
    guard     of that, the look at the model after the step was queued
    memory    of that, what keeps the weights in their place until then
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import llmkernels
from benchmarks import timing
from benchmarks.cases import OURS
from benchmarks.run import Run
from llmkernels.hf.step.decode import decoder
from llmkernels.hf.step.place import Place
from llmkernels.hf.step.program import Program

LAYERS = (24, 36)  # of Qwen2.5-0.5B and SmolLM3-3B
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
ROOM = 100  # tokens after which the cache is cropped, before it has to grow


@torch.no_grad()
def measure(run: Run) -> list[dict]:
    if not run.wants(OURS):
        return []
    found = []
    for layers in LAYERS:
        run.begin(f"host, {layers} layers")
        with prepared(layers, run.device) as functions:
            row = {"op": "host", "layers": layers, "dtype": "bfloat16", "provider": OURS, "timing": "wall"}
            times = timing.time_calls(functions, run.device, run.effort)
            found += [row | {"part": part} | timing.summary(samples) for part, samples in times.items()]
    return found


@contextmanager
def prepared(layers: int, device: torch.device) -> Iterator[dict[str, Callable]]:
    """What to time of a model with so many layers, by part."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=layers, **SIZES)).to(device, torch.bfloat16).eval()
    with llmkernels.patch(model), mock.patch.object(Program, "run", without_the_step):
        turn = loop(model)
        turn()
        snapshot = decoder(model)._described.snapshot
        yield {"loop": turn, "guard": lambda: snapshot.holds(model), "memory": snapshot.memory}


def without_the_step(program: Program, function: Callable, device: torch.device, place: Place):
    """In the place of Program.run: where a graph would be replayed, nothing runs."""
    recording = program.recording(place)
    if recording.graph is None:
        recording.graph, recording.output = mock.sentinel.graph, function()
    return recording.output


def loop(model) -> Callable:
    """A function that makes the next turn of a loop over a model."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = model(token.expand(1, 16), use_cache=True).past_key_values
    length = cache.get_seq_length()

    def turn() -> None:
        nonlocal token
        if cache.get_seq_length() == length + ROOM:
            cache.crop(-ROOM)
        output = model(input_ids=token, past_key_values=cache, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)

    return turn
