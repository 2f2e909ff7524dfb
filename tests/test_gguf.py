"""GGUF files on the command line: the text of the same model in a folder, and a line that says what is wrong."""

import importlib.util
import os

import pytest
import torch

from generating import NEW, hf_generate, small_model
from hf_models import tiny_config
from llmkernels import __main__
from llmkernels._checkpoint import open_checkpoint
from test_command_line import CHARACTERS, check_line

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers reads no GGUF file without it

TOKENS = [*CHARACTERS[:94], "Ġ", "<|endoftext|>", "!!"]


def tiny_llama():
    """hidden_size is num_attention_heads * head_dim, as transformers takes it to be in a GGUF file of this family."""
    config = tiny_config("llama", hidden_size=128, num_attention_heads=2, intermediate_size=96, eos_token_id=95)
    return small_model("llama", config=config)


def write_gguf(path, model, leave_out=(), architecture="llama"):
    """As llama.cpp writes it: its rotary embedding rotates neighbours, so rows of q and k go in another order."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["! !"] * 2)  # transformers takes one for a string
    writer.add_token_types([1] * len(TOKENS))
    writer.add_bos_token_id(95)
    writer.add_eos_token_id(95)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name in leave_out:
            continue
        part = name.split(".")[-2]
        if part in heads:
            weight = weight.view(heads[part], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        stem, kind = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama())
    return path


def test_the_text_of_the_same_model(file, capfd, monkeypatch):
    """Whatever the folder that one is in, and with nothing on standard error."""
    prompt = [64, 96, 94, 65]
    expected = hf_generate(tiny_llama(), torch.tensor([prompt]))[0].tolist()
    expected = "".join(TOKENS[i] for i in expected if i != 95).replace("Ġ", " ")
    readers = gguf.GGUFReader, gguf.get_tensor_name_map
    monkeypatch.chdir(file.parent)
    for path in (str(file), file.name):
        arguments = ["generate", path, "--prompt", "a!! b", "--device", "cpu", "--max-new-tokens", str(NEW)]
        assert __main__.main(arguments) == 0
        out, err = capfd.readouterr()
        assert out.strip("\n") == expected
        assert err == ""
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == readers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights(file, dtype):
    weights = open_checkpoint(str(file)).model(dtype).state_dict()
    for name, expected in tiny_llama().state_dict().items():
        assert torch.equal(weights[name], expected.to(dtype))


def cut(at):
    def cut_there(path):
        os.truncate(path, at)

    return cut_there


def the_last_bytes(path):
    os.truncate(path, path.stat().st_size - 100)


def another_file(path):
    path.write_text("no model")


def broken_header(path):
    path.write_bytes(b"GGUF" + b"\xff" * 1000)


def a_weight_missing(path):
    write_gguf(path, tiny_llama(), leave_out={"model.layers.1.mlp.down_proj.weight"})


def another_architecture(path):
    write_gguf(path, tiny_llama(), architecture="own")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        *((cut(at), "is truncated or damaged: ") for at in (4, 20, 200, 2000, 20000)),
        (the_last_bytes, "is truncated or damaged: "),
        (cut(0), "MODEL must be a folder or a GGUF file, and "),
        (another_file, "is a file that begins otherwise"),
        (broken_header, "is truncated or damaged: "),
        (a_weight_missing, "lacks 1 weights, model.layers.1.mlp.down_proj.weight for one"),
        (another_architecture, "cannot be loaded: "),
    ],
)
def test_broken_files(file, capfd, break_it, message):
    break_it(file)
    check_line(["generate", str(file), "--prompt", "a"], message, capfd)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_is_missing(file, capfd, monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    message = f"to read a GGUF file, {package} must be installed: pip install 'llmkernels[hf]'"
    check_line(["generate", str(file), "--prompt", "a"], message, capfd)
