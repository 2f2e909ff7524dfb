"""Which kernels let the next one start early, by the rule in csrc/device/ptx.cuh: none that writes what a later launch
may read before the previous kernel has ended."""

import re

import pytest
import torch

import llmkernels  # noqa: F401, registers the ops
from linear_cases import make
from oracles import assert_same
from stub_cuda import CSRC

_op = torch.ops.llmkernels

NEVER = "a launch of a decode step may read it early"
# Of each op that writes an argument: may it let the next kernel start early, and why?
WRITERS = {
    "add_adapters_": "what is added to is never read early",
    "adam_": NEVER,
    "clip_grads_": "gradients are never read early",
    "cross_entropy_": "logits are never read early",
    "cross_entropy_backward_": "gradients are never read early",
    "cross_entropy_scale_": "gradients are never read early",
    "embed_tokens_": NEVER,
    "glu_packed_forward_backward_": "gradients are never read early",
    "linear_add_": "the residual is never read early",
    "linear_add_scale_": "the residual is never read early",
    "rms_norm_add_": "the residual is never read early",
    "rms_norm_add_linear": "the sum is never read early",
    "rms_norm_rope_": "queries and new keys are never read early",
    "rope_": "queries and new keys are never read early",
    "rope_decode_attention": "its keys are read early once PyTorch's kernels have changed the lengths",
    "rope_kv_write": "its keys are read early once PyTorch's kernels have changed the lengths",
    "sample": "what was seen and the state of random numbers are never read early",
}
FILES = {"adam_": "optim/adam.cu", "embed_tokens_": "embedding/embed_tokens.cu"}  # of the ops that never do


def test_every_op_that_writes_is_in_the_table():
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("llmkernels::")]
    writers = {schema.name for schema in schemas if any(argument.is_write for argument in schema.arguments)}
    assert {name.removeprefix("llmkernels::") for name in writers} == WRITERS.keys()
    assert {name for name, reason in WRITERS.items() if reason == NEVER} == FILES.keys()


@pytest.mark.parametrize("file", FILES.values())
def test_kernels_that_must_not(file):
    if not CSRC.exists():
        pytest.skip("needs csrc")
    code = re.sub(r"//.*", "", (CSRC / "kernels" / file).read_text())
    assert "pdl_wait()" in code
    assert "pdl_launch_dependents" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("between", [0, 1, 3], ids=lambda count: f"{count}_between")
def test_weights_of_an_optimizer(between, m, dtype):
    """adam_, `between` launches that let the next one start early, and a linear of a step of what adam_ wrote."""
    n, k = 512, 64
    x, _, weight, _ = make(m, n, k, dtype, "cuda", bias=False)
    grads = torch.randn(6, n, k, device="cuda").to(dtype)
    other = torch.randn(k, k, device="cuda").to(dtype) / 8
    param, m1, m2 = weight.clone(), torch.zeros(n, k, device="cuda"), torch.zeros(n, k, device="cuda")
    step, counter = torch.zeros((), device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    options = (0.3, 0.9, 0.99, 1e-8, 0.0, float("inf"), True, False)

    def start():
        param.copy_(weight)
        for tensor in (m1, m2, step, counter):
            tensor.zero_()

    def steps(synchronize):
        results = []
        for grad in grads:
            _op.adam_([param], [grad], [m1], [m2], [], [step], None, None, None, None, counter, None, [0], *options)
            if synchronize:
                torch.cuda.synchronize()
            y = x
            for _ in range(between):
                y = _op.linear(y, other, None, in_step=True)
            results.append(_op.linear(y, param, None, in_step=True))
            if synchronize:
                torch.cuda.synchronize()
        return torch.stack(results)

    start()
    expected = steps(True)
    assert not torch.equal(expected[0], expected[1])
    start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps(False)
    for _ in range(50):
        start()
        graph.replay()
        assert_same(found, expected)
        start()
        torch.cuda._sleep(2_000_000)  # about 1 ms, in which all launches are made
        assert_same(steps(False), expected)
