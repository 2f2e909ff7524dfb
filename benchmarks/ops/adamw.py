"""A step of AdamW for a list of tensors: one large parameter, or the parameters of a model of 28 layers.

The list has the 339 tensors of Qwen2.5-7B with an eighth of the rows of each matrix, since providers that write get
copies.
"""

from functools import partial

import torch

from benchmarks.cases import Case, Op, Provider

LR, BETAS, EPS, WEIGHT_DECAY = 0.1, (0.9, 0.999), 1e-8, 0.01
HIDDEN, KV, FFN, VOCAB, LAYERS, PART = 3584, 512, 18944, 152064, 28, 8
KINDS = 5  # of tensors: parameters, gradients, first and second moments, steps


def layer():
    yield from ((HIDDEN // PART, HIDDEN), (HIDDEN,), (KV // PART, HIDDEN), (KV,), (KV // PART, HIDDEN), (KV,))
    yield (HIDDEN // PART, HIDDEN)
    yield from ((FFN // PART, HIDDEN), (FFN // PART, HIDDEN), (HIDDEN // PART, FFN), (HIDDEN,), (HIDDEN,))


def shapes(case):
    if case.keys["tensors"] == 1:
        return [(case.keys["parameters"],)]
    return [(VOCAB // PART, HIDDEN), *(shape for _ in range(LAYERS) for shape in layer()), (HIDDEN,),
            (VOCAB // PART, HIDDEN)]  # fmt: skip


def lists(inputs):
    """Of parameters, gradients, moments and steps."""
    count = len(inputs) // KINDS
    return [inputs[i * count : (i + 1) * count] for i in range(KINDS)]


def eager(*inputs):
    """The formula; the parameters after the step."""
    results = []
    for p, g, m, v, step in zip(*lists(inputs), strict=True):
        m, v, t = m.lerp(g, 1 - BETAS[0]), BETAS[1] * v + (1 - BETAS[1]) * g * g, step + 1
        root = (v / (1 - BETAS[1] ** t)).sqrt() + EPS
        results.append(p * (1 - LR * WEIGHT_DECAY) - LR / (1 - BETAS[0] ** t) * m / root)
    return tuple(results)


def by_class(load, **options):
    """The step of an optimizer whose parameters, gradients and state are the inputs."""
    optimizers, counters = {}, {}

    def make(inputs):
        params, grads, *state = lists(inputs)
        params = [torch.nn.Parameter(p) for p in params]
        more = {"capturable": True} if params[0].is_cuda else {}
        optimizer = load()(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **more, **options)
        for param, grad, m, v, step in zip(params, grads, *state, strict=True):
            param.grad = grad
            optimizer.state[param] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
        optimizer._counters = counters  # so that none is made while a graph is captured
        return optimizer

    def call(*inputs):
        key = inputs[0].data_ptr()
        if key not in optimizers:
            optimizers[key] = make(inputs)
        optimizers[key].step()
        return inputs[: len(inputs) // KINDS]

    return call


def load_ours():
    from llmkernels.optim import AdamW

    return AdamW


def inputs(case, device):
    def draw():
        return [torch.randn(shape, dtype=case.dtype, device=device) for shape in shapes(case)]

    steps = [torch.full((), 9.0, device=device) for _ in shapes(case)]
    return (*draw(), *draw(), *(m.mul_(0.3) for m in draw()), *(v.square_() for v in draw()), *steps)


def providers(case):
    state = {"state_dtype": case.dtype}
    return {
        "eager": Provider(partial(by_class, lambda: torch.optim.AdamW, foreach=True), mutates=("fwd",)),
        "torch": Provider(partial(by_class, lambda: torch.optim.AdamW, fused=True), mutates=("fwd",)),
        "llmkernels": Provider(partial(by_class, load_ours, **state), mutates=("fwd",)),
    }


def case(parameters, tensors=1, dtype=torch.float32, quick=False):
    keys = {"parameters": parameters, "tensors": tensors}
    return Case("adamw", keys, dtype, 7 * parameters * dtype.itemsize, quick=quick)


def whole_list():
    any_case = Case("adamw", {"parameters": 0, "tensors": 0}, torch.bfloat16, 0)
    sizes = [torch.Size(shape).numel() for shape in shapes(any_case)]
    return case(sum(sizes), len(sizes), torch.bfloat16)


OP = Op(
    name="adamw",
    cases=(case(1_000_000, quick=True), case(10_000_000), case(50_000_000), whole_list()),
    inputs=inputs,
    eager=eager,
    providers=providers,
    differentiable=0,
)
