"""The restart policy: which replica groups to start, kill and give up, and when the run is over.

Pure: events in, effects out, time is an argument (seconds of any monotonic clock). It holds every decision of
the launcher about its groups; ``supervisor`` carries the effects out.

A group is restarted alone and whole: when one rank dies, the others of its group are killed before a new life
starts. A restart is delayed, twice as long with each failure that followed no progress, and after
``max_restarts`` such failures in a row the group is given up. A fault that was injected does not count. When
the first group has finished, nothing is restarted any more: a late-comer would find nobody to fetch the state
from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

REFUSED_STATUS = 2
"""Exit status of a trainer whose configuration is wrong: another try would end the same way."""
KILL_DEADLINE_S = 30.0
"""How long a killed process may take to disappear (freeing memory takes about 0.2 s per GB)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run file says about restarts; times in seconds."""

    max_restarts: int = 3
    restart_delay_s: float = 0.1
    restart_delay_max_s: float = 30.0
    stop_grace_s: float = 15.0
    min_replicas: int = 1


class Phase(Enum):
    """Where a group is."""

    RUNNING = "running"
    STOPPING = "stopping"  # asked to end; killed when the grace is over
    KILLED = "killed"  # waiting until its last rank is gone
    WAITING = "waiting"  # to be restarted
    FINISHED = "finished"  # all ranks did their work
    STOPPED = "stopped"  # ended because the run was over
    GIVEN_UP = "given up"


ALIVE = (Phase.RUNNING, Phase.STOPPING, Phase.KILLED)
ENDED = (Phase.FINISHED, Phase.STOPPED, Phase.GIVEN_UP)


@dataclass(frozen=True, slots=True)
class Start:
    """Start all ranks of a group as a new incarnation."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to all ranks of a group that still run."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to all ranks of a group that still run."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Say:
    """A sentence for people."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Nothing is left to run. ``finished``: at least one group did all its work, and none was given up."""

    finished: bool
    reason: str
    refused: bool = False
    """A trainer found its configuration wrong before it did anything."""


Effect = Start | Terminate | Kill | Say | End


@dataclass(slots=True)
class Group:
    """What the policy knows about one replica group."""

    replica_id: str
    phase: Phase = Phase.WAITING
    deadline: float = 0.0
    """WAITING: when to start. STOPPING, KILLED: when patience ends. RUNNING: see ``ended_ranks``."""
    failures: int = 0
    """Failures in a row without progress."""
    progressed: bool = False
    """This life has committed a step."""
    ended_ranks: set[int] = field(default_factory=set[int])
    """Ranks that ended with status 0 in this life."""
    finished: bool = True
    """Each of them had done all the work of the run."""


class RestartPolicy:
    """Decides about the groups of one run.

    Args:
        replica_ids: the groups.
        ranks_per_replica: number of ranks in each.
        limits: what the run file says.
    """

    def __init__(self, replica_ids: tuple[str, ...], ranks_per_replica: int, limits: Limits) -> None:
        self.groups = {replica_id: Group(replica_id) for replica_id in replica_ids}
        self._ranks = ranks_per_replica
        self._limits = limits
        self._over = False
        self._ended = False
        self._refused = False
        self._reason = ""

    def begin(self, now: float) -> list[Effect]:
        """Start every group."""
        return [e for group in self.groups.values() for e in self._start(group)]

    def rank_exited(
        self, replica_id: str, rank: int, now: float, *, status: int, finished: bool, injected: bool
    ) -> list[Effect]:
        """A rank is exiting or gone.

        Args:
            status: exit status, or the negative signal number.
            finished: it ended well and all the work of the run is done.
            injected: a fault was injected into this life of the group.
        """
        group = self.groups[replica_id]
        if group.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        if status == 0:
            group.ended_ranks.add(rank)
            group.finished = group.finished and finished
            if group.phase is Phase.RUNNING and len(group.ended_ranks) == 1:
                group.deadline = now + self._limits.stop_grace_s
            return []
        if group.phase is Phase.RUNNING:
            self._count_failure(group, status, injected)
        group.phase, group.deadline = Phase.KILLED, now + KILL_DEADLINE_S
        return [Kill(replica_id)]

    def group_gone(self, replica_id: str, now: float, *, injected: bool) -> list[Effect]:
        """All ranks of a group have been reaped."""
        group = self.groups[replica_id]
        if group.phase not in ALIVE:
            return []
        ended_well = group.phase is not Phase.KILLED and len(group.ended_ranks) == self._ranks
        if ended_well and group.finished:
            group.phase = Phase.FINISHED
            return [*self._end_of_work(now), *self._maybe_end()]
        if ended_well and not group.progressed:
            self._count_failure(group, 0, injected)
        return [*self._after_death(group, now), *self._maybe_end()]

    def progressed(self, replica_id: str) -> None:
        """The current life of a group has committed a step."""
        group = self.groups[replica_id]
        if group.phase is Phase.RUNNING:
            group.progressed = True
            group.failures = 0

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        effects: list[Effect] = []
        for group in self.groups.values():
            if now >= group.deadline:
                effects += self._expired(group, now)
        return [*effects, *self._maybe_end()]

    def stop(self, now: float, reason: str) -> list[Effect]:
        """End everything in good order; asked a second time, by force."""
        again = bool(self._reason)
        self._over = True
        self._reason = reason
        effects: list[Effect] = [Say(reason)]
        for group in self.groups.values():
            if again and group.phase is Phase.STOPPING:
                group.phase, group.deadline = Phase.KILLED, now + KILL_DEADLINE_S
                effects.append(Kill(group.replica_id))
            else:
                effects += self._let_go(group, now)
        return [*effects, *self._maybe_end()]

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do, if at all."""
        times = [g.deadline for g in self.groups.values() if self._waits(g)]
        return min(times, default=None)

    def _waits(self, group: Group) -> bool:
        if group.phase is Phase.RUNNING:
            return bool(group.ended_ranks) or self._over
        return group.phase not in ENDED

    def _start(self, group: Group) -> list[Effect]:
        group.phase = Phase.RUNNING
        group.progressed = False
        group.ended_ranks = set()
        group.finished = True
        return [Start(group.replica_id)]

    def _count_failure(self, group: Group, status: int, injected: bool) -> None:
        if injected:
            return
        group.failures += 1
        if status == REFUSED_STATUS and not group.progressed:
            self._refused = True

    def _after_death(self, group: Group, now: float) -> list[Effect]:
        """Every rank is gone and the work was not finished."""
        if self._over:
            group.phase = Phase.STOPPED
            return []
        if self._refused:
            return self._give_up(group, now, "found its configuration wrong")
        if group.failures > self._limits.max_restarts:
            return self._give_up(group, now, f"failed {_times(group.failures)} without a committed step")
        group.phase = Phase.WAITING
        doublings = min(max(group.failures - 1, 0), 40)
        delay_s = min(self._limits.restart_delay_s * 2**doublings, self._limits.restart_delay_max_s)
        group.deadline = now + delay_s
        return []

    def _give_up(self, group: Group, now: float, why: str) -> list[Effect]:
        group.phase = Phase.GIVEN_UP
        sentence = f"{group.replica_id} {why} and is not started again; its log says more."
        effects: list[Effect] = [Say(sentence)]
        left = sum(g.phase is not Phase.GIVEN_UP for g in self.groups.values())
        if not self._over and (self._refused or left < self._limits.min_replicas):
            effects += self.stop(now, f"The run ends: {left} of {len(self.groups)} groups are left.")
        return effects

    def _end_of_work(self, now: float) -> list[Effect]:
        """The first group has finished: the others finish by themselves, or are stopped."""
        if self._over:
            return []
        self._over = True
        effects: list[Effect] = []
        for group in self.groups.values():
            if group.phase is Phase.RUNNING and group.progressed:
                if not group.ended_ranks:
                    group.deadline = now + self._limits.stop_grace_s
            else:
                effects += self._let_go(group, now)
        return effects

    def _let_go(self, group: Group, now: float) -> list[Effect]:
        if group.phase is Phase.WAITING:
            group.phase = Phase.STOPPED
        if group.phase is not Phase.RUNNING:
            return []
        group.phase, group.deadline = Phase.STOPPING, now + self._limits.stop_grace_s
        return [Terminate(group.replica_id)]

    def _expired(self, group: Group, now: float) -> list[Effect]:
        if group.phase is Phase.WAITING:
            return self._start(group)
        if group.phase is Phase.STOPPING:
            group.phase, group.deadline = Phase.KILLED, now + KILL_DEADLINE_S
            return [Kill(group.replica_id)]
        if group.phase is Phase.KILLED:
            return self._give_up(group, now, f"cannot be ended ({KILL_DEADLINE_S:.0f} s after SIGKILL)")
        if group.phase is Phase.RUNNING and group.ended_ranks:
            missing = sorted(set(range(self._ranks)) - group.ended_ranks)
            group.failures += 1
            group.phase, group.deadline = Phase.KILLED, now + KILL_DEADLINE_S
            grace_s = self._limits.stop_grace_s
            text = f"{group.replica_id}: rank {missing[0]} did not end within {grace_s:g} s after the others."
            return [Say(text), Kill(group.replica_id)]
        if group.phase is Phase.RUNNING and self._over:
            return self._let_go(group, now)
        return []

    def _maybe_end(self) -> list[Effect]:
        if self._ended or any(group.phase not in ENDED for group in self.groups.values()):
            return []
        self._ended = True
        finished = any(g.phase is Phase.FINISHED for g in self.groups.values())
        given_up = [g.replica_id for g in self.groups.values() if g.phase is Phase.GIVEN_UP]
        reason = self._reason or (f"given up: {', '.join(given_up)}" if given_up else "all groups have ended")
        return [End(finished and not given_up, reason, self._refused)]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"
