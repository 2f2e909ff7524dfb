"""What calls a patched model in its own way: lm-evaluation-harness, TRL, transformers' server and its batches."""

import random
import socket
import time

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

import llmkernels
from generating import generate_step, small_model
from hf_models import tiny_inputs, tiny_model

WORDS = 90


pytestmark = pytest.mark.usefixtures("no_state_of_accelerate")


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def text(rng, count):
    return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(count))


def test_lm_evaluation_harness(device):
    """Log-likelihoods, of continuations and of whole texts, and generation with stop words."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    rng = random.Random(0)
    model = tiny_model(vocab_size=WORDS + 3).to(device)
    harness = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=4, max_length=64)

    def instances(kind, arguments):
        return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]

    pairs = [(text(rng, rng.randrange(3, 20)) + " ", text(rng, rng.randrange(1, 6))) for _ in range(10)]
    stops = {"until": ["w5"], "max_gen_toks": 12, "do_sample": False}
    likelihoods = instances("loglikelihood", pairs)
    rolling = instances("loglikelihood_rolling", [(text(rng, 40),) for _ in range(3)])
    prompts = instances("generate_until", [(text(rng, rng.randrange(3, 20)), stops) for _ in range(6)])

    def run():
        scores = harness.loglikelihood(likelihoods, disable_tqdm=True)
        whole = harness.loglikelihood_rolling(rolling, disable_tqdm=True)
        return scores, whole, harness.generate_until(prompts, disable_tqdm=True)

    expected = run()
    handle = llmkernels.patch(model)
    found = run()
    assert found[2] == expected[2]
    assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in expected[0]]
    assert [score for score, _ in found[0]] == pytest.approx([score for score, _ in expected[0]], abs=1e-4)
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert handle.report().decode[0].calls == {generate_step(): 2}


def test_continuous_batching(device):
    model = small_model(device=device)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = [row[: 4 + index].tolist() for index, row in enumerate(tiny_inputs(device, 3))]

    config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)  # else it takes most of the memory

    def run():
        found = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(**options),
            continuous_batching_config=config,
            progress_bar=False,
        )
        return [found[name].generated_tokens for name in sorted(found)]

    expected = run()
    handle = llmkernels.patch(model)
    assert run() == expected
    assert handle.report().decode[0].calls == {"by transformers: continuous batching": 1}


def test_server_of_transformers(device, tmp_path):
    """`transformers serve`, whose model is patched while it is up: requests at once and in pieces."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    requests = pytest.importorskip("requests")
    from transformers.cli.serve import Serve

    model = tiny_model(vocab_size=WORDS + 3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = Serve(force_model=str(tmp_path), device=device, port=port, non_blocking=True, log_level="error")
    try:
        (loaded,) = server._model_manager.loaded_models.values()
        loaded.processor = tokenizer()  # that of the model's family is chosen by its type, and knows no word
        for _ in range(200):
            try:
                requests.get(f"http://localhost:{port}/health", timeout=5)
                break
            except requests.ConnectionError:
                time.sleep(0.05)

        def ask(stream):
            options = {"prompt": "w1 w2 w3 w4", "max_tokens": 8, "temperature": 0.0, "stream": stream}
            answer = requests.post(
                f"http://localhost:{port}/v1/completions", json={"model": str(tmp_path)} | options, timeout=60
            )
            return answer.text if stream else answer.json()["choices"]

        expected = ask(False)
        handle = llmkernels.patch(loaded.model)
        assert ask(False) == expected
        assert "data: " in ask(True)
        assert handle.report().decode[0].calls == {generate_step(): 2}
    finally:
        server.kill_server()


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("training", [False, True])
def test_rollouts_of_trl(training, adapters, device, tmp_path):
    """GRPO: rollouts by the step, in training mode, with the tokens and losses of the model unpatched. Of all
    parameters, or of adapters that the trainer adds to the patched model."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def trained(patched):
        rng = random.Random(0)
        prompts = datasets.Dataset.from_dict({"prompt": [text(rng, 6) for _ in range(8)]})
        torch.manual_seed(0)
        model = tiny_model(vocab_size=WORDS + 3).to(device)
        handle = llmkernels.patch(model, training=training) if patched else None
        completions = []

        def reward(**given):
            completions.append(given["completions"])
            return [float(len({*completion.split()})) for completion in given["completions"]]

        options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 2}
        quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "bf16": False}
        config = trl.GRPOConfig(str(tmp_path), seed=0, use_cpu=device == "cpu", **options, **quiet)
        lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        peft_config = pytest.importorskip("peft").LoraConfig(**lora) if adapters else None
        options = {"processing_class": tokenizer(), "peft_config": peft_config}
        trainer = trl.GRPOTrainer(model, reward, config, prompts, **options)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return completions, losses, list(model.parameters()), handle

    expected, found = trained(False), trained(True)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    for ours, theirs in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert found[3].report().decode[0].calls == {generate_step(): 2}
