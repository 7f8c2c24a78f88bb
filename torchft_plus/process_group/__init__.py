"""Process groups between replicas: lanes, their backends, and torchft's classes on top. The names are loaded on first use."""

from __future__ import annotations

import importlib
from typing import Any

from torchft_plus.compat.absent import absent

_HOMES = {
    "ErrorSwallowingProcessGroupWrapper": "torchft_plus.process_group.nested",
    "FakeProcessGroupWrapper": "torchft_plus.process_group.nested",
    "ManagedProcessGroup": "torchft_plus.process_group.managed",
    "ProcessGroup": "torchft_plus.process_group.wrappers",
    "ProcessGroupDummy": "torchft_plus.process_group.wrappers",
    "ProcessGroupGloo": "torchft_plus.process_group.wrappers",
    "ProcessGroupNCCL": "torchft_plus.process_group.wrappers",
    "ProcessGroupWrapper": "torchft_plus.process_group.nested",
    "SwallowingWork": "torchft_plus.process_group.works",
    "create_store_client": "torchft_plus.process_group.wrappers",
}
_ALIASES = {
    "_ErrorSwallowingWork": "SwallowingWork",
    # In torchft these run in a child process, because an abort of NCCL hung; ours end within milliseconds where they are.
    "ProcessGroupBabyGloo": "ProcessGroupGloo",
    "ProcessGroupBabyNCCL": "ProcessGroupNCCL",
}

__all__ = [*_HOMES, *_ALIASES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _HOMES:
        return absent(__name__, name)
    return getattr(importlib.import_module(_HOMES[name]), name)
