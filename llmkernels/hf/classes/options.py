"""The options of replacements, in which layout.py says what a class computes, and what `patch` knows by name.

A layer is known by what its class computes, of whatever family it is: see layout.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class NormOptions:
    """What a norm computes, in the words of `llmkernels.rms_norm` and `llmkernels.layer_norm`.

    `kind` is one of the two; `eps` names the module's attribute. A norm without `has_weight` has none, or does not use
    it.
    """

    kind: str = "rms_norm"
    eps: str = "variance_epsilon"
    weight_offset: float = 0.0
    cast_before_weight: bool = True
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True)
class Rotation:
    """How an attention rotates q and k, in the words of `llmkernels.rope`.

    `name` is the global of its module that rotates. `table` says what a row of cos and sin holds: "elements", one
    angle per rotated element; "half", of which the first half is used, one angle per pair; "pairs", one angle per
    pair. Rotated are as many elements as a row of "elements" or "half" has, twice as many as one of "pairs".
    With `partial` that may be fewer elements than a head has; without it the function takes none of those tables.
    `float32`: q, k, cos and sin are converted to float32 first. `keeps_dtype`: the results are converted to the dtype
    of q and k, where they would have that of the promotion with cos.
    """

    name: str = "apply_rotary_pos_emb"
    interleaved: bool = False
    table: str = "elements"
    float32: bool = False
    keeps_dtype: bool = False
    partial: bool = False

    def dim(self, row: int) -> int:
        """How many elements are rotated by cos and sin with rows of this length."""
        return 2 * row if self.table == "pairs" else row

    def takes(self, row: int, head_dim: int) -> bool:
        """Whether the function takes cos and sin with rows of this length."""
        return self.dim(row) == head_dim or (self.partial and self.dim(row) < head_dim)


@dataclass(frozen=True)
class MLPNames:
    """The names of an MLP's submodules: down(act(gate(x)) * up(x)), or with `gate` None down(act(up(x))).

    With `up` None `gate` is packed: its result holds those of gate and up, in this order. `dropout` names the attribute
    with the probability of a dropout of the result, in training; `after` a module that is called on the result.
    """

    down: str
    act: str
    gate: str | None
    up: str | None
    dropout: str | None = None
    after: str | None = None


@dataclass(frozen=True)
class FusedNormNames:
    """Of a decoder layer: `norms` names the modules that follow an add directly, in their order. If all of them are
    norms, they are fused with it."""

    norms: tuple[str, ...]


@dataclass(frozen=True)
class Loss:
    """Of a model for causal language modelling: the names of the base model, of the linear layer behind it, and of the
    entry of its config that caps the logits softly, if one does.

    `arguments` are those of its forward, in their order. Of these the base model is given `positional` by position and
    `named` under the same names, and with `passes_rest` all that the forward is given beside them; with `asks_for_dict`
    return_dict=True, too. `output` is the class of what it returns, with `more` of what the base model returns.
    """

    base: str
    head: str
    softcap: str | None
    arguments: tuple[str, ...]
    positional: tuple[str, ...]
    named: tuple[str, ...]
    passes_rest: bool
    asks_for_dict: bool
    output: type
    more: tuple[str, ...] = ()


OF_PARTS = "ForConditionalGeneration"  # of a model of text beside something else, or of one that encodes it

# Kinds by the end of a class's name, where what it computes does not say it: of models and experts, which are known by
# what others do with them; and of what the report lists as left alone, since its forward is not transformers' own or
# computes what has no kernel.
KINDS = {
    "ForCausalLM": "loss",
    "LMHeadModel": "loss",
    OF_PARTS: "loss",
    "Experts": "experts",
    "RMSNorm": "rms_norm",
    "LayerNorm": "layer_norm",
    "Attention": "rope",
    "MLP": "gated_mlp",
    "DecoderLayer": "add_rms_norm",
}

# Names in a forward's code, where neither what it computes nor its class says it:
EPS = "variance_epsilon", "eps"  # of a norm, which has to be made without its __init__
GATE = "gate_proj"  # under which kind the report lists an MLP that has no kernel
OF_EXPERTS = {"experts", "router"}  # a class ...MLP with these is no MLP
OF_LAYER = {"self_attn", "self_attention", "attn"}  # whole models, too, have a cache, and a norm behind an add


def kind_by_name(cls: type) -> str | None:
    return next((kind for end, kind in KINDS.items() if cls.__name__.endswith(end)), None)


_LORA = ("peft.tuners.lora.layer", "Linear")


def is_lora(cls: type) -> bool:
    """Whether a class is PEFT's LoRA around a linear layer, or derives from it."""
    return any((base.__module__, base.__name__) == _LORA for base in cls.__mro__)


def known_base(cls: type) -> type | None:
    """The class of transformers, or torch's LayerNorm, that a class is or derives from, and that patch did not make."""
    for base in cls.__mro__:
        if "original" not in vars(base) and (
            base.__module__.startswith("transformers.models.")
            or (base.__module__, base.__name__) == ("torch.nn.modules.normalization", "LayerNorm")
        ):
            return base
    return None
