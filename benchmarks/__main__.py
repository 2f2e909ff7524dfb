"""python -m benchmarks ops | model | decode | train | stale | merge | show"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import report, results, sections
from benchmarks.cases import PROVIDERS
from benchmarks.run import Run
from benchmarks.sources import ROOT
from llmkernels._command import Problem, check_model_path, run_command

RESULTS = Path("results")
TRAIN_PROVIDERS = ("eager", "llmkernels", "liger", "compile")
MODEL_PROVIDERS = (*TRAIN_PROVIDERS, "llmkernels_fp8")
DECODE_PROVIDERS = ("llmkernels", "generate", "forward", "eager", "eager_generate", "static_compile")


def main() -> int:
    arguments = parse()
    if arguments.what == "show":
        show(RESULTS)
    elif arguments.what == "merge":
        return merge(arguments.folder, arguments.output, arguments.without)
    elif arguments.what == "stale":
        return stale(arguments)
    else:
        wanted = sections.find(sections.COMMANDS[arguments.what], arguments.section)
        if arguments.what == "train" and not arguments.section:
            wanted = [section for section in wanted if (section.name == "real") == arguments.real]
        output = arguments.output or default_output(arguments)
        output.mkdir(parents=True, exist_ok=True)  # before hours of measuring
        failed = sections.measure(wanted, run_of(arguments), output, known=RESULTS)
        show(output)
        return len(failed)
    return 0


def stale(arguments: argparse.Namespace) -> int:
    """Lists what is stale, or measures it."""
    found = sections.stale(RESULTS)
    for section, why in found:
        report.console.print(f"{section.title}: {why}")
    if not found:
        report.console.print("every section was measured on these sources")
    if not arguments.run:
        return int(bool(found))
    wanted = [section for section, _ in found]
    run, output = run_of(arguments), arguments.output or default_output(arguments)
    output.mkdir(parents=True, exist_ok=True)
    failed = sections.measure(wanted, run, output, arguments.budget_s, known=RESULTS)
    if not arguments.output:
        show(output)
    return len(failed)


def merge(source: Path, target: Path, without: Sequence[str]) -> int:
    """Takes over the sections of the results files in a folder. Returns how many files were refused."""
    refused = 0
    for path in results_in(source):
        try:
            meta, rows = results.load(path)
            results.merge(target / path.name, meta, rows, without)
            report.console.print(f"{target / path.name}: {', '.join(meta['sections'])}")
        except ValueError as reason:
            refused += 1
            report.console.print(f"left out: {reason}")
    show(target)
    return refused


def show(folder: Path) -> None:
    """Draws the pictures; of results/ also the tables in the documents."""
    from benchmarks import plots, tables

    results_in(folder)
    plots.draw(folder)
    if folder.resolve() == (ROOT / RESULTS).resolve():
        for document in tables.write(ROOT):
            report.console.print(f"{document}: tables written")


def results_in(folder: Path) -> list[Path]:
    names = {f"{section.file}.json" for section in sections.TABLE}
    if found := sorted(path for path in folder.glob("*.json") if path.name in names):
        return found
    raise Problem(f"there are no results in {folder}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of llmkernels and its peers.")
    commands = parser.add_subparsers(dest="what", required=True)
    ops = commands.add_parser("ops", help="every op beside eager, torch, torch.compile, Triton and Liger-Kernel")
    model = commands.add_parser("model", help="prefill and decode of a live Hugging Face model")
    decode = commands.add_parser("decode", help="the kernels of a decode step, and tokens per second of a model")
    train = commands.add_parser("train", help="a step of fine-tuning a live Hugging Face model, and its memory")
    stale = commands.add_parser("stale", help="which sections of results/ were measured on other sources; 1 if any")
    merge = commands.add_parser("merge", help="take over the sections of the results files in a folder")
    commands.add_parser("show", help="draw the pictures of results/ again, and write the tables of the documents")
    found = ((ops, PROVIDERS), (model, MODEL_PROVIDERS), (decode, DECODE_PROVIDERS), (train, TRAIN_PROVIDERS))
    for command, providers in found:
        names = [section.name for section in sections.find(sections.COMMANDS[command.prog.split()[-1]])]
        command.add_argument(
            "--section", nargs="+", default=(), choices=names, metavar="NAME", help="only these: " + ", ".join(names)
        )
        command.add_argument(
            "--providers", nargs="+", default=(), choices=providers, metavar="NAME", help=", ".join(providers)
        )
    stale.add_argument("--run", action="store_true", help="measure these sections, those that matter most first")
    stale.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        metavar="S",
        help="begin none that may end after S seconds",
    )
    for command in (ops, model, decode, train, stale):
        command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
        command.add_argument("--quick", action="store_true", help="few sizes, few samples")
    for command in (model, decode):
        command.add_argument("--model", metavar="ID_OR_PATH", help="weights by from_pretrained (default: random)")
    train.add_argument(
        "--real", action="store_true", help="fine-tune a real model on Python's sources: --section real, and no other"
    )
    merge.add_argument("folder", type=Path)
    merge.add_argument("--output", type=Path, metavar="DIR", default=RESULTS, help="default: results")
    merge.add_argument("--without", nargs="+", default=[], metavar="PEER", help="peers that these results may lack")
    for command in (ops, model, decode, train, stale):
        command.add_argument(
            "--output",
            type=Path,
            metavar="DIR",
            help="default: results (whole sections, on a GPU) or results/local",
        )
    return parser.parse_args()


def run_of(arguments: argparse.Namespace) -> Run:
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    providers, model_id = tuple(getattr(arguments, "providers", ())), getattr(arguments, "model", None)
    if model_id:
        check_model_path(model_id)
    return Run(device, arguments.quick, providers, model_id)


def default_output(arguments: argparse.Namespace) -> Path:
    """results/ holds whole sections, of a GPU and of the models that we name: nothing less must overwrite those."""
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    partial = arguments.quick or getattr(arguments, "providers", ()) or getattr(arguments, "model", None)
    return RESULTS if on_gpu and not partial else RESULTS / "local"


if __name__ == "__main__":
    raise SystemExit(run_command("benchmarks", main))
