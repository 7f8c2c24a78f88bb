"""One adapter for each supported torchtitan, behind one interface."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from torchft_plus.titan.config import TitanConfig

ADAPTERS = {(0, 2): "torchft_plus.titan.trainer_v02", (0, 3): "torchft_plus.titan.trainer_v03"}


class Adapter(Protocol):
    """What a module of ``ADAPTERS`` offers."""

    def settings(self, config: TitanConfig) -> Any:
        """torchtitan's own config object.

        Raises:
            ConfigError: torchtitan refuses a value or has no place for it.
        """
        ...

    def train(self, config: TitanConfig, settings: Any) -> None:
        """Train with torchtitan's own entry point."""
        ...


def load_adapter(torchtitan: tuple[int, int]) -> Adapter:
    """Import torchtitan, prepared for this machine, and its adapter.

    Args:
        torchtitan: (major, minor), as ``versions.check`` gives it.
    """
    from torchft_plus.titan import cpu  # not above: it imports torch, and mistakes are to be told before that

    cpu.prepare(torchtitan)
    return cast(Adapter, importlib.import_module(ADAPTERS[torchtitan]))
