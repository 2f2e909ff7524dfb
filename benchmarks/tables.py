"""The tables of the documents, written from the results files: `python -m benchmarks show`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; a test compares it with the results.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks import models as published
from benchmarks import odd as odd_widths
from benchmarks import report
from benchmarks.bars import BARS, ODD_LIMIT, Bar
from benchmarks.cases import OURS
from benchmarks.plots import (
    DTYPES,
    MODELS,
    bandwidth,
    dates,
    in_order,
    is_over_sizes,
    label,
    main_rows,
    microseconds,
    milliseconds,
    number,
    over_sizes,
    peak_gb,
    pick,
    teraflops,
)  # fmt: skip
from benchmarks.report import METHODS, best_peer, cases
from benchmarks.results import load
from benchmarks.sections import COMMANDS

DOCUMENTS = ("README.md", "docs/performance.md", "results/README.md")
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SIZES = ((1, 512), (1, 8192), (8, 512), (64, 512))  # batch and context of the README's table of decoding
UNPATCHED = ("eager", "eager_generate", "static_compile")
NOISE = 1.01  # what is closer than that is a draw
WIDE = 1.15  # p90 over p10 from which a table shows both

Rows = list[dict]
Value = Callable[[dict], float]


class Results:
    """The rows of each file, and what was measured on what."""

    def __init__(self, folder: Path):
        self.metas, self.rows = {}, {}
        for file in ("ops", "model", "decode", "decode_ops", "train"):
            path = folder / f"{file}.json"
            self.metas[file], self.rows[file] = load(path) if path.exists() else ({}, [])
        self.tests = json.loads((folder / "gpu_tests.json").read_text())

    def below(self, file: str, rows: Rows) -> str:
        """On what the rows were measured; or how to measure them."""
        if not rows:
            command = next(name for name, files in COMMANDS.items() if file in files)
            return f"Not measured yet: `python -m benchmarks {command}`.\n"
        meta = self.metas[file]
        return f"\n{meta['gpu']}, torch {meta['torch']}, transformers {meta['transformers']}, {dates(meta, rows)}.\n"


def write(root: Path) -> list[str]:
    """Writes every table again. Returns the documents that have changed."""
    results, changed = Results(root / "results"), []
    for name in DOCUMENTS:
        path = root / name
        text = path.read_text()
        if (new := filled(text, results)) != text:
            path.write_text(new)
            changed.append(name)
    return changed


def filled(text: str, results: Results) -> str:
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]](results) + found[3], text)


# ---- each table


def decode(results: Results) -> str:
    """ms per token at a few sizes, a line for each way to generate, and what patching gains over the best of others."""
    steps = over_sizes(results.rows["decode"])
    columns = [{row["provider"]: row for row in pick(steps, batch=batch, context=context)} for batch, context in SIZES]
    labels = {row["provider"]: label(row) for row in steps}
    body = [
        [labels[name], *(cell(found.get(name), milliseconds, fastest(found.values())) for found in columns)]
        for name in in_order(labels)
    ]
    gains = [
        f"{fastest(peers) / found['generate']['time_us']:.1f} x"
        if "generate" in found and (peers := [found[name] for name in UNPATCHED if name in found])
        else ""
        for found in columns
    ]
    body.append(["the fastest unpatched / model.generate, patched", *gains])
    head = ["ms per token", *(f"batch {batch}, context {context}" for batch, context in SIZES)]
    return markdown(head, body) + results.below("decode", steps)


def models(results: Results) -> str:
    """A token of each model by every way to generate, and its first one."""
    ways = {
        ("decode", "generate"): "model.generate",
        ("decode", "forward"): "a loop over the forward",
        ("decode", "eager"): "unpatched, the faster of both",
        ("first_token", OURS): "first token",
        ("first_token", "eager"): "the same, unpatched",
    }
    ours = ("decode", OURS)
    head = ["ms", "llmkernels.generate", "TB/s", *ways.values()]
    body, rows = [], []
    for name, found in of_models(results, (ours, *ways, ("decode", "eager_generate"))).items():
        if unpatched := [found[way] for way in (("decode", "eager"), ("decode", "eager_generate")) if way in found]:
            found["decode", "eager"] = min(unpatched, key=lambda row: row["time_us"])
        times = [cell(found.get(way), milliseconds) for way in (ours, *ways)]
        body.append([MODELS[name], times[0], number(bandwidth(found[ours])) if ours in found else "", *times[1:]])
        rows += found.values()
    return (markdown(head, body) if rows else "") + results.below("decode", rows)


def callers(results: Results) -> str:
    """A token of beam search and other ways to generate, patched and not."""
    ways = {
        ("beams", OURS): "4 beams",
        ("beams", "eager"): "the same, unpatched",
        ("lookup", OURS): "prompt lookup",
        ("lookup", "eager"): "the same, unpatched",
    }
    more = {"sampling": "sampling", "chat": "a chat", "assisted": "a draft of the same model"}
    measured = {row["op"] for row in results.rows["decode"]}
    for op, title in more.items():
        if op in measured:
            ways |= {(op, OURS): title, (op, "eager"): "the same, unpatched"}
    found = of_models(results, ways)
    body = [[MODELS[name], *(cell(rows.get(way), milliseconds) for way in ways)] for name, rows in found.items()]
    rows = [row for one in found.values() for row in one.values()]
    return (markdown(["ms per token", *ways.values()], body) if rows else "") + results.below("decode", rows)


def of_models(results: Results, ways: Iterable[tuple[str, str]]) -> dict[str, dict[tuple[str, str], dict]]:
    """{model: {(op, provider): row}}, from small models to large ones; those that were measured."""
    found = {}
    for name in published.MODELS:
        rows = {(row["op"], row["provider"]): row for row in pick(results.rows["decode"], section=name)}
        if mine := {way: rows[way] for way in ways if way in rows}:
            found[name] = mine
    return found


def ops(results: Results) -> str:
    """A case of each op, beside its best peer."""
    wanted = (
        {"op": "rms_norm", "rows": 2048, "cols": 3584, "pass": "fwd"},
        {"op": "rms_norm", "rows": 16384, "cols": 3584, "pass": "fwd"},
        {"op": "rms_norm", "rows": 16384, "cols": 3584, "pass": "bwd"},
        {"op": "add_rms_norm", "rows": 16384, "cols": 3584, "pass": "fwd"},
        {"op": "rope", "tokens": 8192, "kv_heads": 8, "in_place": False, "pass": "fwd"},
        {"op": "swiglu", "rows": 2048, "cols": 18944, "pass": "fwd"},
        {"op": "swiglu", "rows": 2048, "cols": 18944, "pass": "bwd"},
        {"op": "geglu", "rows": 2048, "cols": 18944, "pass": "fwd"},
        {"op": "layer_norm", "rows": 16384, "pass": "fwd"},
        {"op": "softmax", "rows": 16384, "cols": 32768},
        {"op": "bias_gelu", "cols": 16384, "pass": "fwd"},
        {"op": "rms_norm_rope", "tokens": 8192, "pass": "fwd"},
        {"op": "cross_entropy", "vocab": 152064, "pass": "fwd+bwd"},
        {"op": "fp8_quantize", "rows": 2048, "cols": 18944},
        {"op": "adamw", "dtype": "bfloat16"},
    )
    rows = [row for keys in wanted for row in pick(main_rows(results.rows["ops"]), **keys)]
    return beside_best_peer(rows) + results.below("ops", rows)


def decode_ops(results: Results) -> str:
    """A few cases of each kernel of a step, beside its best peer."""
    of = results.rows["decode_ops"]
    rows = [row for row in pick(of, op="linear") if row["m"] in (1, 16, 64) and row["n"] != 3584]
    rows += [row for row in pick(of, op="decode_attention") if row["cache"] == "contiguous" and row["kv_tokens"] > 512]
    rows += [row for row in pick(of, op="sample") if row["rows"] in (1, 64)]
    return beside_best_peer(rows) + results.below("decode_ops", rows)


def beside_best_peer(rows: Rows) -> str:
    head, body = ["case", "µs", "TB/s", "best peer", "its µs", "eager, µs"], []
    for keys, found in cases(rows):
        ours, peer = found[OURS], best_peer(found)
        best = fastest((ours, *([peer] if peer else [])))
        body.append([
            case_of(keys), cell(ours, microseconds, best), number(bandwidth(ours)),
            label(peer) if peer else "", cell(peer, microseconds, best), cell(found.get("eager"), microseconds),
        ])  # fmt: skip
    return markdown(head, body)


def train(results: Results) -> str:
    """A line for each way to train each model."""
    rows = pick(results.rows["train"], op="train_step")
    head, body = ["model", "by", "ms per step", "tokens/s", "peak, GB", "last loss", "perplexity"], []
    for keys, found in cases(rows):
        best = fastest(found.values())
        for name in in_order(found):
            row = found[name]
            memory = number(peak_gb(row)) if "peak_bytes" in row else ""
            body.append([
                f"{MODELS.get(keys['model'], keys['model'])}, {keys['batch']} x {keys['tokens']} tokens", label(row),
                cell(row, milliseconds, best), f"{row['tokens_per_s']:,}", memory, f"{row['losses'][-1]:.3f}",
                f"{row['perplexity_before']:.2f} to {row['perplexity_after']:.2f}" if "perplexity_after" in row else "",
            ])  # fmt: skip
    return (markdown(head, body, words=2) if rows else "") + results.below("train", rows)


def train_pictures(results: Results) -> str:
    """These are drawn as soon as there is something to draw."""
    if not results.rows["train"]:
        return results.below("train", [])
    words = {"train_step": "Time of a step", "train_memory": "Memory", "train_loss": "Loss over the steps"}
    return "".join(f"![{text}]({name}.png)\n" for name, text in words.items())


def parts(results: Results) -> str:
    rows = pick(results.rows["decode"], op="decode_part")
    batches = sorted({row["batch"] for row in rows})
    found = {(row["part"], row["batch"]): row for row in rows}
    names = dict.fromkeys(row["part"] for row in rows)
    body = [[part, *(cell(found.get((part, batch)), milliseconds) for batch in batches)] for part in names]
    return markdown(["ms", *(f"batch {batch}" for batch in batches)], body) + results.below("decode", rows)


def side_by_side(
    file: str,
    wanted: Callable[[dict], bool],
    unit: str = "µs",
    rate: Value | None = None,
    rate_unit: str = "TB/s",
    order: Callable[[dict], tuple] | None = None,
) -> Callable[[Results], str]:
    """A table with a line for every case, a column for every implementation."""
    value = microseconds if unit == "µs" else milliseconds

    def table(results: Results) -> str:
        rows = [row for row in results.rows[file] if wanted(row)]
        rows = sorted(rows, key=order) if order else rows
        names = in_order({row["provider"] for row in rows})
        labels = {row["provider"]: label(row) for row in rows}
        head = [unit, *(labels[name] for name in names), *([rate_unit] if rate else [])]
        body = []
        for keys, found in cases(rows):
            best = fastest(filter(report.computes_the_op, found.values()))
            cells = [cell(found.get(name), value, best) for name in names]
            body.append([case_of(keys), *cells, *([number(rate(found[OURS]))] if rate else [])])
        return (markdown(head, body) if rows else "") + results.below(file, rows)

    return table


def of_memory(direction: str) -> Callable[[Results], str]:
    """The ops that memory limits."""
    return side_by_side("ops", lambda row: by_graph(row) and row["pass"] == direction and "flops" not in row,
                        rate=bandwidth)  # fmt: skip


def of_kernel(section: str) -> Callable[[Results], str]:
    return side_by_side("decode_ops", lambda row: row["section"] == section, rate=bandwidth)


def of_prefill(logits: str) -> Callable[[Results], str]:
    return side_by_side("model", lambda row: (row["op"], row.get("logits")) == ("prefill", logits), "ms")


def by_graph(row: dict) -> bool:
    return row["op"] != "call_overhead" and row["timing"] == "graph"


def losses(results: Results) -> str:
    """Every case in which a peer is faster than ours by more than the noise, worst first."""
    head, body = ["case", "timed by", "µs", "the faster one", "its µs", "by"], []
    for keys, ours, peer in lost(results):
        factor = ours["time_us"] / peer["time_us"] - 1
        body.append([
            case_of(keys), METHODS[keys["timing"]], number(ours["time_us"]), label(peer),
            number(peer["time_us"]), f"{factor:.0%}",
        ])  # fmt: skip
    return markdown(head, body) + "\n"


def score(results: Results) -> str:
    """How many cases are lost, of how many."""
    lines = []
    for method, words in METHODS.items():
        compared = [keys for keys, _, _ in compare(results) if keys["timing"] == method]
        behind = [keys for keys, _, _ in lost(results) if keys["timing"] == method]
        lines.append(f"- {words}: a peer is faster in {len(behind)} of {len(compared)} cases\n")
    return "".join(lines)


def lost(results: Results) -> list[tuple[dict, dict, dict]]:
    found = [one for one in compare(results) if one[1]["time_us"] > NOISE * one[2]["time_us"]]
    return sorted(found, key=lambda one: one[2]["time_us"] / one[1]["time_us"])


def compare(results: Results) -> Iterator[tuple[dict, dict, dict]]:
    """Every case with peers: its keys, our row, and that of the best peer."""
    for rows in results.rows.values():
        for keys, found in cases(rows):
            if OURS in found and (peer := best_peer(found)):
                yield keys, found[OURS], peer


def missed(results: Results) -> str:
    """The bars that an op does not reach, by how much, and why."""
    body = []
    for bar in BARS:
        for keys, found in cases(pick(results.rows[bar.file], timing="graph", **bar.keys)):
            measured, share = against(bar, found)
            if share < 1:
                limit = f"{bar.limit} {'x' if bar.unit in found else bar.unit}"
                body.append([case_of(keys), measured, limit, f"{1 / share - 1:.1%}", bar.why])
    return markdown(["case", "measured", "limit", "missed by", "why"], body) if body else "None is missed.\n"


def against(bar: Bar, found: dict[str, dict]) -> tuple[str, float]:
    """What was measured, in words, and how much of the limit that is."""
    ours = found[OURS]
    if bar.unit == "µs":
        return f"{ours['time_us']:.4g} µs", bar.limit / ours["time_us"]
    if bar.unit == "TB/s":
        return f"{bandwidth(ours):.2f} TB/s", bandwidth(ours) / bar.limit
    peer = found[bar.unit]
    factor = peer["time_us"] / ours["time_us"]
    return f"{factor:.2f} x {label(peer)}", factor / bar.limit


def odd(results: Results) -> str:
    """Rows of odd widths beside those of the aligned width next to them."""
    rows = pick(results.rows["ops"], section="odd", provider=OURS)
    pairs = [
        (row, neighbour)
        for _, widths, case in odd_widths.OPS
        for (count, aligned), beside in widths.items()
        for width in beside
        for row in pick(rows, **case(count, width).row)
        for neighbour in pick(rows, **case(count, aligned).row)
    ]
    # As they are printed.
    ratios = [round(row["time_us"] / neighbour["time_us"], 2) for row, neighbour in pairs]
    body = [
        [case_of(row), cell(row, microseconds), cell(neighbour, microseconds), f"{ratio:.2f}"]
        for (row, neighbour), ratio in zip(pairs, ratios, strict=True)
    ]
    met = sum(ratio <= ODD_LIMIT for ratio in ratios)
    words = f"\n{ODD_LIMIT}x is met in {met} of {len(ratios)}.\n"
    return markdown(["case", "µs", "the aligned neighbour, µs", "ratio"], body) + words + results.below("ops", rows)


def tests(results: Results) -> str:
    meta = results.tests["meta"]
    parts = {"tests": "all", "two_gpus": "those that need two GPUs"}
    lines = [
        f"- {words}: {', '.join(f'{count} {what}' for what, count in results.tests[part].items())}"
        for part, words in parts.items()
        if part in results.tests
    ]
    lines += [f"- {failure}" for failure in results.tests["failures"] if failure.endswith("did not run to its end")]
    older = ", of the same kernels before other files changed" if "sanitizer_sources" in results.tests else ""
    for tool, found in results.tests["sanitizer"].items():
        lines.append(f"- under {tool}: {found['errors']} errors in {found['tests']} tests{older}")
    return "\n".join([f"{meta['gpu']}, {meta['date'][:10]}:\n", *lines, ""])


TABLES: dict[str, Callable[[Results], str]] = {
    "decode": decode,
    "decode_all": side_by_side(
        "decode", is_over_sizes, "ms per token", order=lambda row: (row["batch"], row["context"])
    ),
    "models": models,
    "callers": callers,
    "adapters": side_by_side("decode", lambda row: row["section"] == "adapters", "ms"),
    "harnesses": side_by_side("decode", lambda row: row["op"] in report.HARNESSES, "ms"),
    "ops": ops,
    "decode_ops": decode_ops,
    "prefill": of_prefill("last"),
    "prefill_all_logits": of_prefill("all"),
    "forward_decode": side_by_side("model", lambda row: row["op"] == "decode", "ms per token"),
    "ops_forward": of_memory("fwd"),
    "ops_backward": of_memory("bwd"),
    "ops_gradients": of_memory("fwd+bwd"),
    "products": side_by_side("ops", lambda row: by_graph(row) and "flops" in row, "µs", teraflops, "TFLOP/s"),
    "fp8_linear": side_by_side(
        "decode_ops", lambda row: row["op"].startswith("fp8_linear"), "µs", teraflops, "TFLOP/s"
    ),
    "int8_linear": side_by_side("decode_ops", lambda row: row["op"] == "int8_linear", "µs", bandwidth),
    "train": train,
    "train_pictures": train_pictures,
    "call_overhead": side_by_side("ops", lambda row: row["op"] == "call_overhead"),
    "linear": of_kernel("linear"),
    "rms_norm_linear": of_kernel("rms_norm_linear"),
    "decode_attention": of_kernel("decode_attention"),
    "sample": of_kernel("sample"),
    "decode_parts": parts,
    "score": score,
    "losses": losses,
    "missed": missed,
    "odd": odd,
    "tests": tests,
}


# ---- what they share


def markdown(head: list[str], body: list[list[str]], words: int = 1) -> str:
    """The first columns are words, the others numbers."""
    lines = [" | ".join(text.replace("|", r"\|") for text in line) for line in (head, *body)]
    lines.insert(1, " | ".join(["---"] * words + ["---:"] * (len(head) - words)))
    return "".join(f"| {line} |\n" for line in lines)


def cell(row: dict | None, value: Value, best: float | None = None) -> str:
    """The median, with a mark where it is of something else than the op; p10 and p90 where these are far apart."""
    if row is None:
        return ""
    words = f"**{number(value(row))}**" if row["time_us"] == best else number(value(row))
    words += "" if report.computes_the_op(row) else " †"
    low, high = (value({**row, "time_us": row.get(f"time_us_{end}", row["time_us"])}) for end in ("p10", "p90"))
    return f"{words} ({number(low)} to {number(high)})" if high > WIDE * low else words


def fastest(rows: Iterable[dict]) -> float | None:
    return min((row["time_us"] for row in rows), default=None)


def case_of(keys: dict) -> str:
    """`rms_norm` backward 2048x3584 fp16"""
    name = "" if keys["op"] in ("call_overhead", "prefill", "decode") else f"`{keys['op']}`"
    of = MODELS.get(keys.get("model"), "") if keys["op"] in report.STEPS and keys["model"] != published.QWEN else ""
    backward = {"bwd": "backward", "fwd+bwd": "and backward"}.get(keys.get("pass"), "")
    dtype = DTYPES[keys["dtype"]] if keys["op"] in ("rms_norm", "add_rms_norm", "softmax", "adamw") else ""
    return " ".join(word for word in (name, of, backward, report.shape(keys), dtype) if word)
