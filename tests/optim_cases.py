"""What the tests of the optimizers share: lists of parameters, options, a small model to train."""

import pytest
import torch
from torch import Tensor

from llmkernels.optim import Adam, AdamW

TORCH = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}
SHAPES = [(3, 5), (1000,), (), (0,), (7, 9, 2), (1,), (8, 128), (5000,)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {
    "default": {},
    "lr": {"lr": 0.1},
    "weight_decay": {"weight_decay": 0.1, "lr": 0.03},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "betas": {"betas": (0.0, 0.5), "eps": 1e-3},
    "everything": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2, "amsgrad": True,
                   "maximize": True},
}  # fmt: skip

both = pytest.mark.parametrize("ours", [Adam, AdamW], ids=lambda one: one.__name__)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def drawn(shapes=SHAPES, dtype=torch.float32, device="cpu") -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def parameters(values: list[Tensor], dtype=None) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(x.detach().clone().to(dtype or x.dtype)) for x in values]


def run(optimizer, params, rounds: list[list[Tensor]]) -> list[Tensor]:
    """A step for each round of gradients; the parameters then."""
    for grads in rounds:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.detach().clone().to(param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def state_of(optimizer, name: str) -> list[Tensor]:
    return [optimizer.state[param][name] for group in optimizer.param_groups for param in group["params"]]


def assert_close_lists(found, expected, **tolerances):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


def model(device="cpu", dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device, dtype)


def loss_of(network, seed=0) -> Tensor:
    parameter = next(network.parameters())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 6, generator=generator).to(parameter)
    return (network(x) - x[:, :2].sin()).square().mean()


def train(network, optimizer, steps=5) -> list[float]:
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, i)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_weights(a, b, **tolerances):
    assert_close_lists(list(a.parameters()), list(b.parameters()), **tolerances)
