"""Short Triton kernels of ours, for the head to head of Triton and CUDA C++; the package does not use them.

They read every input once and write every output once, compute in float32, and take contiguous rows. RoPE takes
(B, H, T, D) views of contiguous (B, T, H, D) memory.
"""

import torch
import triton
import triton.language as tl


def warps(block: int) -> int:
    """About sixteen elements a thread: two 16-byte loads of half precision in flight per tensor."""
    return min(max(block // 512, 4), 16)


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    offsets = tl.program_id(0).to(tl.int64) * n + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + offsets, x, mask=inside)
    wide = x.to(tl.float32)
    normalized = wide * tl.rsqrt(tl.sum(wide * wide, 0) / n + eps)
    rounded = normalized.to(x.dtype).to(tl.float32)
    tl.store(y_ptr + offsets, (rounded * weight).to(x.dtype), mask=inside)


def rms_norm(x, weight, eps):
    y = torch.empty_like(x)
    rows, n = x.numel() // x.shape[-1], x.shape[-1]
    block = triton.next_power_of_2(n)
    rms_norm_kernel[(rows,)](x, None, weight, y, None, n, eps, ADD=False, BLOCK=block, num_warps=warps(block))
    return y


def add_rms_norm(x, residual, weight, eps):
    y, total = torch.empty_like(x), torch.empty_like(x)
    rows, n = x.numel() // x.shape[-1], x.shape[-1]
    block = triton.next_power_of_2(n)
    rms_norm_kernel[(rows,)](x, residual, weight, y, total, n, eps, ADD=True, BLOCK=block, num_warps=warps(block))
    return y, total


@triton.jit
def rms_norm_backward_kernel(
    grad_y_ptr, grad_sum_ptr, x_ptr, weight_ptr, grad_x_ptr, partial_ptr, rows, n, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A fixed number of programs walks over the rows; each keeps its part of grad_weight in registers.
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * n + columns
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        grad_y = tl.load(grad_y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / n + eps)
        normalized = wide * scale
        grad_weight += grad_y * normalized.to(x.dtype).to(tl.float32)
        grad = grad_y * weight
        grad_x = scale * (grad - normalized * (tl.sum(grad * normalized, 0) / n))
        if ADD:
            grad_x += tl.load(grad_sum_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x.to(x.dtype), mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * n + columns, grad_weight, mask=inside)


@triton.jit
def column_sum_kernel(partial_ptr, out_ptr, rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < n)[None, :]
        total += tl.load(partial_ptr + row[:, None] * n + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=columns < n)


def rms_norm_backward(grad_y, grad_sum, x, weight, eps):
    rows, n = x.numel() // x.shape[-1], x.shape[-1]
    block = triton.next_power_of_2(n)
    programs = min(rows, 2 * multiprocessors(x.device))
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    partial = torch.empty(programs, n, dtype=torch.float32, device=x.device)
    rms_norm_backward_kernel[(programs,)](
        grad_y, grad_sum, x, weight, grad_x, partial, rows, n, eps,
        ADD=grad_sum is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    column_sum_kernel[(triton.cdiv(n, 32),)](partial, grad_weight, programs, n, ROWS=64, COLUMNS=32, num_warps=4)
    return grad_x, grad_weight


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def rotate_heads(
    in_ptr, out_ptr, token, cos, sin, HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    heads = tl.arange(0, PADDED)[:, None]
    offsets = (token * HEADS + heads) * (2 * HALF) + tl.arange(0, HALF)[None, :]
    inside = heads < HEADS
    first = tl.load(in_ptr + offsets, mask=inside, other=0.0)
    second = tl.load(in_ptr + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = first.dtype
    first = first.to(tl.float32)
    tl.store(out_ptr + offsets, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(out_ptr + offsets + HALF, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_PADDED: tl.constexpr,
    HALF: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angles = (token % tokens) * (2 * HALF) + tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + angles).to(tl.float32)
    sin = tl.load(sin_ptr + angles).to(tl.float32)
    if INVERSE:
        sin = -sin
    rotate_heads(q_ptr, q_out_ptr, token, cos, sin, Q_HEADS, Q_PADDED, HALF)
    rotate_heads(k_ptr, k_out_ptr, token, cos, sin, K_HEADS, K_PADDED, HALF)


def rope(q, k, cos, sin, inverse=False):
    batch, q_heads, tokens, head_dim = q.shape
    k_heads = k.shape[1]
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)  # keeps the memory order
    rope_kernel[(batch * tokens,)](
        q, k, cos, sin, q_out, k_out, tokens,
        Q_HEADS=q_heads, K_HEADS=k_heads, Q_PADDED=triton.next_power_of_2(q_heads),
        K_PADDED=triton.next_power_of_2(k_heads), HALF=head_dim // 2, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """The activation and its derivative."""
    if GELU:  # the tanh approximation; 0.5 * (1 + tanh(z)) = sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    else:
        inner = gate
        slope = 1.0
    sigmoid = tl.sigmoid(inner)
    value = gate * sigmoid
    return value, sigmoid + value * (1.0 - sigmoid) * slope


@triton.jit
def glu_kernel(gate_ptr, up_ptr, y_ptr, columns, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = column < columns
    gate = tl.load(gate_ptr + row * stride + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = activate(gate.to(tl.float32), GELU)
    rounded = value.to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * columns + column, (rounded * up).to(gate.dtype), mask=inside)


@triton.jit
def glu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, total, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    value, derivative = activate(gate.to(tl.float32), GELU)
    tl.store(grad_gate_ptr + index, (grad * up * derivative).to(gate.dtype), mask=inside)
    tl.store(grad_up_ptr + index, (grad * value).to(gate.dtype), mask=inside)


def glu(gate, up=None, *, activation):
    if up is None:  # packed [gate | up]
        columns = gate.shape[-1] // 2
        y = torch.empty(*gate.shape[:-1], columns, dtype=gate.dtype, device=gate.device)
        up, rows, stride = gate[..., columns:], y.numel() // columns, 2 * columns
    else:
        y = torch.empty_like(gate)
        columns, rows, stride = y.numel(), 1, 0  # rows do not matter: one long row
    grid = (triton.cdiv(columns, 1024), rows)
    glu_kernel[grid](gate, up, y, columns, stride, GELU=activation == "gelu", BLOCK=1024, num_warps=4)
    return y


def glu_backward(grad_y, gate, up, *, activation):
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    total = gate.numel()
    glu_backward_kernel[(triton.cdiv(total, 1024),)](
        grad_y, gate, up, grad_gate, grad_up, total, GELU=activation == "gelu", BLOCK=1024, num_warps=4
    )
    return grad_gate, grad_up


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + block, tl.sum(tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK)), 0))


def read(x, out, block=8192):
    """Reads all of the int32 tensor `x` and writes next to nothing: the read bandwidth's numerator."""
    read_kernel[(x.numel() // block,)](x, out, BLOCK=block, num_warps=8)
