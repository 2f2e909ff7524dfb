"""llmkernels.profile and `python -m llmkernels profile`: where the time of a model goes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.autograd import DeviceType

import llmkernels
from generating import hf_generate, small_model
from hf_models import tiny_inputs
from llmkernels import __main__
from llmkernels.profiling import limits as limits_module
from llmkernels.profiling.kernels import KINDS, kind_of, kind_of_module, owner_of, short_name
from llmkernels.profiling.limits import Rates, limits_ms
from llmkernels.profiling.timing import PREFILL, STEP, Run, _busy_ms, _kernels

NEW = 3
WAYS = ["unpatched", "patched"]
CSRC = Path(__file__).parent.parent / "csrc"


@pytest.fixture(autouse=True, scope="module")
def rates_of_no_device():
    """Measuring them takes longer than all else here; one test does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmkernels.profiling.measure_rates", lambda device, dtype: Rates(1e10, 1e11))
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def found(request):
    model = small_model(device=request.param, dtype=torch.float32 if request.param == "cpu" else torch.bfloat16)
    result = llmkernels.profile(model, tiny_inputs(request.param, 2), new_tokens=NEW)
    assert not hasattr(type(model), "original")  # unpatched again
    return result


def test_both_ways_and_phases(found):
    assert [(call.phase, call.way) for call in found.calls] == [
        (phase, way) for phase in (PREFILL, STEP) for way in WAYS
    ]
    assert (found.model, found.batch, found.tokens, found.not_patched) == ("Qwen2ForCausalLM", 2, 11, None)
    for call in found.calls:
        rows = [row for row in found.rows if (row.phase, row.way) == (call.phase, call.way)]
        assert rows == sorted(rows, key=lambda row: -row.time_ms)
        assert {row.kind for row in rows} <= {*KINDS} - {"training"}
        assert "product" in {row.kind for row in rows}
        assert all(row.time_ms >= 0 and row.launches > 0 and row.kernel for row in rows)
        assert 0 < sum(row.limit_ms for row in rows) <= call.limit_ms
        assert call.phase == STEP or call.wall_ms > 0
        assert 0 < call.busy_ms <= sum(row.time_ms for row in rows) + 1e-6
        assert call.idle_ms == max(0.0, call.wall_ms - call.busy_ms)


def test_kernels_are_ours_in_the_patched_model_alone(found):
    owners = {way: {row.owner for row in found.rows if row.way == way} for way in WAYS}
    assert "llmkernels" in owners["patched"] - owners["unpatched"]
    assert found.find(STEP, "patched", "attention").owner == "llmkernels"


def test_elementwise_kernels_are_of_the_modules_that_launch_them(found):
    """Eager PyTorch has no kernel with the name of an RMSNorm or a rotation."""
    for phase in (PREFILL, STEP):
        for kind in ("norm", "rotation", "activation"):
            assert found.find(phase, "unpatched", kind).owner == "PyTorch"


def test_hooks_are_gone(found):
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


def test_limits_are_of_what_the_model_multiplies(device):
    """Twice the batch are twice the operations where the rate limits; where bytes do, they are those of the weights."""
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    with torch.no_grad():
        by_rate = [limits_ms(model, x, Rates(1e30, 1e9))[PREFILL]["product"] for x in (ids, ids.repeat(2, 1))]
        by_bytes = limits_ms(model, ids[:, :1], Rates(1e9, 1e30))[STEP]["product"]
    assert by_rate[1] == pytest.approx(2 * by_rate[0], rel=1e-3)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    layers = sum(module.weight.numel() for name, module in linears.items() if name != "lm_head")
    tokens, head = ids.numel(), model.lm_head.weight.numel()
    operations = 2 * layers * tokens + 2 * head * len(ids)
    assert by_rate[0] == pytest.approx(operations / 1e6, rel=1e-3 if device == "cpu" else 0.1)
    weights = sum(module.weight.nbytes for module in linears.values())
    assert weights / 1e6 < by_bytes < 1.2 * weights / 1e6


@pytest.mark.parametrize("shown", ["causal", "window"])
def test_limits_of_attention_count_the_keys_that_a_query_sees(shown):
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8)
    place = torch.arange(16)
    mask = (place[None] <= place[:, None]) & (place[None] > place[:, None] - (4 if shown == "window" else 16))
    with torch.no_grad(), limits_module._Counted(Rates(1e30, 1e9)) as counted:
        options = {"is_causal": True} if shown == "causal" else {"attn_mask": mask}
        torch.nn.functional.scaled_dot_product_attention(q, k, k, **options)
    assert counted.ms["attention"] == pytest.approx(4 * 2 * 4 * 8 * int(mask.sum()) / 1e6)


def test_limits_of_experts_count_those_with_tokens():
    x, weights = torch.randn(16, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    ends = torch.tensor([4, 4, 16, 16], dtype=torch.int32)
    found = []
    for rates in (Rates(1e30, 1e9), Rates(1e9, 1e30)):
        with torch.no_grad(), limits_module._Counted(rates) as counted:
            y = torch._grouped_mm(x, weights, offs=ends)
        found.append(counted.ms["product"])
    assert found[0] == pytest.approx(2 * 16 * 64 * 32 / 1e6)
    assert found[1] == pytest.approx((x.nbytes + weights.nbytes / 2 + y.nbytes) / 1e6, rel=1e-2)


def test_rates(device):
    rates = limits_module.measure_rates(torch.device(device), torch.float32)
    assert 1e8 < rates.bandwidth < 2e13
    assert 1e8 < rates.operations < 1e16


def test_a_patched_model_stays_as_it_is():
    """It is measured unpatched as well, on a copy; its handle still undoes the patch, and its options are the same."""
    model, ids = small_model(), tiny_inputs()
    before = hf_generate(model, ids)
    with llmkernels.patch(model, rope=False, decode=False) as handle:
        classes = [type(module) for module in model.modules()]
        found = llmkernels.profile(model, ids, new_tokens=NEW)
        assert [type(module) for module in model.modules()] == classes
        assert not handle.report()["rope"].patched and handle.report()["rms_norm"].patched
    assert found.model == "Qwen2ForCausalLM"
    assert found.find(PREFILL, "patched", "norm").owner == "llmkernels"
    assert {row.owner for row in found.rows if row.way == "unpatched"} == {"PyTorch"}
    assert not hasattr(type(model), "original")
    assert torch.equal(hf_generate(model, ids), before)


def test_packed_weights_stay_packed():
    model, ids = small_model(), tiny_inputs()
    with llmkernels.patch(model):
        hf_generate(model, ids)
        places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        values = {name: parameter.clone() for name, parameter in model.named_parameters()}
        llmkernels.profile(model, ids, new_tokens=NEW)
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() == places[name]
            assert torch.equal(parameter, values[name])


def test_a_model_with_nothing_to_patch(monkeypatch):
    def refuse(model):
        raise ValueError("patch: nothing to patch")

    monkeypatch.setattr("llmkernels.profiling.patch", refuse)
    found = llmkernels.profile(small_model(), tiny_inputs(), new_tokens=NEW)
    assert {call.way for call in found.calls} == {row.way for row in found.rows} == {"unpatched"}
    assert found.not_patched == "patch: nothing to patch" and found.not_patched in str(found)


def test_layers_that_are_no_linear():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100)
    model = transformers.GPT2LMHeadModel(config).eval()
    kernels = set()
    for _ in range(3):  # that of the longest time, which on a busy machine may be any
        found = llmkernels.profile(model, torch.ones(1, 8, dtype=torch.long), new_tokens=NEW)
        assert found.find(PREFILL, "unpatched", "product").limit_ms > 0
        kernels.add(found.find(PREFILL, "unpatched", "norm").kernel)
        if kernels & {"layer_norm", "native_layer_norm"}:
            return
    pytest.fail(f"norms by {kernels}")


def test_text_picture_and_json(found, tmp_path):
    text = str(found)
    for word in (
        PREFILL,
        STEP,
        "product",
        "rotation, cache write",
        "wall time",
        *WAYS,
        "left to win",
    ):
        assert word in text
    norm = found.find(PREFILL, "patched", "norm")
    assert norm.owner == "llmkernels" and f"llmkernels {norm.kernel}" in text
    data = json.loads(found.to_json())
    assert [row["kind"] for row in data["rows"]] == [row.kind for row in found.rows]
    assert [call["idle_ms"] for call in data["calls"]] == [call.idle_ms for call in found.calls]
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 1000


def test_kernels_of_a_gpu_are_linked_to_modules_by_the_profiler():
    """As torch.profiler gives them: an op on the CPU knows what it launched, by name and duration."""

    def event(name, launched=(), parent=None, gpu=False, start=0.0, end=1.0, annotation=False):
        kind = DeviceType.CUDA if gpu else DeviceType.CPU
        kernels = [SimpleNamespace(name=name, duration=duration) for name, duration in launched]
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            name=name, kernels=kernels, cpu_parent=parent, device_type=kind, time_range=span,
            is_user_annotation=annotation,
        )  # fmt: skip

    scope = event("llmkernels.profile: norm", [("llmkernels.profile: norm", 9.0)], annotation=True)
    events = [
        scope,
        event("aten::mul", [("elementwise", 2.0)], parent=event("aten::foo", parent=scope)),
        event("aten::add", [("elementwise", 3.0)]),
        event("llmkernels.profile: norm", gpu=True, start=0.0, end=9.0, annotation=True),
        event("elementwise", gpu=True, start=1.0, end=3.0),
        event("elementwise", gpu=True, start=4.0, end=7.0),
        event("elementwise", gpu=True, start=8.0, end=10.0),  # of a graph
    ]
    assert [(run.kind, run.time_us) for run in _kernels(events)] == [("norm", 2.0), ("other", 3.0), ("other", 2.0)]


def test_busy_time_counts_overlapping_kernels_once():
    spans = [(0, 4), (3, 6), (5, 9), (7, 8), (20, 21)]
    runs = [Run("other", "", start, end - start) for start, end in spans]
    assert _busy_ms(runs, torch.device("cuda")) == 10 / 1e3
    assert _busy_ms(runs, torch.device("cpu")) == 13 / 1e3


def test_a_step_has_the_ops_of_a_step():
    """One argmax and the attention of each layer, in both ways, and nothing of the prompt."""
    found = llmkernels.profile(small_model(), tiny_inputs(tokens=20), new_tokens=8)
    for way in WAYS:
        assert found.find(STEP, way, "sampling").launches == 1
    assert found.find(STEP, "patched", "attention").launches == 2
    assert found.find(STEP, "patched", "attention").kernel == "rope_decode_attention"
    assert found.find(STEP, "patched", "norm") is None


@pytest.mark.parametrize(
    ("name", "kind", "owner", "short"),
    [
        (
            "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
            "product",
            "cuBLAS",
            "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        ),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
            "product",
            "cuBLAS",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8>"
            "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8::Params)",
            "product",
            "cuBLAS",
            "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, "
            "false, true, true, false, 6, false, cublasGemvParamsEx<int> >(cublasGemvParamsEx<int>)",
            "product",
            "cuBLAS",
            "gemvx::kernel",
        ),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)",
            "product",
            "cuBLAS",
            "splitKreduce_kernel",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
            "attention",
            "cuDNN",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        ),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
            "cutlass::bfloat16_t>, false, true>(pytorch_flash::Flash_fwd_params)",
            "attention",
            "PyTorch",
            "flash_fwd_kernel",
        ),
        (
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
            "attention",
            "PyTorch",
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
            "other",
            "PyTorch",
            "vectorized_elementwise_kernel",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel("
            "at::TensorIteratorBase&)::{lambda()#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
            "activation",
            "PyTorch",
            "vectorized_elementwise_kernel",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::"
            "OpaqueType<2u>, unsigned int, 4, 64, 64>(at::native::(anonymous namespace)::OpaqueType<2u>*)",
            "copies",
            "PyTorch",
            "CatArrayBatchedCopy_contig",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned "
            "int, long, 4, 4> >(at::native::ReduceOp<float, at::native::ArgMaxOps<float> >)",
            "sampling",
            "PyTorch",
            "reduce_kernel",
        ),
        ("triton_poi_fused_mul_silu_3", "activation", "Triton", "triton_poi_fused_mul_silu_3"),
        ("triton_tem_fused_addmm_0", "product", "Triton", "triton_tem_fused_addmm_0"),
        (
            "triton_red_fused__to_copy_mean_mul_pow_rsqrt_2",
            "norm",
            "Triton",
            "triton_red_fused__to_copy_mean_mul_pow_rsqrt_2",
        ),
        (
            "void llmk::kernels::gemm::(anonymous namespace)::gemm_kernel<__nv_bfloat16, 256, true>(CUtensorMap, "
            "CUtensorMap, llmk::kernels::gemm::Arguments)",
            "product",
            "llmkernels",
            "gemm_kernel",
        ),
        (
            "void llmk::kernels::linear::linear_kernel<llmk::kernels::RmsNorm, llmk::kernels::Swiglu, 64>(int)",
            "product",
            "llmkernels",
            "linear_kernel",
        ),
        (
            "void llmk::kernels::flash_attention_sm90_kernel<__nv_bfloat16, 128, true>(llmk::FlashAttentionParams)",
            "attention",
            "llmkernels",
            "flash_attention_sm90_kernel",
        ),
        (
            "void llmk::kernels::norm::norm_kernel<__half, 8, (llmk::kernels::Sum)1>(llmk::NormParams, float)",
            "norm",
            "llmkernels",
            "norm_kernel",
        ),
        (
            "void llmk::kernels::(anonymous namespace)::norm_rope_kv_write_kernel<__nv_bfloat16, 8>(llmk::Params, int)",
            "rotation",
            "llmkernels",
            "norm_rope_kv_write_kernel",
        ),
        (
            "void llmk::kernels::(anonymous namespace)::glu_kernel<llmk::kernels::activation::Silu>(llmk::GluParams)",
            "activation",
            "llmkernels",
            "glu_kernel",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies", "CUDA", "Memcpy DtoD"),
        ("Memset (Device)", "copies", "CUDA", "Memset"),
        ("_layer_kernel", "other", "unknown", "_layer_kernel"),
        ("aten::addmm", "product", "PyTorch", "addmm"),
        ("aten::bmm", "product", "PyTorch", "bmm"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention", "PyTorch", None),
        ("llmkernels::rms_norm", "norm", "llmkernels", "rms_norm"),
        ("llmkernels::rms_norm_linear", "product", "llmkernels", "rms_norm_linear"),
        ("llmkernels::rope_decode_attention", "attention", "llmkernels", "rope_decode_attention"),
    ],
)
def test_kinds_owners_and_names(name, kind, owner, short):
    assert (kind_of(name), owner_of(name)) == (kind, owner)
    assert short is None or short_name(name) == short


def own_kernels():
    sources = [path for path in CSRC.rglob("*.cu*") if "kernels" in path.parts]
    found = {name for path in sources for name in re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", path.read_text())}
    return sorted(found - {"empty_kernel", "wgmma_kernel"})  # which find out what a device has


@pytest.mark.skipif(not CSRC.exists(), reason="needs the sources")
def test_every_kernel_of_ours_has_a_kind():
    names = own_kernels()
    assert len(names) > 50 and {"gemm_kernel", "sum_kernel", "flash_attention_sm90_kernel"} <= {*names}
    for name in names:
        full = f"void llmk::kernels::(anonymous namespace)::{name}<__nv_bfloat16, 8>(llmk::Params)"
        assert short_name(full) == name
        assert kind_of(full) != "other", name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2RMSNorm", "norm"),
        ("LlamaRotaryEmbedding", "rotation"),
        ("Qwen2Attention", "rotation"),
        ("Qwen2MLP", "activation"),
        ("SiLUActivation", "activation"),
        ("Qwen2DecoderLayer", None),
        ("Linear", None),
    ],
)
def test_kinds_of_modules(name, kind):
    assert kind_of_module(name) == kind


def test_the_command(tmp_path, capfd):
    small_model().save_pretrained(tmp_path / "model")
    options = ["--tokens", "8", "--new-tokens", "2", "--device", "cpu", "--output"]
    for output in ("profile.svg", "profile.json"):
        if output.endswith("svg"):
            pytest.importorskip("matplotlib")
        assert __main__.main(["profile", str(tmp_path / "model"), *options, str(tmp_path / output)]) == 0
        out = capfd.readouterr().out
        assert PREFILL in out and STEP in out and "no GPU's" in out
    assert (tmp_path / "profile.svg").read_text().startswith("<?xml")
    assert json.loads((tmp_path / "profile.json").read_text())["tokens"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing"], "missing does not exist"),
        (["model", "--tokens", "70"], "--tokens and --new-tokens must be less than the model's 64 positions"),
        (["model", "--output", "profile.doc"], "--output must end in .json, .pdf, .png or .svg, got profile.doc"),
        (["model", "--output", "missing/a.png"], "--output must be in a folder that exists, got missing/a.png"),
        (["model", "--output", "folder.json"], "--output must be a file, got the folder folder.json"),
    ],
)
def test_what_the_command_refuses(tmp_path, monkeypatch, capfd, options, message):
    small_model().save_pretrained(tmp_path / "model")
    (tmp_path / "folder.json").mkdir()
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["profile", f"./{options[0]}", *options[1:], "--device", "cpu"]) == 1
    assert message in capfd.readouterr().err


def test_the_command_says_one_line(tmp_path, capfd):
    """The progress bar of transformers was written to a file, too."""
    transformers.logging.enable_progress_bar()
    small_model().save_pretrained(tmp_path)
    capfd.readouterr()
    assert __main__.main(["profile", str(tmp_path), "--tokens", "70", "--device", "cpu"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("llmkernels: --tokens and --new-tokens must be less than")


def test_bad_arguments():
    model, ids = small_model(), tiny_inputs()
    with pytest.raises(TypeError, match=r"profile: model must be a torch.nn.Module, got str"):
        llmkernels.profile("model", ids)
    with pytest.raises(
        TypeError, match=r"profile: model must be a causal language model with generate\(\), got Linear"
    ):
        llmkernels.profile(torch.nn.Linear(2, 2), ids)
    with pytest.raises(TypeError, match=r"profile: input_ids must be a tensor, got list"):
        llmkernels.profile(model, [1, 2])
    with pytest.raises(TypeError, match=r"profile: input_ids must be int64, got torch.float32"):
        llmkernels.profile(model, ids.float())
    for bad in (torch.ones(12, dtype=torch.long), ids[:, :0]):
        with pytest.raises(ValueError, match=r"profile: input_ids must be \(batch, tokens\), not empty, got \("):
            llmkernels.profile(model, bad)
    with pytest.raises(ValueError, match=r"profile: input_ids must be on cpu, got one on meta"):
        llmkernels.profile(model, ids.to("meta"))
    with pytest.raises(ValueError, match=r"profile: input_ids must be from 0 to 96, got tokens from -1 to"):
        llmkernels.profile(model, torch.full_like(ids, -1))
    with pytest.raises(ValueError, match="profile: new_tokens must be at least 1, got 0"):
        llmkernels.profile(model, ids, new_tokens=0)
