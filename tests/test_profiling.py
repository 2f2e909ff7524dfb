"""llmkernels.profile and `python -m llmkernels profile`: where the time of a model goes."""

import pytest
import torch

import llmkernels
from generating import small_model
from hf_models import tiny_inputs
from llmkernels import __main__
from llmkernels.profiling import FIRST, NEXT, _limits, kind_of, owner_of

NEW = 3


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def found(request):
    model = small_model(device=request.param)
    result = llmkernels.profile(model, tiny_inputs(request.param, 2), new_tokens=NEW)
    assert not hasattr(type(model), "original")  # unpatched again
    return result


def test_both_ways_and_phases(found):
    multiplied = {"linear", "attention"} if found.device == "the CPU" else {"linear"}  # by PyTorch's products on a GPU
    assert [phase.name for phase in found.phases] == [FIRST, NEXT]
    for phase in found.phases:
        assert set(phase.lines) == set(phase.wall) == {"unpatched", "patched"}
        assert phase.name == NEXT or all(value > 0 for value in phase.wall.values())
        assert multiplied <= set(phase.limits)
        for lines in phase.lines.values():
            assert all(line.time > 0 and line.launches > 0 for line in lines.values())
            assert all(abs(sum(line.owners.values()) - line.time) < 1e-6 for line in lines.values())


def test_ours_run_in_the_patched_model_alone(found):
    first = found.phases[0]
    owners = {way: {owner for line in lines.values() for owner in line.owners} for way, lines in first.lines.items()}
    assert "llmkernels" in owners["patched"]
    assert "llmkernels" not in owners["unpatched"]


def test_limits_are_of_what_the_model_multiplies(device):
    """Twice the batch are twice the operations where the rate limits; where bytes do, they are those of the weights."""
    model, ids = small_model(device=device), tiny_inputs(device, 2)
    with torch.no_grad():
        by_rate = [_limits(model, x, 1e30, 1e9)[FIRST]["linear"] for x in (ids, ids.repeat(2, 1))]
        by_bytes = _limits(model, ids[:, :1], 1e9, 1e30)[NEXT]["linear"]
    assert by_rate[1] == pytest.approx(2 * by_rate[0], rel=1e-3)
    weights = sum(module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert weights / 1e6 < by_bytes < 1.2 * weights / 1e6


def test_a_patched_model_stays_patched():
    model = small_model()
    with llmkernels.patch(model):
        found = llmkernels.profile(model, tiny_inputs(), new_tokens=NEW)
        assert [*found.phases[0].lines] == ["patched"]
        assert hasattr(type(model), "original")


def test_a_model_with_nothing_to_patch():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100)
    model = transformers.GPT2LMHeadModel(config).eval()
    found = llmkernels.profile(model, torch.ones(1, 8, dtype=torch.long), new_tokens=NEW)
    if found.unpatchable:
        assert [*found.phases[0].lines] == ["unpatched"]
        assert found.unpatchable in str(found)
    assert found.phases[0].limits["linear"] > 0  # its layers are no nn.Linear


def test_text_and_picture(found, tmp_path):
    pytest.importorskip("matplotlib")
    text = str(found)
    for word in (FIRST, NEXT, "linear", "attention", "wall time", "unpatched", "patched", "left to win"):
        assert word in text
    found.plot(str(tmp_path / "profile.png"))
    assert (tmp_path / "profile.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "kind", "owner"),
    [
        ("void llmk::kernels::(anonymous namespace)::gemv_kernel<__nv_bfloat16, 1>", "linear", "llmkernels"),
        ("void llmk::kernels::norm::norm_kernel<__nv_bfloat16, 8, 1, false>", "norm", "llmkernels"),
        ("void llmk::kernels::decode_attention_kernel<Shape<__nv_bfloat16, 128, 1>>", "attention", "llmkernels"),
        ("void llmk::kernels::sampling::sample_kernel<__nv_bfloat16>", "sampling", "llmkernels"),
        ("void llmk::kernels::(anonymous namespace)::glu_kernel<Silu, __nv_bfloat16>", "activation", "llmkernels"),
        ("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", "linear", "cuBLAS"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention", "cuDNN"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>", "other", "PyTorch"),
        ("Memcpy DtoD (Device -> Device)", "copies", "PyTorch"),
        ("aten::addmm", "linear", "PyTorch"),
        ("llmkernels::rms_norm", "norm", "llmkernels"),
    ],
)
def test_kinds_and_owners(name, kind, owner):
    assert (kind_of(name), owner_of(name)) == (kind, owner)


def test_the_command(tmp_path, capfd):
    small_model().save_pretrained(tmp_path / "model")
    options = ["--tokens", "8", "--new-tokens", "2", "--device", "cpu", "--plot", str(tmp_path / "profile.svg")]
    assert __main__.main(["profile", str(tmp_path / "model"), *options]) == 0
    out = capfd.readouterr().out
    assert FIRST in out and NEXT in out
    assert (tmp_path / "profile.svg").read_text().startswith("<?xml")
    assert __main__.main(["profile", str(tmp_path / "missing")]) == 1
    assert "does not exist" in capfd.readouterr().err


def test_bad_arguments():
    model, ids = small_model(), tiny_inputs()
    with pytest.raises(TypeError, match=r"profile: model must be a torch.nn.Module, got str"):
        llmkernels.profile("model", ids)
    with pytest.raises(TypeError, match=r"profile: input_ids must be a tensor, got list"):
        llmkernels.profile(model, [1, 2])
    with pytest.raises(ValueError, match=r"profile: input_ids must be \(batch, tokens\), not empty, got \(12,\)"):
        llmkernels.profile(model, torch.ones(12, dtype=torch.long))
    with pytest.raises(ValueError, match="profile: new_tokens must be at least 1, got 0"):
        llmkernels.profile(model, ids, new_tokens=0)
