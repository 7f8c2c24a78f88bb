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
from torchft_plus.semi_sync.schedule import Schedule, TimedWindow
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

    def window_is_due(
        self, inner_steps: int, ready: bool = False, least_peers: int = 1, grace_ms: int = 0
    ) -> bool:
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


class Level(Scripted):
    """Is level, and lets each window end when the loop itself wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.polls: list[tuple[int, bool, int, int]] = []
        self.weights: list[float] = []

    def start_step(self) -> StepPlan:
        return StepPlan(self.step + 1, behind=False)

    def window_is_due(
        self, inner_steps: int, ready: bool = False, least_peers: int = 1, grace_ms: int = 0
    ) -> bool:
        self.polls.append((inner_steps, ready, least_peers, grace_ms))
        return ready

    def launch_step(self, weight: float) -> None:
        self.weights.append(weight)

    def finish_step(self, *given: Any) -> StepOutcome:
        self.step += 1
        return StepOutcome(Head(self.step, 1), applied=True, contributed=True, contributors=2)


def test_a_window_that_ends_by_time_counts_by_its_tokens() -> None:
    model = nn.Linear(2, 1)
    named = list(model.named_parameters())
    outer = torch.optim.SGD([p for _, p in named], lr=1.0)
    now_s = [0.0]
    manager = Level()
    loop = OuterLoop(
        manager,
        [Fragment(named, outer)],
        Schedule(100),
        timed=TimedWindow(seconds=10, least_groups=3, grace_seconds=0.5),
        clock=lambda: now_s[0],
    )
    loop.open()
    for tokens, at_s in ((5, 4.0), (7, 10.0), (2, 12.0), (3, 20.0)):
        now_s[0] = at_s
        loop.inner_step_done(tokens=tokens)
    assert manager.weights == [12.0, 5.0]
    assert manager.polls == [(1, False, 3, 500), (2, True, 3, 500), (1, False, 3, 500), (2, True, 3, 500)]
