"""The model families that `patch` supports. Another one of this structure needs an entry in FAMILIES, and a test.

layout.py and trunk.py check that a class computes what its entry says; else it is not replaced.
"""

from dataclasses import dataclass

# The kind of a class, by the end of its name. The report has this order.
KINDS = {
    "RMSNorm": "rms_norm",
    "Attention": "rope",
    "MLP": "gated_mlp",
    "DecoderLayer": "add_rms_norm",
    "ForCausalLM": "loss",
}


@dataclass(frozen=True)
class Family:
    """A transformers modeling module, its class prefix, and the options of its RMSNorm.

    The classes are `<prefix>RMSNorm`, `<prefix>Attention`, `<prefix>MLP` and `<prefix>DecoderLayer`; for the decode
    step also `<prefix>Model` and `<prefix>ForCausalLM`.
    `eps` names the norm's attribute; `weight_offset` and `cast_before_weight` are those of `llmkernels.rms_norm`.
    """

    model_type: str
    prefix: str
    eps: str = "variance_epsilon"
    weight_offset: float = 0.0
    cast_before_weight: bool = True

    @property
    def module(self) -> str:
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"


FAMILIES = [
    Family("llama", "Llama"),
    Family("qwen2", "Qwen2"),
]


def find(cls: type) -> tuple[Family, str] | None:
    """The family and kind of a module class, or of the known class that it derives from."""
    known = {(family.module, family.prefix + end): (family, kind) for family in FAMILIES for end, kind in KINDS.items()}
    for base in cls.__mro__:
        if (match := known.get((base.__module__, base.__name__))) is not None:
            return match
    return None


_LORA = ("peft.tuners.lora.layer", "Linear")


def is_lora(cls: type) -> bool:
    """Whether a class is PEFT's LoRA around a linear layer, or derives from it."""
    return any((base.__module__, base.__name__) == _LORA for base in cls.__mro__)
