"""What is asked of a section when it is measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cases import CPU_PROVIDERS, PROVIDERS
from benchmarks.timing import FULL, QUICK, Effort


@dataclass(frozen=True)
class Run:
    device: torch.device
    quick: bool = False
    providers: tuple[str, ...] = ()  # none: all that the section has
    model_id: str | None = None  # none: a real configuration with random weights
    begin: Callable[[str], None] = lambda what: None  # told what is measured next
    warn: Callable[[str, Exception], None] = lambda provider, problem: None  # told which peer does not run

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def small(self) -> bool:
        """Few sizes, few samples."""
        return self.quick or not self.on_gpu

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else FULL

    @property
    def op_providers(self) -> tuple[str, ...]:
        return self.providers or (PROVIDERS if self.on_gpu else CPU_PROVIDERS)

    def wants(self, provider: str) -> bool:
        return not self.providers or provider in self.providers
