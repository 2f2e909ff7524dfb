"""Runs the examples of README.md and docs/ as they stand, with a small model in place of large ones; checks what ran.

    python scripts/readme_examples.py

Needs the package and what its extra `hf` brings, no more. Those of README.md stand for themselves; a page of docs/ has
`model`, a model, and `ids`, tokens.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import llmkernels

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = re.compile(r"Qwen/Qwen2\.5-[\d.]+B")


def save_small_model(folder: str) -> None:
    """A model with the tokens that the examples use, and a tokenizer of one character per token."""
    characters = [chr(33 + i) for i in range(94)]
    vocabulary = {character: i for i, character in enumerate([*characters, "Ġ", "<|endoftext|>"])}
    Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 1000}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def run_examples(document: Path, folder: str, names: dict | None = None) -> None:
    """All of them with these names, or each one by itself."""
    for example in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        example = MODELS.sub(folder, example)
        print(f"# {document.relative_to(ROOT)}\n{example}")
        scope = {} if names is None else names
        exec(example, scope)
        if "handle =" in example:
            check(scope["handle"].report(), "generate(" in example)


def check(report, generates: bool) -> None:
    print(report)
    assert not any(row.left_alone for row in report.rows.values())
    if generates:
        assert report.left_alone() == []
        assert [{*decode.calls} for decode in report.decode] == [{"by the decode step"}]
    else:
        assert set(report["loss"].runs) == {"llmkernels::linear_cross_entropy"}


def run_command(folder: str) -> None:
    options = ["--prompt", "What?", "--max-new-tokens", "8", "--report"]
    command = [sys.executable, "-m", "llmkernels", "generate", folder, *options]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    print(result.stderr)
    assert result.returncode == 0
    assert "1 by the decode step, 7 steps" in result.stderr


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as checkpoint:
        save_small_model(checkpoint)
        run_examples(ROOT / "README.md", checkpoint)
        for page in sorted(ROOT.glob("docs/*.md")):
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(DEVICE)
            ids = torch.randint(0, 1000, (1, 16), device=DEVICE)
            names = {"torch": torch, "llmkernels": llmkernels, "model": model, "ids": ids}
            run_examples(page, checkpoint, names)
        run_command(checkpoint)
