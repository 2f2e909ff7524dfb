"""The tokenizer and the model that a command is given: a folder, a GGUF file, or a name on the Hugging Face Hub."""

import functools
import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path

from llmkernels._command import Problem, check_model_path


def open_checkpoint(name: str) -> "Checkpoint":
    """Raises Problem where there is none, as do the methods."""
    if Path(name).is_file():
        return GgufFile(name)
    check_model_path(name)
    return Checkpoint(name)


class Checkpoint:
    """A folder, or a name on the Hub."""

    dtype = "auto"  # of the model on a GPU, if the user names none

    def __init__(self, name: str):
        self.name = name
        self.source = {"pretrained_model_name_or_path": name, "trust_remote_code": False}
        self.model_options = {}

    def tokenizer(self):
        import transformers

        try:
            with self.reading():
                tokenizer = transformers.AutoTokenizer.from_pretrained(**self.source)
        except Exception as error:
            raise Problem(f"the tokenizer of {self.name} cannot be loaded: {error}") from error
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of no files at all
            raise Problem(f"{self.name} has no tokenizer")
        return tokenizer

    def model(self, dtype):
        """The model in `dtype`, of torch or "auto", on the CPU."""
        import torch
        import transformers

        options = self.source | self.model_options | {"dtype": dtype, "ignore_mismatched_sizes": True}
        try:
            with self.reading():
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(**options, output_loading_info=True)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise Problem(f"the model of {self.name} cannot be loaded: {error}") from error
        # What is missing or does not fit, transformers fills with random numbers.
        if others := sorted(loading["mismatched_keys"]):
            key, found, expected = others[0]
            raise Problem(f"{key} of {self.name} must be {list(expected)} by its configuration, got {list(found)}")
        if missing := sorted(loading["missing_keys"]):
            raise Problem(f"the checkpoint of {self.name} lacks {len(missing)} weights, {missing[0]} for one")
        return model

    def reading(self):
        """A context in which transformers reads the checkpoint."""
        return nullcontext()


class GgufFile(Checkpoint):
    """A file of llama.cpp, whose weights are dequantized: our kernels read float32, float16 and bfloat16."""

    dtype = "bfloat16"

    def __init__(self, name: str):
        path = Path(name)
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise Problem(f"MODEL must be a folder or a GGUF file, and {name} is a file that begins otherwise")
        needed = [package for package in ("gguf", "accelerate") if not importlib.util.find_spec(package)]
        if needed:
            raise Problem(
                f"to read a GGUF file, {' and '.join(needed)} must be installed: pip install 'llmkernels[hf]'"
            )
        import gguf
        import transformers

        super().__init__(name)
        self.source |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self.model_options = {"quantization_config": transformers.GgufConfig(dequantize=True)}
        self.cached = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
        try:
            self.cached["GGUFReader"](str(path.parent / path.name))
        except Exception as error:
            raise Problem(f"{name} is truncated or damaged: {error}") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """transformers reads the whole file four times and looks up names once for each module, which would take
        three times as long. Its progress bar does not ask whether bars are wanted."""
        import gguf

        is_terminal = sys.stderr and sys.stderr.isatty()
        originals = {name: getattr(gguf, name) for name in self.cached}
        try:
            for name, function in self.cached.items():
                setattr(gguf, name, function)
            with nullcontext() if is_terminal else redirect_stderr(io.StringIO()):
                yield
        finally:
            for name, function in originals.items():
                setattr(gguf, name, function)
