"""python -m benchmarks ops | model | decode | plot"""

import argparse
from pathlib import Path

import torch

from benchmarks import call_overhead
from benchmarks.cases import PROVIDERS
from benchmarks.ops import DECODE_OPS, OPS
from benchmarks.run_decode import PROVIDERS as DECODERS
from benchmarks.variants import VARIANTS


def main() -> None:
    arguments = parse()
    output = arguments.output or default_output(arguments)
    if arguments.what == "plot":
        from benchmarks import plots

        plots.draw(output)
        return
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    if arguments.what == "ops":
        from benchmarks import run_ops

        run_ops.run(device, output, arguments.only, arguments.providers, arguments.quick)
    elif arguments.what == "decode":
        from benchmarks import run_decode

        run_decode.run(device, output, arguments.model, arguments.only, arguments.providers, arguments.quick)
    else:
        from benchmarks import run_model

        run_model.run(device, output, arguments.model, arguments.providers, arguments.quick)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of llmkernels and its peers.")
    commands = parser.add_subparsers(dest="what", required=True)
    ops = commands.add_parser("ops", help="every op beside eager, torch, torch.compile, Triton and Liger-Kernel")
    model = commands.add_parser("model", help="prefill and decode of a live Hugging Face model")
    decode = commands.add_parser("decode", help="the kernels of a decode step, and tokens per second of a model")
    plot = commands.add_parser("plot", help="draw the pictures again from the results files")
    for command, names in ((ops, PROVIDERS), (model, tuple(VARIANTS)), (decode, DECODERS)):
        command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
        command.add_argument("--quick", action="store_true", help="few sizes, few samples")
        command.add_argument("--providers", nargs="+", default=(), choices=names, metavar="NAME", help=", ".join(names))
    ops.add_argument("--only", nargs="+", default=(), choices=(*OPS, call_overhead.OP), metavar="OP", help="only these")
    parts = (*DECODE_OPS, "decode")
    decode.add_argument("--only", nargs="+", default=(), choices=parts, metavar="PART", help=", ".join(parts))
    for command in (model, decode):
        command.add_argument("--model", metavar="ID_OR_PATH", help="weights by from_pretrained (default: random)")
    for command in (ops, model, decode, plot):
        command.add_argument(
            "--output", type=Path, metavar="DIR", help="default: results for a whole run on a GPU, else results/local"
        )
    return parser.parse_args()


def default_output(arguments: argparse.Namespace) -> Path:
    """results/ holds whole runs on a GPU; anything less must not overwrite those."""
    if arguments.what == "plot":
        return Path("results")
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    partial = arguments.quick or arguments.providers or getattr(arguments, "only", ())
    return Path("results") if on_gpu and not partial else Path("results/local")


if __name__ == "__main__":
    main()
