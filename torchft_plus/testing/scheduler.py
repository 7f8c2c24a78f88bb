"""Virtual time: one queue of events, ordered by time and, within a millisecond, by chance."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

MAX_EVENTS = 400_000
"""A run has some thousands; one that never comes to rest is a live-lock."""


class TooManyEvents(AssertionError):
    """Something goes round in circles."""


class Timer:
    """A scheduled call that can be taken back."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """The call will not happen."""
        self.cancelled = True


class Scheduler:
    """Runs calls in the order of virtual time (milliseconds). Equal seeds give equal runs."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ms = 0
        self.events = 0
        self._queue: list[tuple[int, float, int, Timer, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay_ms: float, call: Callable[..., object], *arguments: Any) -> Timer:
        """Run ``call`` in ``delay_ms``."""
        self._number += 1
        timer = Timer()
        at_ms = self.now_ms + max(0, int(delay_ms))
        entry = (at_ms, self.random.random(), self._number, timer, call, arguments)
        heapq.heappush(self._queue, entry)
        return timer

    def run(self, end_ms: int, done: Callable[[], bool] | None = None) -> bool:
        """Run until ``done`` or ``end_ms``; True if ``done`` said so."""
        while self._queue and self._queue[0][0] <= end_ms:
            at_ms, _, _, timer, call, arguments = heapq.heappop(self._queue)
            if timer.cancelled:
                continue
            self.now_ms = at_ms
            self.events += 1
            if self.events > MAX_EVENTS:
                raise TooManyEvents(f"liveness: {MAX_EVENTS} events, and no end")
            call(*arguments)
            if done is not None and done():
                return True
        self.now_ms = max(self.now_ms, end_ms)
        return False
