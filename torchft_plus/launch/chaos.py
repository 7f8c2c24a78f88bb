"""Failure injection: when to do what to whom. Pure: events and times in, injections out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchft_plus.config import Chaos
from torchft_plus.launch.event_follower import Event


@dataclass(frozen=True, slots=True)
class Injection:
    """Do ``action`` to ``replica_id`` ("lighthouse" too), to all its ranks or to one."""

    action: Literal["kill", "stop", "terminate", "resume"]
    replica_id: str
    rank: int | None = None
    step: int = 0

    @property
    def target(self) -> str:
        """The target as the run file writes it."""
        return self.replica_id if self.rank is None else f"{self.replica_id}.{self.rank}"


@dataclass(slots=True)
class _Entry:
    chaos: Chaos
    draw: random.Random
    due: float | None = None
    done: int = 0
    resumes: list[tuple[float, Injection]] = field(default_factory=list[tuple[float, Injection]])


class ChaosSchedule:
    """Runs the ``[[chaos]]`` entries of a run file.

    Args:
        entries: the entries, already checked.
        now: start of the run, seconds of the clock that ``tick`` gets.
        steps_per_commit: training steps that a committed step of the protocol stands for; ``at_step`` counts them.
    """

    def __init__(self, entries: Sequence[Chaos], now: float, steps_per_commit: int = 1) -> None:
        self._step = 0
        self._steps_per_commit = steps_per_commit
        self._entries = [_Entry(chaos, random.Random(chaos.seed)) for chaos in entries]
        for entry in self._entries:
            self._schedule_next(entry, now)

    def feed(self, event: Event, now: float) -> None:
        """An event of any log; ``at_step`` and ``at_event`` entries become due by it."""
        if event.kind == "commit":
            self._step = max(self._step, event.integer("step"))
        for entry in self._entries:
            chaos = entry.chaos
            by_step = chaos.at_step is not None and self._step * self._steps_per_commit >= chaos.at_step
            by_event = (
                chaos.at_event is not None and chaos.at_event == event.kind and _is_in(event, chaos.target)
            )
            if (by_step or by_event) and not entry.done and entry.due is None:
                entry.due = now

    def tick(self, now: float, training: Sequence[str]) -> list[Injection]:
        """What is to be done now.

        Args:
            now: seconds.
            training: groups whose present life has committed a step. A random fault takes one of them, and
                never the last: losing all groups at once is another experiment.
        """
        injections: list[Injection] = []
        left = list(training)
        for entry in self._entries:
            injections += [i for due, i in entry.resumes if due <= now]
            entry.resumes = [r for r in entry.resumes if r[0] > now]
            if entry.due is None or entry.due > now:
                continue
            injection = self._injection(entry, left)
            if injection is None:
                continue  # a random fault waits for a second group that trains
            entry.done += 1
            entry.due = None
            self._schedule_next(entry, now)
            injections.append(injection)
            left = [replica_id for replica_id in left if replica_id != injection.replica_id]
            if entry.chaos.resume_after_s is not None:
                resume = Injection("resume", injection.replica_id, injection.rank, self._step)
                entry.resumes.append((now + entry.chaos.resume_after_s, resume))
        return injections

    def _schedule_next(self, entry: _Entry, now: float) -> None:
        chaos = entry.chaos
        if chaos.every_s is not None and (chaos.times is None or entry.done < chaos.times):
            entry.due = now + chaos.every_s * entry.draw.uniform(0.5, 1.5)

    def _injection(self, entry: _Entry, training: list[str]) -> Injection | None:
        chaos = entry.chaos
        if chaos.target == "random":
            if len(training) < 2:
                return None
            return Injection(chaos.action, entry.draw.choice(sorted(training)), None, self._step)
        replica_id, _, rank = chaos.target.partition(".")
        return Injection(chaos.action, replica_id, int(rank) if rank else None, self._step)


def _is_in(event: Event, target: str) -> bool:
    """The event stands in the log of the target (of any of its ranks, if the target is a whole group)."""
    return target in (event.replica_id, f"{event.replica_id}.{event.group_rank}")
