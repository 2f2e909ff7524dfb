"""A chat of two turns over one cache: the second turn computes only the tokens that are new.

    python examples/chat.py [MODEL]

MODEL is a name on the Hugging Face Hub, or a folder, with a chat template, as Qwen/Qwen2.5-7B-Instruct. Without it, a
tiny model with random weights answers, whose bytes mean nothing.
"""

import sys

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen2Config, Qwen2Tokenizer

import llmkernels

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(dtype: torch.dtype):
    """A model and a tokenizer of bytes."""
    alphabet = [*sorted(ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer


device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
else:
    model, tokenizer = tiny(dtype)
model = model.to(device).eval()
handle = llmkernels.patch(model)

cache = DynamicCache(config=model.config)
messages, said = [], ""
ids = torch.empty(1, 0, dtype=torch.int64, device=device)
for question in ("What is the capital of France?", "And what is it known for?"):
    messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith(said), "the template writes earlier turns in another way"
    new = tokenizer(text[len(said) :], add_special_tokens=False, return_tensors="pt").input_ids.to(device)
    ids = torch.cat([ids, new], -1)
    print(f"user: {question}    ({ids.shape[-1]} tokens, {cache.get_seq_length()} of them in the cache)")

    prompt = ids.shape[-1]
    ids = llmkernels.generate(model, ids, past_key_values=cache, max_new_tokens=32, do_sample=False)
    if ids[0, -1] == tokenizer.eos_token_id:  # which the template writes, too
        ids = ids[:, :-1]
    answer = tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)
    print(f"assistant: {answer!r}")
    messages.append({"role": "assistant", "content": answer})
    said = text + answer
print(f"\n{handle.report()}")
