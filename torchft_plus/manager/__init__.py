"""The Manager and what it is made of. torchft's names are loaded on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Manager": "torchft_plus.manager.manager",
    "TIMEOUT_SEC_ENV": "torchft_plus.manager.torchft_names",
    "WorldSizeMode": "torchft_plus.manager.torchft_names",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
