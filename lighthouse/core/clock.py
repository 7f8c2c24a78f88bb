"""The time base of the Lighthouse: time in which it ran itself (protocol-rationale F22)."""

from __future__ import annotations


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
