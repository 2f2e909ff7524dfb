"""A profile as tables and as a picture."""

import os

COLOURS = {  # in the order of a bar's parts
    "attention": "#d62728",
    "product": "#1f3d7a",
    "norm": "#3a9d5d",
    "rotation": "#f2a13a",
    "activation": "#9467bd",
    "sampling": "#17a2a2",
    "training": "#8c564b",
    "copies": "#e377c2",
    "other": "#9d9d9d",
}
IDLE_COLOUR = "#eeeeee"
WORDS = {"rotation": "rotation, cache write"}
WIDTH = 160  # where there is no terminal


def text(profile) -> str:
    from rich.console import Console

    console = Console(width=WIDTH, no_color=True, highlight=False)
    with console.capture() as capture:
        show(profile, console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def show(profile, console=None) -> None:
    from rich.console import Console

    console = console or Console(width=None if os.isatty(1) else WIDTH, highlight=False)
    console.print(_heading(profile))
    console.print(
        f"limits at {profile.bandwidth_gb_s / 1e3:.3g} TB/s and {profile.rate_tflop_s:.3g} TFLOP/s, as measured here"
        + ("" if _on_gpu(profile) else "; times are of PyTorch's ops on the CPU, and no GPU's")
    )
    if profile.not_patched:
        console.print(f"not patched: {profile.not_patched}")
    for phase in _phases(profile):
        console.print(_table(profile, phase))


def draw(profile, path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.4, 1.3 + 0.75 * len(profile.calls)), layout="constrained")
        figure.suptitle(_heading(profile), x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        phases = _phases(profile)
        panels = figure.subplots(len(phases), squeeze=False)[:, 0]
        for axes, (phase, calls) in zip(panels, phases.items(), strict=True):
            for place, call in enumerate(calls):
                end = 0.0
                for kind, colour in COLOURS.items():
                    if row := profile.find(phase, call.way, kind):
                        axes.barh(place, row.time_ms, left=end, color=colour)
                        end += row.time_ms
                axes.barh(place, max(0.0, call.wall_ms - end), left=end, color=IDLE_COLOUR)
                axes.vlines(call.limit_ms, place - 0.45, place + 0.45, color="black")
            axes.set_title(f"{phase}, ms", loc="left", fontsize=9)
            axes.set_yticks(range(len(calls)), [call.way for call in calls])
            axes.set_xlim(0, None)
            axes.invert_yaxis()
        found = {row.kind for row in profile.rows}
        shown = {WORDS.get(kind, kind): colour for kind, colour in COLOURS.items() if kind in found}
        for words, colour in (shown | {_idle(profile): IDLE_COLOUR}).items():
            panels[0].barh(0, 0, color=colour, label=words)
        panels[0].vlines([], 0, 0, color="black", label="limit")
        figure.legend(loc="outside lower left", ncols=6, fontsize=8.5, frameon=False)
        figure.savefig(path, dpi=130)


def _heading(profile) -> str:
    return f"{profile.model} in {profile.dtype} on {profile.device}, {profile.batch} x {profile.tokens} tokens"


def _phases(profile) -> dict[str, list]:
    """The calls of each."""
    return {
        phase: [call for call in profile.calls if call.phase == phase]
        for phase in dict.fromkeys(call.phase for call in profile.calls)
    }


def _table(profile, phase):
    from rich import box
    from rich.table import Table

    calls = _phases(profile)[phase]
    table = Table(title=f"{phase}, ms", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for call in calls:
        table.add_column(call.way, justify="right", no_wrap=True)
        table.add_column("launches", justify="right", no_wrap=True)
        table.add_column("most of it", overflow="fold")
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("left to win", justify="right", no_wrap=True)
    for kind in dict.fromkeys(row.kind for row in profile.rows if row.phase == phase):
        rows = [profile.find(phase, call.way, kind) for call in calls]
        cells = [cell for row in rows for cell in _cells(row)]
        limit = max(row.limit_ms for row in rows if row)
        left = rows[-1].left_ms if rows[-1] else 0.0  # of the patched model, where there is one
        table.add_row(WORDS.get(kind, kind), *cells, _number(limit), _number(left))
    table.add_section()
    for words, name in ((_busy(profile), "busy_ms"), (_idle(profile), "idle_ms"), ("wall time", "wall_ms")):
        cells = [cell for call in calls for cell in (_number(getattr(call, name)), "", "")]
        totals = (_number(calls[-1].limit_ms), _number(calls[-1].left_ms)) if name == "wall_ms" else ()
        table.add_row(words, *cells, *totals)
    return table


def _cells(row) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    return _number(row.time_ms), f"{row.launches:.4g}", f"{row.owner} {row.kernel}"


def _busy(profile) -> str:
    return "GPU busy" if _on_gpu(profile) else "in ops"


def _idle(profile) -> str:
    return "GPU idle" if _on_gpu(profile) else "between ops"


def _on_gpu(profile) -> bool:
    return profile.device != "CPU"


def _number(value: float) -> str:
    return f"{value:.3g}"
