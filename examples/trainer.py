"""Fine-tuning a patched model with transformers' Trainer.

    python examples/trainer.py

A tiny model learns the bytes of this file by heart.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainingArguments, set_seed

import llmkernels

set_seed(0)
config = Qwen2Config(
    vocab_size=256,  # a token is a byte
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
text = torch.tensor(list(Path(__file__).read_bytes()))
pieces = text.unfold(0, 64, 8)
dataset = [{"input_ids": piece, "labels": piece} for piece in pieces]

handle = llmkernels.patch(model, training=True)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=30,
        per_device_train_batch_size=8,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=10,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    optimizer = llmkernels.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))
    trainer.train()
print(f"\n{handle.report()}")
