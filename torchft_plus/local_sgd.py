"""torchft's module of this name."""

from torchft_plus.semi_sync.diloco import DiLoCo
from torchft_plus.semi_sync.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
