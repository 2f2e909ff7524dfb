"""Errors of ATen inside an op arrive as torch's own: their text, torch.OutOfMemoryError on a GPU, nothing on stderr."""

import os
import subprocess
import sys

import pytest
import torch

import llmkernels

_ops = torch.ops.llmkernels


def expanded(device) -> torch.Tensor:
    """One element that looks like an exbibyte: can be read, but not allocated a second time."""
    return torch.zeros((), device=device).expand(2**30, 2**28)


ROWS = 2**20  # for what computes something else before: a norm, the targets
# In each of these the allocation is another one: outputs, a contiguous copy of an operand, torch's own linear.
CALLS = {
    "rms_norm": lambda x: llmkernels.rms_norm(x),
    "rms_norm of a leaf": lambda x: llmkernels.rms_norm(x.detach().requires_grad_()),
    "rms_norm_backward": lambda x: _ops.rms_norm_backward(x, x, None, None, 1e-6, 0.0, True, False),
    "add_rms_norm": lambda x: llmkernels.add_rms_norm(x, x),
    "layer_norm": lambda x: llmkernels.layer_norm(x),
    "layer_norm_backward": lambda x: _ops.layer_norm_backward(x, x, None, None, 1e-5, 0.0, False, False),
    "add_layer_norm": lambda x: llmkernels.add_layer_norm(x, x),
    "swiglu": lambda x: llmkernels.swiglu(x, x),
    "swiglu packed": lambda x: llmkernels.swiglu(x),
    "glu_backward": lambda x: _ops.glu_backward(x, x, x, None, None, "silu", False, False),
    "geglu": lambda x: llmkernels.geglu(x, x),
    "softmax": lambda x: llmkernels.softmax(x),
    "log_softmax_backward": lambda x: _ops.log_softmax_backward(x, x, 1.0),
    "cross_entropy": lambda x: llmkernels.cross_entropy(x[:ROWS].detach().requires_grad_(), x[:ROWS, 0].long()),
    "linear_cross_entropy": lambda x: llmkernels.linear_cross_entropy(x[:1, :1], x.reshape(-1, 1), x[:1, 0].long()),
    "bias_gelu": lambda x: llmkernels.bias_gelu(x),
    "bias_act_backward": lambda x: _ops.bias_act_backward(x, x, None, "relu2", False),
    "bias_swiglu": lambda x: llmkernels.bias_swiglu(x, x),
    "bias_swiglu packed": lambda x: llmkernels.bias_swiglu(x),
    "glu_packed_backward": lambda x: _ops.glu_packed_backward(x[:, ::2], x, None, "silu", False),
    "glu_packed_forward_backward": lambda x: _ops.glu_packed_forward_backward(x[:, ::2], x, "silu"),
    "gated_mlp": lambda x: llmkernels.gated_mlp(x[:, :1], x[:1].t(), x[:1, : 2**27]),
    "lora_linear": lambda x: llmkernels.lora_linear(x[:, :1], x[:1].t(), x[:1, :1], x[:1].t()),
    "add_lora": lambda x: llmkernels.add_lora(x, x, x[:1], x[:1].t()),
    "rope": lambda x: llmkernels.rope(x[:, None, None], x[:, None, None], x[:1], x[:1]),
    "rope_backward": lambda x: _ops.rope_backward(*[x[:, None, None]] * 2, x[:1], x[:1], None, False, False, None),
    "rms_norm_rope": lambda x: llmkernels.rms_norm_rope(*[x[:, None, None]] * 2, None, None, x[:1], x[:1]),
    "rms_norm_rope_backward": lambda x: _ops.rms_norm_rope_backward(
        *[x[:, None, None]] * 4,
        None,
        None,
        x[:1],
        x[:1],
        None,
        1e-6,
        0.0,
        True,
        False,
        False,
        False,
        None,
        False,
        False,
    ),
    "linear": lambda x: llmkernels.linear(x[:, :1], x[:1].t()),
    "linear, copied": lambda x: llmkernels.linear(x, x[:1]),
    "rms_norm_linear": lambda x: llmkernels.rms_norm_linear(x[:ROWS, :1], None, x[:1].t()),
    "rms_norm_glu_linear": lambda x: _ops.rms_norm_glu_linear(x[:ROWS, :1], None, x[:1].t()),
    "rms_norm_add_linear": lambda x: _ops.rms_norm_add_linear(
        x.new_zeros(ROWS, 1), x[:ROWS, :1], x[:ROWS, :1], None, 1e-6, 0.0, True, 1.0, x[:1].t()
    ),
    "fp8_quantize": lambda x: llmkernels.fp8_quantize(x),
    "rms_norm_fp8_quantize": lambda x: llmkernels.rms_norm_fp8_quantize(x),
    "linear_add_": lambda x: _ops.linear_add_(x.new_zeros(2, 1), x.reshape(1, -1).expand(2, -1), x.reshape(1, -1)),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@every_call
def test_more_memory_than_there_is(call, device, capfd):
    kind, text = (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    if device == "cuda":
        kind, text = torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate"
    with pytest.raises(kind, match=text):
        call(expanded(device))
    assert capfd.readouterr().err == ""


def test_another_error_of_aten(device, capfd):
    x = torch.zeros((), device=device).expand(2**31, 2**30)
    with pytest.raises(RuntimeError, match="Storage size calculation overflowed"):
        llmkernels.rms_norm(x)
    assert capfd.readouterr().err == ""


_ON_A_FULL_GPU = """
import torch
import llmkernels

torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.get_device_properties("cuda").total_memory)
x = torch.ones(2**24, 5, device="cuda", dtype=torch.bfloat16)  # 160 MiB, and as much again for the result
try:
    llmkernels.rms_norm(x)
except torch.OutOfMemoryError as error:
    print(error)
assert (llmkernels.rms_norm(x[: 2**22]) == 1).all()
"""


@pytest.mark.gpu
def test_a_full_gpu():
    """The output would fit into the memory of the GPU, but not into what the process may have of it.

    In a process of its own: another one may hold memory that is free, and takes the output.
    """
    command = [sys.executable, "-c", _ON_A_FULL_GPU]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CUDA out of memory. Tried to allocate 160.00 MiB" in done.stdout


def test_accelerate_finds_a_batch_size(device):
    memory = pytest.importorskip("accelerate.utils.memory")
    sizes = []

    def halve():
        return sizes[-1] // 2**20

    @memory.find_executable_batch_size(starting_batch_size=2**60, reduce_batch_size_fn=halve)
    def run(batch_size):
        sizes.append(batch_size)
        return llmkernels.rms_norm(torch.ones((), device=device).expand(batch_size, 1))

    assert run().shape == (2**20, 1)
    assert sizes == [2**60, 2**40, 2**20]
