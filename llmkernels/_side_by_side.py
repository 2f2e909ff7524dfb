"""A model answers a prompt, unpatched and then patched, in two panels as one watches.

The model is that of _real_model.py. Where it cannot be fetched, one of its shape with random weights goes on from
random tokens, which are shown as numbers.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

import llmkernels
from llmkernels import _real_model
from llmkernels._checkpoint import open_checkpoint

console = Console(width=None if os.isatty(1) else 120, highlight=False)  # a file has no width of its own
WIDTH = (min(console.width, 120) - 1) // 2  # of a panel
WARM_UP = 4  # tokens before those that are shown: the first of a process are slow, and CUDA graphs are recorded
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "eos_token_id": None,
}


@dataclass
class Answer:
    """A streamer that notes what came and when."""

    show: Callable[[], None] = lambda: None
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    has_prompt: bool = False

    def put(self, ids):
        if self.has_prompt:
            self.times_s.append(time.perf_counter())
            self.tokens += ids.flatten().tolist()
            self.show()
        self.has_prompt = True  # which is the first that transformers gives to streamers

    def end(self):
        self.show()

    @property
    def ms_per_token(self) -> float:
        """After the first token, which is the prefill's. NaN where there is no other."""
        steps = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / steps * 1e3 if steps > 0 else math.nan

    @property
    def speed(self) -> str:
        return "too short to time" if math.isnan(self.ms_per_token) else f"{self.ms_per_token:.2f} ms per token"


class Screen:
    """The answers side by side, drawn again 20 times a second at most."""

    def __init__(self, live: Live, decode: Callable[[list[int]], str]):
        self.live, self.decode, self.panels, self.drawn_s = live, decode, {}, 0.0

    def show(self, title: str, answer: Answer, subtitle: str = "...", at_once: bool = False) -> None:
        if not at_once and time.perf_counter() - self.drawn_s < 0.05:
            return
        text = Text(self.decode(answer.tokens))
        self.panels[title] = Panel(text, title=title, subtitle=subtitle, width=WIDTH)
        self.live.update(Columns(self.panels.values(), padding=(0, 1)), refresh=True)
        self.drawn_s = time.perf_counter()


def load(device: torch.device):
    """The model and its name, the ids of a prompt by a function of its text, and the text of ids by another."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        checkpoint = open_checkpoint(str(_real_model.fetch()))
    except _real_model.Unavailable as reason:
        console.print(f"{reason}.\nWhat follows has random weights, and numbers of tokens for a text.", style="yellow")
        return random_model(device, dtype)
    tokenizer = checkpoint.tokenizer()

    def encode(text):
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).input_ids.to(device)

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    return checkpoint.model(dtype).to(device).eval(), _real_model.NAME, encode, decode


def random_model(device: torch.device, dtype: torch.dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()

    def encode(text):
        return torch.randint(SHAPE["vocab_size"], (1, len(text)), device=device)

    def decode(ids):
        return " ".join(map(str, ids))

    return model, f"random weights in the shape of {_real_model.NAME}", encode, decode


def answer(model, ids, screen: Screen, title: str, tokens: int) -> Answer:
    """Greedily, by the generate of transformers: once by the clock alone, then as it is shown."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    model.generate(ids, max_new_tokens=WARM_UP, **options)
    timed = Answer()
    model.generate(ids, max_new_tokens=tokens, streamer=timed, **options)
    shown = Answer(lambda: screen.show(title, shown))
    model.generate(ids, max_new_tokens=tokens, streamer=shown, **options)
    screen.show(title, timed, timed.speed, at_once=True)
    return timed


def compare(unpatched: Answer, patched: Answer) -> str:
    pairs = zip(unpatched.tokens, patched.tokens, strict=False)
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    text = "the same text" if same is None else f"the same text up to token {same}, where rounding decides"
    factor = unpatched.ms_per_token / patched.ms_per_token
    return text if math.isnan(factor) else f"{factor:.1f} times as fast, {text}"


def show(prompt: str, device: torch.device, tokens: int) -> None:
    """Print both answers of up to `tokens` tokens, how fast they came, and what ran on which kernel."""
    model, name, encode, decode = load(device)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(f"\n{name} in {dtype} on {place}: {prompt}")
    ids = encode(prompt)
    with Live(console=console, auto_refresh=False) as live:
        screen = Screen(live, decode)
        unpatched = answer(model, ids, screen, "unpatched", tokens)
        handle = llmkernels.patch(model)
        patched = answer(model, ids, screen, "llmkernels.patch(model)", tokens)
    print("" if console.is_terminal else "\n", compare(unpatched, patched), sep="")  # files end no line after panels
    print(f"\n{handle.report()}")
