"""python -m llmkernels profile MODEL: where the time of a model goes."""

import argparse

from llmkernels._checkpoint import open_checkpoint
from llmkernels._command import Problem, check_installation, choose_device, number
from llmkernels._generate import DTYPES


def add_command(commands):
    parser = commands.add_parser("profile", help="where the time of a model goes, unpatched and patched")
    count = number(int, lambda x: x > 0, "positive")
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a name on the Hugging Face Hub")
    parser.add_argument("--tokens", type=count, default=512, metavar="N", help="of the prompt; default: %(default)s")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences; default: %(default)s")
    parser.add_argument("--new-tokens", type=count, default=16, metavar="N", help="steps; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as generate")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--plot", metavar="FILE", help="write a picture, too (PNG, PDF, SVG)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    check_installation()
    import torch
    import transformers

    from llmkernels.profiling import profile

    device = choose_device(options.device)
    transformers.logging.set_verbosity_error()
    checkpoint = open_checkpoint(options.model)
    dtype = options.dtype or ("float32" if device.type == "cpu" else checkpoint.dtype)
    model = checkpoint.model(dtype if dtype == "auto" else getattr(torch, dtype)).to(device).eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (options.batch, options.tokens), device=device)
    found = profile(model, ids, new_tokens=options.new_tokens)
    found.print()
    if options.plot:
        try:
            found.plot(options.plot)
        except ModuleNotFoundError as error:
            raise Problem("--plot must have matplotlib: pip install matplotlib") from error
