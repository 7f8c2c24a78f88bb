"""The optimizer wrapper: steps only when the quorum has committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchft_plus.manager.manager import Manager


class Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer: ``zero_grad`` starts the step, ``step`` finishes it and applies it if it was committed.

    A step that was not committed leaves parameters and optimizer state as they are. While this group is behind, the step is
    recorded, to be replayed when the state has arrived.

    Args:
        manager: the group's Manager.
        optim: any ``torch.optim`` optimizer, or a container with a list of them in ``optimizers`` (TorchTitan's). With the
            first step it is registered at ``manager.state`` under ``name``, if steps are no windows (DiLoCo); and so
            are its parameters, where nothing else has them.
        name: needed only if there are several optimizers.
    """

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer, name: str = "optimizer") -> None:
        # No super().__init__: state and groups are the inner optimizer's.
        self.manager = manager
        self.optim = optim
        parts = getattr(optim, "optimizers", None)
        self._parts: list[torch.optim.Optimizer] = [optim] if parts is None else list(parts)
        for index, part in enumerate(self._parts):
            manager.adopt_optimizer(name if parts is None else f"{name}_{index}", part)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optim.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's; before the first step."""
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start the step, then clear gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Finish the step; apply it if it was committed.

        Raises:
            ValueError: a closure was given; it would compute the loss again after the vote.
        """
        if closure is not None:
            raise ValueError("closure is not supported: the loss may not be computed again after the vote")
        self.manager.average_unreduced(
            parameter for part in self._parts for group in part.param_groups for parameter in group["params"]
        )
        if self.manager.should_commit():
            self.manager.record_or_step(self._parts, self.optim.step)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inner optimizer's."""
        self.optim.load_state_dict(state_dict)
