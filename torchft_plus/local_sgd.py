"""torchft's module of this name."""

from __future__ import annotations

import torch

from torchft_plus.reduce.local_tensors import local_part
from torchft_plus.semi_sync.diloco import DiLoCo
from torchft_plus.semi_sync.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD", "extract_local_tensor"]


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """A copy of ``t``, of a DTensor of the local shard; detached."""
    return local_part(t.detach()).clone()
