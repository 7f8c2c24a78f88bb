"""torchft's module of this name."""

from torchft_plus.manager.optim import Optimizer
from torchft_plus.manager.optim import Optimizer as OptimizerWrapper

__all__ = ["Optimizer", "OptimizerWrapper"]
