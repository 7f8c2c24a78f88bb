"""What a trainer shares with the other replica groups beside parameters and optimizer state."""

from __future__ import annotations

from typing import Any

import torch


class TrainingState:
    """Tokens seen and learning rate schedule, which move with committed steps only.

    A joiner receives them at the head where it joins, before its first step, and moves them itself from there on.

    Args:
        schedulers: torchtitan's container of learning rate schedulers.
    """

    def __init__(self, schedulers: Any) -> None:
        self._schedulers = schedulers
        self.tokens = 0
        """Tokens that all groups committed, divided by the ranks of one group: torchtitan's ``ntokens_seen``."""

    def get(self) -> dict[str, Any]:
        """For the state registry."""
        return {"tokens": self.tokens, "schedulers": self._schedulers.state_dict()}

    def set(self, values: dict[str, Any]) -> None:
        """Take over a donor's values."""
        self.tokens = int(values["tokens"])
        self._schedulers.load_state_dict(values["schedulers"])


def align(schedulers: Any, step: int) -> None:
    """Put schedules and learning rates to where they are after ``step`` steps.

    Args:
        schedulers: torchtitan's container; its schedules are functions of the step (``LambdaLR``).
        step: number of steps.
    """
    for scheduler in schedulers.schedulers:
        scheduler.last_epoch, scheduler._step_count = step, step + 1
        rates = [
            base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        scheduler._last_lr = rates
