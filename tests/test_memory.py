"""Memory that the ops read and write: all of every output, nothing else, at any 64-bit offset; and the short selection
for compute-sanitizer."""

import ctypes.util
import subprocess
import sys

import pytest
import torch

import llmkernels
from cases import CASES, case_named, every_case
from every_op import poisoned_memory, reading_what_was_there
from oracles import DTYPES, angles, assert_same, laid_out, scaled_rows, tensors
from registry import SMALL, Size

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
_backward = torch.ops.llmkernels.rms_norm_backward
_glu_backward, _glu_packed_backward = torch.ops.llmkernels.glu_backward, torch.ops.llmkernels.glu_packed_backward


SIZES = [SMALL, *(Size(2, 5, cols, 2, 70, 1003) for cols in (64, 129, 2056)), Size(1, 3, 1, 1, 1, 1)]


@every_dtype
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.cols}")
def test_no_op_depends_on_what_was_in_memory(device, size, dtype):
    """All of registry.py, which needs no formula: backwards, quantization, optimizers, sampling, caches."""
    assert reading_what_was_there(size, device, dtype=dtype) == []


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [1, 64, 129, 2056])
def test_every_output_element_is_written(case, device, cols, dtype):
    inputs = case.inputs(70, cols, dtype, device)
    grad_outputs = case.grad_outputs(inputs)
    expected = case.differentiate(inputs, grad_outputs)
    with poisoned_memory():
        assert torch.empty(3, device=device, dtype=dtype).isnan().all(), "torch no longer poisons memory"
        results = case.differentiate(inputs, grad_outputs)
    assert not any(t.isnan().any() for t in results)
    assert_same(results, expected)


@every_case
def test_no_rows(case, device):
    """Without rows, the gradient of the weight is zero, not what was in memory."""
    inputs = case.inputs(0, 64, torch.float32, device)
    with poisoned_memory():
        results = case.differentiate(inputs, case.grad_outputs(inputs))
    for result in results:
        assert result.numel() == 0 or (result == 0).all()


@pytest.mark.gpu
@every_case
@every_dtype
@pytest.mark.parametrize("cols", [126, 128])
def test_neighbours_of_the_outputs_stay(case, cols, dtype):
    """Outputs get freed blocks between blocks full of a pattern. With 256 rows their size is a multiple of the
    allocator's 512 bytes, so that the next block begins right after the last element."""
    inputs = case.inputs(256, cols, dtype, "cuda")
    grad_outputs = case.grad_outputs(inputs)
    with torch.no_grad():
        sizes = {t.numel() * t.element_size() for t in tensors(case.ours(*inputs))}
    for t, dim in zip(inputs, case.row_dims, strict=True):
        if dim is not None or t.nbytes <= 2048:  # the gradients of larger weights are PyTorch's
            sizes.add(t.nbytes)
    assert all(size % 512 == 0 for size in sizes if size > 2048)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for size in sizes:
        # Many: the first ones fill the gaps of this size, so that the later ones lie side by side. More, where earlier
        # tests have left more gaps than that.
        for count in (64, 512, 4096):
            blocks = [torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(count)]
            guards = blocks[: count // 2] + blocks[count // 2 :: 2]
            free = {block.data_ptr() for block in blocks[count // 2 + 1 :: 2]}
            del blocks
            results = case.differentiate(inputs, grad_outputs)
            landed = [t for t in results if t.numel() * t.element_size() == size]
            assert all((guard == 0x5A).all() for guard in guards)
            if lies_between := not landed or any(t.data_ptr() in free for t in landed):
                break
            del results, landed, guards
        assert lies_between, "no output lies between the guards"


OVERRUN = """
import torch
from every_op import results
from registry import SMALL, Size
for size in (SMALL, *(Size(1, 5, cols, 2, 7, cols) for cols in (1, 7, 64, 129))):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        results(size, "cpu", dtype=dtype)
"""


def test_nothing_behind_cpu_outputs_is_written(pytestconfig):
    """glibc's checking allocator ends the process if the byte after a freed block has changed."""
    debug = ctypes.util.find_library("c_malloc_debug") or "libc_malloc_debug.so.0"
    environment = {"LD_PRELOAD": debug, "GLIBC_TUNABLES": "glibc.malloc.check=3", "OMP_NUM_THREADS": "2"}
    paths = [str(pytestconfig.rootpath / "tests"), *sys.path]

    def run(code):
        code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    overrun = "import ctypes, torch; x = torch.ones(100, dtype=torch.uint8); ctypes.memset(x.data_ptr(), 1, 101); del x"
    if run(overrun).returncode == 0:
        pytest.skip("no checking allocator here")
    result = run(OVERRUN)
    assert result.returncode == 0, result.stderr


# 64-bit offsets.

FAR = 2**31


def far_rows(rows, cols, device, dtype=torch.bfloat16):
    """Rows 2^31 elements apart. On the CPU, pages that are not touched take no memory."""
    rows_apart = torch.empty((rows - 1) * FAR + cols, dtype=dtype, device=device).as_strided((rows, cols), (FAR, 1))
    return rows_apart.copy_(scaled_rows(rows, cols, dtype=dtype, device=device))


def test_row_stride_of_2_31_on_the_cpu():
    assert_far_rows("cpu")


@pytest.mark.large(40)
def test_row_stride_of_2_31():
    assert_far_rows("cuda")


def assert_far_rows(device):
    for cols in (96, 97):
        x = far_rows(3, cols, device)
        near = x.contiguous()
        weight = near[0].clone()
        assert_same(llmkernels.rms_norm(x), llmkernels.rms_norm(near))
        assert_same(llmkernels.add_rms_norm(near, x), llmkernels.add_rms_norm(near, near))
        assert_same(llmkernels.layer_norm(x), llmkernels.layer_norm(near))
        assert_same(llmkernels.add_layer_norm(near, x), llmkernels.add_layer_norm(near, near))
        far, close = (_backward(t, t, weight, t, 1e-6, 0.0, True, True) for t in (x, near))
        assert_same(far, close)
        assert_same(llmkernels.swiglu(x, near), llmkernels.swiglu(near, near))
        assert_same(*(_glu_backward(t, t, t, None, None, "silu", False, False)[:2] for t in (x, near)))
    x = far_rows(3, 64, device)
    cos, sin = angles(3, 64, dtype=x.dtype, device=device)
    near = x.contiguous()
    expected = llmkernels.rope(near[None, :, None], near[None, :, None], cos, sin)
    assert_same(llmkernels.rope(x[None, :, None], near[None, :, None], cos, sin), expected)
    assert_same(
        llmkernels.rope(x[None, :, None], x[None, :, None], x, near),
        llmkernels.rope(near[None, :, None], near[None, :, None], near, near),
    )
    assert_same(llmkernels.rope(x[None, :, None], near[None, :, None], cos, sin, inplace=True)[0], expected[0])


def interesting(rows, cols):
    """Rows around the elements 2^31 and 2^32, the first and the last."""
    around = {2**power // cols + step for power in (31, 32) for step in (-1, 0, 1)}
    return sorted(i for i in {0, 1, *around, rows - 2, rows - 1} if 0 <= i < rows)


COLS = 3584
MANY_ROWS = 2 * (2**31 // COLS + 2)  # more than 2^32 elements


def huge():
    return torch.empty(MANY_ROWS, COLS, dtype=torch.bfloat16, device="cuda").normal_()


def assert_rows_alone(function, results, inputs):
    """The same rows computed alone have the same bits."""
    for i in interesting(*inputs[0].shape):
        alone = tensors(function(*(t[i : i + 1] for t in inputs)))
        assert_same(alone, tuple(t[i : i + 1] for t in results), f"row {i}, output")


def chunks(*whole):
    yield from zip(*(t.split(2**17) for t in whole), strict=True)


@pytest.mark.large(60)
def test_more_than_2_32_elements_rms_norm():
    x = huge()
    y = llmkernels.rms_norm(x)
    assert_rows_alone(llmkernels.rms_norm, (y,), (x,))
    norms = torch.linalg.vector_norm(y, dim=1, dtype=torch.float32)
    torch.testing.assert_close(norms, torch.full_like(norms, COLS**0.5), rtol=1e-2, atol=0)

    grad_y, weight = huge(), torch.ones(COLS, dtype=x.dtype, device="cuda")

    def backward(grad_y, x):
        return _backward(grad_y, x, weight, None, 1e-6, 0.0, True, True)

    grad_x, grad_weight = backward(grad_y, x)
    assert_rows_alone(lambda *t: backward(*t)[0], (grad_x,), (grad_y, x))
    expected = sum((g.float() * n).sum(0, dtype=torch.float64) for g, n in chunks(grad_y, y))
    torch.testing.assert_close(
        grad_weight.double() / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=5e-3
    )


@pytest.mark.large(60)
def test_more_than_2_32_elements_rms_norm_unaligned():
    x = huge()[:, 1:]
    y = llmkernels.rms_norm(x)
    assert_rows_alone(llmkernels.rms_norm, (y,), (x,))
    grad_x, _ = _backward(x, x, None, None, 1e-6, 0.0, True, False)
    assert_rows_alone(lambda x: _backward(x, x, None, None, 1e-6, 0.0, True, False)[0], (grad_x,), (x,))


@pytest.mark.large(60)
def test_more_than_2_32_elements_add_rms_norm():
    x, residual = huge(), huge()
    y, total = llmkernels.add_rms_norm(x, residual)
    assert_rows_alone(llmkernels.add_rms_norm, (y, total), (x, residual))
    for a, b, c in chunks(x, residual, total):
        assert torch.equal(a + b, c)


@pytest.mark.large(80)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_more_than_2_32_elements_swiglu(packed):
    case = case_named("swiglu_packed" if packed else "swiglu")
    inputs = (huge().view(MANY_ROWS // 2, 2 * COLS),) if packed else (huge(), huge())
    y = case.ours(*inputs)
    for *some, ours in chunks(*inputs, y):
        assert torch.equal(case.eager(*some), ours)

    def backward(grad_y, *inputs):
        if packed:
            return _glu_packed_backward(grad_y, *inputs, None, "silu", False)[0]
        return _glu_backward(grad_y, *inputs, None, None, "silu", False, False)[:2]

    grads = tensors(backward(y, *inputs))
    assert_rows_alone(backward, grads, (y, *inputs))


@pytest.mark.large(40)
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_more_than_2_32_elements_rope(layout):
    tokens, heads, dim = 2**20 + 1, 32, 128
    shape = (1, heads, tokens, dim) if layout == "bhtd" else (1, tokens, heads, dim)
    q = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    k = q[:, :1].clone() if layout == "bhtd" else q[:, :, :1].clone()
    cos, sin = angles(tokens, dim, dtype=q.dtype, device="cuda")
    rotated, _ = llmkernels.rope(q, k, cos, sin, layout=layout)
    head_axis = 1 if layout == "bhtd" else 2
    for head in range(heads):
        one = q.narrow(head_axis, head, 1)
        expected, _ = case_named("rope").eager(one, k, cos, sin, layout=layout)
        assert torch.equal(rotated.narrow(head_axis, head, 1), expected)
    llmkernels.rope(q, k, cos, sin, layout=layout, inplace=True)
    assert torch.equal(q, rotated)


@pytest.mark.large(50)
def test_more_than_2_32_elements_rms_norm_rope():
    """Every head is as if it were alone, forward and backward."""
    tokens, heads, dim = 2**20 + 1, 32, 128
    q = torch.empty(1, tokens, heads, dim, dtype=torch.bfloat16, device="cuda").normal_()
    k, weight = q[:, :, :1].clone(), torch.rand(dim, device="cuda").bfloat16()
    shared = weight, weight, *angles(tokens, dim, dtype=q.dtype, device="cuda")
    out, out_k = llmkernels.rms_norm_rope(q, k, *shared)
    backward, options = torch.ops.llmkernels.rms_norm_rope_backward, (1e-6, 0.0, True, False, False, False, None)
    grad = backward(out, out_k, q, k, *shared, None, *options, True, True)[0]
    for head in (0, 17, 31):
        one, one_out = (t[:, :, head : head + 1].clone() for t in (q, out))
        assert torch.equal(llmkernels.rms_norm_rope(one, k, *shared)[0], one_out)
        expected = backward(one_out, out_k, one, k, *shared, None, *options, True, True)[0]
        assert torch.equal(grad[:, :, head : head + 1], expected)


@pytest.mark.large(60)
def test_more_than_2_31_rows():
    x = torch.ones(2**31 + 5, 1, dtype=torch.bfloat16, device="cuda")
    x[1::2] = -1
    y = llmkernels.rms_norm(x)
    assert torch.equal(y, x)
    del y
    # With eps = 1, n = x / sqrt(2); a row of one element has the gradient (1 - n^2) / sqrt(2).
    grad_x, _ = _backward(x, x, None, None, 1.0, 0.0, True, False)
    assert torch.equal(grad_x, x * (0.5 * 0.5**0.5))
    del grad_x
    assert torch.equal(llmkernels.swiglu(x, x)[-3:], case_named("swiglu").eager(x[-3:], x[-3:]))


# The short selection for compute-sanitizer: every kernel path once. Inputs are copied to the GPU, so that few other
# kernels run.


def every_path():
    for case in CASES:
        for cols in (64, 63) if case.batch_invariant else ():  # vectors, single elements; cuBLAS is not ours to check
            yield case, torch.bfloat16, cols, 5
    for name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        case = case_named(name)
        # Rows of one lane, of 1 and 2 vectors per thread, read twice; not aligned: in registers, of one warp and of
        # several, in shared memory, read twice.
        for cols in (8, 2048, 10000, 36864, 150, 259, 4099, 40001, 120001):
            yield case, torch.bfloat16, cols, 3
        yield case, torch.bfloat16, 10000, 300  # of 4 vectors per thread
        yield case, torch.float32, 16384, 2
        yield case, torch.float16, 2048, 900  # several rows per group in the persistent backward
        yield case, torch.bfloat16, 259, 4000  # not aligned: several rows per group in both persistent kernels
        yield case, torch.float32, 5000, 3
        yield case, torch.float32, 33, 70  # more rows than partial sums
    for name in ("rms_norm_rope", "rms_norm_rope_gemma", "rms_norm_rope_row_wise"):
        for dtype in (torch.bfloat16, torch.float32):
            yield case_named(name), dtype, 128, 1500  # several rows per group in the persistent backward
        yield case_named(name), torch.float32, 126, 9
    for name in ("rope", "swiglu_packed", "bias_swiglu"):
        yield case_named(name), torch.float32, 256, 4
    for name in ("softmax", "log_softmax", "cross_entropy"):  # rows of one block, of a cluster, read twice
        for dtype, cols in ((torch.float32, 8200), (torch.float32, 131072), (torch.bfloat16, 524296)):
            yield case_named(name), dtype, cols, 2
        for dtype, cols in ((torch.float16, 259), (torch.bfloat16, 40001), (torch.float32, 131071)):  # not aligned
            yield case_named(name), dtype, cols, 3
    yield case_named("bias_gelu"), torch.bfloat16, 2064, 1100  # several strips, several rows per block in the backward
    for name in ("bias_gelu", "bias_swiglu"):  # not aligned
        for dtype, cols, rows in ((torch.bfloat16, 2061, 300), (torch.float32, 130, 3), (torch.float16, 5, 40)):
            yield case_named(name), dtype, cols, rows


@pytest.mark.sanitizer
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case, dtype, cols, rows",
    [
        pytest.param(*path, id=f"{path[0].name}-{path[1]}-{path[2]}x{path[3]}".replace("torch.", ""))
        for path in every_path()
    ],
)
def test_every_kernel_path(case, dtype, cols, rows):
    inputs = case.inputs(rows, cols, dtype)
    grad_outputs = case.grad_outputs(inputs)
    expected = case.differentiate(inputs, grad_outputs)
    results = case.differentiate([t.cuda() for t in inputs], [t.cuda() for t in grad_outputs])
    for ours, cpu in zip(results, expected, strict=True):
        scale = cpu.abs().max().item()
        torch.testing.assert_close(ours.cpu(), cpu, rtol=0, atol=scale * 8 * torch.finfo(dtype).eps)


@pytest.mark.sanitizer
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row_strided_aligned", "offset", "expanded"])
def test_every_kernel_path_strided(layout):
    for name in ("rms_norm", "add_rms_norm", "swiglu"):
        case = case_named(name)
        *rows, last = case.inputs(4, 64, torch.float16)
        inputs = *(laid_out(t, layout) for t in rows), last
        ours = tensors(case.ours(*(laid_out(t.cuda(), layout) for t in rows), last.cuda()))
        for a, b in zip(ours, tensors(case.ours(*inputs)), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=2e-3)


@pytest.mark.sanitizer
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row_strided", "offset", "expanded"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "softmax"])
def test_every_kernel_path_of_rows_that_are_not_aligned(name, layout):
    """Forward and backward, also where rows have no others behind them that a vector may end in."""
    case = case_named(name)
    inputs = case.inputs(5, 1001, torch.bfloat16)
    grad_outputs = case.grad_outputs(inputs)
    results = []
    for device in ("cpu", "cuda"):
        some = [
            [laid_out(t.to(device), layout) if t.dim() == 2 else t.to(device) for t in given]
            for given in (inputs, grad_outputs)
        ]
        results.append(case.differentiate(*some))
    for expected, found in zip(*results, strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=scale * 8 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.sanitizer
@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 3])  # vectors, single elements
def test_every_kernel_path_lora(rank):
    """Of sizes for which no product of cuBLAS runs: without rows, and without columns."""
    for rows, columns in ((0, 200), (300, 0)):
        x = torch.randn(rows, columns).bfloat16()
        a, b = torch.randn(rank, columns), torch.randn(columns, rank)
        found = []
        for device in ("cpu", "cuda"):
            inputs = [t.to(device) for t in (x, x, a, b)]
            y, *parts = torch.ops.llmkernels.add_lora(*inputs, 0.5, True)
            options = 0.5, True, True, True, True
            grads = torch.ops.llmkernels.lora_linear_backward(y, inputs[1], None, *inputs[2:], *parts, *options)
            found.append(tuple(t.cpu() for t in (y, *parts, *grads)))
        assert_same(*found)


@pytest.mark.sanitizer
@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_every_kernel_path_rope_positions(inplace):
    q, k, cos, sin, ids = case_named("rope_positions").inputs(6, 64, torch.bfloat16)
    half = cos[:, :16].contiguous(), sin[:, :16].contiguous()
    options = {"layout": "bhtd", "rotary_dim": 32, "interleaved": True, "inplace": inplace}
    expected = llmkernels.rope(q.clone(), k.clone(), *half, ids, **options)
    ours = llmkernels.rope(*(t.cuda() for t in (q, k, *half, ids)), **options)
    assert_same(tuple(t.cpu() for t in ours), expected)
