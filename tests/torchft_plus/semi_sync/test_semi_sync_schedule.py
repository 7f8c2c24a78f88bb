"""The arithmetic of windows and fragments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.semi_sync.schedule import Schedule


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((10, 0), "model_fragments is empty"),
        ((0, 1), "sync_every is 0"),
        ((10, 3), "multiple of the number of fragments"),
        ((10, 1, 10), "fragment_sync_delay is 10"),
        ((10, 2, 5), "below the 5 inner steps"),
        ((10, 1, -1), "fragment_sync_delay is -1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Schedule(*arguments)


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_who_was_there_from_the_start_is_always_full(
    fragments: int, window: int, data: st.DataObject
) -> None:
    """Walk through syncs as a group does that never fails: it contributes to each of them."""
    schedule = Schedule(fragments * window, fragments, data.draw(st.integers(0, window - 1)))
    since_set = [0] * fragments
    for committed in range(4 * fragments):
        turn = schedule.fragment(committed)
        for inner in range(1, schedule.window + 1):
            since_set = [steps + 1 for steps in since_set]
            if inner == schedule.launch_after:
                assert schedule.is_full(committed, since_set[turn])
                assert not schedule.is_full(committed, since_set[turn] - 1)
        since_set[turn] = 0


@given(st.integers(1, 5), st.integers(2, 6), st.integers(5, 40), st.data())
def test_who_came_within_a_window_counts_from_the_first_full_one(
    fragments: int, window: int, committed: int, data: st.DataObject
) -> None:
    schedule = Schedule(fragments * window, fragments)
    missed = data.draw(st.integers(1, window - 1))
    since_set = [0] * fragments
    contributed: list[bool] = []
    for sync in range(committed, committed + 2 * fragments + 1):
        turn = schedule.fragment(sync)
        steps = schedule.window - (missed if sync == committed else 0)
        since_set = [before + steps for before in since_set]
        contributed.append(schedule.is_full(sync, since_set[turn]))
        since_set[turn] = 0
    assert contributed == [False] * fragments + [True] * (fragments + 1)
