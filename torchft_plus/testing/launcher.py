"""Starts replica groups again, reports exits (or not), and keeps what is on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lighthouse.messages import Head, Process
from torchft_plus.testing.content import State, initial_content
from torchft_plus.testing.group import Group

if TYPE_CHECKING:
    from torchft_plus.testing.rank import Rank
    from torchft_plus.testing.simulation import Simulation

REPORT_EVERY_MS = 100


class Checkpoints:
    """Checkpoints on disk: none, one place for each replica group, or one shared place."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation.world
        self._kind = simulation.world.settings.disk
        self._saved: dict[str, tuple[Head, State]] = {}

    def wants(self, rank: Rank) -> bool:
        """Whether to write one now."""
        return (
            self._kind != "none"
            and rank.head.step > 0
            and rank.content is not None
            and self._world.chance(0.2)
        )

    def write(self, group: Group, head: Head, state: State) -> None:
        """Takes its time; complete or not there at all."""
        group.lives[0].after(self._world.between((1, 60)), self._complete, group, head, state)

    def newest(self, replica_id: str) -> tuple[Head, State] | None:
        """What a new process of ``replica_id`` would load."""
        return self._saved.get(replica_id if self._kind == "own" else "shared")

    def _complete(self, group: Group, head: Head, state: State) -> None:
        place = group.process.replica_id if self._kind == "own" else "shared"
        saved = self._saved.get(place)
        if saved is None or saved[0].order < head.order:
            self._saved[place] = (head, state)
            group.disk_saved(head)


class Launcher:
    """The launchers of all groups."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._starts = 0
        self.groups: dict[str, Group] = {}
        """The newest life of each replica group."""
        self.all: list[Group] = []
        self.by_process: dict[Process, Group] = {}

    def start(self, replica_id: str) -> Group:
        """Start a new life of a replica group."""
        simulation = self._simulation
        self._starts += 1
        process = Process(replica_id, f"{self._starts:03d}")
        name = "all" if self._world.settings.equal_start else f"{process}"
        content = initial_content(name)
        saved = simulation.disk.newest(replica_id)
        head, state = saved if saved is not None else (Head(0, 0, content), State(content))
        group = Group(
            simulation, process, f"host_{replica_id}", head, state, head if saved is not None else None
        )
        simulation.hosts[group.address] = group.host
        self.groups[replica_id] = group
        self.all.append(group)
        self.by_process[process] = group
        simulation.oracle.started(group, head, state)
        group.start()
        return group

    def group_ended(self, group: Group, silently: bool) -> None:
        """Every process of a group is gone: report it if this launcher does, and start it again."""
        if self._world.settings.reports_exits and not silently:
            self._world.scheduler.after(self._world.between((0, 30)), self._report, group.process)
        if self.groups[group.process.replica_id] is group:
            delay_ms = self._world.between((20, 200) if self._world.calm else (20, 2_000))
            self._world.scheduler.after(delay_ms, self._restart, group)

    def _restart(self, group: Group) -> None:
        if self.groups[group.process.replica_id] is group:
            self.start(group.process.replica_id)

    def _report(self, process: Process) -> None:
        """Until it is answered; an answer may be lost, and the report comes again."""
        lighthouse = self._simulation.lighthouse
        if lighthouse is None or not lighthouse.exit_seen(process):
            self._world.scheduler.after(REPORT_EVERY_MS, self._report, process)
        elif not self._world.calm and self._world.chance(0.1):
            self._world.scheduler.after(self._world.between((10, 3_000)), self._report, process)
