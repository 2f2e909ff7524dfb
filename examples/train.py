"""Training with a loop of one's own: a patched model, its loss without logits, and an optimizer of one launch.

    python examples/train.py

A tiny model learns the bytes of this file by heart.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import llmkernels

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=256,  # a token is a byte
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).train()
handle = llmkernels.patch(model, training=True)
# Small updates would round away in bfloat16. The gradients are clipped inside the step.
optimizer = llmkernels.optim.AdamW(
    model.parameters(), lr=3e-3, stochastic_rounding=dtype == torch.bfloat16, max_grad_norm=1.0
)

text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
for step in range(30):
    starts = torch.randint(len(text) - 64, (8,)).tolist()
    ids = torch.stack([text[start : start + 64] for start in starts])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == 29:
        print(f"step {step}: loss {loss.item():.3f}")
print(f"\n{handle.report()}")
