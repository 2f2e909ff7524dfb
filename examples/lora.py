"""Fine-tuning LoRA adapters of PEFT on a patched model.

    python examples/lora.py

The adapters have to be there before the patch. A tiny model with random weights stands for a real one, and adapters of
all its linear layers learn the bytes of this file.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
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
model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
model.print_trainable_parameters()
handle = llmkernels.patch(model.train(), training=True)
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = llmkernels.optim.AdamW(trainable, lr=1e-2)

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
