"""When is a bucket full? When its parameters have fired as often as in the last step: nobody announces micro-batches."""

from __future__ import annotations

from collections.abc import Sequence


class Readiness:
    """Counts of hooks per parameter, and what the last step taught.

    Args:
        bucket_of: bucket of each parameter.
        buckets: number of buckets.
    """

    def __init__(self, bucket_of: Sequence[int], buckets: int) -> None:
        self._bucket_of = bucket_of
        self._buckets = buckets
        self._learned: list[int] | None = None
        self._counts = [0] * len(bucket_of)
        self._missing = [0] * buckets

    def begin(self) -> None:
        """A step starts with nothing fired. A parameter that did not fire in the last step is not waited for."""
        self._counts = [0] * len(self._bucket_of)
        self._missing = [0] * self._buckets
        for bucket, expected in zip(self._bucket_of, self._learned or (), strict=False):
            self._missing[bucket] += expected > 0

    def fired(self, index: int) -> int:
        """Count one firing of parameter ``index``; returns its bucket."""
        self._counts[index] += 1
        bucket = self._bucket_of[index]
        if self._learned is not None and self._counts[index] == self._learned[index]:
            self._missing[bucket] -= 1
        return bucket

    def first_unready(self, start: int) -> int:
        """The first bucket from ``start`` on that is not full; ``start`` while nothing has been learned."""
        if self._learned is None:
            return start
        while start < self._buckets and self._missing[start] == 0:
            start += 1
        return start

    def as_often_as_learned(self) -> bool:
        """True if no parameter is expected to fire again in this step (also if nothing is known yet)."""
        return self._learned is None or not any(self._missing)

    def any_fired(self) -> bool:
        """True if this step has had (a part of) a backward."""
        return any(self._counts)

    def learn(self) -> None:
        """The step's counts are complete. Steps without any, like a joiner's, teach nothing."""
        if self.any_fired():
            self._learned = list(self._counts)
