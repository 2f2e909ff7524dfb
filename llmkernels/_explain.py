"""`llmkernels.explain`: which kernel runs a linear or an attention on which GPU, why, and how.

The decision is that of the ops themselves, csrc/kernels/linear/route.h and csrc/kernels/attention/route.h: asked here
for shapes, without tensors.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmkernels import _library
from llmkernels._tune.table import RULE, Measured, table_of

KERNELS = {
    "linear": {
        "gemv": "gemv: dot products, weights by bulk copies",
        "mma": "mma.sync, weights by TMA",
        "wgmma": "wgmma, weights by TMA",
        "sm80": "mma.sync, weights straight to registers",
        "gemm": "wgmma, tiles of 128 tokens by TMA",
        "library": "cuBLAS",
    },
    "decode_attention": {
        "tma": "mma.sync, keys and values by TMA",
        "cp_async": "mma.sync, keys and values by cp.async",
        "prompt": "that of attention",
        "plain": "the plain one, without tensor cores",
        "none": "none",
    },
    "attention": {
        "wgmma": "wgmma, keys and values by TMA",
        "mma": "mma.sync, keys and values by cp.async",
        "plain": "the plain one, without tensor cores",
        "none": "none",
    },
}
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class Gpu:
    """What routes depend on."""

    name: str
    compute_capability: int
    sm_count: int
    shared_bytes: int  # of a block, at most
    clusters: dict[int, int] = field(default_factory=dict)  # how many run at the same time, by their blocks
    wgmma: bool = True  # the build has code for sm_90a
    tensor_maps: bool = True  # the driver has them
    tuned: tuple[Measured, ...] = ()  # choices that were measured on it, if it is a GPU of this machine


# Clusters of several blocks count on 9.0 only.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 90, 132, 232448, {2: 66, 4: 32, 8: 14, 16: 6}),
        Gpu("H100", 90, 132, 232448, {2: 66, 4: 32, 8: 14, 16: 6}),
        Gpu("A100", 80, 108, 166912),
        Gpu("RTX 4090", 89, 128, 101376),
        Gpu("L40S", 89, 142, 101376),
        Gpu("RTX 5090", 120, 170, 101376),
        Gpu("B200", 100, 148, 232448),
    )
}
ABSENT = "H200"  # what is taken where there is no GPU


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Prints as a short table."""

    op: str
    operands: str  # names and shapes
    dtype: str
    device: str
    variant: str  # a word of KERNELS
    kernel: str  # what it stands for
    reason: str
    norm: str | None  # how x is normalized, if it is
    plan: dict[str, int]  # empty with "library", "plain" and "none"
    then: "Explanation | None" = None  # the second product of gated_mlp, the backward of attention
    measured: bool = False  # the choice was measured on this GPU: see `llmkernels.autotune`

    def __str__(self) -> str:
        lines = [f"{self.op}  {self.operands}  {self.dtype}  on {self.device}"]
        lines += [f"kernel  {self.kernel}", f"why     {self.reason}"]
        lines += [f"norm    {self.norm}"] if self.norm else []
        lines += [f"plan    {_plan_text(self.plan)}"] if self.plan else []
        lines += ["", str(self.then)] if self.then else []
        return "\n".join(lines)


@dataclass(frozen=True)
class _Product:
    """One product of an op: the names of its operands, and what it fuses."""

    x: str = "x"
    weight: str = "weight"
    glu: bool = False
    norm: bool = False
    residual: bool = False
    bias: bool = True  # whether it takes one
    weight_type: str = ""  # of the weight's elements, where it is not the dtype of x


OPS = {
    "linear": [_Product()],
    "rms_norm_linear": [_Product(norm=True)],
    "glu_linear": [_Product(glu=True, bias=False)],
    "rms_norm_glu_linear": [_Product(glu=True, norm=True, bias=False)],
    "linear_add_": [_Product(residual=True)],
    "int8_linear": [_Product(weight_type="int8")],
    "gated_mlp": [_Product(weight="gate_up_weight", glu=True), _Product("act(gate) up", "down_weight")],
}
ATTENTIONS = ("decode_attention", "attention")


def explain(
    op: str,
    *shapes: Sequence[Any],
    dtype: torch.dtype = torch.bfloat16,
    device: str | int | torch.device | None = None,
    bias: bool = False,
    in_step: bool = False,
    aligned: bool = True,
) -> Explanation:
    """Which kernel an op runs on a GPU for tensors of such shapes, or that cuBLAS runs; why, and by which plan.

    Nothing is run, and no GPU is needed: the answer for one that is not here is that of a build with code for it.

    Args:
        op: "linear", "rms_norm_linear", "glu_linear", "rms_norm_glu_linear", "linear_add_", "int8_linear",
            "gated_mlp", "decode_attention" or "attention".
        shapes: of x, (..., K), and of the weight, (N, K); of gated_mlp x, (..., K), gate_up_weight, (2 F, K), and
            down_weight, (N, F). Of decode_attention q, (B, T, H, D), and k_cache, (B, capacity, Hkv, D); or pages,
            (pages, page_size, Hkv, D), and block_table, (B, pages of a sequence). Of attention q, (B, Tq, H, D), and k,
            (B, Tk, Hkv, D). One by one, or as one list.
        dtype: of the tensors; of int8_linear that of x.
        device: a GPU of this machine, as torch names it, with the choices that were measured on it and are in use
            (:func:`llmkernels.autotune`), or one by its name, by the rules: "H200", "H100", "A100", "RTX 4090",
            "L40S", "RTX 5090" or "B200". None: the current one of this machine, or an H200 where there is none.
        bias: whether there are biases.
        in_step: in a decode step of ``generate``, which does without cuBLAS up to 64 rows of x, and whose
            decode_attention also rotates queries and keys and fills the cache. Of up to 128 rows what adds to a
            residual splits K, where that fills the GPU; a linear behind it then needs no launch of the norm, and splits
            K likewise, which is not shown here.
        aligned: whether every row of the tensors, or every head, begins at a multiple of 16 bytes.

    Returns: an :class:`Explanation`, which prints as a table. Its ``variant`` and ``reason`` are text, its ``plan`` is
        a dict of numbers; with ``measured`` the reason has the times. Tokens are rows of x. Of gated_mlp there are two
        products, the second one in ``then``; of attention the backward is there.

    Raises: ValueError for an op, dtype or device that is not known, for an option that the op has not, and for shapes
        that do not fit; RuntimeError for a GPU of this machine that the build has no kernels for.

    >>> print(explain("linear", (4, 3584), (4608, 3584), device="H200"))
    linear  x (4, 3584)  weight (4608, 3584)  bfloat16  on H200
    kernel  mma.sync, weights by TMA
    why     up to 16 tokens
    plan    36 rows per tile, 128 tiles, 128 blocks, 12 stages, 180 KB in flight, 192 KB of shared memory
    """
    products = _find_products(op)
    for name, value in {"bias": bias, "in_step": in_step, "aligned": aligned}.items():
        if not isinstance(value, bool):
            raise ValueError(f"{op}: {name} must be a bool, got {value!r}")
    if len(shapes) == 1 and _is_list(shapes[0]) and shapes[0] and all(map(_is_list, shapes[0])):
        shapes = tuple(shapes[0])
    if op in ATTENTIONS:
        tensors = _check_attention(op, shapes)
    else:
        x, *weights = _check_shapes(op, products, shapes)
    if dtype not in DTYPES:
        raise ValueError(f"{op}: dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if bias and not (products and all(product.bias for product in products)):
        raise ValueError(f"{op}: bias must be False, as the op has none, got True")
    if in_step and op == "attention":
        raise ValueError(f"{op}: in_step must be False, as a decode step runs decode_attention, got True")
    gpu, place = _find_gpu(op, device)
    if op in ATTENTIONS:
        return _explain_attention(op, tensors, DTYPES[dtype], gpu, place, in_step=in_step, aligned=aligned)
    explanation = None
    inputs = [x, (*x[:-1], weights[0][0] // 2)]  # of the first product, and of the second of gated_mlp
    for product, operand, weight in reversed(list(zip(products, inputs, weights, strict=False))):
        in_epilogue = product.glu and not bias  # else the activation has a kernel of its own
        explanation = _explain_product(
            op, product, operand, weight, DTYPES[dtype], gpu, place, explanation,
            glu=in_epilogue, bias=bias, in_step=in_step, aligned=aligned,
        )  # fmt: skip
    assert explanation is not None
    return explanation


def _explain_product(
    op: str,
    product: _Product,
    x: tuple[int, ...],
    weight: tuple[int, ...],
    dtype: str,
    gpu: Gpu,
    place: str,
    then: Explanation | None,
    *,
    glu: bool,
    **options: bool,
) -> Explanation:
    from llmkernels._C import linear_route  # an optional part of the package: the ops work without it

    n, k = weight
    fused = {"glu": glu, "norm": product.norm, "residual": product.residual, "weight_type": product.weight_type}
    measured = {one.numbers: one for one in gpu.tuned}
    facts = {"tuned": list(measured), **facts_of(gpu)}
    route = linear_route(math.prod(x[:-1]), n, k, dtype=dtype, **fused, **options, **facts)
    found = measured.get(route["tuned"])
    norm = "a launch of rms_norm before" if route["norm_first"] else "folded into the kernel"
    return Explanation(
        op=op,
        operands=f"{product.x} {x}  {product.weight} {weight}",
        dtype=dtype,
        device=place,
        variant=route["variant"],
        kernel=KERNELS["linear"][route["variant"]],
        reason=_reason_of(route["reason"], found),
        norm=norm if product.norm else None,
        plan=route["plan"],
        then=then,
        measured=found is not None,
    )


def _reason_of(reason: str, found: Measured | None) -> str:
    if found is None:
        return reason
    return f"{reason}{'; ' if found.choice == RULE else ': '}{found.text}"


def _explain_attention(
    op: str,
    tensors: dict[str, tuple[int, ...]],
    dtype: str,
    gpu: Gpu,
    place: str,
    *,
    in_step: bool,
    aligned: bool,
) -> Explanation:
    from llmkernels._C import attention_route, decode_attention_route

    q, k, *table = tensors.values()
    batch, tokens, heads, head_dim = q
    options = {"dtype": dtype, "aligned": aligned, **facts_of(gpu)}
    if op == "attention":
        route = attention_route(batch, tokens, k[1], heads, k[2], head_dim, **options)
    else:
        page_size = k[1] if table else 0
        capacity = k[1] * table[0][1] if table else k[1]
        route = decode_attention_route(
            batch, tokens, heads, k[2], head_dim, capacity, page_size=page_size, fused=in_step, **options
        )

    def explanation(op: str, route: dict[str, Any], then: Explanation | None = None) -> Explanation:
        return Explanation(
            op=op,
            operands="  ".join(f"{name} {shape}" for name, shape in tensors.items()),
            dtype=dtype,
            device=place,
            variant=route["variant"],
            kernel=KERNELS["attention" if "backward" in op else op][route["variant"]],
            reason=route["reason"],
            norm=None,
            plan=route["plan"],
            then=then,
        )

    backward = explanation("attention_backward", route["backward"]) if op == "attention" else None
    return explanation(op, route, backward)


def facts_of(gpu: Gpu) -> dict[str, Any]:
    names = ("compute_capability", "wgmma", "tensor_maps", "sm_count", "shared_bytes", "clusters")
    return {name: getattr(gpu, name) for name in names}


def _plan_text(plan: dict[str, int]) -> str:
    cluster = f" in clusters of {plan['cluster']}" if plan.get("cluster", 1) > 1 else ""
    of_launches = f" of each of {plan['launches']} launches" if plan.get("launches", 1) > 1 else ""
    texts = {
        "tile_rows": "{} rows per tile",
        "output_tiles": "{} tiles",
        "queries": f"{{}} queries by {plan.get('keys')} keys per tile",
        "work_tiles": "{} work tiles" + of_launches,
        "blocks": "{} blocks" + cluster,
        "blocks_per_sm": "{} per SM",
        "splits": "heads of a kv head in {} parts",
        "stages": "{} stages",
    }
    parts = [text.format(plan[name]) for name, text in texts.items() if name in plan]
    texts = {"bytes_in_flight": "in flight", "shared_bytes": "of shared memory"}
    parts += [f"{plan[name] / 1024:.0f} KB {text}" for name, text in texts.items() if name in plan]
    return ", ".join(parts)


# ---- arguments


def _find_products(op: str) -> list[_Product]:
    if not isinstance(op, str) or (op not in OPS and op not in ATTENTIONS):
        raise ValueError(f"explain: op must be one of {', '.join([*OPS, *ATTENTIONS])}, got {op!r}")
    return OPS.get(op, [])


def _check_shapes(op: str, products: list[_Product], shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    names = ["x", *(product.weight for product in products)]
    if len(shapes) != len(names):
        raise ValueError(f"{op}: shapes must be those of {', '.join(names)}, got {len(shapes)} of them")
    found = [_check_shape(op, name, shape) for name, shape in zip(names, shapes, strict=True)]
    if not found[0]:
        raise ValueError(f"{op}: x must have at least one dimension, got shape []")
    columns, of = found[0][-1], "x.size(-1)"
    for product, weight in zip(products, found[1:], strict=True):
        if len(weight) != 2 or weight[1] != columns:
            raise ValueError(f"{op}: {product.weight} must have shape [N, {columns}] ({of}), got {list(weight)}")
        if product.glu and weight[0] % 2:
            raise ValueError(
                f"{op}: {product.weight} must have an even number of rows, [gate | up], got shape {list(weight)}"
            )
        columns, of = weight[0] // 2, f"{product.weight}.size(0) / 2"
    return found


def _check_attention(op: str, shapes: Sequence[Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The shapes by the names of their tensors: q, that of the keys, and block_table."""
    keys, axes = ("k", "Tk") if op == "attention" else ("k_cache", "capacity")
    names = ["q", keys, "block_table"]
    most = 2 if op == "attention" else 3
    if not 2 <= len(shapes) <= most:
        optional = ", and block_table of a paged cache" if most == 3 else ""
        raise ValueError(f"{op}: shapes must be those of q, {keys}{optional}, got {len(shapes)} of them")
    found = {name: _check_shape(op, name, shape) for name, shape in zip(names, shapes, strict=False)}
    q, k, *table = found.values()
    if len(q) != 4:
        raise ValueError(f"{op}: q must have shape (B, T, H, D), got {list(q)}")
    batch, _, heads, head_dim = q
    first = "pages, page_size" if table else f"{batch}, {axes}"
    if len(k) != 4 or k[3] != head_dim or (not table and k[0] != batch):
        raise ValueError(f"{op}: {keys} must have shape ({first}, Hkv, {head_dim}), got {list(k)}")
    if heads % k[2] if k[2] else heads:
        raise ValueError(f"{op}: q must have a multiple of the {k[2]} heads of {keys}, got shape {list(q)}")
    if table and (len(table[0]) != 2 or table[0][0] != batch):
        raise ValueError(f"{op}: block_table must have shape ({batch}, pages of a sequence), got {list(table[0])}")
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _check_shape(op: str, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    is_shape = _is_list(shape) and all(isinstance(size, int) and size >= 0 for size in shape)
    if not is_shape:
        raise ValueError(f"{op}: the shape of {name} must be a tuple of sizes that are not negative, got {shape!r}")
    return tuple(shape)


def _find_gpu(op: str, device: str | int | torch.device | None) -> tuple[Gpu, str]:
    """The GPU, and what to call it."""
    has_gpu = torch.cuda.is_available() and _library.build_info().get("cuda") is not None
    if isinstance(device, str) and device in GPUS:
        return GPUS[device], device
    if device is None and not has_gpu:
        return GPUS[ABSENT], f"{ABSENT} (this machine has no GPU)"
    try:
        index = _index_of(device) if has_gpu else None
    except RuntimeError:  # no device of torch
        index = None
    if index is None or index >= torch.cuda.device_count():
        raise ValueError(f"{op}: device must be a GPU of this machine or one of {', '.join(GPUS)}, got {device!r}")
    return present_gpu(op, index), torch.cuda.get_device_name(index)


def _index_of(device: str | int | torch.device | None) -> int | None:
    """Of a GPU as torch names it; None for another kind of device."""
    if device is None:
        return torch.cuda.current_device()
    place = torch.device(device)
    if place.type != "cuda":
        return None
    return torch.cuda.current_device() if place.index is None else place.index


def present_gpu(op: str, index: int) -> Gpu:
    facts = (ctypes.c_int * 9)()
    name = torch.cuda.get_device_name(index)
    with torch.cuda.device(index):
        status = ctypes.CDLL(str(_library.PATH)).llmk_route_facts(facts)
    if status != 0:
        raise RuntimeError(f"{op}: this build has no kernels for {name}: see `python -m llmkernels info`")
    capability, wgmma, tensor_maps, sm_count, shared_bytes, *clusters = facts
    by_size = dict(zip((2, 4, 8, 16), clusters, strict=True))
    switches = bool(wgmma), bool(tensor_maps)
    return Gpu(name, capability, sm_count, shared_bytes, by_size, *switches, table_of(index))
