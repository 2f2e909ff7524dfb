"""A bar that shows how far something is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, shown: bool = True) -> Iterator[Callable[[str, int], None]]:
    """A block with a function that is called with what runs now, and how many parts of `total` have ended."""
    from rich.progress import Progress

    with Progress(disable=not shown) as bar:
        task = bar.add_task("", total=total)
        yield lambda description, ended: bar.update(task, description=description, advance=ended)
