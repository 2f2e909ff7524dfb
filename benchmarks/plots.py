"""The pictures, drawn from the results files alone; `python -m benchmarks plot` draws them again."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import references, report
from benchmarks.cases import OURS
from benchmarks.report import cases, ordered
from benchmarks.results import load

# One colour per provider in every picture; ours is the only red.
COLOURS = {
    "empty": "#d9d9d9",
    "eager": "#8c8c8c",
    "torch": "#4c78a8",
    "compile": "#f2a13a",
    "triton": "#9467bd",
    "liger": "#3a9d5d",
    "cublas": "#4c78a8",
    "cudnn": "#4c78a8",
    "flash": "#f2a13a",
    "generate": "#ff9896",
    "eager_generate": "#c7c7c7",
    "static_compile": "#f2a13a",
    "llmkernels": "#d62728",
    "quack": "#7f4f24",
    "flashinfer": "#0fa3b1",
}
LABELS = {
    "empty": "empty op",
    "torch": "torch fused",
    "compile": "torch.compile",
    "triton": "Triton (ours)",
    "liger": "Liger-Kernel",
    "flashinfer": "FlashInfer",
    "cublas": "cuBLAS",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2 (torch)",
    "generate": "model.generate, patched",
    "eager_generate": "model.generate",
    "static_compile": "static cache, torch.compile",
}
OPS = {"rms_norm": "RMSNorm", "add_rms_norm": "add + RMSNorm", "rope": "RoPE", "swiglu": "SwiGLU", "geglu": "GEGLU"}
MARKS = {"quack": "D", "flashinfer": "^"}
WHOLE_STEP = "step"
PAPER_GB_S = {"NVIDIA H200": 4800}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",
}

Rows = list[dict]
Panel = tuple[Rows, Callable]  # drawn if it has rows


def draw(folder: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        report.console.print("matplotlib is not installed: no pictures")
        return
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        if (folder / "ops.json").exists():
            meta, rows = load(folder / "ops.json")
            rows = [{**row, "gpu": meta["gpu"]} for row in rows]
            draw_forward(meta, rows, folder / "ops.png")
            draw_backward(meta, rows, folder / "ops_backward.png")
            draw_roofline(meta, rows, folder / "ops_roofline.png")
        if (folder / "model.json").exists():
            meta, rows = load(folder / "model.json")
            draw_model(meta, rows, folder / "model.png")
        if (folder / "decode_ops.json").exists():
            meta, rows = load(folder / "decode_ops.json")
            draw_decode_ops(meta, rows, folder / "decode_ops.png")
        if (folder / "decode.json").exists():
            meta, rows = load(folder / "decode.json")
            draw_decode(meta, rows, folder / "decode.png")


def draw_forward(meta: dict, rows: Rows, path: Path) -> None:
    forward = pick(main_rows(rows), **{"pass": "fwd"})
    overhead = pick(rows, op="call_overhead")
    norm = pick(forward, op="rms_norm", rows=2048)
    rope = pick(forward, op="rope", heads=32, kv_heads=32, in_place=False)
    swiglu = pick(forward, op="swiglu", packed=False)
    single = pick(forward, rows=1)
    rest = [row for row in forward if not any(row in group for group in (norm, rope, swiglu, single))]
    shelves = [
        [
            line_panel(norm, meta, "cols", "RMSNorm, 2048 rows", "hidden size"),
            line_panel(rope, meta, "tokens", "RoPE, 32 + 32 heads", "tokens"),
            line_panel(swiglu, meta, "cols", "SwiGLU, 2048 rows", "ffn size"),
        ],
        [bar_panel(rest, "other sizes", "TB/s", bandwidth, meta)],
        [
            bar_panel(single, "one row", "µs per call", microseconds),
            bar_panel(overhead, "CPU time of one Python call", "µs", microseconds),
        ],
    ]
    grid(shelves, path, f"Forward, {how(forward)}, {where(meta)}")


def draw_backward(meta: dict, rows: Rows, path: Path) -> None:
    backward = pick(main_rows(rows), **{"pass": "bwd"})
    norm = pick(backward, op="rms_norm", rows=2048)
    rest = [row for row in backward if row not in norm]
    shelves = [
        [line_panel(norm, meta, "cols", "RMSNorm, 2048 rows", "hidden size")],
        [bar_panel(rest, "other ops and sizes", "TB/s", bandwidth, meta)],
    ]
    grid(shelves, path, f"Backward, {how(backward)}, {where(meta)}", width=10)


def draw_model(meta: dict, rows: Rows, path: Path) -> None:
    if not rows:
        return
    last, everything = (pick(rows, op="prefill", logits=logits) for logits in ("last", "all"))
    shelf = [
        bar_panel(last, "prefill, last-token logits", "ms", milliseconds),
        bar_panel(everything, "prefill, all logits, no cache", "ms", milliseconds),
        bar_panel(pick(rows, op="decode"), "decode after 512 tokens", "ms per token", milliseconds),
    ]
    title = f"{rows[0]['model']}, {rows[0]['dtype']}, wall time of a forward from Python, {where(meta)}"
    grid([shelf], path, title)


def draw_decode_ops(meta: dict, rows: Rows, path: Path) -> None:
    linear = pick(rows, op="linear")
    shelves = [
        [(linear, partial(linears, rows=linear, meta=meta))],
        [
            bar_panel(pick(rows, op="decode_attention"), "decode attention, 28 + 4 heads", "µs", microseconds),
            bar_panel(pick(rows, op="sample"), "sampling, top-k 50 and top-p 0.9", "µs", microseconds),
        ],
    ]
    grid(shelves, path, f"Kernels of decoding, {where(meta)}", width=14)


def draw_decode(meta: dict, rows: Rows, path: Path) -> None:
    steps, launches = pick(rows, op="decode"), pick(rows, op="decode_part")
    short = [row for row in steps if row["context"] == 512 and row["batch"] in (1, 8, 64)]
    shelves = [
        [
            bar_panel(short, "a decode step, context 512", "ms per token", milliseconds),
            (pick(steps, provider=OURS), partial(throughput, rows=pick(steps, provider=OURS), meta=meta)),
        ],
        [(launches, partial(parts, rows=launches, steps=steps))],
    ]
    grid(shelves, path, f"Decode, {where(meta)}", width=14)


def throughput(axes, rows: Rows, meta: dict) -> None:
    """Tokens per second over the batch, a line per context, each below what reading the memory once a step allows."""
    contexts = sorted({row["context"] for row in rows})
    for index, context in enumerate(contexts):
        mine = sorted(pick(rows, context=context), key=lambda row: row["batch"])
        batches = [row["batch"] for row in mine]
        shade = 0.25 + 0.75 * (index + 1) / len(contexts)
        rates = [row["batch"] / row["time_us"] * 1e6 for row in mine]
        axes.plot(batches, rates, "o-", color=COLOURS[OURS], alpha=shade, label=f"llmkernels, context {context}")
        roof = [row["batch"] * meta["read_gb_s"] * 1e9 / row["bytes"] for row in mine]
        axes.plot(batches, roof, ":", color="black", alpha=shade, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="tokens/s", title="throughput (dotted: read limit)")
    values = sorted({row["batch"] for row in rows})
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.legend(fontsize=7)


def linears(axes, rows: Rows, meta: dict) -> None:
    """Bandwidth over the number of rows, a line per weight and provider."""
    styles = ("-", "--", "-.", ":", (0, (1, 3)))
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    for style, (n, k) in zip(styles, shapes, strict=False):
        for name in ordered({row["provider"] for row in rows}):
            mine = sorted(pick(rows, provider=name, n=n, k=k), key=lambda row: row["m"])
            axes.plot([row["m"] for row in mine], [bandwidth(row) for row in mine], linestyle=style, marker="o",
                      markersize=3, color=COLOURS[name], label=f"{LABELS.get(name, name)}, {n}x{k}")  # fmt: skip
    limits(axes, meta, "read")
    values = sorted({row["m"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.set(title="linear for few rows, rotating weights", xlabel="rows of x", ylabel="TB/s", ylim=(0, None))


def parts(axes, rows: Rows, steps: Rows) -> None:
    """Where a step's time goes: its launches, each timed alone, stacked, beside the whole step."""
    names = list(dict.fromkeys(row["part"] for row in rows if row["part"] != WHOLE_STEP))
    batches = sorted({row["batch"] for row in rows})
    import matplotlib.pyplot as plt

    colours = plt.get_cmap("tab10")
    for place, batch in enumerate(batches):
        left = 0.0
        for index, name in enumerate(names):
            for row in pick(rows, part=name, batch=batch):
                width = row["time_us"] / 1e3  # of all its launches
                axes.barh(place, width, left=left, color=colours(index), label=name if place == 0 else None)
                left += width
        for row in pick(rows, part=WHOLE_STEP, batch=batch):
            axes.plot([row["time_us"] / 1e3] * 2, [place - 0.4, place + 0.4], "--", color="black", linewidth=2)
        for row in pick(steps, provider=OURS, batch=batch, context=512):
            axes.plot([row["time_us"] / 1e3] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set(title="one step, context 512: its launches timed alone; (dashed) all of them in one graph; "
                   "(black) the step as generate takes it",
             xlabel="ms")  # fmt: skip


def draw_roofline(meta: dict, rows: Rows, path: Path) -> None:
    """Achieved bandwidth over bytes moved: every case of ours and its best peer, under the measured limit."""
    import matplotlib.pyplot as plt

    # A single row is bound by latency and says nothing about this roof.
    groups = [(keys, found) for keys, found in cases(main_rows(rows)) if OURS in found and keys.get("rows") != 1]
    if not groups:
        return
    figure, axes = plt.subplots(figsize=(8.5, 4.4))
    marks = dict(zip(OPS, "osD^v", strict=True))
    for keys, found in groups:
        ours = found[OURS]
        x, y, mark = ours["bytes"] / 1e6, bandwidth(ours), marks.get(keys["op"], "P")
        peers = [bandwidth(row) for name, row in found.items() if name != OURS]
        if peers:
            axes.plot([x, x], [max(peers), y], color="#c9c9c9", linewidth=0.8, zorder=1)
            axes.plot(x, max(peers), mark, color="#b3b3b3", markersize=5, zorder=2)
        face = "white" if keys["pass"] == "bwd" else COLOURS[OURS]
        axes.plot(x, y, mark, color=COLOURS[OURS], markerfacecolor=face, markersize=6.5, zorder=3)
    roofs = limits(axes, meta)
    axes.set(xscale="log", xlabel="compulsory bytes per call (MB)", ylabel="achieved bandwidth (TB/s)", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"llmkernels under the memory roof, {how(main_rows(rows))}, {where(meta)}", loc="left")
    handles = [axes.plot([], [], mark, color=COLOURS[OURS], label=OPS[op])[0] for op, mark in marks.items()]
    handles += axes.plot([], [], "o", color=COLOURS[OURS], markerfacecolor="white", label="backward: open")
    handles += axes.plot([], [], "o", color="#b3b3b3", label="best peer")
    axes.legend(handles=[*handles, *roofs], loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
    plt.close(figure)


def grid(shelves: list[list[Panel]], path: Path, title: str, width: float = 15) -> None:
    """Shelves of panels, those that have rows, under one legend."""
    import matplotlib.pyplot as plt

    shelves = [found for shelf in shelves if (found := [paint for rows, paint in shelf if rows])]
    if not shelves:
        return
    figure = plt.figure(figsize=(width, 3.5 * len(shelves)), layout="constrained")
    places = figure.add_gridspec(len(shelves), 6)
    for line, shelf in enumerate(shelves):
        span = 6 // len(shelf)
        for column, paint in enumerate(shelf):
            paint(figure.add_subplot(places[line, column * span : (column + 1) * span]))
    found = {}
    for axes in figure.axes:
        found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=6 if width > 10 else 4)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path)
    plt.close(figure)


def line_panel(rows: Rows, meta: dict, key: str, title: str, label: str) -> Panel:
    return rows, partial(lines, rows=rows, meta=meta, key=key, title=title, label=label)


def bar_panel(rows: Rows, title: str, unit: str, value: Callable, meta: dict | None = None) -> Panel:
    return rows, partial(bars, rows=rows, title=title, unit=unit, value=value, meta=meta)


def lines(axes, rows: Rows, meta: dict, key: str, title: str, label: str) -> None:
    """Bandwidth over one case key, a line per provider."""
    for name in ordered({row["provider"] for row in rows}):
        mine = sorted(pick(rows, provider=name), key=lambda row: row[key])
        bold = {"linewidth": 2.4, "markersize": 6, "zorder": 3} if name == OURS else {"linewidth": 1.3, "markersize": 4}
        x, y = [row[key] for row in mine], [bandwidth(row) for row in mine]
        axes.plot(x, y, "o-", color=COLOURS[name], label=LABELS.get(name, name), **bold)
        if name == OURS:
            for row in mine:
                mark_references(axes, row, row[key], bandwidth)
    limits(axes, meta)
    if key == "tokens":
        axes.set_xscale("log", base=2)
    values = sorted({row[key] for row in rows})
    axes.set_xticks(values, [str(value) for value in values], rotation=40)
    axes.set(title=f"{title}, {rows[0]['dtype']}", xlabel=label, ylabel="TB/s", ylim=(0, None))


def bars(axes, rows: Rows, title: str, unit: str, value: Callable, meta: dict | None) -> None:
    """One group of bars per case; `meta` where the limits belong into the picture."""
    groups = cases(rows)
    names = ordered({row["provider"] for row in rows})
    width = 0.86 / len(names)
    heights = [value(row) for row in rows]
    low = min(heights) / 2 if max(heights) > 50 * min(heights) else 0  # else the small ones could not be seen
    if low:
        axes.set_yscale("log")
        axes.set_ylim(low, 2 * max(heights))
    inside = {"ha": "center", "va": "center", "rotation": 90, "color": "white", "fontweight": "bold", "fontsize": 7}
    for place, (_, found) in enumerate(groups):
        for index, name in enumerate(names):
            if name not in found:
                continue
            x, height = place + (index - (len(names) - 1) / 2) * width, value(found[name])
            axes.bar(x, height, width * 0.94, color=COLOURS[name], label=LABELS.get(name, name))
            if name == OURS:
                axes.text(x, (low * height) ** 0.5 if low else height / 2, f"{height:.3g}", **inside)
                mark_references(axes, found[name], x, value)
    if meta:
        limits(axes, meta)
    axes.set_xticks(range(len(groups)), [tick(keys) for keys, _ in groups], fontsize=7.5)
    axes.set(title=title, ylabel=unit, xlim=(-0.6, len(groups) - 0.4))


def mark_references(axes, row: dict, x: float, value: Callable[[dict], float]) -> None:
    for name, time_us in references.lookup(row).items():
        label = f"{LABELS.get(name, name)}, {references.NOTE}"
        y = value({**row, "time_us": time_us})
        axes.plot(x, y, MARKS[name], color=COLOURS[name], markeredgecolor="white", label=label, zorder=4)


def limits(axes, meta: dict, of: str = "copy") -> list:
    """What the memory gives, as measured by a copy or by reading alone, and on paper."""
    limit = meta[f"{of}_gb_s"] / 1e3
    drawn = [axes.axhline(limit, color="black", linewidth=1, label=f"{of} limit, measured: {limit:.2f} TB/s")]
    if meta["gpu"] in PAPER_GB_S:
        paper = PAPER_GB_S[meta["gpu"]] / 1e3
        drawn.append(axes.axhline(paper, color="black", linewidth=1, ls=":", label=f"on paper: {paper:.1f} TB/s"))
    return drawn


def main_rows(rows: Rows) -> Rows:
    """The rows of ops by the main method: graphs, or wall time where there are none (a CPU)."""
    ops = [row for row in rows if row["op"] != "call_overhead"]
    return pick(ops, timing="graph") or pick(ops, timing="wall")


def pick(among: Rows, /, **keys) -> Rows:
    return [row for row in among if all(row.get(key) == value for key, value in keys.items())]


def bandwidth(row: dict) -> float:
    return row["bytes"] / row["time_us"] / 1e6


def microseconds(row: dict) -> float:
    return row["time_us"]


def milliseconds(row: dict) -> float:
    return row["time_us"] / 1e3


def tick(keys: dict) -> str:
    """The case below its bars, in short lines."""
    if keys["op"] == "prefill":
        return f"{keys['tokens']}\ntokens"
    if keys["op"] == "decode":
        return f"batch {keys['batch']}"
    words = (
        report.shape(keys)
        .replace(", ", "\n")
        .replace(" packed", "\npacked")
        .replace(" paged", "\npaged")
        .replace(" in place", "\nin place")
    )
    return (
        words
        if keys["op"] in ("call_overhead", "decode_attention", "sample")
        else f"{OPS.get(keys['op'], keys['op'])}\n{words}"
    )


def how(rows: Rows) -> str:
    graph = bool(rows) and rows[0]["timing"] == "graph"
    return "CUDA graphs over rotated inputs" if graph else "wall time per call"


def where(meta: dict) -> str:
    return f"{meta['gpu'] or meta['cpu']}, torch {meta['torch']}, sources {meta['sources'][:8]}"
