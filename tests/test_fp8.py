"""fp8_quantize, rms_norm_fp8_quantize and swiglu_fp8_quantize: exactness, scales, layouts, special values."""

import pytest
import torch

import oracles
from llmkernels import fp8_quantize, rms_norm, rms_norm_fp8_quantize, swiglu, swiglu_fp8_quantize
from oracles import DEVICES, DTYPES, LAYOUTS, SHAPES, assert_same, laid_out

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
GRANULARITIES = ["token", "block", "tensor"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_format = pytest.mark.parametrize("fp8_dtype", FORMATS, ids=str)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


def make(rows, cols, dtype, device):
    """Magnitudes over many binades, so that every code of FP8 occurs, subnormals among them."""
    x = torch.randn(rows, cols, device=device) * torch.exp2(torch.rand(rows, cols, device=device) * 24 - 20)
    return (x * torch.exp2(torch.rand(rows, 1, device=device) * 8 - 4)).to(dtype)


def quantized(x, granularity="token", fp8_dtype=torch.float8_e4m3fn, power_of_two=False):
    """The formula, in torch."""
    wide, largest = x.float(), torch.finfo(fp8_dtype).max
    rows, cols = x.shape
    blocks = -(-cols // 128)
    if granularity == "token":
        amax = wide.abs().amax(-1, keepdim=True) if cols else wide.new_zeros(rows, 1)
    elif granularity == "tensor":
        amax = wide.abs().max() if wide.numel() else wide.new_zeros(())
    else:
        padded = torch.nn.functional.pad(wide.abs(), (0, 128 * blocks - cols))
        amax = padded.view(rows, blocks, 128).amax(-1)
    scale = amax.cpu() / largest  # on a GPU torch would multiply by the rounded reciprocal
    scale = torch.where(scale < 2**-126, 2**-126, scale)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        rounded = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = torch.where(scale.isfinite(), rounded, scale)
    scale, inverse = scale.to(x.device), (1 / scale).to(x.device)
    if granularity == "block":
        inverse = inverse.repeat_interleave(128, -1)[:, :cols]
    return (wide * inverse).clamp(-largest, largest).to(fp8_dtype), scale


def assert_equal(found, expected):
    """The codes bit for bit, but for the sign of NaN."""
    (q, scale), (expected_q, expected_scale) = found, expected
    assert q.dtype == expected_q.dtype and q.shape == expected_q.shape and q.is_contiguous()
    assert_same(scale, expected_scale, "scale")
    nans = expected_q.float().isnan()
    assert torch.equal(q.float().isnan(), nans)
    codes = [t.view(torch.uint8).masked_fill(nans, 0) for t in (q, expected_q)]
    assert torch.equal(*codes), f"{(codes[0] != codes[1]).sum()} codes differ"


@every_dtype
@every_granularity
@pytest.mark.parametrize("device, rows, cols", SHAPES)
def test_equals_the_cast_of_torch(device, rows, cols, granularity, dtype):
    x = make(rows, cols, dtype, device)
    for fp8_dtype in FORMATS:
        found = fp8_quantize(x, granularity=granularity, fp8_dtype=fp8_dtype)
        assert_equal(found, quantized(x, granularity, fp8_dtype))


# Both sides of every limit of the launch plans: lanes, one to eight vectors per thread, groups read twice.
LENGTHS = [16, 120, 136, 256, 264, 512, 1024, 1032, 4096, 8192, 8200, 16384, 16392, 32768, 32776, 65536, 65544, 152064]
# The same for rows that are not aligned.
LENGTHS += [*range(1, 20), 63, 129, 135, 255, 257, 1001, 4095, 4097, 16381, 32767, 32769, 50257, 131071]


@every_dtype
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 3, cols) for cols in (1023, 1024, 1025, 16400)]
    + [("cuda", rows, cols) for rows in (1, 3, 700) for cols in LENGTHS if "cuda" in DEVICES and rows * cols < 2e7],
)
def test_row_lengths(device, rows, cols, dtype):
    x = make(rows, cols, dtype, device)
    for granularity in GRANULARITIES:
        assert_equal(fp8_quantize(x, granularity=granularity), quantized(x, granularity))


@every_dtype
@every_granularity
@pytest.mark.parametrize("cols", [1, 5, 20, 127, 130, 1001, 4096, 4099])
def test_any_alignment(device, cols, granularity, dtype):
    """A row has the same bits wherever it starts, and nothing beside it is read as a part of it."""
    for rows in (7, 300) if device == "cuda" else (7,):  # many rows have a kernel of their own
        check_any_alignment(device, rows, cols, granularity, dtype)


def check_any_alignment(device, rows, cols, granularity, dtype):
    x, up = make(rows, cols, dtype, device), torch.randn(rows, cols, device=device).to(dtype)
    expected = quantized(x, granularity), fp8_quantize(swiglu(x, up), granularity=granularity)
    for offset in range(9):
        view, other = (
            x.new_full((rows * (cols + gap) + 16,), float("nan")).as_strided((rows, cols), (cols + gap, 1), start)
            for start, gap in ((offset, 1), ((3 * offset + 1) % 8, offset))
        )
        assert_equal(fp8_quantize(view.copy_(x), granularity=granularity), expected[0])
        assert_equal(swiglu_fp8_quantize(view, other.copy_(up), granularity=granularity), expected[1])


@every_format
@every_granularity
def test_powers_of_two(device, granularity, fp8_dtype):
    x = make(65, 300, torch.bfloat16, device)
    x[0] = torch.finfo(fp8_dtype).max * 2.0**-9  # a quotient that is one already
    q, scale = found = fp8_quantize(x, granularity=granularity, fp8_dtype=fp8_dtype, power_of_two=True)
    assert_equal(found, quantized(x, granularity, fp8_dtype, power_of_two=True))
    assert (torch.frexp(scale)[0] == 0.5).all()
    plain = fp8_quantize(x, granularity=granularity, fp8_dtype=fp8_dtype)[1]
    assert (scale >= plain).all() and (scale < 2 * plain).all()
    if granularity == "token":
        assert scale[0] == 2.0**-9 and (q[0].float() == torch.finfo(fp8_dtype).max).all()


@pytest.mark.parametrize("fp8_dtype, bits", [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)], ids=str)
def test_error(device, fp8_dtype, bits):
    """Half a unit in the last place, for what is not subnormal."""
    x = torch.randn(9, 640, device=device)
    for granularity in ("token", "tensor"):
        q, scale = fp8_quantize(x, granularity=granularity, fp8_dtype=fp8_dtype)
        error = (q.double() * scale - x).abs()
        assert (error <= (2.0 ** -(bits + 1) * x.abs()).clamp_min(1e-3 * x.abs().max()) * 1.0001).all()


@every_format
def test_every_code_is_a_fixed_point(device, fp8_dtype):
    """Numbers of FP8 with a scale of one: all 256 of them, ties between neighbours to even, and what saturates."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(fp8_dtype)
    finite = codes.float()[codes.float().isfinite()]
    largest = finite.max()
    q, scale = fp8_quantize(finite[None], fp8_dtype=fp8_dtype)
    assert scale.item() == 1
    assert torch.equal(q[0].float(), finite)
    positive = finite[finite >= 0].unique()
    ties = torch.cat(((positive[1:] + positive[:-1]) / 2, largest[None]))
    for x in (ties, -ties, ties * (1 + 2**-20), ties * (1 - 2**-20)):
        x = torch.cat((x.clamp(-largest, largest), largest[None]))
        assert torch.equal(fp8_quantize(x, fp8_dtype=fp8_dtype)[0].float(), x.to(fp8_dtype).float())


@every_dtype
@pytest.mark.parametrize("cols", [256, 255, 20000])
def test_special_values(device, cols, dtype):
    x = make(8 if device == "cpu" else 300, cols, dtype, device)
    x[0, 5], x[1, 7], x[2, 100] = float("inf"), float("-inf"), float("nan")
    x[3], x[4] = 0, -0.0
    x[5, -1] = torch.finfo(dtype).max
    x[6] = torch.finfo(dtype).smallest_normal / 4  # subnormal
    x[7, 3:] = 0
    for granularity in ("token", "block"):
        for power_of_two in (False, True):
            found = fp8_quantize(x, granularity=granularity, power_of_two=power_of_two)
            assert_equal(found, quantized(x, granularity, power_of_two=power_of_two))
    q, scale = fp8_quantize(x)
    product = q.float() * scale
    assert product[:3].isnan().all() and product[3:].isfinite().all()
    assert (scale[3:] >= 2**-126).all() and (product[3:5] == 0).all()
    assert fp8_quantize(x, granularity="tensor")[1].isnan()
    assert fp8_quantize(x[:2], granularity="tensor")[1] == float("inf")
    assert_equal(fp8_quantize(x[3:], granularity="tensor"), quantized(x[3:], "tensor"))


@every_dtype
@every_granularity
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [192, 99])
def test_layouts(device, layout, cols, granularity, dtype):
    x = laid_out(make(9, cols, dtype, device), layout)
    assert_equal(fp8_quantize(x, granularity=granularity), quantized(x.contiguous(), granularity))


@every_granularity
@pytest.mark.parametrize("shape", [(6,), (2, 3, 300), (2, 0, 6), (3, 0), (0, 0), (2, 1, 2, 1, 130)], ids=str)
def test_any_leading_shape(device, shape, granularity):
    x = torch.randn(shape, device=device)
    q, scale = fp8_quantize(x, granularity=granularity)
    cols, rows = shape[-1], x[..., 0].numel() if shape[-1] else torch.Size(shape[:-1]).numel()
    matrix, of_matrix = fp8_quantize(x.reshape(rows, cols), granularity=granularity)
    assert q.shape == x.shape and torch.equal(q.view(rows, cols).float(), matrix.float())
    groups = {"token": (1,), "block": (-(-cols // 128),)}.get(granularity)
    assert scale.shape == ((*shape[:-1], *groups) if groups else ())
    assert_same(scale.reshape(of_matrix.shape), of_matrix)
    if granularity == "block" and x.numel():
        assert of_matrix.stride() == (1, rows) and scale.view(rows, -1).stride() == (1, rows)


def test_float64_is_rounded_first():
    x = torch.randn(5, 100, dtype=torch.float64)
    assert_equal(fp8_quantize(x), fp8_quantize(x.float()))


NORMS = [{}, {"weight_offset": 1.0, "cast_before_weight": False}, {"eps": 0.5}]


@every_dtype
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 5, 300)]
    + [("cuda", rows, cols) for rows in (5, 700) for cols in (7, 8, 128, 136, 264, 1024, 1032, 3584, 8192, 16384, 18944)
       if "cuda" in DEVICES],
)  # fmt: skip
def test_behind_rms_norm(device, rows, cols, dtype):
    x, weight = oracles.scaled_rows(rows, cols, dtype=dtype, device=device), torch.randn(cols, device=device).to(dtype)
    for options in NORMS:
        for given in (weight, None):
            y = rms_norm(x, given, **options)
            for granularity in GRANULARITIES:
                found = rms_norm_fp8_quantize(x, given, **options, granularity=granularity)
                assert_equal(found, fp8_quantize(y, granularity=granularity))
    found = rms_norm_fp8_quantize(x, weight, fp8_dtype=torch.float8_e5m2, power_of_two=True)
    assert_equal(found, fp8_quantize(rms_norm(x, weight), fp8_dtype=torch.float8_e5m2, power_of_two=True))


def test_behind_rms_norm_with_a_weight_of_another_dtype(device):
    x, weight = torch.randn(5, 96, device=device).bfloat16(), torch.randn(96, device=device)
    assert_equal(rms_norm_fp8_quantize(x, weight), fp8_quantize(rms_norm(x, weight)))


# Rows in registers, rows read twice (beyond 20480 elements of 16 bits), and those that are not aligned.
WIDTHS = [7, 8, 128, 136, 1032, 4096, 18944, 20480, 20488, 28672, 32768, 40000, 53248]
WIDTHS += [1, 15, 129, 1001, 4097, 11009, 20479, 20481, 53249]


@every_dtype
@pytest.mark.parametrize(
    "device, rows, cols",
    [("cpu", 5, 300)] + [("cuda", rows, cols) for rows in (5, 700) for cols in WIDTHS if "cuda" in DEVICES],
)
def test_behind_swiglu(device, rows, cols, dtype):
    packed = torch.randn(rows, 2 * cols, device=device).mul_(2).to(dtype)
    gate, up = packed.chunk(2, -1)
    y = swiglu(gate, up)
    for granularity in GRANULARITIES:
        expected = fp8_quantize(y, granularity=granularity)
        assert_equal(swiglu_fp8_quantize(gate, up, granularity=granularity), expected)
        assert_equal(swiglu_fp8_quantize(packed, granularity=granularity), expected)
    found = swiglu_fp8_quantize(gate, up, fp8_dtype=torch.float8_e5m2, power_of_two=True)
    assert_equal(found, fp8_quantize(y, fp8_dtype=torch.float8_e5m2, power_of_two=True))


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("cols", [4096, 18944, 20488, 28672, 53248, 200_000])
def test_aligned_rows_behind_swiglu_take_one_kernel(cols, granularity, dtype):
    """Of any length: those of Llama-70B (28672) and Llama-405B (53248) took two."""
    gate, up = torch.randn(2, 5, cols, device="cuda").to(dtype)
    swiglu_fp8_quantize(gate, up, granularity=granularity)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        swiglu_fp8_quantize(gate, up, granularity=granularity)
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cols", [192, 99])
def test_layouts_behind_others(device, layout, cols):
    x, y = (laid_out(torch.randn(9, cols, device=device).bfloat16(), layout) for _ in range(2))
    weight = laid_out(torch.randn(1, cols, device=device).bfloat16(), layout)[0]
    for granularity in GRANULARITIES:
        found = swiglu_fp8_quantize(x, y, granularity=granularity)
        assert_equal(found, fp8_quantize(swiglu(x.contiguous(), y.contiguous()), granularity=granularity))
        found = rms_norm_fp8_quantize(x, weight, granularity=granularity)
        assert_equal(found, fp8_quantize(rms_norm(x, weight), granularity=granularity))


CALLS = {
    "fp8_quantize": lambda x, **options: fp8_quantize(x, **options),
    "rms_norm_fp8_quantize": lambda x, **options: rms_norm_fp8_quantize(x, x[0], **options),
    "swiglu_fp8_quantize": lambda x, **options: swiglu_fp8_quantize(x, x.flip(-1), **options),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@every_call
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("cols", [896, 3584, 1001])
def test_a_row_alone_has_the_bits_of_one_in_a_batch(device, cols, granularity, call):
    x = make(900, cols, torch.bfloat16, device)
    q, scale = call(x, granularity=granularity)
    weight_first = call is CALLS["rms_norm_fp8_quantize"]
    for row in (0, 77, 899):
        alone = rms_norm_fp8_quantize(x[row : row + 1], x[0], granularity=granularity) if weight_first else call(
            x[row : row + 1], granularity=granularity
        )  # fmt: skip
        assert_equal(alone, (q[row : row + 1], scale[row : row + 1]))


@every_call
@every_granularity
def test_same_bits_every_time(device, granularity, call):
    x = make(300, 2048, torch.bfloat16, device)
    expected = call(x, granularity=granularity)
    for _ in range(50 if device == "cuda" else 3):
        assert_equal(call(x, granularity=granularity), expected)


def outputs_are_written(device):
    """Every kernel path, into memory full of NaN; on a GPU also a selection for compute-sanitizer."""
    shapes = [(5, cols) for cols in (64, 63, 136, 1001, 3584, 4095, 8200, 16384, 18944, 33001, 66000)]
    for rows, cols in [*shapes, (300, 131), (300, 4099)]:
        x = make(rows, cols, torch.bfloat16, device)
        for call in CALLS.values():
            for granularity in GRANULARITIES:
                expected = call(x, granularity=granularity)
                torch.use_deterministic_algorithms(True)
                try:
                    found = call(x, granularity=granularity)
                finally:
                    torch.use_deterministic_algorithms(False)
                assert not found[0].float().isnan().any() and not found[1].isnan().any()
                assert_equal(found, expected)


def test_every_output_element_is_written(device):
    outputs_are_written(device)


@pytest.mark.sanitizer
@pytest.mark.gpu
def test_every_kernel_path():
    outputs_are_written("cuda")


@pytest.mark.gpu
@every_call
@every_granularity
def test_in_a_graph(granularity, call):
    x = make(300, 2048, torch.bfloat16, "cuda")
    call(x, granularity=granularity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(x, granularity=granularity)
    x.copy_(make(300, 2048, torch.bfloat16, "cuda"))
    graph.replay()
    assert_equal(found, call(x, granularity=granularity))


@pytest.mark.large(20)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_more_than_2_31_elements(granularity):
    rows, cols = 70000, 32768
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(cols, device="cuda")
    q, scale = fp8_quantize(x, granularity=granularity)
    expected_q, expected_scale = quantized(x[-1:], granularity)
    assert torch.equal(q[-1:].view(torch.uint8), expected_q.view(torch.uint8))
    assert_same(scale if granularity == "tensor" else scale[-1:], expected_scale)
    assert (q[-2].float() == 0).all() and (q[0].float() == 0).all()
