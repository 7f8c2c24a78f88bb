"""The time base of the Lighthouse: time in which it ran itself (protocol-rationale F22)."""

from __future__ import annotations


def tick_and_gap_ms(heartbeat_timeout_ms: int, most_ms: int) -> tuple[int, int]:
    """How often to look at the clock (at most every ``most_ms``), and from which gap on it was a pause.

    A pause that is as long as the heartbeat limit must be seen as one, however short that limit is; a late tick must not.
    """
    tick_ms = max(1, min(most_ms, heartbeat_timeout_ms // 4))
    return tick_ms, max(2 * tick_ms, min(1_000, heartbeat_timeout_ms // 2))


class RunningClock:
    """Milliseconds during which this process ran and read its inbox.

    It must be read at least every ``max_gap_ms``; a longer gap was a pause of our own (stopped, swapped out, a
    suspended machine) and counts as ``max_gap_ms`` only. So after a pause nobody looks silent before his words were
    read.
    """

    def __init__(self, max_gap_ms: int) -> None:
        self.max_gap_ms = max_gap_ms
        self._last_ms: float | None = None
        self._running_ms = 0.0

    def read(self, monotonic_ms: float) -> tuple[int, bool]:
        """Advance to ``monotonic_ms``; returns the running time in ms, and whether there was a pause."""
        gap_ms = 0.0 if self._last_ms is None else max(0.0, monotonic_ms - self._last_ms)
        self._last_ms = monotonic_ms
        self._running_ms += min(gap_ms, self.max_gap_ms)
        return int(self._running_ms), gap_ms > self.max_gap_ms
