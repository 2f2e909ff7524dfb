"""The command line: what it does, and that whatever stops it is said in one line, with status 1 and no traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import llmkernels
from generating import NEW, hf_generate, small_model
from hf_models import VOCAB, tiny_config
from llmkernels import __main__, _library
from llmkernels._command import run_command

CHARACTERS = [chr(33 + i) for i in range(94)] + [" "]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a tokenizer of one character per token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    vocabulary = {CHARACTERS[i]: i for i in range(94)} | {"Ġ": 94, "<|endoftext|>": 95, "<x>": 96}
    transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    small_model(config=tiny_config(head_dim=64)).save_pretrained(folder)
    return folder


def test_command(checkpoint, capsys):
    prompt = [4, 8, 15]
    expected = hf_generate(small_model(), torch.tensor([prompt]))[0].tolist()
    arguments = ["generate", str(checkpoint), "--prompt", "".join(CHARACTERS[i] for i in prompt), "--device", "cpu"]
    assert __main__.main([*arguments, "--max-new-tokens", str(NEW), "--report"]) == 0
    out, err = capsys.readouterr()
    assert out.strip("\n") == "".join(CHARACTERS[i] for i in expected if i < 95)
    assert f"decodes by the decode step (calls of generate: 1 by the decode step, {NEW - 1} steps)" in err
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--temperature=2", "--top-p=0.99", "--seed", seed, "--dtype=bfloat16", "--max-new-tokens=40"]
        assert __main__.main([*arguments, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of the checkpoint, to be broken."""
    return shutil.copytree(checkpoint, tmp_path / "broken")


def no_tokenizer(folder):
    for path in folder.glob("tok*"):
        path.unlink()


def truncated_weights(folder):
    os.truncate(folder / "model.safetensors", 10000)


def corrupt_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def a_weight_missing(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def another_shape(folder):
    change_config(folder, vocab_size=50)


def tokenizer_of_another_model(folder):
    change_config(folder, vocab_size=50)
    weights = load_file(folder / "model.safetensors")
    fitting = {name: weight[:50].clone() if weight.shape[0] == VOCAB else weight for name, weight in weights.items()}
    save_file(fitting, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncated_tokenizer(folder):
    os.truncate(folder / "tokenizer.json", 100)


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": "qwen2", ')


def another_kind_of_model(folder):
    (folder / "config.json").write_text('{"model_type": "vit"}')


def code_of_its_own(folder):
    (folder / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}')


def broken_template(folder):
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")


def refusing_template(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('system first') }}")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (no_tokenizer, "has no tokenizer"),
        (truncated_weights, "cannot be loaded: Error while deserializing header"),
        (corrupt_weights, "cannot be loaded: Error while deserializing header"),
        (no_weights, "cannot be loaded: Error no file named model.safetensors"),
        (a_weight_missing, "lacks 1 weights, model.layers.1.mlp.down_proj.weight for one"),
        (another_shape, "must be [50, 112] by its configuration, got [97, 112]"),
        (tokenizer_of_another_model, "the tokenizer does not fit the model: it has token 64, and the model 50 tokens"),
        (truncated_tokenizer, "the tokenizer of "),
        (no_config, "has no config.json"),
        (broken_config, "cannot be loaded: "),
        (another_kind_of_model, "cannot be loaded: "),
        (code_of_its_own, "cannot be loaded: "),
        (broken_template, "the model's chat template cannot be used: TemplateSyntaxError"),
        (refusing_template, "the model's chat template cannot be used: TemplateError: system first"),
    ],
)
def test_broken_models(broken, capfd, break_it, message):
    break_it(broken)
    chat = ["--chat"] if "template" in message else []
    check_line(["generate", str(broken), "--prompt", "a", *chat], message, capfd)


def check_line(arguments, message, capture):
    """One line that says what is wrong, no traceback, status 1."""
    assert __main__.main(arguments) == 1
    out, err = capture.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("llmkernels: ")
    assert message in err


def test_command_errors(checkpoint, capfd, tmp_path):
    for arguments, message in (
        ([str(tmp_path), "--prompt", "a"], "has no config.json"),
        ([str(tmp_path / "missing"), "--prompt", "a"], "does not exist"),
        ([str(checkpoint / "config.json"), "--prompt", "a"], "is a file"),
        ([str(checkpoint), "--prompt", "a", "--device", "nope"], "--device must be cpu, cuda or cuda:N, got nope"),
        ([str(checkpoint), "--prompt", "a", "--device", "mps"], "--device must be cpu, cuda or cuda:N, got mps"),
        ([str(checkpoint), "--prompt", "a", "--device", "meta"], "--device must be cpu, cuda or cuda:N, got meta"),
        ([str(checkpoint), "--prompt", "a", "--device", "cuda:99"], "--device cuda:99 must "),
        ([str(checkpoint), "--prompt", ""], "--prompt must have at least one token"),
        ([str(checkpoint), "--prompt", "a\udcff"], "--prompt must be text in UTF-8, got the byte 0xff"),
        ([str(checkpoint), "--prompt", "a", "--chat"], "--chat must have a model with a chat template"),
    ):
        check_line(["generate", *arguments], message, capfd)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 1, "out of memory: CUDA out of"),
        (MemoryError(), 1, "out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("of\ntwo lines"), 1, "ValueError: of two lines (python -X dev shows where)"),
        (RuntimeError("x" * 9999), 1, "RuntimeError: xxx"),
    ],
)
def test_what_stops_generating(checkpoint, monkeypatch, capfd, error, status, message):
    def generate(*arguments, **options):
        raise error

    monkeypatch.setattr(llmkernels, "generate", generate)
    assert __main__.main(["generate", str(checkpoint), "--prompt", "a", "--device", "cpu"]) == status
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert len(line) < 550


def command(line, **options):
    """The line in a shell, without what would hide when Python writes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(_library.PATH.parent.parent), "PYTHON": sys.executable}
    line = f"set -o pipefail; {line}"
    return subprocess.run(["bash", "-c", line], capture_output=True, env=environment, timeout=300, **options)


GENERATE = '"$PYTHON" -m llmkernels generate "$0" --device cpu --prompt'
INFO = '"$PYTHON" -m llmkernels info'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{GENERATE} a | true", "standard output was closed before the end"),
        (f"{INFO} | true", "standard output was closed before the end"),
        (f"{INFO} --json | true", "standard output was closed before the end"),
        (f"{GENERATE} a > /dev/full", "standard output: No space left on device"),
        (f"{INFO} > /dev/full", "standard output: No space left on device"),
        (f"{INFO} --help > /dev/full", "standard output: No space left on device"),
        (f"head -c 99 /dev/urandom | {GENERATE} -", "standard input must be text in UTF-8, got the byte"),
        (f"{GENERATE} - <&-", "--prompt - must have a standard input"),
    ],
)
def test_streams(checkpoint, line, message):
    result = command(line.replace('"$0"', f"'{checkpoint}'"))
    (error,) = result.stderr.decode().splitlines()
    assert error.startswith("llmkernels: ")
    assert message in error
    assert result.returncode == 1


def test_terminal_without_the_characters(monkeypatch, capfdbinary):
    with open(sys.stdout.fileno(), "w", encoding="ascii", closefd=False) as ascii_only:
        monkeypatch.setattr(sys, "stdout", ascii_only)
        assert run_command("x", lambda: print("\u00e9")) == 0
    assert capfdbinary.readouterr().out == b"\\xe9\n"


def test_benchmarks_say_it_in_a_line(tmp_path):
    root = Path(__file__).resolve().parent.parent
    result = command(f"\"$PYTHON\" -m benchmarks merge '{tmp_path}'", cwd=root)
    assert result.stderr.decode() == f"benchmarks: there are no results in {tmp_path}\n"
    assert result.returncode == 1


BAD_OPTIONS = {
    ("--max-new-tokens", "0"): "must be positive, got 0",
    ("--temperature", "-1"): "must be at least 0, got -1",
    ("--temperature", "nan"): "must be at least 0, got nan",
    ("--temperature", "warm"): "invalid float value: 'warm'",
    ("--top-k", "-1"): "must be at least 0 and below 2^31, got -1",
    ("--top-k", "2147483648"): "must be at least 0 and below 2^31, got 2147483648",
    ("--top-p", "2"): "must be in (0, 1], got 2",
    ("--top-p", "0"): "must be in (0, 1], got 0",
    ("--min-p", "3"): "must be in [0, 1], got 3",
    ("--repetition-penalty", "0"): "must be positive, got 0",
    ("--seed", str(2**64)): "must be of 64 bits, got 18446744073709551616",
}


@pytest.mark.parametrize("option, message", BAD_OPTIONS.items(), ids=map(" ".join, BAD_OPTIONS))
def test_command_refuses_options_out_of_range(capsys, option, message):
    with pytest.raises(SystemExit) as stop:
        __main__.main(["generate", "no-model", "--prompt", "a", *option])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {option[0]}: {message}\n")


def test_command_samples_where_an_option_asks_for_it(checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(llmkernels, "generate", lambda *arguments, **options: calls.append(options))
    for arguments, expected in (
        ([], (False, None)),
        (["--repetition-penalty", "1.2", "--seed", "1"], (False, None)),
        (["--top-k", "0", "--top-p", "1", "--min-p", "0"], (False, None)),
        (["--top-k", "5"], (True, 1.0)),
        (["--top-p", "0.9"], (True, 1.0)),
        (["--min-p", "0.1"], (True, 1.0)),
        (["--temperature", "0.5"], (True, 0.5)),
        (["--temperature", "0.5", "--top-p", "0.9"], (True, 0.5)),
        (["--temperature", "0", "--top-p", "0.9"], (False, None)),
    ):
        assert __main__.main(["generate", str(checkpoint), "--prompt", "a", "--device", "cpu", *arguments]) == 0
        assert (calls[-1]["do_sample"], calls[-1]["temperature"]) == expected, arguments
