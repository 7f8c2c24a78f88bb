"""Quorum-based fault tolerance for PyTorch and TorchTitan.

The public names are loaded on first use: configuration and command line must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchft_plus.compat.absent import absent

if TYPE_CHECKING:
    from torchft_plus.data import DistributedSampler as DistributedSampler
    from torchft_plus.manager.manager import Manager as Manager
    from torchft_plus.manager.optim import Optimizer as Optimizer
    from torchft_plus.otel import setup_logger as setup_logger
    from torchft_plus.process_group.managed import ManagedProcessGroup as ManagedProcessGroup
    from torchft_plus.process_group.nested import (
        ErrorSwallowingProcessGroupWrapper as ErrorSwallowingProcessGroupWrapper,
    )
    from torchft_plus.process_group.nested import FakeProcessGroupWrapper as FakeProcessGroupWrapper
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
    "DistributedSampler": "torchft_plus.data",
    "ErrorSwallowingProcessGroupWrapper": "torchft_plus.process_group.nested",
    "FakeProcessGroupWrapper": "torchft_plus.process_group.nested",
    "HTTPTransport": "torchft_plus.checkpointing",
    "LighthouseClient": "torchft_plus.coordination",
    "LighthouseServer": "torchft_plus.coordination",
    "LocalSGD": "torchft_plus.semi_sync.local_sgd",
    "ManagedProcessGroup": "torchft_plus.process_group.managed",
    "Manager": "torchft_plus.manager.manager",
    "Optimizer": "torchft_plus.manager.optim",
    "PGTransport": "torchft_plus.checkpointing.pg_transport",
    "ProcessGroup": "torchft_plus.process_group.wrappers",
    "ProcessGroupBabyNCCL": "torchft_plus.process_group",
    "ProcessGroupDummy": "torchft_plus.process_group.wrappers",
    "ProcessGroupGloo": "torchft_plus.process_group.wrappers",
    "ProcessGroupNCCL": "torchft_plus.process_group.wrappers",
    "setup_logger": "torchft_plus.otel",
}
_SUBMODULES = (
    "checkpointing", "coordination", "data", "ddp", "futures", "local_sgd", "manager", "optim", "otel",
    "parameter_server", "process_group",
)  # fmt: skip
"""torchft's ``import torchft`` loads them: ``torchft.process_group.X`` needs no further import."""

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        return absent(__name__, name)
    return getattr(importlib.import_module(_HOMES[name]), name)
