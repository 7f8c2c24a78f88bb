"""LocalSGD: parameters are averaged every N inner steps."""

from __future__ import annotations

import torch
from torch import nn

from torchft_plus.manager.manager import Manager
from torchft_plus.semi_sync.diloco import DiLoCo


class LocalSGD(DiLoCo):
    """Trains locally and averages parameters every ``sync_every`` inner steps (arXiv 1805.09767); torchft's constructor.

    It is DiLoCo with an outer optimizer that takes the average as it is: SGD with learning rate 1 and without momentum.

    Args:
        manager: of this rank, before its first step.
        model: its trainable parameters are averaged.
        optimizer: the optimizer of the model; not ``torchft_plus.Optimizer``.
        sync_every: inner steps between two averages.

    Raises:
        ValueError: as ``DiLoCo``.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
    ) -> None:
        outer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        super().__init__(manager, [model], optimizer, outer, sync_every)
