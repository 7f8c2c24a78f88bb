"""Which batches a replica group trains on: its share, in order, each committed once.

A group reads the share of its index, whoever else is there. The *position* of a share is the number of its batches that
were committed; every group keeps the positions of all shares, so that a group that comes back goes on where its
predecessor's last commit was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Batch = tuple[dict[str, Any], Any]
"""(inputs by name, labels), as torchtitan's dataloaders give it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the data a group reads."""

    index: int
    size: int

    def shift(self, dp_rank: int, dp_world_size: int) -> tuple[int, int]:
        """Data-parallel rank and size over all groups, of those within this group."""
        return self.index * dp_world_size + dp_rank, self.size * dp_world_size


class CommittedBatches:
    """Batches of one rank's share; what was taken for a step that was not committed is given again.

    Args:
        load: starts to read the share from its beginning.
        prepare: torchtitan's generator around a reader (it counts tokens and loading times).
    """

    def __init__(
        self, load: Callable[[], Iterator[Batch]], prepare: Callable[[Iterable[Batch]], Iterator[Batch]]
    ) -> None:
        self._load = load
        self._prepare = prepare
        self._reader: Iterator[Batch] | None = None
        self._batches: Iterator[Batch] | None = None
        self._held: list[Batch] = []
        self._given = 0
        self.committed = 0
        """Batches of this share that were committed up to the position of the reader."""

    @property
    def position(self) -> int:
        """The position if the present step is committed."""
        return self.committed + self._given

    @property
    def given(self) -> list[Batch]:
        """The batches of the present step so far."""
        return self._held[: self._given]

    def seek(self, position: int) -> None:
        """Make ``position`` the place where the next step starts; what is held for another place is dropped.

        Reading on costs what loading the skipped batches costs.

        Raises:
            ValueError: the share is shorter than that.
        """
        if self._reader is not None and position == self.committed:
            return
        taken = self.committed + len(self._held)
        self._held.clear()
        if self._reader is None or position < taken:
            self._reader, taken = self._load(), 0
            self._batches = self._prepare(self._reader)
        for count in range(taken, position):
            if next(self._reader, None) is None:
                raise ValueError(
                    f"this share of the data ends after {count} batches, before position {position}"
                )
        self.committed = position

    def prefetch(self, count: int) -> list[Batch]:
        """The first ``count`` batches of the next step, which ``step`` will give."""
        self._fill(count)
        return self._held[:count]

    def _fill(self, count: int) -> None:
        assert self._batches is not None, "seek comes first"
        while len(self._held) < count:
            self._held.append(next(self._batches))

    def step(self) -> Iterator[Batch]:
        """Batches for one attempt of a step, from the first one that is not committed.

        Raises (in the iterator):
            torchtitan's DataloaderExhaustedError: the share has no more batches.
        """
        self._given = 0
        return self._give()

    def _give(self) -> Iterator[Batch]:
        while True:
            self._fill(self._given + 1)
            inputs, labels = self._held[self._given]
            self._given += 1
            yield dict(inputs), labels  # a copy: torchtitan puts device tensors into it

    def commit(self) -> None:
        """The step that was given batches is committed."""
        self.committed += self._given
        del self._held[: self._given]
        self._given = 0
