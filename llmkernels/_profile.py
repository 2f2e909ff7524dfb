"""python -m llmkernels profile MODEL: where the time of a model goes."""

import argparse
import importlib.util
from pathlib import Path

import llmkernels
from llmkernels._checkpoint import open_checkpoint
from llmkernels._command import Problem, check_installation, choose_device, number, quiet_transformers
from llmkernels._generate import DTYPES

FORMATS = (".json", ".pdf", ".png", ".svg")


def add_command(commands):
    parser = commands.add_parser("profile", help="where the time of a model goes, unpatched and patched")
    count = number(int, lambda x: x > 0, "positive")
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a name on the Hugging Face Hub")
    parser.add_argument("--tokens", type=count, default=2048, metavar="N", help="of each prompt; default: %(default)s")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences; default: %(default)s")
    parser.add_argument("--new-tokens", type=count, default=16, metavar="N", help="steps; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as generate")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write a picture, too (.png, .pdf, .svg), or the numbers (.json)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    check_installation()
    output = options.output
    if output:
        _check_output(output)
    import torch

    device = choose_device(options.device)
    quiet_transformers()
    checkpoint = open_checkpoint(options.model)
    dtype = options.dtype or ("float32" if device.type == "cpu" else checkpoint.dtype)
    model = checkpoint.model(dtype if dtype == "auto" else getattr(torch, dtype)).to(device).eval()
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and options.tokens + options.new_tokens >= longest:
        raise Problem(
            f"--tokens and --new-tokens must be less than the model's {longest} positions, "
            f"got {options.tokens} + {options.new_tokens}"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (options.batch, options.tokens), device=device)
    found = llmkernels.profile(model, ids, new_tokens=options.new_tokens)
    found.print()
    if output and output.suffix == ".json":
        output.write_text(found.to_json() + "\n")
    elif output:
        found.plot(output)


def _check_output(output: Path) -> None:
    """Before anything takes time."""
    if output.suffix not in FORMATS:
        raise Problem(f"--output must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {output}")
    if not output.parent.is_dir():
        raise Problem(f"--output must be in a folder that exists, got {output}")
    if output.is_dir():
        raise Problem(f"--output must be a file, got the folder {output}")
    if output.suffix != ".json" and not importlib.util.find_spec("matplotlib"):
        raise Problem("--output of a picture must have matplotlib: pip install matplotlib")
