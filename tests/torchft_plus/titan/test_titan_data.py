"""Batches are committed once, whatever is refused, restarted or found out late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.titan.data import Batch, CommittedBatches, Share


class Source:
    """A share of ``length`` numbered batches."""

    def __init__(self, length: int = 10_000) -> None:
        self.length = length
        self.starts = 0
        self.counted = 0

    def load(self) -> Iterator[Batch]:
        self.starts += 1
        return (({"input": n}, n) for n in range(self.length))

    def prepare(self, reader: Iterable[Batch]) -> Iterator[Batch]:
        for batch in reader:
            self.counted += 1
            yield batch

    def batches(self) -> CommittedBatches:
        return CommittedBatches(self.load, self.prepare)


steps = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["commit", "refuse", "seek"])), max_size=40)


@given(steps, st.data())
def test_a_step_starts_at_the_first_batch_that_is_not_committed(
    plan: list[tuple[int, str]], data: st.DataObject
) -> None:
    source = Source()
    batches = source.batches()
    batches.seek(0)
    position = 0
    for count, what in plan:
        if what == "seek":
            position = data.draw(st.integers(0, 50))
            batches.seek(position)
        attempt = batches.step()
        taken = [next(attempt)[1] for _ in range(count)]
        assert taken == list(range(position, position + count))
        assert batches.position == position + count
        assert [labels for _, labels in batches.given] == taken
        if what == "commit":
            batches.commit()
            position += count
        assert batches.committed == position


def test_seeking_forward_reads_on_and_backward_starts_again() -> None:
    source = Source()
    batches = source.batches()
    batches.seek(5)
    batches.seek(8)
    assert source.starts == 1
    assert next(batches.step())[1] == 8
    batches.seek(2)
    assert source.starts == 2
    assert next(batches.step())[1] == 2


def test_skipped_batches_are_not_counted_and_refused_ones_once() -> None:
    source = Source()
    batches = source.batches()
    batches.seek(100)
    for _ in range(3):
        attempt = batches.step()
        assert [next(attempt)[1], next(attempt)[1]] == [100, 101]
    assert source.counted == 2


def test_prefetched_batches_are_the_ones_of_the_step() -> None:
    batches = Source().batches()
    batches.seek(3)
    assert [labels for _, labels in batches.prefetch(2)] == [3, 4]
    assert next(batches.step())[1] == 3


def test_what_the_trainer_puts_into_a_batch_does_not_stay() -> None:
    batches = Source().batches()
    batches.seek(0)
    inputs, _ = next(batches.step())
    inputs["input"] = "on another device"
    again: dict[str, Any] = next(batches.step())[0]
    assert again == {"input": 0}


def test_a_position_beyond_the_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="ends after 3 batches"):
        Source(3).batches().seek(4)


@given(st.integers(1, 8), st.integers(1, 8))
def test_shares_cover_the_data_once(groups: int, ranks: int) -> None:
    places = [Share(index, groups).shift(rank, ranks) for index in range(groups) for rank in range(ranks)]
    assert sorted(rank for rank, _ in places) == list(range(groups * ranks))
    assert {size for _, size in places} == {groups * ranks}
