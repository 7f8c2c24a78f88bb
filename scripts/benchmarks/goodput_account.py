"""What a row of ``bench goodput`` has committed, and what it is compared with. Pure: no process, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.recovery_log import Attempt

KILL_WINDOW_S = 0.5
"""A kill falls at a random moment of this window: some steps."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One kill of the schedule."""

    at_s: float
    """After the start of the disturbed part."""
    order: tuple[str, ...]
    """The first of these that trains is the victim."""


def schedule(names: Sequence[str], seconds: float, every_s: float, seed: int) -> list[Strike]:
    """Kills ``every_s`` from each other, the first after ``every_s``; the same ones for the same seed."""
    chance = random.Random(seed)
    strikes: list[Strike] = []
    while (at_s := (len(strikes) + 1) * every_s) < seconds:
        order = tuple(chance.sample(list(names), len(names)))
        strikes.append(Strike(at_s + chance.uniform(0.0, KILL_WINDOW_S), order))
    return strikes


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that counts."""

    time: float
    participants: int


def committed_steps(attempts: Iterable[Attempt]) -> list[Committed]:
    """Each step once, from what all groups say of it: when the first one had it, and how many gradients are in it."""
    steps: dict[int, Committed] = {}
    for one in attempts:
        if not one.committed or not one.participants:
            continue
        known = steps.get(one.step)
        time = one.time if known is None else min(one.time, known.time)
        steps[one.step] = Committed(time, max(one.participants, known.participants if known else 0))
    return sorted(steps.values(), key=lambda step: step.time)


@dataclass(slots=True)
class Absence:
    """A group that the bench has killed."""

    replica_id: str
    killed: float
    ready: float | None = None
    """Its new process has done its imports and built its model."""
    level: float | None = None
    """It has committed a step of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run, between two moments of the monotonic clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start

    def batches(self, steps: Iterable[Committed]) -> int:
        """Batches committed in it."""
        return sum(step.participants for step in steps if self.start <= step.time < self.end)

    def timeline(self, steps: Iterable[Committed], tokens_per_batch: int) -> list[tuple[int, int]]:
        """(second, tokens committed in it), all seconds."""
        bins = [0] * max(1, round(self.seconds))
        for step in steps:
            if self.start <= step.time < self.end:
                second = min(int(step.time - self.start), len(bins) - 1)
                bins[second] += step.participants * tokens_per_batch
        return list(enumerate(bins))

    def absent_s(self, absences: Iterable[Absence], until: str) -> float:
        """Group-seconds of this part from each kill until the victim's new process is "ready" or "level"."""
        total = 0.0
        for one in absences:
            back = one.ready if until == "ready" else one.level
            end = self.end if back is None else min(back, self.end)
            total += max(0.0, end - max(one.killed, self.start))
        return total


def corrected(share: float, absent_s: float, groups: int, seconds: float) -> float:
    """``share`` of the undisturbed rate as a share of what the groups that were there could have committed.

    Those could have committed the undisturbed rate times (1 - absent group-seconds / all group-seconds). Absent is only
    whom the bench has killed: a system that lets healthy groups die or wait gets nothing for those.
    """
    return share / (1.0 - absent_s / (groups * seconds))
