"""What the residual stream of a small model begins with: embeddings of tokens, and maybe those of positions."""

from ..classes.recorder import Node
from ..errors import UnknownLayout
from .observe import Number, Record
from .template import Factor, Path


def token_embedding(start: Node) -> tuple[Path, Factor | None]:
    """The table that is read by the tokens, and what its rows are multiplied by."""
    start, numbers = start.unscaled()
    if start.kind != "embedding":
        raise UnknownLayout(f"has layers that are given what {start.said} makes, where embeddings are expected")
    if len(numbers) > 1:
        raise UnknownLayout("scales embeddings more than once")
    return Path(start.args[1].name), Factor(tuple(numbers)) if numbers else None


def position_embedding_of(record: Record, nodes: list[Node]) -> tuple[Path | None, Number | int]:
    """The table that is read by the positions, if there is one, and its row for the first of them."""
    if not nodes:
        return None, 0
    weight, first = nodes[0].args[1].name, first_row(record, nodes[0])
    path = weight.rpartition(".")[0]
    members = vars(record.model.get_submodule(path)) if first else {}
    names = [name for name, value in members.items() if type(value) is int and value == first]
    if first and not names:
        raise UnknownLayout(f"reads {weight} from row {first} on, a number of its own")
    return Path(weight), Number(first, path, names[0]) if first else 0


def first_row(record: Record, node: Node) -> int | None:
    """The row of the first position in an embedding that is read by the positions, else None."""
    if node.kind != "embedding" or node.args[0].value.shape != record.positions.shape:
        return None
    ahead = node.args[0].value - record.positions
    return int(ahead.min()) if ahead.min() == ahead.max() else None
