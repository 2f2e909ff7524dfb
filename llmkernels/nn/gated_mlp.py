"""The feed-forward block of gated models as a module."""

import torch
from torch import Tensor, nn

from llmkernels.nn._plain import is_plain
from llmkernels.ops import gated_mlp, glu
from llmkernels.ops.activation import ACTIVATIONS, CLASSES

_NAMES = {name: activation for (_, name), activation in CLASSES.items()}


class GatedMLP(nn.Module):
    """:func:`llmkernels.gated_mlp` with weights of its own: the feed-forward block of Llama and similar models.

    Takes the place of ``LlamaMLP``, ``down_proj(act(gate_proj(x)) * up_proj(x))``, with the weights of the gate and of
    the up projection packed. :meth:`from_transformers` makes one out of such a module, and ``load_state_dict`` packs
    ``gate_proj`` and ``up_proj`` of a state dict; ``state_dict`` has the packed names, which are those of ``Phi3MLP``.

    Args:
        hidden_size, intermediate_size: sizes of the input and of the gate.
        activation: as in :func:`llmkernels.glu`.
        bias: whether the projections have one.

    Parameters: ``gate_up_proj.weight`` (2 * intermediate_size, hidden_size), the rows of the gate first,
        ``down_proj.weight`` (hidden_size, intermediate_size), and their biases.
    Shape: (..., hidden_size) to the same.

    A projection that has been replaced, by an adapter or a quantized layer, or that has hooks, is called as a module,
    with the packed activation between the two.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"GatedMLP: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        self.activation = activation

    @classmethod
    def from_transformers(cls, mlp: nn.Module, copy: bool = False) -> "GatedMLP":
        """The GatedMLP with the weights of ``mlp``, a module with gate_proj, up_proj, down_proj and act_fn.

        Args:
            mlp: for example a LlamaMLP, Qwen2MLP, MistralMLP or GemmaMLP.
            copy: with False both modules have one memory: the new one gets the parameters of down_proj themselves,
                and those of gate_proj and up_proj become views of its packed ones, so a change of values in place is
                seen by both. An optimizer or whoever else has the old parameters keeps parameters of its own, though:
                train one of the two. With True the new module shares nothing with ``mlp``, which stays as it was.

        Packing takes memory for the gate and up weights once more, with ``copy=False`` only until it returns. The new
        module has the dtype, device, training mode and frozen state of the old one, and no hooks.

        Raises: TypeError for projections that are not ``torch.nn.Linear``; ValueError for another activation, or a gate
            and up projection that differ in shape, dtype, device, in having a bias or in being frozen.
        """
        gate, up, down = (_linear(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        new = cls(gate.in_features, gate.out_features, _name_of(getattr(mlp, "act_fn", None)), device="meta")
        for kind in ("weight", "bias"):
            new.gate_up_proj.register_parameter(kind, _pack(kind, getattr(gate, kind), getattr(up, kind), copy))
            of_down = getattr(down, kind)
            if copy and of_down is not None:
                of_down = nn.Parameter(of_down.detach().clone(), of_down.requires_grad)
            new.down_proj.register_parameter(kind, of_down)
        new.down_proj.in_features, new.down_proj.out_features = down.in_features, down.out_features
        return new.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        if is_plain(gate_up) and is_plain(down):
            return gated_mlp(x, gate_up.weight, down.weight, gate_up.bias, down.bias, activation=self.activation)
        return down(glu(gate_up(x), activation=self.activation))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}_proj.{kind}" for name in ("gate", "up")]
            parts, packed = [state_dict.get(name) for name in names], getattr(self.gate_up_proj, kind, None)
            if any(part is None for part in parts):
                continue
            shapes = [[*part.shape] for part in parts]
            if shapes[0] == shapes[1]:
                state_dict[f"{prefix}gate_up_proj.{kind}"] = torch.cat(parts)
            elif packed is not None:
                half = [packed.shape[0] // 2, *packed.shape[1:]]
                errors.append(f"size mismatch for {' and '.join(names)}: both must have shape {half}, got {shapes}")
                state_dict[f"{prefix}gate_up_proj.{kind}"] = packed  # as it is
            for name in names:
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


def _linear(mlp: nn.Module, name: str) -> nn.Linear:
    module = getattr(mlp, name, None)
    if type(module) is not nn.Linear:
        raise TypeError(
            f"GatedMLP.from_transformers: mlp.{name} must be a torch.nn.Linear, got {type(module).__name__}"
        )
    return module


def _name_of(act_fn) -> str:
    if type(act_fn) is nn.GELU:
        return "gelu" if act_fn.approximate == "none" else "gelu_pytorch_tanh"
    if type(act_fn).__name__ not in _NAMES:
        raise ValueError(
            f"GatedMLP.from_transformers: mlp.act_fn must be one of {', '.join(_NAMES)}, got {type(act_fn).__name__}"
        )
    return _NAMES[type(act_fn).__name__]


def _pack(kind: str, gate: nn.Parameter | None, up: nn.Parameter | None, copy: bool) -> nn.Parameter | None:
    """One parameter with the rows of both, which become views of it unless it is a copy."""
    if gate is None and up is None:
        return None

    def facts(parameter):
        return (
            parameter
            if parameter is None
            else (tuple(parameter.shape), parameter.dtype, parameter.device, parameter.requires_grad)
        )

    if facts(gate) != facts(up):
        raise ValueError(
            f"GatedMLP.from_transformers: the {kind} of mlp.up_proj must have the shape, dtype, device and "
            f"requires_grad of that of mlp.gate_proj, {facts(gate)}, got {facts(up)}"
        )
    packed = torch.cat((gate.detach(), up.detach()))
    if not copy:
        gate.data, up.data = packed.chunk(2)
    return nn.Parameter(packed, gate.requires_grad)
