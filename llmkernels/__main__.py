"""python -m llmkernels COMMAND"""

import argparse
import sys

from llmkernels import __version__, _demo, _generate, _info, _profile
from llmkernels._command import run_command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llmkernels", description="Kernels for large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    _demo.add_command(commands)
    _generate.add_command(commands)
    _profile.add_command(commands)
    _info.add_command(commands)  # a command is a module that adds its parser, with the function to `run`

    def run() -> int | None:
        options = parser.parse_args(arguments)
        return options.run(options)

    return run_command("llmkernels", run)


if __name__ == "__main__":
    sys.exit(main())
