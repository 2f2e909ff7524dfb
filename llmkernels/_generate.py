"""python -m llmkernels generate MODEL --prompt TEXT: text from a model, as it is made."""

import argparse
import math
import os
import sys

import llmkernels
from llmkernels._checkpoint import open_checkpoint
from llmkernels._command import Problem, check_installation, choose_device, number, quiet_transformers

DTYPES = ("bfloat16", "float16", "float32")


def add_command(commands):
    parser = commands.add_parser("generate", help="text from a Hugging Face model, streamed")
    count = number(int, lambda x: x > 0, "positive")
    temperature = number(float, lambda x: 0 <= x < math.inf, "at least 0")
    top_k = number(int, lambda x: 0 <= x < 2**31, "at least 0 and below 2^31")
    top_p = number(float, lambda x: 0 < x <= 1, "in (0, 1]")
    min_p = number(float, lambda x: 0 <= x <= 1, "in [0, 1]")
    penalty = number(float, lambda x: 0 < x < math.inf, "positive")
    seed = number(int, lambda x: -(2**63) <= x < 2**64, "of 64 bits")
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a name on the Hugging Face Hub")
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
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: float32 on the CPU, else the checkpoint's, or bfloat16 of a GGUF file"
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--report", action="store_true", help="print what ran on which kernel, to standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the text."""
    check_installation()
    import torch
    import transformers

    device = choose_device(options.device)
    quiet_transformers()
    tokenizer, inputs, model = _load(options, device)
    try:
        handle = llmkernels.patch(model)
    except ValueError as error:
        raise Problem(str(error)) from error
    if options.seed is not None:
        torch.manual_seed(options.seed)
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if options.top_k or options.top_p < 1 or options.min_p else 0.0
    sampling = {"temperature": temperature, "top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
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
    if options.report:
        print(handle.report(), file=sys.stderr)


def _load(options: argparse.Namespace, device) -> tuple:
    """The tokenizer, what it makes of the prompt, and the model."""
    import torch

    prompt = _prompt(options.prompt)
    checkpoint = open_checkpoint(options.model)
    tokenizer = checkpoint.tokenizer()
    if options.chat:
        prompt = _chat(tokenizer, prompt)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not options.chat).to(device)
    if inputs.input_ids.numel() == 0:
        raise Problem("--prompt must have at least one token")
    dtype = options.dtype or ("float32" if device.type == "cpu" else checkpoint.dtype)
    model = checkpoint.model(dtype if dtype == "auto" else getattr(torch, dtype))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if (largest := int(inputs.input_ids.max())) >= vocabulary:
        raise Problem(
            f"the tokenizer does not fit the model: it has token {largest}, and the model {vocabulary} tokens"
        )
    return tokenizer, inputs, model.to(device).eval()


def _prompt(text: str) -> str:
    if text == "-" and not sys.stdin:
        raise Problem("--prompt - must have a standard input")
    # As bytes, since Python lets what is no text through in some locales.
    data = sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = "standard input" if text == "-" else "--prompt"
        raise Problem(f"{where} must be text in UTF-8, got the byte {data[error.start]:#04x}") from None


def _chat(tokenizer, prompt: str) -> str:
    if not tokenizer.chat_template:
        raise Problem("--chat must have a model with a chat template")
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise Problem(f"the model's chat template cannot be used: {type(error).__name__}: {error}") from error
