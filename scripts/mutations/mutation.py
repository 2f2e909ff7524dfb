"""What a mutation is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    what: str  # is broken
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # pytest arguments
    tool: str = ""  # of compute-sanitizer, where only that can see it

    @property
    def device(self) -> str:
        return "cuda" if self.name.startswith("cuda_") else "cpu"

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/")
