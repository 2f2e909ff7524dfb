"""The pictures, one message each, drawn from the results files alone; `python -m benchmarks show` draws them again.

A colour is an implementation, in all of them. Each picture carries the hash of the file that it was drawn from.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import models, references, report
from benchmarks.cases import OURS
from benchmarks.report import cases, dtype_of
from benchmarks.results import load

NAMES_AND_COLOURS = {
    "llmkernels_sm80": ("llmkernels, without TMA", "#f4a6a6"),
    "llmkernels": ("llmkernels", "#d62728"),
    "llmkernels_fp8": ("llmkernels, in FP8", "#8c1616"),
    "generate": ("model.generate, patched", "#f4a3a3"),
    "forward": ("a loop over the forward, patched", "#b5515f"),
    "empty": ("an empty op", "#dddddd"),
    "eager": ("eager", "#9d9d9d"),
    "eager_generate": ("model.generate, unpatched", "#9d9d9d"),
    "torch": ("torch, fused", "#4c78a8"),
    "compile": ("torch.compile", "#f2a13a"),
    "static_compile": ("static cache, torch.compile", "#f2a13a"),
    "triton": ("Triton (ours)", "#9467bd"),
    "liger": ("Liger-Kernel", "#3a9d5d"),
    "cublas": ("cuBLAS", "#1f3d7a"),
    "cudnn": ("cuDNN", "#17a2a2"),
    "flash": ("FlashAttention-2 (torch)", "#8c564b"),
    "quack": ("quack", "#5c4a1f"),
    "flashinfer": ("FlashInfer", "#e377c2"),
}
OPS = {
    "rms_norm": "RMSNorm",
    "add_rms_norm": "add + RMSNorm",
    "layer_norm": "LayerNorm",
    "rope": "RoPE",
    "rms_norm_rope": "QK-norm + RoPE",
    "swiglu": "SwiGLU",
    "geglu": "GEGLU",
    "softmax": "softmax",
    "attention": "attention",
    "cross_entropy": "cross-entropy",
    "linear_cross_entropy": "linear + cross-entropy",
    "bias_gelu": "bias + GELU",
    "fp8_quantize": "FP8",
    "rms_norm_fp8_quantize": "RMSNorm, FP8",
    "swiglu_fp8_quantize": "SwiGLU, FP8",
    "gated_mlp": "gated MLP",
    "lora_linear": "LoRA linear",
    "adamw": "AdamW",
    "linear": "",
    "decode_attention": "",
    "sample": "",
}
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
MODELS = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "smollm3-3b": "SmolLM3-3B",
    "phi-4-mini": "Phi-4-mini",
    "qwen2.5-7b": "Qwen2.5-7B",
    "mistral-7b": "Mistral-7B-v0.3",
    "olmo-2-7b": "OLMo-2-7B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-8b": "Qwen3-8B",
    "granite-3.3-8b": "Granite-3.3-8B",
    "gemma-2-9b": "Gemma-2-9B",
    "qwen2.5-14b": "Qwen2.5-14B",
    "qwen2.5-7b-lora": "Qwen2.5-7B, LoRA",
    "SmolLM2-135M-Instruct-lora": "SmolLM2-135M-Instruct, LoRA",
}
PARTS = {"q|k|v": "norm, q|k|v", "gate|up": "norm, gate|up, SwiGLU", "head": "norm, head", "step": "the whole step"}
PART_COLOUR = "#9fb6cd"
READ_LIMIT = "weights and cache read once"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "savefig.dpi": 130,
    "savefig.bbox": "tight",
}
QUIET = "#666666"

Rows = list[dict]
Value = Callable[[dict], float]


# ---- what each picture shows


def ops_forward(meta: dict, rows: Rows, path: Path) -> None:
    forward = [row for row in limited_by_memory(rows, "fwd") if row.get("rows") != 1]
    marks = {"copy": meta["copy_gb_s"] / 1e3}
    dots("Forward: bandwidth, further right is better", "TB/s", forward, bandwidth, marks, meta, path)


def ops_backward(meta: dict, rows: Rows, path: Path) -> None:
    backward = limited_by_memory(rows, "bwd") + limited_by_memory(rows, "fwd+bwd")
    marks = {"copy": meta["copy_gb_s"] / 1e3}
    dots("Backward: bandwidth, further right is better", "TB/s", backward, bandwidth, marks, meta, path)


def one_row(meta: dict, rows: Rows, path: Path) -> None:
    single = pick(main_rows(rows), rows=1)
    bars("One row, as when decoding: time of a kernel, shorter is better", "µs", single, microseconds, meta, path)


def call_overhead(meta: dict, rows: Rows, path: Path) -> None:
    found = pick(rows, op="call_overhead")
    bars("CPU time of one call from Python, shorter is better", "µs", found, microseconds, meta, path)


def prefill(meta: dict, rows: Rows, path: Path) -> None:
    found = [row for row in pick(rows, op="prefill", logits="last", batch=1) if row["model"] != models.QWEN_05B]
    bars(f"Prefill of {model(found)}: shorter is better", "ms", found, milliseconds, meta, path)


def decode(meta: dict, rows: Rows, path: Path) -> None:
    found = [row for row in at_context_512(rows) if row["batch"] in (1, 8, 64)]
    title = f"Time per token of {model(found)}, context {context(found)}: shorter is better"
    bars(title, "ms per token", found, milliseconds, meta, path)


def decode_throughput(meta: dict, rows: Rows, path: Path) -> None:
    found = [row for row in at_context_512(rows) if row["provider"] in (OURS, "eager_generate")]
    title = f"Throughput of {model(found)}, context {context(found)}: higher is better"
    lines(title, "sequences", "tokens/s", found, "batch", tokens_per_second, meta, path)


def decode_context(meta: dict, rows: Rows, path: Path) -> None:
    found = [row for row in pick(over_sizes(rows), batch=1) if row["provider"] in (OURS, "eager_generate")]
    title = f"Time per token of {model(found)} over the length of the context: lower is better"
    lines(title, "tokens in the cache", "ms per token", found, "context", milliseconds, meta, path)


def decode_parts(meta: dict, rows: Rows, path: Path) -> None:
    found = pick(rows, op="decode_part")
    title = f"Where a step of {model(found)} spends its time, context {context(found)}: its launches, each timed alone"
    groups = [
        (sequences(batch), [(row, PARTS.get(row["part"], row["part"])) for row in pick(found, batch=batch)])
        for batch in dict.fromkeys(row["batch"] for row in found)
    ]
    grouped_bars(title, "ms, in all layers", groups, milliseconds, meta, path)


def linear(meta: dict, rows: Rows, path: Path) -> None:
    found = [row for row in pick(rows, op="linear") if row["m"] in (1, 16, 64)]
    marks = {"read": meta["read_gb_s"] / 1e3}
    dots("Linear for few rows: bandwidth, further right is better", "TB/s", found, bandwidth, marks, meta, path)


def decode_attention(meta: dict, rows: Rows, path: Path) -> None:
    found = pick(rows, section="decode_attention")
    title = "Decode attention, 28 + 4 heads: time, further left is better"
    dots(title, "µs", found, microseconds, {}, meta, path, log=True)


def sample(meta: dict, rows: Rows, path: Path) -> None:
    found = pick(rows, op="sample")
    bars("Sampling, top-k 50 and top-p 0.9: shorter is better", "µs", found, microseconds, meta, path)


def train_step(meta: dict, rows: Rows, path: Path) -> None:
    found = pick(rows, op="train_step")
    bars("A step of fine-tuning: shorter is better", "ms", found, milliseconds, meta, path)


def train_memory(meta: dict, rows: Rows, path: Path) -> None:
    found = [row for row in pick(rows, op="train_step") if "peak_bytes" in row]
    if found:
        bars("Memory of fine-tuning, at its peak: shorter is better", "GB", found, peak_gb, meta, path)


def train_loss(meta: dict, rows: Rows, path: Path) -> None:
    """Ours beside eager's, a panel for each model: one line on the other, if the kernels are right."""
    found = [row for row in pick(rows, op="train_step") if row["provider"] in (OURS, "eager")]
    names = dict.fromkeys(row["model"] for row in found)
    if not names:
        return
    title = "Loss over the steps of fine-tuning, the same weights and tokens"
    figure, panels = canvas(title, height=1 + 2.4 * math.ceil(len(names) / 2), panels=len(names))
    for axes, name in zip(panels, names, strict=True):
        for row in sorted(pick(found, model=name), key=is_ours):
            options = {"color": colour(row), "linewidth": 1.2 if is_ours(row) else 4, "label": label(row)}
            axes.plot(range(1, len(row["losses"]) + 1), row["losses"], **options)
        axes.set_title(MODELS.get(name, name), fontsize=9)
        axes.set(xlabel="step", ylabel="loss")
    finish(figure, meta, found, path)


PICTURES = {
    "train": (train_step, train_memory, train_loss),
    "ops": (ops_forward, ops_backward, one_row, call_overhead),
    "model": (prefill,),
    "decode": (decode, decode_throughput, decode_context, decode_parts),
    "decode_ops": (linear, decode_attention, sample),
}


def draw(folder: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        report.console.print("matplotlib is not installed: no pictures")
        return
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        for file, pictures in PICTURES.items():
            source = folder / f"{file}.json"
            if source.exists():
                meta, rows = load(source)
                rows = [{**row, "gpu": meta["gpu"]} for row in rows]
                meta = {**meta, "hash": content_hash(source)}
                for picture in pictures:
                    picture(meta, rows, folder / f"{picture.__name__}.png")


def content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- kinds of pictures


def bars(title: str, unit: str, rows: Rows, value: Value, meta: dict, path: Path) -> None:
    """A bar for every implementation of every case."""
    groups = [
        (heading(keys), [(found[name], label(found[name])) for name in in_order(found)]) for keys, found in cases(rows)
    ]
    grouped_bars(title, unit, groups, value, meta, path)


def grouped_bars(
    title: str, unit: str, groups: list[tuple[str, list[tuple[dict, str]]]], value: Value, meta: dict, path: Path
) -> None:
    """Groups of bars under a heading, each with its words before it and its number behind it."""
    rows = [row for _, found in groups for row, _ in found]
    if not rows:
        return
    figure, axes = canvas(title, height=0.9 + 0.21 * (len(rows) + len(groups)))
    longest = max(value(row) for row in rows)
    place, ticks = 0.0, {}
    for words, found in groups:
        axes.text(0, place, words, fontweight="bold", va="center", transform=axes.get_yaxis_transform())
        for row, words in found:
            place += 1
            ticks[place] = words
            axes.barh(place, value(row), 0.82, color=colour(row))
            weight = "bold" if is_ours(row) else "normal"
            axes.text(value(row) + 0.008 * longest, place, number(value(row)), va="center", fontweight=weight)
        place += 1.25
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel=unit, ylim=(place - 0.4, -0.7), xlim=(0, 1.08 * longest))
    axes.grid(False, axis="y")
    finish(figure, meta, rows, path)


def dots(
    title: str, unit: str, rows: Rows, value: Value, marks: dict[str, float], meta: dict, path: Path, log: bool = False
) -> None:
    """A line for every case, a dot on it for every implementation; our number is in the margin."""
    groups = cases(rows)
    if not groups:
        return
    figure, axes = canvas(title, height=1.2 + 0.25 * len(groups))
    shown = {}
    for place, (_, found) in enumerate(groups):
        values = [value(row) for row in found.values()]
        axes.plot([min(values), max(values)], [place, place], color="#cccccc", linewidth=1, zorder=1)
        for name, row in found.items():
            style = {"marker": "o", "color": colour(row), "markersize": 9 if is_ours(row) else 5.5, "linestyle": ""}
            style |= {"markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 2 if is_ours(row) else 3}
            axes.plot(value(row), place, **style)
            shown[name] = (label(row), style)
        if OURS in found:
            ours = found[OURS]
            text = {"va": "center", "color": colour(ours), "fontweight": "bold"}
            axes.text(1.01, place, number(value(ours)), transform=axes.get_yaxis_transform(), **text)
            for name, time_us in references.lookup(ours).items():
                row = {**ours, "provider": name, "time_us": time_us}
                style = {"marker": "d", "color": colour(row), "markersize": 5, "linestyle": ""}
                axes.plot(value(row), place, **style)
                shown[name] = (f"{label(row)}, {references.NOTE}", style)
    axes.set_yticks(range(len(groups)), [heading(keys) for keys, _ in groups])
    axes.set(xlabel=unit, ylim=(len(groups) - 0.4, -0.6))
    if log:
        plain_log(axes.xaxis, axes.set_xscale)
    else:
        axes.set_xlim(0, None)
    for name, limit in marks.items():
        axes.axvline(limit, color="black", linewidth=1)
        axes.text(limit, -0.7, f"{name}: {limit:.2f} {unit}", ha="center", va="bottom", fontsize=8)
    for name in in_order(shown):
        words, style = shown[name]
        axes.plot([], [], label=words, **style)
    finish(figure, meta, rows, path)


def lines(title: str, xlabel: str, ylabel: str, rows: Rows, key: str, value: Value, meta: dict, path: Path) -> None:
    """A line for every implementation, its name at its end, and dotted what reading the memory once allows."""
    if len({row[key] for row in rows}) < 2:
        return
    figure, axes = canvas(title, height=4.2)

    def line(found: Rows, words: str, *style, **options):
        x, y = [row[key] for row in found], [value(row) for row in found]
        axes.plot(x, y, *style, **options)
        axes.annotate(words, (x[-1], y[-1]), (7, 0), textcoords="offset points", va="center", color=options["color"])

    rows = sorted(rows, key=lambda row: row[key])
    for name in in_order({row["provider"] for row in rows}):
        mine = pick(rows, provider=name)
        line(mine, label(mine[0]), "o-", color=colour(mine[0]), linewidth=2)
    limit = [{**row, "time_us": row["bytes"] / meta["read_gb_s"] / 1e3} for row in pick(rows, provider=OURS)]
    if limit:
        line(limit, READ_LIMIT, ":", color="black")
    plain_log(axes.xaxis, axes.set_xscale)
    plain_log(axes.yaxis, axes.set_yscale)
    values = sorted({row[key] for row in rows})
    axes.set_xticks(values, [str(one) for one in values])
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    finish(figure, meta, rows, path)


# ---- what they share


def canvas(title: str, height: float, panels: int = 0):
    """A figure with one panel, or a list of panels, two in a line."""
    import matplotlib.pyplot as plt

    size = {"nrows": math.ceil(panels / 2), "ncols": min(panels, 2), "squeeze": False} if panels else {}
    figure, axes = plt.subplots(figsize=(8.4, height), layout="constrained", **size)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    if not panels:
        return figure, axes
    for unused in axes.flat[panels:]:
        unused.remove()
    return figure, list(axes.flat[:panels])


def finish(figure, meta: dict, rows: Rows, path: Path) -> None:
    """Below the panel: on what it was measured, and how, and the colours where the panel does not name them."""
    import matplotlib.pyplot as plt

    how = {"graph": "CUDA graphs over rotated inputs", "wall": "wall time"}[rows[0]["timing"]]
    dtypes = {DTYPES[dtype_of(row)] for row in rows}
    facts = [meta["gpu"] or meta["cpu"], f"torch {meta['torch']}", *(dtypes if len(dtypes) == 1 else ()), how]
    below = ", ".join([*facts, dates(meta, rows)])
    handles, words = figure.axes[0].get_legend_handles_labels()
    if handles:
        legend = figure.legend(handles, words, loc="outside lower left", ncols=4, fontsize=8.5, title=below,
                               title_fontsize=8, alignment="left")  # fmt: skip
        legend.get_title().set_color(QUIET)
    else:
        figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=QUIET)
    figure.savefig(path, metadata={"Source": meta["hash"], "Software": None})
    plt.close(figure)


def plain_log(axis, set_scale: Callable) -> None:
    """A logarithmic scale with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def dates(meta: dict, rows: Rows) -> str:
    days = sorted({meta["sections"][row["section"]]["date"][:10] for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def heading(keys: dict) -> str:
    """A case in words."""
    if keys["op"] == "prefill":
        return f"{keys['tokens']} tokens"
    if keys["op"] == "decode":
        return sequences(keys["batch"])
    if keys["op"] == "train_step":
        return f"{MODELS.get(keys['model'], keys['model'])}, {keys['batch']} x {keys['tokens']} tokens"
    dtype = f" {DTYPES[keys['dtype']]}" if keys["op"] in ("rms_norm", "softmax", "adamw") else ""
    both = " and backward" if keys.get("pass") == "fwd+bwd" else ""
    return f"{OPS.get(keys['op'], '')}{both} {report.shape(keys)}{dtype}".strip()


def sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count > 1)}"


def in_order(names: Iterable[str]) -> list[str]:
    """Ours first."""
    known = list(NAMES_AND_COLOURS)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def label(row: dict) -> str:
    if row["op"] == "decode" and row["section"] != "decode":  # which is a loop over the forward, by everybody
        words = {OURS: "llmkernels.generate", "eager": "a loop over the forward, unpatched"}
        return words.get(row["provider"], NAMES_AND_COLOURS[row["provider"]][0])
    return NAMES_AND_COLOURS.get(row["provider"], (row["provider"],))[0]


def colour(row: dict) -> str:
    if row["op"] == "decode_part" and not is_ours(row):
        return PART_COLOUR
    return NAMES_AND_COLOURS.get(row["provider"], ("", "#000000"))[1]


def is_ours(row: dict) -> bool:
    return row["provider"] == OURS and row.get("part", "step") == "step"


def number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def model(rows: Rows) -> str:
    return MODELS.get(rows[0]["model"], rows[0]["model"]) if rows else ""


def context(rows: Rows) -> str:
    return str(rows[0]["context"]) if rows else ""


def at_context_512(rows: Rows) -> Rows:
    """Of whole steps; a short run has another context."""
    steps = over_sizes(rows)
    return pick(steps, context=512) or steps


def over_sizes(rows: Rows) -> Rows:
    return [row for row in rows if is_over_sizes(row)]


def is_over_sizes(row: dict) -> bool:
    """A step of the model that is measured at many sizes; those of the others have sections of their names."""
    return row["op"] == "decode" and row["section"] not in models.MODELS


def main_rows(rows: Rows) -> Rows:
    """The rows of ops by the main method: graphs, or wall time where there are none (a CPU). Without odd widths."""
    ops = [row for row in rows if row["op"] != "call_overhead" and row.get("section") != "odd"]
    return pick(ops, timing="graph") or pick(ops, timing="wall")


def limited_by_memory(rows: Rows, direction: str) -> Rows:
    return [row for row in pick(main_rows(rows), **{"pass": direction}) if "flops" not in row]


def pick(among: Rows, /, **keys) -> Rows:
    return [row for row in among if all(row.get(key) == value for key, value in keys.items())]


def bandwidth(row: dict) -> float:
    return row["bytes"] / row["time_us"] / 1e6


def teraflops(row: dict) -> float:
    return row["flops"] / row["time_us"] / 1e6


def tokens_per_second(row: dict) -> float:
    return row["batch"] / row["time_us"] * 1e6


def microseconds(row: dict) -> float:
    return row["time_us"]


def peak_gb(row: dict) -> float:
    return row["peak_bytes"] / 1e9


def milliseconds(row: dict) -> float:
    return row["time_us"] / 1e3
