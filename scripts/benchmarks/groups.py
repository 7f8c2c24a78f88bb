"""Three replica groups of one variant under one Lighthouse: started, killed and started again by the bench."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, Child, ChildFailed, Worker, environment
from benchmarks.recovery_log import Journal
from benchmarks.workload import Workload
from lighthouse.messages import Process
from torchft_plus.launch.exit_reporter import ExitReporter
from torchft_plus.launch.process import parse_exiting

GROUPS = 3
EXIT_POLL_S = 0.005
"""As the launcher looks after its children."""
EXIT_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A system and its settings."""

    title: str
    system: str
    gradients: str = "ddp"
    report_exit: bool = False
    lighthouse_options: tuple[str, ...] = ()
    tuning: dict[str, float] = field(default_factory=dict)


TUNED: dict[str, Any] = {
    "lighthouse_options": (
        *("--heartbeat_timeout_ms", "1000"),
        *("--quorum_tick_ms", "20"),
        *("--join_timeout_ms", "10000"),
    ),
    "tuning": {
        "process_group_timeout_s": 5.0,
        "timeout_s": 10.0,
        "quorum_timeout_s": 30.0,
        "heartbeat_interval_ms": 50,
    },
}
"""torchft's shortest settings that were found to work."""

VARIANTS = {
    "plus": Variant(
        "torchft_plus, defaults, the launcher reports the exit", "torchft_plus", report_exit=True
    ),
    "plus-unreported": Variant("torchft_plus, defaults, nobody reports the exit", "torchft_plus"),
    "torchft": Variant("torchft, defaults (heartbeat_timeout 5000), its DDP", "torchft"),
    "torchft-allreduce": Variant(
        "torchft, defaults, one manager.allreduce", "torchft", gradients="allreduce"
    ),
    "torchft-tuned": Variant("torchft, tuned (heartbeat_timeout 1000), its DDP", "torchft", **TUNED),
    "torchft-tuned-allreduce": Variant(
        "torchft, tuned, one manager.allreduce", "torchft", gradients="allreduce", **TUNED
    ),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """How the processes of a variant are started.

    Attributes:
        lighthouse: starts it, on the given host:port if that is not empty; returns it and its host:port.
        python, env: of a group's process.
    """

    lighthouse: Callable[[str], tuple[Child, str]]
    python: str
    env: dict[str, str]


def launch_of(variant: Variant, folder: Path, torchft_python: str | None, min_replicas: int) -> Launch:
    """The commands of a variant."""
    if variant.system == "torchft_plus":
        return Launch(
            lambda address: lighthouses.start_torchft_plus(folder, min_replicas, GROUPS, address),
            sys.executable,
            environment([ROOT, ROOT / "scripts"], RES_OPTIONS="timeout:1 attempts:1"),
        )
    assert torchft_python is not None
    python, options = torchft_python, variant.lighthouse_options
    return Launch(
        lambda address: lighthouses.start_torchft(
            python, folder, "lighthouse", min_replicas, options, address
        ),
        python,
        environment([ROOT / "scripts"], RUST_LOG="error", RES_OPTIONS="timeout:1 attempts:1"),
    )


class Groups:
    """The processes of a variant: a Lighthouse, which runs at once, and groups, which ``start_missing`` starts.

    Args:
        variant: what is run.
        folder: for logs.
        torchft_python: Python of an environment that has torchft, if the variant needs it.
        min_replicas: fewest groups that may train.
        workload: what they train.

    Raises:
        ChildFailed: the Lighthouse does not start.
    """

    def __init__(
        self,
        variant: Variant,
        folder: Path,
        torchft_python: str | None,
        min_replicas: int,
        workload: Workload,
    ) -> None:
        folder.mkdir(parents=True)
        self.variant = variant
        self._launch = launch_of(variant, folder, torchft_python, min_replicas)
        self._min_replicas = min_replicas
        self.lighthouse, self._address = self._launch.lighthouse("")
        self.names = tuple(f"replica_{index}" for index in range(GROUPS))
        self.workers: dict[str, Worker] = {}
        self.journal = Journal()
        """What the groups say goes here; may be replaced."""
        self.started: dict[str, float] = {}
        """When the present process of each group was started."""
        self.ready: dict[str, float] = {}
        """When it was about to ask for a quorum: imports are done and the model is built."""
        self._folder = folder
        self._workload = workload
        self._starts = 0
        self._incarnations: dict[str, str] = {}
        self._reporter = ExitReporter(lambda: self._address, "bench") if variant.report_exit else None

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reporter is not None:
            self._reporter.close()
        for worker in self.workers.values():
            worker.process.kill()
        for worker in self.workers.values():
            worker.end()
        self.lighthouse.end()

    def alive(self, replica_id: str) -> bool:
        """It has a process that has not ended."""
        return replica_id in self.workers and self.workers[replica_id].alive

    def start_missing(self) -> list[str]:
        """Start all that have no process. Returns which."""
        missing = [name for name in self.names if not self.alive(name)]
        for name in missing:
            self._start(name)
        return missing

    def kill(self, replica_id: str) -> None:
        """SIGKILL; with ``report_exit`` the exit is reported once it can be seen, as a launcher does.

        Raises:
            ChildFailed: it does not die.
        """
        pid = self.workers[replica_id].process.pid
        os.kill(pid, signal.SIGKILL)
        if self._reporter is None:
            return
        end = time.monotonic() + EXIT_DEADLINE_S
        while parse_exiting(Path(f"/proc/{pid}/stat").read_bytes()) is None:
            if time.monotonic() > end:
                raise ChildFailed(f"{replica_id} does not die of SIGKILL within {EXIT_DEADLINE_S:g} s")
            time.sleep(EXIT_POLL_S)
        self._reporter.report(Process(replica_id, self._incarnations[replica_id]))

    def restart_lighthouse(self) -> None:
        """Start it again where it was, after its death.

        Raises:
            ChildFailed: it does not listen.
        """
        self.lighthouse.end()
        self.lighthouse, _ = self._launch.lighthouse(self._address)

    def _start(self, replica_id: str) -> None:
        old = self.workers.get(replica_id)
        if old is not None:
            old.end()
        self._starts += 1
        self._incarnations[replica_id] = f"bench-{self._starts}"
        env = {**self._launch.env, "TORCHFT_PLUS_INCARNATION": self._incarnations[replica_id]}
        log = self._folder / f"{replica_id}.log"
        self.ready.pop(replica_id, None)
        self.started[replica_id] = time.monotonic()
        command = [self._launch.python, "-m", "benchmarks.recovery_worker"]
        worker = Worker(replica_id, command, env, log, on_line=lambda line: self._take(replica_id, line))
        self.workers[replica_id] = worker
        worker.send(
            system=self.variant.system,
            replica_id=replica_id,
            lighthouse=self._address,
            tuning=self.variant.tuning,
            gradients=self.variant.gradients,
            min_replicas=self._min_replicas,
            workload=asdict(self._workload),
        )

    def _take(self, replica_id: str, line: dict[str, Any]) -> None:
        if "ready" in line:
            self.ready[replica_id] = line["ready"]
        else:
            self.journal.add(replica_id, line)
