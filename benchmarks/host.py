"""What a forward of a patched model takes on the host besides the kernels of its step: a user's own loop over it.

The model has as many layers as a real one, and small ones, and its step is not run: whoever asks for it gets the logits
of the time before. So this can be measured without a GPU.

    loop      a whole turn: the forward behind a cache, and argmax of its logits
    guard     of that, the look at the model after the step was queued
    memory    of that, what keeps the weights in their place until then

And how long the GPU waits for the host where a call begins, patched and not in turn:

    prompt    from a forward of a prompt to the first launch that computes something of it: the graph, or embeddings
    generate  likewise of a call of model.generate
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

import llmkernels
from benchmarks import timing, variants
from benchmarks.cases import OURS
from benchmarks.run import Run
from llmkernels.hf.step import compose
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
PROMPT = 128  # tokens
# Of launches: calls of each way before those that count, of those, and turns. The first calls make layouts and graphs.
WARM, CALLS, TURNS = 5, 20, 4


@torch.no_grad()
def measure(run: Run) -> list[dict]:
    found = []
    for layers in LAYERS:
        run.begin(f"host, {layers} layers")
        row = {"op": "host", "layers": layers, "dtype": "bfloat16", "timing": "wall"}
        times = {}
        if run.wants(OURS):
            with prepared(layers, run.device) as functions:
                parts = timing.time_calls(functions, run.device, run.effort)
            times = {(OURS, part): samples for part, samples in parts.items()}
        times |= until_launch(run, make(layers, run.device))
        for (provider, part), samples in times.items():
            found.append(row | {"provider": provider, "part": part} | timing.summary(samples))
    return found


def make(layers: int, device: torch.device) -> torch.nn.Module:
    """A model with so many layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=layers, **SIZES)).to(device, torch.bfloat16).eval()


def until_launch(run: Run, model: torch.nn.Module) -> dict[tuple[str, str], list[float]]:
    """Microseconds by provider and part. Without a forward's prompt where the model's modules run it, as on a CPU."""
    ids = torch.ones(1, PROMPT, dtype=torch.long, device=model.device)
    greedy = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls = {
        "prompt": lambda: model(ids, use_cache=True, logits_to_keep=1),
        "generate": lambda: model.generate(ids, **greedy),
    }
    samples: dict[tuple[str, str], list[float]] = {}
    providers = [provider for provider in (OURS, "eager") if run.wants(provider)]
    for provider in timing.in_turn(providers, 1 if run.small else TURNS):
        with (
            variants.VARIANTS[provider](model),
            noted_launches(provider) as launches,
            timing.garbage_collection_paused(),
        ):
            for part, call in calls.items():
                for count in range(WARM + (2 if run.small else CALLS)):
                    timing.synchronize(run.device)
                    launches.clear()
                    start = time.perf_counter()
                    call()
                    if launches and count >= WARM:
                        samples.setdefault((provider, part), []).append((launches[0] - start) * 1e6)
    return samples


@contextmanager
def noted_launches(provider: str) -> Iterator[list[float]]:
    """When what computes began: graphs and the ops of a prompt, or embeddings."""
    found = []

    def noting(function: Callable) -> Callable:
        def noted(*args, **kwargs):
            found.append(time.perf_counter())
            return function(*args, **kwargs)

        return noted

    ours = ((Program, "run"), (compose, "embed"))
    with ExitStack() as stack:
        for owner, name in ours if provider == OURS else ((torch.nn.functional, "embedding"),):
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name))))
        yield found


@contextmanager
def prepared(layers: int, device: torch.device) -> Iterator[dict[str, Callable]]:
    """What to time of a model with so many layers, by part."""
    model = make(layers, device)
    with llmkernels.patch(model), mock.patch.object(Program, "run", without_the_step):
        turn = loop(model)
        turn()
        snapshot = decoder(model).described.snapshot
        yield {"loop": turn, "guard": lambda: snapshot.holds(model), "memory": snapshot.memory}


def without_the_step(
    program: Program, function: Callable, device: torch.device, place: Place | None = None, in_pieces: bool = False
):
    """In the place of Program.run: where a graph would be replayed, nothing runs."""
    recording = program.recording(place or Place())
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
