"""Generating with a patched model, by transformers' generate and by the leaner loop of llmkernels.

    python examples/generate.py

The model is tiny and its weights are random, so its bytes mean nothing. For one that talks, take a name on the Hugging
Face Hub and its tokenizer: AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct", dtype=torch.bfloat16).
"""

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import llmkernels

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=256,  # a token is a byte
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
)
model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
prompt = torch.tensor([list(b"The capital of France is")], device=device)

unpatched = model.generate(prompt, max_new_tokens=32, do_sample=False)
with llmkernels.patch(model) as handle:
    greedy = model.generate(prompt, max_new_tokens=32, do_sample=False)
    samples = llmkernels.generate(
        model, prompt, max_new_tokens=32, do_sample=True, temperature=0.7, top_p=0.9, num_return_sequences=3
    )
    print(handle.report())
same = int((greedy == unpatched).sum()) - prompt.numel()
print(f"\ngreedy: {same} of 32 new tokens as without the patch")  # all, where rounding decides nothing
for sample in samples:
    print(f"sample: {bytes(sample.tolist())}")
