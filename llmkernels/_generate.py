"""python -m llmkernels generate MODEL --prompt TEXT: text from a model, as it is made."""

import argparse
import math
import sys
from collections.abc import Callable

DTYPES = ("bfloat16", "float16", "float32")


def add_command(commands):
    parser = commands.add_parser("generate", help="text from a Hugging Face model, streamed")
    count = _number(int, lambda x: x > 0, "positive")
    temperature = _number(float, lambda x: 0 <= x < math.inf, "at least 0")
    top_k = _number(int, lambda x: 0 <= x < 2**31, "at least 0 and below 2^31")
    top_p = _number(float, lambda x: 0 < x <= 1, "in (0, 1]")
    min_p = _number(float, lambda x: 0 <= x <= 1, "in [0, 1]")
    penalty = _number(float, lambda x: 0 < x < math.inf, "positive")
    seed = _number(int, lambda x: -(2**63) <= x < 2**64, "of 64 bits")
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face Hub")
    parser.add_argument("--prompt", required=True, help="the text to go on from, or - for standard input")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-new-tokens", type=count, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="sample, the flatter the higher; 0 takes the most likely token; default: 1 where --top-k, --top-p or "
        "--min-p is on, else 0",
    )
    parser.add_argument("--top-k", type=top_k, default=0, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument("--top-p", type=top_p, default=1.0, metavar="P", help="... that make up this probability")
    parser.add_argument("--min-p", type=min_p, default=0.0, metavar="P", help="... of at least P times the largest")
    parser.add_argument("--repetition-penalty", type=penalty, default=1.0, metavar="X", help="1, the default: none")
    parser.add_argument("--seed", type=seed, metavar="N", help="for the same text every time")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's, on the CPU float32")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--report", action="store_true", help="print what ran on which kernel, to standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the text; 1 with a message on standard error where there is none."""
    try:
        _generate(options)
    except _Problem as problem:
        print(f"llmkernels generate: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


class _Problem(Exception):
    """What the user has to know."""


def _generate(options: argparse.Namespace) -> None:
    import llmkernels
    from llmkernels import _library

    if _library.error:
        raise _Problem(_library.error)
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise _Problem("transformers must be installed: pip install 'llmkernels[hf]'") from None
    import torch

    device = _device(options.device)
    dtype = options.dtype or ("float32" if device.type == "cpu" else "auto")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
        )
    except (OSError, ValueError) as error:
        raise _Problem(f"MODEL must be a causal language model with its tokenizer: {error}") from error
    model = model.to(device).eval()
    try:
        handle = llmkernels.patch(model)
    except ValueError as error:
        raise _Problem(str(error)) from error
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.chat:
        if not tokenizer.chat_template:
            raise _Problem("--chat must have a model with a chat template")
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not options.chat).to(device)
    if inputs.input_ids.numel() == 0:
        raise _Problem("--prompt must have at least one token")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if options.top_k or options.top_p < 1 or options.min_p else 0.0
    sampling = {"temperature": temperature, "top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
    try:
        llmkernels.generate(
            model,
            inputs.input_ids,
            attention_mask=inputs.get("attention_mask"),
            max_new_tokens=options.max_new_tokens,
            do_sample=temperature > 0,
            **(sampling if temperature > 0 else dict.fromkeys(sampling)),
            repetition_penalty=options.repetition_penalty,
            streamer=transformers.TextStreamer(tokenizer, skip_prompt=options.chat, skip_special_tokens=True),
        )
    except torch.OutOfMemoryError as error:
        raise _Problem(f"out of memory on {device}: {error}") from error
    if options.report:
        print(handle.report(), file=sys.stderr)


def _device(name: str | None):
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _Problem(f"--device must be cpu, cuda or cuda:N, got {name}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise _Problem(f"--device {name} must have a GPU that torch can use; python -m llmkernels info says more")
    return device


def _number(kind: type, is_valid: Callable, words: str) -> Callable[[str], int | float]:
    """A parser of numbers in a range, which `words` are for."""

    def parse(text):
        number = kind(text)
        if not is_valid(number):
            raise argparse.ArgumentTypeError(f"must be {words}, got {text}")
        return number

    parse.__name__ = kind.__name__  # argparse calls it that where the text is no number
    return parse
