"""What the replica groups said of their steps, and the figures of a kill that follow from it."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Attempt:
    """One pass through the training loop."""

    time: float
    step: int
    committed: bool
    participants: int
    crc: int | None


@dataclass(slots=True)
class Journal:
    """Attempts of all groups, by replica id; filled by reader threads, read by the bench."""

    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, replica_id: str, line: dict[str, Any]) -> None:
        """One line of a group."""
        with self.changed:
            self.attempts.setdefault(replica_id, []).append(Attempt(**line))
            self.changed.notify_all()

    def wake(self) -> None:
        """A group has ended."""
        with self.changed:
            self.changed.notify_all()

    def since(self, replica_id: str, start: float) -> list[Attempt]:
        """Attempts that ended after ``start``."""
        with self.changed:
            return [attempt for attempt in self.attempts.get(replica_id, []) if attempt.time > start]

    def commits(self, replica_id: str, start: float, participants: int = 0) -> list[Attempt]:
        """Commits after ``start`` in which at least so many took part."""
        since = self.since(replica_id, start)
        return [attempt for attempt in since if attempt.committed and attempt.participants >= participants]

    def normal_step_s(self, replica_id: str, before: float, count: int = 20) -> float:
        """Median time between the last commits before a moment."""
        with self.changed:
            times = [one.time for one in self.attempts[replica_id] if one.committed and one.time <= before]
        recent = times[-count - 1 :]
        return statistics.median(late - early for early, late in pairwise(recent))

    def longest_gap_s(self, replica_id: str, start: float, end: float) -> float:
        """Longest time between commits, from the last one before ``start`` to the first one after ``end``."""
        with self.changed:
            times = [one.time for one in self.attempts[replica_id] if one.committed]
        first = max((index for index, time in enumerate(times) if time <= start), default=0)
        last = next((index for index, time in enumerate(times) if time >= end), len(times) - 1)
        span = times[first : last + 1]
        return max((late - early for early, late in pairwise(span)), default=0.0)

    def disagreements(self) -> tuple[int, int]:
        """(steps after which two groups held different parameters, steps that could be compared)."""
        with self.changed:
            lines: Iterable[list[Attempt]] = [list(attempts) for attempts in self.attempts.values()]
        by_step: dict[int, list[int]] = {}
        for attempts in lines:
            for attempt in attempts:
                if attempt.committed and attempt.crc is not None:
                    by_step.setdefault(attempt.step, []).append(attempt.crc)
        compared = [crcs for crcs in by_step.values() if len(crcs) > 1]
        return sum(len(set(crcs)) > 1 for crcs in compared), len(compared)
