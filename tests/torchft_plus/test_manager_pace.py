"""What a step has to spare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchft_plus.manager.manager import REPLAY_SHARE, Manager
from torchft_plus.manager.pace import Pace


def _step(pace: Pace, start: float, compute: tuple[float, float]) -> None:
    pace.step_begins(start)
    pace.compute_begins(compute[0])
    pace.compute_ends(compute[1])


def test_what_is_not_computed_is_spare() -> None:
    pace = Pace()
    assert pace.spare_ms == 0
    _step(pace, 10.0, (10.1, 10.7))
    assert pace.spare_ms == 0, "there was no whole step"
    pace.step_begins(11.0)
    assert round(pace.spare_ms) == 400


def test_a_step_that_is_begun_again_counts_once() -> None:
    pace = Pace()
    pace.step_begins(0.0)
    pace.compute_begins(0.0)
    pace.step_begins(1.0)
    assert pace.spare_ms == 1000, "it was given up, and nothing is known of what it computed"
    pace.compute_begins(1.0)
    pace.compute_ends(1.5)
    pace.compute_ends(1.9)
    pace.step_begins(2.0)
    assert pace.spare_ms == 500


@pytest.mark.parametrize(
    ("state_is_here", "windowed", "nearly_level", "replays"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_ahead_of_the_boundary_a_joiner_replays_in_a_share_of_what_it_has_to_spare(
    state_is_here: bool, windowed: bool, nearly_level: bool, replays: bool
) -> None:
    """P4: without a budget all others would wait for the whole replay."""
    budgets_ms: list[float | None] = []

    def replay(_report: object, budget_ms: float | None = None) -> bool:
        budgets_ms.append(budget_ms)
        return False

    manager: Any = object.__new__(Manager)
    manager._fetcher = SimpleNamespace(report=object() if state_is_here else None)
    manager._windowed = windowed
    manager.catch_up = SimpleNamespace(nearly_level=nearly_level, replay=replay)
    manager._take_values = lambda: True
    manager._pace = SimpleNamespace(spare_ms=400.0)
    manager._replay_ahead()
    assert budgets_ms == ([REPLAY_SHARE * 400.0] if replays else [])
