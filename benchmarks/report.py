"""Tables on the terminal, progress, and what was left out."""

import functools
import os
from collections.abc import Iterable, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from benchmarks.cases import OURS, PROVIDERS
from benchmarks.models import QWEN

# A log file has no width of its own.
console = Console(width=None if os.isatty(1) else 170, highlight=False)

STEPS = ("decode", "beams", "lookup", "sampling", "chat", "assisted", "adapters")  # whose time is that of a token
HARNESSES = (
    "pipeline", "chats", "continuous_batching", "lm_eval_likelihoods", "lm_eval_generation", "server", "grpo",
)  # fmt: skip
CALLS = ("prefill", "first_token", "train_step", *HARNESSES)  # whose time is that of all
MEASUREMENT = ("provider", "time_us", "time_us_p10", "time_us_p90")
CASE_KEYS = (
    "op", "function", "part", "model", "layers", "parameters", "tensors", "rows", "cols", "vocab", "hidden", "packed",
    "m", "n", "k", "batch", "tokens", "kv_tokens", "heads", "kv_heads", "head_dim", "causal", "in_place", "cache",
    "context", "shortest", "logits", "dtype", "pass", "timing",
)  # fmt: skip


def cases(rows: Iterable[dict]) -> list[tuple[dict, dict[str, dict]]]:
    """Rows that differ in nothing but the provider, together: [(case keys, {provider: row}), ...]."""
    groups: dict[tuple, tuple[dict, dict[str, dict]]] = {}
    for row in rows:
        keys = {key: row[key] for key in CASE_KEYS if key in row} | {"dtype": dtype_of(row)}
        groups.setdefault(tuple(keys.items()), (keys, {}))[1][row["provider"]] = row
    return list(groups.values())


def dtype_of(row: dict) -> str:
    """That of the model, whose products may have another."""
    return row.get("model_dtype", row["dtype"])


def computes_the_op(row: dict) -> bool:
    return row["provider"] != "empty" and not row.get("approximate")


def is_peer(row: dict) -> bool:
    return row["provider"] not in NO_PEERS and computes_the_op(row)


def best_peer(found: dict[str, dict]) -> dict | None:
    return min(filter(is_peer, found.values()), key=lambda row: row["time_us"], default=None)


def shape(keys: dict) -> str:
    """The case in a few words, for a table's first column or a picture's axis."""
    if keys["op"] in ("rope", "rms_norm_rope"):
        words = [f"{keys['tokens']} tokens, {keys['heads']}+{keys['kv_heads']} heads", "in place" * keys["in_place"]]
    elif "m" in keys:
        words = [f"{keys['n']}x{keys['k']}, {keys['m']} row{'s' * (keys['m'] > 1)}"]
    elif keys["op"] == "attention":
        words = [f"batch {keys['batch']}, {keys['tokens']} tokens,", f"{keys['heads']}+{keys['kv_heads']} heads"]
        words += [f"of {keys['head_dim']}", "" if keys["causal"] else "all to all"]
    elif "kv_tokens" in keys:
        heads = (keys["heads"], keys["kv_heads"], keys["head_dim"])
        words = [f"batch {keys['batch']}, {keys['kv_tokens']} keys", "paged" * (keys["cache"] == "paged")]
        words += [] if heads == QWEN_HEADS else ["of {}+{}x{} heads".format(*heads)]
        shortest = keys.get("shortest", keys["kv_tokens"])
        words += [f"the others {shortest}"] if shortest < keys["kv_tokens"] else []
        words += [f"{keys['tokens']} queries each"] if keys.get("tokens", 1) > 1 else []
    elif "parameters" in keys:
        words = [f"{keys['parameters'] / 1e6:.0f}M parameters", f"in {keys['tensors']} tensors" * (keys["tensors"] > 1)]
    elif "vocab" in keys:
        words = [f"{keys['rows']}x{keys['vocab']}", f"of {keys['hidden']}" if "hidden" in keys else ""]
    elif "rows" in keys:
        words = [f"{keys['rows']}x{keys['cols']}", "packed" * keys.get("packed", False)]
    elif keys["op"] == "host":
        words = [f"{keys['part']}, {keys['layers']} layers"]
    elif "part" in keys:
        words = [f"{keys['part']}, batch {keys['batch']}"]
    elif keys["op"] == "prefill":
        words = ["" if keys["model"] == QWEN else keys["model"], f"{prompts(keys)}, {keys['logits']} logits"]
    elif keys["op"] == "train_step":
        words = [keys["model"], f"{keys['batch']} x {keys['tokens']} tokens"]
    elif keys["op"] in STEPS:
        words = [f"batch {keys['batch']}, context {keys['context']}"]
    elif keys["op"] == "first_token":
        words = [keys["model"], f"{keys['tokens']} tokens"]
    elif keys["op"] in HARNESSES:
        words = [keys["model"], f"{keys['batch']} prompts"]
    else:
        words = [keys["function"]]
    return " ".join(word for word in words if word)


def prompts(keys: dict) -> str:
    """The tokens of a prompt, or of many."""
    shortest = f"{keys['shortest']} to " if "shortest" in keys else ""
    return f"{keys['batch']} x " * (keys["batch"] > 1) + f"{shortest}{keys['tokens']} tokens"


def ordered(names: Iterable[str]) -> list[str]:
    known = ("empty", *PROVIDERS)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def number(time_us: float) -> str:
    return f"{time_us:.2f}" if time_us < 100 else f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


# Other ways to our own kernels, and what computes nothing.
NO_PEERS = (OURS, "llmkernels_sm80", "llmkernels_fp8", "generate", "forward", "empty")
METHODS = {
    "graph": "CUDA graph over rotated inputs",
    "events": "single launches, L2 flushed",
    "wall": "wall time",
}
QWEN_HEADS = (28, 4, 128)  # of decode attention: where no heads are named
READERS = ("linear", "rms_norm_linear", "decode_attention", "sample", *STEPS)  # what they write is little


def print_rows(rows: Sequence[dict], meta: dict) -> None:
    """A table for each op and method of timing."""
    for op, method in dict.fromkeys((row["op"], row["timing"]) for row in rows):
        found = [row for row in rows if (row["op"], row["timing"]) == (op, method)]
        unit, unit_us = ("ms", 1e3) if op in (*STEPS, *CALLS) else ("us", 1)
        limit = "read" if op in READERS else "copy"
        limit_gb_s = 0 if op == "call_overhead" or not all("bytes" in row for row in found) else meta[f"{limit}_gb_s"]
        print_table(f"{op}, {METHODS[method]}, {unit}", found, limit_gb_s, unit_us, limit)
    facts = {row["provider"]: row for row in rows}
    for provider, row in facts.items():
        notes = [f"{key} {value}" for key, value in row.items() if key.startswith(("logits_error", "patched"))]
        if notes:
            console.print(f"{provider}: {', '.join(notes)}")


def print_table(
    title: str, rows: Sequence[dict], limit_gb_s: float = 0, unit_us: float = 1, limit: str = "copy"
) -> None:
    """One line per case, one column per provider; with `limit_gb_s` also our bandwidth and its share of that limit."""
    groups = cases(rows)
    if not groups:
        return
    providers = ordered({row["provider"] for row in rows})
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    table.add_column("case", no_wrap=True)
    for provider in providers:
        table.add_column(provider, justify="right")
    unit, gb_s = ("TB/s", 1e3) if limit_gb_s > 1e3 else ("GB/s", 1)
    bandwidth = (unit, f"of {limit}") if limit_gb_s else ()
    for name in (*bandwidth, "vs eager", "vs best peer"):
        table.add_column(name, justify="right")
    for keys, found in groups:
        cells = [f"{keys['op']} {shape(keys)}" + f" {keys.get('pass', '')} {keys['dtype']}"]
        best = min((row["time_us"] for row in found.values() if computes_the_op(row)), default=None)
        for provider in providers:
            time_us = found[provider]["time_us"] if provider in found else None
            style = "bold green" if time_us == best else ""
            cells.append(Text(number(time_us / unit_us), style) if time_us else "-")
        ours = found.get(OURS)
        peer = best_peer(found)
        if bandwidth:
            rate = ours["bytes"] / ours["time_us"] / 1e3 if ours else 0
            cells += [f"{rate / gb_s:.2f}", f"{rate / limit_gb_s:.0%}"] if ours else ["", ""]
        cells.append(f"{found['eager']['time_us'] / ours['time_us']:.2f}x" if ours and "eager" in found else "")
        cells.append(f"{peer['time_us'] / ours['time_us']:.2f}x" if ours and peer else "")
        table.add_row(*cells)
    console.print()
    console.print(table)


@functools.cache  # the same error for one case after the other is said once
def _say_left_out(provider: str, error: str) -> None:
    console.print(Text(f"  {provider} left out: {error}", "yellow"))


def warn(provider: str, error: BaseException) -> None:
    """A provider that does not run is left out, by name."""
    lines = str(error).strip().splitlines() or [""]
    _say_left_out(provider, f"{type(error).__name__}: {lines[0][:300]}")


def plausible(rows: Iterable[dict], meta: dict) -> None:
    """Says so when a time is shorter than the memory allows: then something else was measured."""
    limit_gb_s = 1.1 * max(meta["copy_gb_s"], meta["read_gb_s"])
    for row in rows:
        if row["timing"] == "graph" and "bytes" in row and row["bytes"] / row["time_us"] / 1e3 > limit_gb_s:
            console.print(f"  impossible: {row}")


@contextmanager
def progress():
    """Yields a function that says what begins now: a line that moves on a terminal, one line per case in a log."""
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def begin(what: str) -> None:
            if not console.is_terminal:
                console.print(f"  {what}")
            bar.update(task, description=what)

        yield begin
