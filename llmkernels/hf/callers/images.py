"""What a prompt of generate() has beside text, and the positions behind it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Arguments of a prompt that the modules run, since it has images, video or sound in it.
OF_MODULES = {"pixel_values", "pixel_values_videos", "pixel_mask", "pixel_attention_mask", "image_sizes"}
OF_MODULES |= {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "input_features", "input_features_mask"}
OF_MODULES |= {"token_type_ids", "mm_token_type_ids", "mm_encoder_outputs"}


def is_nothing(value: Any) -> bool:
    """Whether an argument says as much as if it was not given."""
    return value is None or (isinstance(value, dict) and not value)


def images_of(inputs: Mapping[str, Any]) -> list[str]:
    """The names of what a prompt has beside text."""
    return sorted(name for name in OF_MODULES if not is_nothing(inputs.get(name)))


def last_position(inputs: Mapping[str, Any]) -> Tensor:
    """(B,) or (1,): the position of the token that the next one follows. Where positions have rows, of time, height
    and width behind those of the mask, that is the furthest one."""
    positions = inputs["position_ids"]
    return positions[:, -1] if positions.ndim == 2 else positions[-3:].amax((0, 2))
