"""The processes of one replica group, life after life."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchft_plus.launch.process import ChildProcess

TakeSpare = Callable[[Mapping[str, str], Path], ChildProcess | None]


class ReplicaGroup:
    """Starts, signals and watches the ranks of one group.

    Args:
        replica_id: its stable name.
        index: its place among the groups of the run.
        logs: folder of the ranks' output.
    """

    def __init__(self, replica_id: str, index: int, logs: Path) -> None:
        self.replica_id = replica_id
        self.index = index
        self.incarnation = ""
        self.lives = 0
        self.injected = False
        """A fault was injected into the present life."""
        self.told_to_leave = False
        """SIGTERM was injected into the present life: an exit with status 0 does not mean that the work is done."""
        self.asked = False
        """The present life was asked to end because the run is over."""
        self.failed = False
        """A rank of the present life ended with something else than status 0."""
        self._logs = logs
        self._children: list[ChildProcess] = []
        self._seen: set[int] = set()
        self._gone_taken = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the present life, by rank."""
        return [child.pid for child in self._children]

    @property
    def alive(self) -> bool:
        """Some rank of the present life has not been reaped."""
        return any(not child.reaped for child in self._children)

    @property
    def descriptors(self) -> list[int]:
        """pidfds of what is alive; readable when the process is gone."""
        return [child.pidfd for child in self._children if not child.reaped]

    def new_incarnation(self) -> str:
        """Name of the next life; then ``start`` it."""
        self.incarnation = uuid.uuid4().hex
        return self.incarnation

    def start(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], take: TakeSpare
    ) -> int:
        """Start one process a rank. The ranks of the last life must be gone.

        Args:
            command: of every rank.
            environments: of each rank.
            take: gives a warm spare, or None if there is none.

        Returns:
            How many ranks were warm spares.
        """
        if self.alive:
            raise RuntimeError(f"{self.replica_id} is started while a rank of its last life is left")
        self.lives += 1
        self.injected = False
        self.told_to_leave = False
        self.asked = False
        self.failed = False
        self._seen = set()
        self._gone_taken = False
        self._children = []
        warm = 0
        for rank, environment in enumerate(environments):
            log = self._logs / f"{self.replica_id}.{rank}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"--- life {self.lives}, incarnation {self.incarnation}\n")
            spare = take(environment, log)
            warm += spare is not None
            self._children.append(spare or ChildProcess(command, environment, log))
        return warm

    def new_exits(self) -> list[tuple[int, int]]:
        """(rank, status) of ranks that began to die since the last call."""
        exits: list[tuple[int, int]] = []
        for rank, child in enumerate(self._children):
            status = None if rank in self._seen else child.exit_status()
            if status is not None:
                self._seen.add(rank)
                exits.append((rank, status))
        return exits

    def take_gone(self) -> bool:
        """True, once a life, when every rank is gone and its exit was told by ``new_exits``."""
        if not self._children or self._gone_taken:
            return False
        gone = [child.reap() for child in self._children]
        self._gone_taken = all(gone) and len(self._seen) == len(gone)
        return self._gone_taken

    def signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to all ranks, or to one."""
        for index, child in enumerate(self._children):
            if rank in (None, index):
                child.signal(number)

    def last_lines(self, rank: int, count: int = 5) -> list[str]:
        """The end of a rank's output."""
        return self._children[rank].last_lines(count)
