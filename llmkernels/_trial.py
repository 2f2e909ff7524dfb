"""What patch leaves alone with the installed transformers: tried on a small model."""

import llmkernels


def trial() -> list[str]:
    """What is left alone of a small Llama on the CPU, which is patched in full and generates a few tokens.

    In the words of `Report.left_alone`; empty where all of it runs on kernels.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = LlamaForCausalLM(config).eval()
        handle = llmkernels.patch(model, training=True)
        llmkernels.generate(model, torch.tensor([[3, 4, 5]]), max_new_tokens=3)
    report = handle.report()
    found = report.left_alone()
    [decode] = report.decode
    if decode.reason is None and not decode.steps:
        found.append(f"the decode step ({', '.join(decode.calls)})")
    return found
