"""When which fragment is synchronised: pure arithmetic on the number of committed syncs and of inner steps.

Nothing here counts syncs by itself. The number of the next one is the Manager's step, which all groups share, so a group that
comes back is at the same fragment as everybody (protocol-rationale, F36).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedWindow:
    """Windows that end by time, for groups of different speed (Decoupled DiLoCo, arXiv 2604.21428).

    Pseudo-gradients are then averaged by the tokens behind them.

    Args:
        seconds: after which a group ends its window, if it has not done all inner steps of one before.
        least_groups: the minimum quorum: so many groups must wait at the sync to make others end theirs earlier.
        grace_seconds: and they wait so long for the others to come by themselves.

    Raises:
        ValueError: an argument that makes no sense.
    """

    seconds: float
    least_groups: int = 1
    grace_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"sync_seconds is {self.seconds}: it must be above 0")
        if self.least_groups < 1:
            raise ValueError(f"sync_least_groups is {self.least_groups}: it must be at least 1")
        if self.grace_seconds < 0:
            raise ValueError(f"sync_grace_seconds is {self.grace_seconds}: it must be at least 0")


def timed_window(
    seconds: float | None, least_groups: int = 1, grace_seconds: float = 0.0
) -> TimedWindow | None:
    """A ``TimedWindow``, or None without ``seconds``.

    Raises:
        ValueError: an argument makes no sense, or not without ``seconds``.
    """
    if seconds is not None:
        return TimedWindow(seconds, least_groups, grace_seconds)
    if least_groups != 1 or grace_seconds != 0:
        raise ValueError("sync_least_groups and sync_grace_seconds are about sync_seconds, which is not set")
    return None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Windows of inner steps, each of which ends with the sync of one fragment.

    Streaming DiLoCo (arXiv 2501.18512) synchronises each of its fragments every ``sync_every`` inner steps, one after
    the other; DiLoCo (arXiv 2311.08105) and LocalSGD (arXiv 1805.09767) are the case of a single fragment.

    Args:
        sync_every: inner steps between two syncs of the same fragment.
        fragments: how many there are.
        delay: inner steps between sending a pseudo-gradient and using the average (``fragment_sync_delay``).

    Raises:
        ValueError: an argument that does not fit the others.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.fragments < 1:
            raise ValueError("model_fragments is empty: pass at least one module")
        if self.sync_every < 1 or self.sync_every % self.fragments != 0:
            raise ValueError(
                f"sync_every is {self.sync_every}: it must be a positive multiple of the number of fragments "
                f"({self.fragments}), which are synchronised one after the other"
            )
        if not 0 <= self.delay < self.window:
            raise ValueError(
                f"fragment_sync_delay is {self.delay}: it must be at least 0 and below the {self.window} inner steps between "
                "two syncs (sync_every / number of fragments)"
            )

    @property
    def window(self) -> int:
        """Inner steps between two syncs."""
        return self.sync_every // self.fragments

    @property
    def launch_after(self) -> int:
        """Inner steps of a window after which its pseudo-gradient is sent."""
        return self.window - self.delay

    def fragment(self, committed_syncs: int) -> int:
        """Which fragment the sync after ``committed_syncs`` is about."""
        return committed_syncs % self.fragments

    def is_full(self, committed_syncs: int, inner_steps: int) -> bool:
        """Has a group done its whole share before the sync after ``committed_syncs``?

        Args:
            committed_syncs: since the run began, or went on from a checkpoint.
            inner_steps: since it last took over this fragment (or the whole model) from the others.
        """
        windows = min(committed_syncs + 1, self.fragments)  # at first a fragment's turn comes early
        return inner_steps >= windows * self.window - self.delay
