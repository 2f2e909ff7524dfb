"""A step of fine-tuning: forward, loss, backward and optimizer, with the kernels of each library in turn.

A case is a configuration with random weights, all of them trained in bfloat16 by AdamW, or low-rank adapters alone.
Every provider begins with the same weights and sees the same tokens, so the losses of its steps compare, too. Wall time
of a step, the device synchronized before and after; the peak of memory is that of all steps but the first.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import timing, variants
from benchmarks.cases import OURS
from benchmarks.models import (
    MODELS,
    QWEN,
    QWEN_05B,
    SMALL,
    SMALL_CONFIG,
    Configuration,
    default_dtype,
    with_random_weights,
)
from benchmarks.run import Run

STEPS, FIRST_TIMED = 50, 10
BATCHES = 4  # of tokens, which come round: random ones can only be learnt by heart
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@dataclass(frozen=True)
class Case:
    model: str
    config: Configuration
    batch: int
    tokens: int
    lora: bool = False
    learning_rate: float = 1e-4


FULL = Case(QWEN_05B, MODELS[QWEN_05B], batch=4, tokens=2048, learning_rate=1e-5)
ADAPTERS = Case(f"{QWEN}-lora", MODELS[QWEN], batch=1, tokens=2048, lora=True)
SMALL_FULL = Case(SMALL, SMALL_CONFIG, batch=2, tokens=64)
SMALL_ADAPTERS = Case(f"{SMALL}-lora", SMALL_CONFIG, batch=1, tokens=64, lora=True)

Parts = tuple[Callable, torch.optim.Optimizer]  # the forward to call, and the optimizer


def measure(case: Case, small: Case, run: Run) -> list[dict]:
    case = small if run.small else case
    rows = []
    for name, provider in PROVIDERS.items():
        if not run.wants(name) or (run.small and not run.providers and name not in ("eager", OURS)):
            continue
        run.begin(f"{case.model}, {name}")
        try:
            rows.append(measure_one(case, run, name, provider))
        except Exception as problem:
            if name == OURS:
                raise
            run.warn(f"{name}, {case.model}", problem)
        finally:
            clear(run)
    return rows


measure_full = partial(measure, FULL, SMALL_FULL)
measure_adapters = partial(measure, ADAPTERS, SMALL_ADAPTERS)


def measure_one(case: Case, run: Run, name: str, provider: Callable) -> dict:
    model = build(case, run.device)
    generator = torch.Generator(run.device).manual_seed(1)
    vocabulary, shape = model.config.vocab_size, (BATCHES, case.batch, case.tokens)
    batches = torch.randint(vocabulary, shape, device=run.device, generator=generator)
    steps, first_timed = (8, 2) if run.small else (STEPS, FIRST_TIMED)
    with provider(model, case.learning_rate) as parts:
        return row_of(run, name, case.model, batches, *train(run, parts, batches, steps), first_timed)


def train(run: Run, parts: Parts, batches: Tensor, steps: int) -> tuple[list[float], list[float]]:
    """What each step took, in microseconds, and its loss."""
    forward, optimizer = parts
    times, losses = [], []
    with timing.garbage_collection_paused():
        for number in range(steps):
            ids = batches[number % len(batches)]
            timing.synchronize(run.device)
            start = time.perf_counter()
            losses.append(step(forward, optimizer, ids))
            timing.synchronize(run.device)
            times.append((time.perf_counter() - start) * 1e6)
            if number == 0 and run.on_gpu:  # what the optimizer allocates is there from now on
                torch.cuda.reset_peak_memory_stats(run.device)
    return times, torch.stack(losses).tolist()


def row_of(
    run: Run, name: str, model: str, batches: Tensor, times: list[float], losses: list[float], first_timed: int
) -> dict:
    _, batch, tokens = batches.shape
    summary = timing.summary(times[first_timed:])
    dtype = str(default_dtype(run.device)).removeprefix("torch.")
    row = {"op": "train_step", "model": model, "batch": batch, "tokens": tokens, "dtype": dtype, "provider": name}
    row |= {"timing": "wall", **summary, "tokens_per_s": round(batch * tokens / summary["time_us"] * 1e6)}
    if run.on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated(run.device)
    return row | {"losses": [round(loss, 5) for loss in losses]}


def step(forward: Callable, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach().float()


def build(case: Case, device: torch.device) -> nn.Module:
    model = with_random_weights(case.config, device)
    return (with_adapters(model) if case.lora else model).train()


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**LORA))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def base(model: nn.Module) -> nn.Module:
    """The model inside its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def torch_adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=learning_rate, fused=True)


# ---- providers: (model, learning rate) -> a context of Parts


@contextmanager
def eager(model: nn.Module, learning_rate: float) -> Iterator[Parts]:
    yield model, torch_adamw(model, learning_rate)


@contextmanager
def compiled(model: nn.Module, learning_rate: float) -> Iterator[Parts]:
    torch._dynamo.reset()
    yield torch.compile(model, dynamic=False), torch_adamw(model, learning_rate)
    torch._dynamo.reset()


@contextmanager
def liger(model: nn.Module, learning_rate: float) -> Iterator[Parts]:
    with variants.liger(base(model), training=True):
        yield model, torch_adamw(model, learning_rate)


@contextmanager
def llmkernels(model: nn.Module, learning_rate: float) -> Iterator[Parts]:
    from llmkernels.optim import AdamW

    with variants.llmkernels(base(model), training=True):
        # PyTorch keeps the moments in the parameters' dtype, ours in float32 if nothing is said: the same for all.
        yield model, AdamW(trained(model), lr=learning_rate, state_dtype=trained(model)[0].dtype)


PROVIDERS = {"eager": eager, "compile": compiled, "liger": liger, OURS: llmkernels}


def clear(run: Run) -> None:
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()
