"""Learning rates of Adam and AdamW: tensors, those below 0, and torch's schedulers, asked of ours as of torch's."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, ReduceLROnPlateau

from optim_cases import TORCH, both, model, same_weights, train


@both
@pytest.mark.parametrize("on_device", [False, True])
def test_learning_rates_that_are_tensors(ours, on_device, device):
    network, other = model(device), model(device)
    lr = torch.tensor(0.1, device=device if on_device else "cpu")
    optimizer = ours(network.parameters(), lr=lr)
    train(network, optimizer, 3)
    lr.mul_(0.1)
    train(network, optimizer, 3)
    torchs = TORCH[ours](other.parameters(), lr=0.1)
    train(other, torchs, 3)
    torchs.param_groups[0]["lr"] = 0.01
    train(other, torchs, 3)
    same_weights(network, other, rtol=1e-3, atol=1e-4)


SCHEDULERS = {
    "exponential": [lambda o: ExponentialLR(o, 0.7)],
    "cosine": [lambda o: CosineAnnealingLR(o, 4)],
    "lambda": [lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch))],
    "plateau": [lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.9)],
    "chained": [lambda o: ExponentialLR(o, 0.9), lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch))],
}


@both
@pytest.mark.parametrize("makers", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(ours, makers, tensor_lr):
    networks, rates = [model() for _ in range(2)], []
    for network, kind in zip(networks, (ours, TORCH[ours]), strict=True):
        optimizer = kind(network.parameters(), lr=torch.tensor(0.1) if tensor_lr else 0.1)
        schedulers = [maker(optimizer) for maker in makers]
        for _ in range(6):
            train(network, optimizer, 1)
            for scheduler in schedulers:
                scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates[0] == rates[1]
    same_weights(*networks, rtol=1e-3, atol=1e-4)


@both
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_learning_rates_below_zero(ours, tensor_lr, device):
    """LinearLR ends there, by rounding; others may go farther, and PyTorch with them."""
    networks, rates = [model(device) for _ in range(2)], []
    for network, kind in zip(networks, (ours, TORCH[ours]), strict=True):
        lr = 1e-3
        optimizer = kind(network.parameters(), lr=torch.tensor(lr) if tensor_lr else lr, weight_decay=0.1)
        for scheduler in (LinearLR(optimizer, end_factor=0.0, total_iters=7), LambdaLR(optimizer, lambda i: 2 - i)):
            for _ in range(9):
                train(network, optimizer, 1)
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates[:18] == rates[18:] and min(rates[:9]) <= 0 and min(rates) < -1e-3
    same_weights(*networks, rtol=1e-3, atol=1e-4)


@both
def test_a_scheduler_knows_whether_there_was_a_step(ours):
    """It warns if it was the first; and goes on where a state dict left it."""
    network = model()
    optimizer = ours(network.parameters(), lr=0.5)
    scheduler = ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(network, optimizer, 1)
        scheduler.step()
    other = ours(network.parameters(), lr=0.5)
    resumed = ExponentialLR(other, 0.5)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        resumed.step()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    train(network, other, 1)
    resumed.step()
    assert other.param_groups[0]["lr"] == 0.125


@both
def test_a_scheduler_of_groups_and_of_averages(ours):
    """Each group by its own factor; SWALR anneals to one rate for all."""
    rates = []
    for kind in (ours, TORCH[ours]):
        network = model()
        groups = [{"params": network[0].parameters(), "lr": 0.1}, {"params": network[2].parameters(), "lr": 0.01}]
        optimizer = kind(groups)
        schedulers = [
            LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 0.25**epoch]),
            torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2),
        ]
        for scheduler in (schedulers[0], schedulers[0], schedulers[1], schedulers[1], schedulers[1]):
            train(network, optimizer, 1)
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[:5] == rates[5:] and rates[4] == [0.05, 0.05]
