"""How much of a step this rank computes, and how much is left. Pure."""

from __future__ import annotations


class Pace:
    """Times of the last step, from the training loop's calls; seconds on one clock.

    A trainer that skips forward and backward while its group is behind (TorchTitan's does) has nearly all of a step to spare,
    one that computes for nothing only what it waits for the others.
    """

    def __init__(self) -> None:
        self.spare_ms = 0.0
        """Of the last whole step, what was not computed in; 0 before there was one."""
        self._began: float | None = None
        self._compute_began: float | None = None
        self._computed_s = 0.0

    def step_begins(self, now: float) -> None:
        """``start_step``."""
        if self._began is not None:
            self.spare_ms = 1000 * max(0.0, now - self._began - self._computed_s)
        self._began, self._computed_s = now, 0.0

    def compute_begins(self, now: float) -> None:
        """Forward and backward follow."""
        self._compute_began = now

    def compute_ends(self, now: float) -> None:
        """``finish_step``."""
        if self._compute_began is not None:
            self._computed_s += now - self._compute_began
            self._compute_began = None
