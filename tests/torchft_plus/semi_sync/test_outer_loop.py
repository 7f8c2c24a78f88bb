"""What the outer loop does around the syncs of others, with a Manager that plays a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lighthouse.messages import Head
from torchft_plus.manager.outcome import StepOutcome, StepPlan
from torchft_plus.semi_sync.fragment import Fragment
from torchft_plus.semi_sync.outer_loop import OuterLoop
from torchft_plus.semi_sync.schedule import Schedule
from torchft_plus.state.registry import StateRegistry


class Scripted:
    """Is behind for ever; the others commit one sync after the other."""

    def __init__(self) -> None:
        self.state = StateRegistry()
        self.step = 0

    def attach(self, reduction: Any) -> None: ...

    def use_windows(self) -> None: ...

    def start_step(self) -> StepPlan:
        return StepPlan(self.step + 1, behind=True)

    def inner_step_done(self) -> None: ...

    def window_is_due(self, inner_steps: int, ready: bool = False) -> bool:
        return False

    def launch_step(self, weight: float) -> None: ...

    def finish_step(
        self, scalars: Mapping[str, float] | None = None, positions: Mapping[str, int] | None = None
    ) -> StepOutcome:
        self.step += 1
        if self.step == 2:  # a quorum was given up meanwhile
            self.step -= 1
            self.finish_step = self._commit
            return StepOutcome(Head(self.step, 1), refused=True, behind=True)
        return StepOutcome(Head(self.step, 1), applied=True, behind=True, contributors=2)

    def _commit(self, *given: Any) -> StepOutcome:
        self.step += 1
        return StepOutcome(Head(self.step, 1), applied=True, behind=True, contributors=2)

    def record_or_step(self, optimizers: list[torch.optim.Optimizer], step: Callable[[], Any]) -> Any: ...

    def report_error(self, error: Exception) -> None: ...

    def current_step(self) -> int:
        return self.step


def test_a_group_that_is_behind_when_the_run_ends_does_not_wait_for_its_state() -> None:
    model = nn.Linear(2, 1)
    named = list(model.named_parameters())
    outer = torch.optim.SGD([p for _, p in named], lr=1.0)
    told: list[int] = []
    manager = Scripted()
    loop = OuterLoop(
        manager, [Fragment(named, outer)], Schedule(5), syncs=4, on_commit=lambda o: told.append(o.head.step)
    )
    loop.open()
    assert told == [1, 2, 3, 4], "each commit is told once, a refused one is not"
    assert (manager.current_step(), loop.inner_steps) == (4, 0)
