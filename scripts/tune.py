"""Measures on the GPU that is there which kernel and plan is the fastest for each linear of the decode steps of models.

The models are those that the benchmarks name. Writes the table of its architecture, of GPUs with as many SMs:
llmkernels/tuned/sm<capability>-<SMs>.json.

    python scripts/tune.py                            all models of benchmarks/models.py
    python scripts/tune.py --models qwen2.5-7b        some of them; the file keeps what it has of others
    python scripts/tune.py --outside                  also the same products outside of a step, where cuBLAS is a choice
    python scripts/tune.py --output table.json        into another file, and not the package's
    python scripts/tune.py --list                     what would be measured; needs no GPU

The package reads its file wherever there is such a GPU, if no choices were measured there by llmkernels.autotune. An
architecture without a file takes the rules of csrc/kernels/linear/route.h and plan.h.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import DEFAULTS, MODELS  # noqa: E402
from llmkernels import patch  # noqa: E402
from llmkernels._tune import files, table  # noqa: E402
from llmkernels._tune.autotune import BATCH_SIZES, Tuning, measure_all, problems_for  # noqa: E402
from llmkernels._tune.measure import Problem  # noqa: E402
from llmkernels.hf.step.describe import describe  # noqa: E402
from llmkernels.hf.step.routes import products_of  # noqa: E402

ALONE = {  # what a product of a step is elsewhere: the norm is a module of its own
    "linear": "linear",
    "rms_norm_linear": "linear",
    "glu_linear": "glu_linear",
    "rms_norm_glu_linear": "glu_linear",
    "linear_add_": "linear",
}
PROMPTS = (128, 512, 2048)  # tokens, outside of a step


def main() -> None:
    options = parse_arguments()
    problems = all_problems(options.models, options.outside)
    if options.list:
        print("\n".join(map(str, problems)))
        return
    if not torch.cuda.is_available():
        sys.exit("tune.py: this machine has no GPU that torch can use; --list needs none")
    index = torch.cuda.current_device()
    identity = files.identity_of(index)
    measured = measure_all(problems, index)
    path = options.output or files.packaged_path(identity)
    if reason := files.save_packaged(path, identity, measured):
        sys.exit(f"tune.py: {reason}")
    print(Tuning(str(identity["gpu"]), table.merge((), measured), path))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--outside", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def all_problems(names: list[str], outside: bool) -> list[Problem]:
    """Each once, whichever models it is of."""
    products = dict.fromkeys(product for name in names for product in products_of_model(name))
    problems = problems_for(products, BATCH_SIZES, torch.bfloat16)
    if outside:
        alone = dict.fromkeys((ALONE[op], *shape) for op, *shape in products)
        problems += problems_for(alone, BATCH_SIZES + PROMPTS, torch.bfloat16, in_step=False)
    return problems


def products_of_model(name: str) -> list[tuple[str, int, int, bool]]:
    """Of a decode step. The model has four layers, all kinds that there are, whose weights are never written."""
    import transformers
    from transformers.initialization import no_init_weights

    kind, facts = MODELS[name]
    config = getattr(transformers, kind)(**copy.deepcopy(DEFAULTS | facts | {"num_hidden_layers": 4}))
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    patch(model)
    return list(products_of(describe(model)))


if __name__ == "__main__":
    main()
