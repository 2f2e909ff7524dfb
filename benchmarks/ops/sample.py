"""Sampling a token per row: temperature 0.8, the 50 largest logits, of these the most probable that reach 0.9."""

import torch

from benchmarks.cases import Case, Op, Provider, plain

VOCAB = 152064
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9


def kept(logits):
    """Probabilities of the tokens that may be drawn, and these tokens."""
    values, tokens = (logits.float() / TEMPERATURE).topk(TOP_K)  # sorted
    probabilities = values.softmax(-1)
    return probabilities * (probabilities.cumsum(-1) - probabilities < TOP_P), tokens


def torch_sample(logits):
    probabilities, tokens = kept(logits)
    # What multinomial does, without its synchronization: exponential races.
    return tokens.gather(-1, (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True))


def compiled_sample():
    return torch.compile(torch_sample, dynamic=False)


def ours():
    from llmkernels import sample

    options = {}

    def call(logits):
        if not options:  # on the device, as a graph wants them
            rows = logits.shape[0]
            options["temperature"] = torch.full((rows,), TEMPERATURE, device=logits.device)
            options["top_k"] = torch.full((rows,), TOP_K, dtype=torch.int32, device=logits.device)
            options["top_p"] = torch.full((rows,), TOP_P, device=logits.device)
            options["rng_state"] = torch.tensor([1, 0], device=logits.device)
        return sample(logits, **options)

    return call


def error(outputs, inputs):
    """0 where every token is one that may be drawn."""
    probabilities, tokens = kept(inputs[0])
    allowed = (tokens == outputs[0].view(-1, 1)) & (probabilities > 0)
    return 0.0 if bool(allowed.any(-1).all()) else 1.0


def case(rows):
    return Case("sample", {"rows": rows, "vocab": VOCAB}, torch.float32, rows * VOCAB * 4, quick=rows == 1)


OP = Op(
    name="sample",
    cases=tuple(case(rows) for rows in (1, 8, 64)),
    inputs=lambda case, device: (torch.randn(case.keys["rows"], VOCAB, device=device).mul_(3),),
    eager=torch_sample,
    providers=lambda case: {
        "torch": plain(torch_sample),
        "compile": Provider(compiled_sample),
        "llmkernels": Provider(ours),
    },
    differentiable=1,
    error=error,
)
