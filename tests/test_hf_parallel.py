"""patch(training=True) under DDP, FSDP1 and FSDP2, in two processes on the CPU."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import llmkernels
from hf_models import ComputedLogits, assert_close, tiny_inputs, tiny_model

RANKS = 2


def ddp(model):
    return DistributedDataParallel(model)


def ddp_with_unused_parameters(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp1(model, use_orig_params=True):
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)


def fsdp(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp_with_its_head_apart(model):
    fully_shard(model.lm_head)
    return fsdp(model)


WRAPPERS = {
    "ddp": ddp,
    "ddp_with_unused_parameters": ddp_with_unused_parameters,
    "fsdp1": fsdp1,
    "fsdp1_of_flat_parameters": functools.partial(fsdp1, use_orig_params=False),
    "fsdp": fsdp,
    "fsdp_with_its_head_apart": fsdp_with_its_head_apart,
}


def gradients(wrap, training, when="before"):
    """Loss, logits and gradients of a step, each rank with tokens of its own; the report's row of the loss, and how
    many ops made logits before somebody read them."""
    model = tiny_model().train()
    handle = llmkernels.patch(model, training=training) if when == "before" else None
    wrapped = wrap(model)
    handle = handle or llmkernels.patch(wrapped, training=training)
    ids = tiny_inputs("cpu", seed=dist.get_rank())
    with ComputedLogits() as computed:
        output = wrapped(input_ids=ids, labels=ids)
    logits = output["logits"].detach()
    output.loss.backward()
    grads = {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}
    return output.loss.detach(), logits, whole, (handle.report()["loss"], computed.count) if training else None


def worker(rank, name, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    wrap = WRAPPERS[name]
    expected_loss, expected_logits, expected, _ = gradients(wrap, training=False)
    for when in ("before", "after"):  # patched, that is
        loss, logits, found, (row, computed) = gradients(wrap, training=True, when=when)
        if name.endswith("apart"):  # a head that is sharded apart has to be called, so that its weight is gathered
            assert row.runs == {"without a kernel": 1}
            assert "lm_head has to be called" in str(row.left_alone)
        else:
            assert row.runs == {"llmkernels::linear_cross_entropy": 1}
            assert len(row.patched) == 1 and not row.left_alone
            assert computed == 0 or name == "ddp_with_unused_parameters"  # DDP clones the outputs then
        assert_close(loss, expected_loss, 1e-4)
        assert_close(logits, expected_logits, 1e-4)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            if gradient.numel() > 0:  # of FSDP1 it is what this rank has
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
