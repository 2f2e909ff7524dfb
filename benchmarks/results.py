"""Results files: {"meta": ..., "rows": [...]}, where every row names its section.

`meta["sections"]` has the meta of every section, with the hash of the sources that it depends on; the rest of `meta` is
that of the section measured last.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path


def load(path: Path) -> tuple[dict, list[dict]]:
    """Raises ValueError for a file of anything else."""
    try:
        content = json.loads(path.read_text())
        return content["meta"], content["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no results ({type(error).__name__}: {error})") from error


def save(path: Path, meta: dict, rows: Sequence[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    unfinished = path.with_suffix(".json.new")
    unfinished.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')
    unfinished.replace(path)


def sections(path: Path) -> dict[str, dict]:
    """The meta of each section."""
    return load(path)[0].get("sections", {}) if path.exists() else {}


def merge(path: Path, meta: dict, rows: Sequence[dict], without: Collection[str] = ()) -> None:
    """Puts whole sections into a results file, in the places of those that it has, or that they replace.

    Raises ValueError for results of another machine, and for those that lack a provider that the file has, unless it
    is one of `without`.
    """
    if path.exists():
        old_meta, old_rows = load(path)
        here, there = (one["gpu"] or one["cpu"] for one in (old_meta, meta))
        if here != there:
            raise ValueError(f"{path} was measured on {here}, and these results on {there}")
        replaced = {name for one in meta["sections"].values() for name in one.get("replaces", ())}
        for section, one in meta["sections"].items():
            for old in (section, *one.get("replaces", ())):
                if lost := providers(old_rows, old) - providers(rows, section) - set(without):
                    raise ValueError(f"{path} has {', '.join(sorted(lost))} in {old}, and these results have not")
        newer = max(old_meta, meta, key=lambda one: one["date"])
        kept = {name: one for name, one in old_meta["sections"].items() if name not in replaced}
        fresh = replaced | {row["section"] for row in rows}
        meta = {**newer, "sections": {**kept, **meta["sections"]}}
        rows = [*(row for row in old_rows if row["section"] not in fresh), *rows]
    places = {name: place for place, name in enumerate(meta["sections"])}
    save(path, meta, sorted(rows, key=lambda row: places[row["section"]]))


def providers(rows: Sequence[dict], section: str) -> set[str]:
    return {row["provider"] for row in rows if row["section"] == section}
