"""What a kernel does and who made it, by its name alone: a replayed CUDA graph tells no more of its kernels."""

import re

OTHER, COPIES = "other", "copies"
# The first pattern that is found decides. Of our kernels and ops the last part of the name is searched, without its
# template arguments; of others all of it, since PyTorch's elementwise kernels say there what they compute.
_KINDS = (
    ("training", r"backward|bwd|adam|grad_|clip_grads|cross_entropy|nll_loss|^(column|partial)_sums?_kernel"),
    ("training", r"^(statistics|add_parts|combine_partials)_kernel"),  # of gradients
    ("attention", r"attention|attn|flash|fmha|sdpa|softmax"),
    ("rotation", r"rope|rotary"),
    (
        "product",
        r"gemm|gemv|nvjet|xmma|cutlass|split_?k|linear|mlp|lora|adapters|matmul|mkldnn|(\b|_)(add|badd)?b?m[mv](\b|_)",
    ),
    ("norm", r"norm|rsqrt"),
    ("product", r"quantize|^(amax|epilogue|split|sum)_kernel"),  # what prepares operands, and what follows
    ("activation", r"glu|silu|gelu|relu|bias_act|softcap"),
    ("sampling", r"sample|arg_?max|multinomial|topk|sort|distribution"),
    (COPIES, r"memcpy|memset|copy|catarray|fill|embed|::(cat|clone|contiguous|to)\b"),
)
KINDS = (*dict.fromkeys(kind for kind, _ in _KINDS), OTHER)
_OWNERS = (
    ("llmkernels", r"llmk"),
    ("cuDNN", r"cudnn"),
    ("Triton", r"triton"),
    ("PyTorch", r"\bat::|\baten::|pytorch|fmha_cutlass"),
    ("cuBLAS", r"nvjet|gemm|gemv|xmma|splitk|cublas|cutlass"),
    ("CUDA", r"memcpy|memset"),
)
# Elementwise kernels are known by the module that launches them: a norm in eager PyTorch is a mean and products.
_MODULES = (
    ("norm", r"norm"),
    ("rotation", r"rotary|rope|attention|attn"),
    ("activation", r"mlp|feedforward|activation|silu|gelu|relu|experts|moe"),
)


def kind_of(name: str) -> str:
    """The kind of a kernel, or of an op, one of KINDS."""
    return _find(_KINDS, short_name(name) if "llmk" in name else name) or OTHER


def owner_of(name: str) -> str:
    """Who made a kernel: a library, or "unknown"."""
    return _find(_OWNERS, name) or "unknown"


def kind_of_module(name: str) -> str | None:
    """The kind of the elementwise kernels and copies that a module of a class of this name launches, if it is known."""
    return _find(_MODULES, name)


def short_name(name: str) -> str:
    """The name of a kernel without its namespaces, template arguments and parameters.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)")
    'vectorized_elementwise_kernel'
    """
    if inside := re.search(r"(cutlass_\d|fmha_)\w+", name):  # an argument of a template that says nothing
        return inside[0]
    name, count = name.replace("(anonymous namespace)::", ""), 1
    while count:
        name, count = re.subn(r"<[^<>]*>", "", name)
    name = name.partition("(")[0].strip()
    if "::" not in name:
        return name.removeprefix("void ")
    *spaces, last = name.split()[-1].split("::")
    return f"{spaces[-1]}::{last}" if spaces and last.lower() in ("kernel", "kernel2", "device_kernel") else last


def _find(patterns: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((found for found, pattern in patterns if re.search(pattern, name, re.IGNORECASE)), None)
