"""Runs the examples of the README on the CPU, with a small model in the place of the large one, and checks what ran.

    python scripts/readme_examples.py

Needs the package and what its extra `hf` brings, no more.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import llmkernels

README = Path(__file__).resolve().parent.parent / "README.md"
MODEL = "Qwen/Qwen2.5-7B"


def save_small_model(folder: str) -> None:
    """A model with the tokens that the examples use, and a tokenizer of one character per token."""
    characters = [chr(33 + i) for i in range(94)]
    vocabulary = {character: i for i, character in enumerate([*characters, "Ġ", "<|endoftext|>"])}
    Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 1000}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def run_examples(folder: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    for example in examples:
        if "llmkernels.patch(" in example and "model" in names:  # patched by the one before
            llmkernels.unpatch(names["model"])
        example = example.replace(MODEL, folder).replace('"cuda"', '"cpu"')
        print(example)
        exec(example, names)
        if "handle" in example:
            check(names["handle"].report())
    names["model"].train()(names["ids"], labels=names["ids"]).loss.backward()
    names["optimizer"].step()


def check(report) -> None:
    [decode] = report.decode
    print(report)
    assert report.left_alone() == []
    assert set(decode.calls) == {"by the decode step"}


def run_command(folder: str) -> None:
    options = ["--prompt", "What?", "--max-new-tokens", "8", "--device", "cpu", "--report"]
    command = [sys.executable, "-m", "llmkernels", "generate", folder, *options]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    print(result.stderr)
    assert result.returncode == 0
    assert "1 by the decode step, 7 steps" in result.stderr


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as checkpoint:
        save_small_model(checkpoint)
        run_examples(checkpoint)
        run_command(checkpoint)
