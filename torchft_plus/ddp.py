"""torchft's module of this name."""

from torchft_plus.reduce.ddp import DistributedDataParallel
from torchft_plus.reduce.ddp import DistributedDataParallel as PureDistributedDataParallel

__all__ = ["DistributedDataParallel", "PureDistributedDataParallel"]
