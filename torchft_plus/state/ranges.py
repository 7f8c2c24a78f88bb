"""Sets of byte ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class RangeSet:
    """A set of integers kept as sorted, disjoint, half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add ``[start, end)``; ranges that touch are merged."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def covers(self, start: int, end: int) -> bool:
        """True if every integer of ``[start, end)`` is in the set."""
        if start >= end:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and self._ends[index] >= end

    def size(self) -> int:
        """How many integers are in the set."""
        return sum(self._ends) - sum(self._starts)
