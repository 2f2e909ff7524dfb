"""patch(training=True) under DDP and FSDP2, in two processes on the CPU."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import llmkernels
from hf_models import assert_close, tiny_inputs, tiny_model

RANKS = 2


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp_with_its_head_apart(model):
    fully_shard(model.lm_head)
    return fsdp(model)


WRAPPERS = {"ddp": ddp, "fsdp": fsdp, "fsdp_with_its_head_apart": fsdp_with_its_head_apart}


def gradients(wrap, training):
    """Loss and gradients of a step, each rank with tokens of its own, and what computed the loss."""
    model = tiny_model().train()
    handle = llmkernels.patch(model, training=training)
    wrapped = wrap(model)
    ids = tiny_inputs("cpu", seed=dist.get_rank())
    loss = wrapped(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}
    return loss.detach(), whole, dict(handle.report()["loss"].runs) if training else None


def worker(rank, name, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    wrap = WRAPPERS[name]
    loss, found, runs = gradients(wrap, training=True)
    expected_loss, expected, _ = gradients(wrap, training=False)
    # A head that is sharded apart has to be called, so that its weight is gathered.
    by_op = "without a kernel" if name.endswith("apart") else "llmkernels::linear_cross_entropy"
    assert runs == {by_op: 1}, runs
    assert_close(loss, expected_loss, 1e-4)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.abs().max() > 0, key
        assert_close(found[key], gradient, 1e-4)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", WRAPPERS)
def test_loss_and_gradients(name, tmp_path, monkeypatch):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])  # for the processes
    torch.multiprocessing.spawn(worker, (name, str(tmp_path)), nprocs=RANKS)
