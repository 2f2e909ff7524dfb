"""The text of a model that takes more than that, as images: its config, and the modules that compute it.

Such a model has a config of parts, and the decoder of the text among other modules. Given tokens alone it is that
decoder with the head.
"""

from typing import Any

from torch import nn


def text_config(config: Any) -> Any:
    """The config of the text: the one given, where it is that of the text alone."""
    return config.get_text_config(decoder=True)


def is_config(value: Any) -> bool:
    """Whether an entry of a config is that of a part."""
    return hasattr(value, "get_text_config")


def text_entry(config: Any) -> str | None:
    """The entry of a config that is the config of the text; None where that is the config itself."""
    text = text_config(config)
    return next((name for name, value in vars(config).items() if value is text), None)


def entries_of(config: Any) -> list[dict[str, Any]]:
    """The entries of a config, and those of its text's: a look at a dict takes less than one at an attribute."""
    own = vars(config)
    text = own.get("text_config")
    return [own] if text is None else [own, vars(text)]


def text_model(model: nn.Module) -> nn.Module:
    """The decoder of the text within a model of more; else the model."""
    text = text_config(model.config)
    if text is model.config:
        return model
    return next((module for module in model.modules() if vars(module).get("config") is text), model)


def modules_of_text(model: nn.Module) -> set[nn.Module]:
    """The modules that a forward of tokens alone may call: the decoder, the head, and those around them."""
    decoder = text_model(model)
    if decoder is model:
        return {*model.modules()}
    found = {*decoder.modules(), model.get_output_embeddings()}
    paths = [name.split(".") for name, module in model.named_modules() if module in found]
    around = {"", *(".".join(path[:end]) for path in paths for end in range(1, len(path)))}
    return found | {module for name, module in model.named_modules() if name in around}
