"""What the metrics logger shows of fault tolerance."""

from __future__ import annotations

from torchft_plus.titan.seam import Outcome


class FaultToleranceMetrics:
    """Counters of one process, under ``ft/`` in torchtitan's own metrics.

    Args:
        synchronises: commits are syncs between inner steps.
    """

    def __init__(self, synchronises: bool = False) -> None:
        self._synchronises = synchronises
        self._syncs = 0
        self._participants = 0
        self._quorum_id = 0
        self._commits = 0
        self._refusals = 0
        self._behind_since: float | None = None
        self._heal_seconds = 0.0

    def started(self, behind: bool, now: float) -> None:
        """A step starts, at ``now`` seconds of a steady clock."""
        if behind and self._behind_since is None:
            self._behind_since = now
        elif not behind and self._behind_since is not None:
            self._heal_seconds = now - self._behind_since
            self._behind_since = None

    def finished(self, outcome: Outcome, quorum_id: int) -> None:
        """A step ended under ``quorum_id``."""
        if outcome.refused:
            self._refusals += 1
            return
        self._commits += 1
        self._syncs = outcome.head.step
        self._participants = outcome.contributors
        self._quorum_id = quorum_id

    def values(self) -> dict[str, float]:
        """For ``extra_metrics``: groups whose gradients counted, quorum, steps committed and refused by this process,
        and how long it last took from joining to being level (0 if it never was behind). With windows of inner steps
        a step is a sync, and ``ft/syncs`` is the number of all that the run has committed."""
        values = {
            "ft/participants": self._participants,
            "ft/quorum_id": self._quorum_id,
            "ft/commits": self._commits,
            "ft/refusals": self._refusals,
            "ft/heal_seconds": self._heal_seconds,
        }
        return {**values, "ft/syncs": self._syncs} if self._synchronises else values
