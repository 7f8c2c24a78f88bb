"""Quorum-based fault tolerance for PyTorch and TorchTitan.

The public names are loaded on first use: configuration and command line must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchft_plus.manager.manager import Manager as Manager
    from torchft_plus.manager.optim import Optimizer as Optimizer
    from torchft_plus.process_group.managed import ManagedProcessGroup as ManagedProcessGroup
    from torchft_plus.process_group.wrappers import ProcessGroup as ProcessGroup
    from torchft_plus.process_group.wrappers import ProcessGroupDummy as ProcessGroupDummy
    from torchft_plus.process_group.wrappers import ProcessGroupGloo as ProcessGroupGloo
    from torchft_plus.process_group.wrappers import ProcessGroupNCCL as ProcessGroupNCCL
    from torchft_plus.reduce.ddp import DistributedDataParallel as DistributedDataParallel
    from torchft_plus.semi_sync.diloco import DiLoCo as DiLoCo
    from torchft_plus.semi_sync.local_sgd import LocalSGD as LocalSGD

__version__ = "0.1.0"

_HOMES = {
    "DiLoCo": "torchft_plus.semi_sync.diloco",
    "DistributedDataParallel": "torchft_plus.reduce.ddp",
    "LocalSGD": "torchft_plus.semi_sync.local_sgd",
    "ManagedProcessGroup": "torchft_plus.process_group.managed",
    "Manager": "torchft_plus.manager.manager",
    "Optimizer": "torchft_plus.manager.optim",
    "ProcessGroup": "torchft_plus.process_group.wrappers",
    "ProcessGroupDummy": "torchft_plus.process_group.wrappers",
    "ProcessGroupGloo": "torchft_plus.process_group.wrappers",
    "ProcessGroupNCCL": "torchft_plus.process_group.wrappers",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
