"""The jobs of ``bench goodput``: replica groups under a supervisor of the bench's, and ranks under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from benchmarks.children import ROOT, ChildFailed, Worker, environment
from benchmarks.goodput_account import Absence, Committed, committed_steps
from benchmarks.groups import GROUPS, Groups, Variant
from benchmarks.recovery_log import Attempt, Journal
from benchmarks.workload import Workload

MIN_REPLICAS = 1
CHECKPOINT_EVERY = 5
"""Steps between checkpoints: copying the state takes some ms of a step, and a kill rolls back half of this in the mean."""


class Job(Protocol):
    """What the bench needs of a job."""

    names: tuple[str, ...]
    absences: list[Absence]
    restarts: int
    """Processes that were started, beyond the first of each group."""
    own_deaths: int
    """Processes that ended, or were ended by their own system, without being killed by the bench."""
    total_losses: int
    """How often nobody was left who had the state."""
    deaths: list[str]
    """A sentence about each of those that the bench supervises."""

    def __enter__(self) -> Job: ...

    def __exit__(self, *error: object) -> None: ...

    def level(self, name: str) -> bool:
        """It trains: its present process has committed a step of its own."""
        ...

    def kill(self, name: str) -> None:
        """SIGKILL."""
        ...

    def tend(self) -> None:
        """Called often: note what has happened, start again what has ended."""
        ...

    def steps(self) -> list[Committed]:
        """All steps that count."""
        ...

    def batches_lost(self) -> int:
        """Computed by groups that trained, and counted in no commit; or rolled back."""
        ...

    def digests(self) -> tuple[int, int] | None:
        """(steps after which two groups held different parameters, steps compared); None: nothing to compare."""
        ...

    def compared_since(self, moment: float) -> bool:
        """All groups that train have told the digest of one step after ``moment``."""
        ...

    def pids(self) -> list[int]:
        """Of its processes that live."""
        ...


class SupervisedGroups:
    """Groups of ours or of torchft's. Whoever ends is started again at once."""

    def __init__(
        self, variant: Variant, folder: Path, torchft_python: str | None, workload: Workload
    ) -> None:
        self._groups = Groups(variant, folder, torchft_python, MIN_REPLICAS, workload)
        self.names = self._groups.names
        self.absences: list[Absence] = []
        self.restarts = self.own_deaths = self.total_losses = 0
        self.deaths: list[str] = []
        self._lost = 0
        """Batches of processes that have ended."""
        self._ended: list[Journal] = []
        """Of lineages that nobody was left of."""
        self._killed: set[str] = set()

    def __enter__(self) -> SupervisedGroups:
        self._groups.__enter__()
        self._groups.start_missing()
        return self

    def __exit__(self, *error: object) -> None:
        self._groups.__exit__(*error)

    def level(self, name: str) -> bool:
        """See ``Job``."""
        return self._groups.alive(name) and self._first_commit(name) is not None

    def kill(self, name: str) -> None:
        """See ``Job``."""
        self.absences.append(Absence(name, time.monotonic()))
        self._killed.add(name)
        self._groups.kill(name)

    def tend(self) -> None:
        """See ``Job``."""
        dead = [name for name in self.names if not self._groups.alive(name)]
        if dead:
            self._bury(dead)
        for absence in self.absences:
            ready = self._groups.ready.get(absence.replica_id, 0.0)
            if ready > absence.killed and absence.level is None:  # before, it is that of the killed process
                absence.ready = absence.ready or ready
                absence.level = self._first_commit(absence.replica_id)

    def steps(self) -> list[Committed]:
        """See ``Job``. What was committed before everybody was lost counts too, as if a checkpoint had cost nothing."""
        journals = [*self._ended, self._groups.journal]
        return list(chain.from_iterable(committed_steps(_attempts(journal)) for journal in journals))

    def batches_lost(self) -> int:
        """See ``Job``."""
        return self._lost + sum(map(self._refused, self.names))

    def digests(self) -> tuple[int, int] | None:
        """See ``Job``."""
        pairs = [journal.disagreements() for journal in (*self._ended, self._groups.journal)]
        return sum(wrong for wrong, _ in pairs), sum(compared for _, compared in pairs)

    def compared_since(self, moment: float) -> bool:
        """See ``Job``."""
        journal = self._groups.journal
        told = [
            {one.step for one in journal.commits(name, moment, 1) if one.crc is not None}
            for name in self.names
            if self.level(name)
        ]
        return len(told) > 1 and bool(set.intersection(*told))

    def pids(self) -> list[int]:
        """See ``Job``."""
        workers = [self._groups.workers[name] for name in self.names if self._groups.alive(name)]
        return [child.process.pid for child in (self._groups.lighthouse, *workers)]

    def _bury(self, dead: list[str]) -> None:
        for name in dead:
            self._lost += self._refused(name)
            if name not in self._killed:
                self.own_deaths += 1
                worker = self._groups.workers[name]
                self.deaths.append(f"{name} ended with status {worker.process.returncode}, see {worker.log}")
        self._killed.clear()
        if self._groups.journal.attempts and not any(map(self.level, self.names)):
            self.total_losses += 1
            self._ended.append(self._groups.journal)
            self._groups.journal = Journal()  # from step 0 again: not to be compared with what was before
        self.restarts += len(self._groups.start_missing())

    def _first_commit(self, name: str) -> float | None:
        """Of its present process."""
        commits = self._groups.journal.commits(name, self._groups.started[name], 1)
        return commits[0].time if commits else None

    def _refused(self, name: str) -> int:
        """Batches that its present process has computed in vain since it trains."""
        first = self._first_commit(name)
        if first is None:
            return 0
        return sum(not attempt.committed for attempt in self._groups.journal.since(name, first))


class TorchrunRanks:
    """One job of plain DDP. torchrun kills all when one ends, and starts all again; they load the last checkpoint."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        folder.mkdir(parents=True)
        self.names = tuple(f"rank_{rank}" for rank in range(GROUPS))
        self.absences: list[Absence] = []
        self.restarts = self.own_deaths = self.total_losses = 0
        self.deaths: list[str] = []
        self._folder, self._workload = folder, workload
        self._lock = threading.Lock()
        self._present: dict[str, _Rank] = {}
        self._steps: dict[int, Committed] = {}
        self._rolled_back = 0

    def __enter__(self) -> TorchrunRanks:
        options = {
            "workload": asdict(self._workload),
            "checkpoint": str(self._folder / "checkpoint.pt"),
            "checkpoint_every": CHECKPOINT_EVERY,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
        command += [f"--nproc-per-node={GROUPS}", "-m", "benchmarks.checkpoint_worker", json.dumps(options)]
        # With torchrun's default the store outlives a restart with the addresses of the dead ranks in it, and gloo hangs.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env = environment([ROOT, ROOT / "scripts"], RES_OPTIONS="timeout:1 attempts:1", **own_store)
        self._torchrun = Worker("torchrun", command, env, self._folder / "torchrun.log", on_line=self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._torchrun.end()  # its ranks end with its channel, which is theirs too
        for rank in self._present.values():
            rank.close()

    def level(self, name: str) -> bool:
        """See ``Job``."""
        with self._lock:
            rank = self._present.get(name)
            return rank is not None and rank.level is not None and rank.alive()

    def kill(self, name: str) -> None:
        """See ``Job``."""
        with self._lock:
            self.absences.append(Absence(name, time.monotonic()))
            self._present[name].kill()

    def tend(self) -> None:
        """See ``Job``. torchrun itself starts again what has ended.

        Raises:
            ChildFailed: torchrun has ended.
        """
        if not self._torchrun.alive:
            status = self._torchrun.process.returncode
            raise ChildFailed(f"torchrun ended with status {status}, see {self._torchrun.log}")
        with self._lock:
            for absence in self.absences:
                rank = self._present[absence.replica_id]
                if rank.ready > absence.killed and absence.level is None:
                    absence.ready, absence.level = rank.ready, rank.level

    def steps(self) -> list[Committed]:
        """See ``Job``: without those that were rolled back and not yet done again."""
        with self._lock:
            return list(self._steps.values())

    def batches_lost(self) -> int:
        """See ``Job``: those that were rolled back."""
        return self._rolled_back

    def digests(self) -> tuple[int, int] | None:
        """Nothing that could differ: all ranks load one file."""
        return None

    def compared_since(self, moment: float) -> bool:
        """Nothing to wait for."""
        del moment
        return True

    def pids(self) -> list[int]:
        """See ``Job``."""
        with self._lock:
            ranks = [rank.pid for rank in self._present.values() if rank.alive()]
        return [self._torchrun.process.pid, *ranks]

    def _take(self, line: dict[str, Any]) -> None:
        name = f"rank_{line.pop('rank')}"
        with self._lock:
            if "ready" in line:
                self._started(name, line)
                return
            rank = self._present[name]
            if rank.level is None:
                rank.level = line["time"]
            self._steps.setdefault(line["step"], Committed(line["time"], line["participants"]))

    def _started(self, name: str, line: dict[str, Any]) -> None:
        before = self._present.get(name)
        if before is not None:
            self.restarts += 1
            self.own_deaths += not before.killed
            before.close()
        self._present[name] = _Rank(line["pid"], line["ready"])
        for step in [step for step in self._steps if step > line["step"]]:
            self._rolled_back += self._steps.pop(step).participants


class _Rank:
    """A rank's process. It is torchrun's child: held by a file descriptor, as its number may be given to another."""

    def __init__(self, pid: int, ready: float) -> None:
        self.pid, self.ready = pid, ready
        self.level: float | None = None
        """Its first commit."""
        self.killed = False
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = -1

    def alive(self) -> bool:
        """It has not ended."""
        return self._handle >= 0 and not select.select([self._handle], [], [], 0)[0]

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        if self._handle >= 0:
            os.close(self._handle)


def _attempts(journal: Journal) -> list[Attempt]:
    with journal.changed:
        return list(chain.from_iterable(journal.attempts.values()))
