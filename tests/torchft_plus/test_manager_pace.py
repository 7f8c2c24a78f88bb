"""What a step has to spare."""

from __future__ import annotations

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
