"""A run of real processes for tests: a Lighthouse and replica groups that can be killed, frozen and restarted."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from netns import Network

from lighthouse.security import Security

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).with_name("trainer.py")
Event = dict[str, Any]
MakeCluster = Callable[..., "Cluster"]


class Timeout(AssertionError):
    pass


class Cluster:
    """Starts and owns processes; everything is gone after ``close``.

    ``script`` is what each rank runs. With a ``network`` each replica group runs on its host of that name, and the
    Lighthouse on "lighthouse"; without one all are on loopback. ``trainer``: settings of the script.
    ``security``: token and TLS of all processes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        min_replicas: int = 1,
        expected: int | None = None,
        network: Network | None = None,
        script: Path = TRAINER,
        security: Security | None = None,
        **trainer: object,
    ) -> None:
        self.security = security or Security()
        self.folder = folder
        self.events_folder = folder / "events"
        self.events_folder.mkdir(parents=True, exist_ok=True)
        self.trainer = trainer_settings(trainer)
        self.timeout_ms = int(self.trainer.get("TRAINER_TIMEOUT_MS", "20000"))
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.incarnations: dict[str, str] = {}
        self.started_at: dict[str, float] = {}
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self.network = network
        self.script = script
        self.port = free_port()
        self._min_replicas, self._expected = min_replicas, expected

    # --- processes ---------------------------------------------------------------------------------------------

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCHFT_PLUS_EVENTS": str(self.events_folder),
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            **self.security.environment(),
            **more,
        }

    def words(self) -> list[str]:
        """What ``python`` runs in each rank."""
        return [str(self.script)]

    def start_lighthouse(self) -> None:
        command = [
            *self._enter("lighthouse"), sys.executable, "-m", "lighthouse",
            "--bind", f"{'0.0.0.0' if self.network else '127.0.0.1'}:{self.port}", "--min_replicas", str(self._min_replicas),
            "--timeout_ms", str(self.timeout_ms), "--store", str(self.folder / "lighthouse.sqlite"),
        ]  # fmt: skip
        if self._expected is not None:
            command += ["--expected_replicas", str(self._expected)]
        heard = len(self.lighthouse_events("listening"))
        with (self.folder / "lighthouse.log").open("ab") as log:
            self.lighthouse = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log)
        until(
            lambda: len(self.lighthouse_events("listening")) > heard,
            20,
            "the Lighthouse does not listen",
            self,
        )

    def kill_lighthouse(self) -> None:
        assert self.lighthouse is not None
        self.lighthouse.kill()
        self.lighthouse.wait()

    def start(
        self, replica: str, ranks: int = 1, security: Security | None = None, **trainer: object
    ) -> None:
        """(Re)start a replica group of ``ranks`` processes; ``trainer``, ``security``: settings for this life of it only."""
        host = self.network.address("lighthouse") if self.network else "127.0.0.1"
        master_port = str(free_port())
        incarnation = self.incarnations[replica] = uuid.uuid4().hex
        self.processes[replica] = []
        self.started_at[replica] = time.time()
        for rank in range(ranks):
            environment = self.environment(
                TORCHFT_LIGHTHOUSE=f"{host}:{self.port}", REPLICA_ID=replica, RANK=str(rank), WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=master_port, TORCHFT_PLUS_INCARNATION=incarnation,
                **self.trainer, **trainer_settings(trainer), **(security or self.security).environment(),
            )  # fmt: skip
            with (self.folder / f"{replica}.{rank}.log").open("ab") as log:
                command = [*self._enter(replica), sys.executable, *self.words()]
                self.processes[replica].append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )

    def kill(self, replica: str, rank: int | None = None) -> float:
        """SIGKILL a group (or one rank of it); returns when."""
        for process in self._of(replica, rank):
            process.kill()
        when = time.time()
        for process in self._of(replica, rank):
            process.wait()
        return when

    def signal(self, replica: str, number: signal.Signals, rank: int | None = None) -> float:
        for process in self._of(replica, rank):
            process.send_signal(number)
        return time.time()

    def wait(self, replica: str, timeout_s: float = 60) -> int:
        """Wait for all ranks of a group to end; the worst status."""
        end = time.monotonic() + timeout_s
        return max(
            (process.wait(max(0.1, end - time.monotonic())) for process in self.processes[replica]), key=abs
        )

    def close(self) -> None:
        everything = [process for group in self.processes.values() for process in group]
        for process in [*everything, *([self.lighthouse] if self.lighthouse else [])]:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _enter(self, host: str) -> list[str]:
        return self.network.enter(host) if self.network else []

    def _of(self, replica: str, rank: int | None) -> list[subprocess.Popen[bytes]]:
        group = self.processes[replica]
        return group if rank is None else [group[rank]]

    # --- events --------------------------------------------------------------------------------------------------

    def events(self, replica: str, kind: str | None = None, rank: int = 0) -> list[Event]:
        return self.read(f"{replica}.{rank}.jsonl", kind)

    def lighthouse_events(self, kind: str) -> list[Event]:
        return self.read("lighthouse.jsonl", kind)

    def read(self, name: str, kind: str | None = None) -> list[Event]:
        """Events in the file ``name`` of the event folder."""
        path = self.events_folder / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if kind is None or event["kind"] == kind]

    def step(self, replica: str) -> int:
        return max((event["step"] for event in self.events(replica, "commit")), default=0)

    def until_step(self, replica: str, step: int, timeout_s: float = 60) -> None:
        until(lambda: self.step(replica) >= step, timeout_s, f"{replica} did not reach step {step}", self)

    def until_event(self, replica: str, kind: str, timeout_s: float = 60, after: float = 0.0) -> Event:
        def found() -> bool:
            return any(event["time"] > after for event in self.events(replica, kind))

        until(found, timeout_s, f"{replica} has no event {kind}", self)
        return next(event for event in self.events(replica, kind) if event["time"] > after)

    def assert_digests_equal(self, replicas: list[str], ranks: int = 1, at_least: int = 1) -> int:
        """Every (step, quorum_id) has one digest over all replicas, for each group rank; returns how many were compared."""
        compared = 0
        for rank in range(ranks):
            seen: dict[tuple[int, int], dict[str, set[str]]] = {}
            for replica in replicas:
                for event in self.events(replica, "digest", rank):
                    key = (event["step"], event["quorum_id"])
                    seen.setdefault(key, {}).setdefault(event["digest"], set()).add(replica)
            for (step, quorum_id), digests in sorted(seen.items()):
                assert len(digests) == 1, f"rank {rank}, step {step}, quorum {quorum_id}: {digests}"
                compared += sum(len(who) for who in digests.values()) > 1
        assert compared >= at_least, f"only {compared} digests were compared"
        return compared

    def assert_no_step_lost(self, replica: str, since: float = 0.0) -> None:
        """In each life of a group, steps follow one another without a gap, and from the moment that it is level each
        counts its own gradient; no computed step was refused. What a group lost before ``since`` is forgiven."""
        level, last = False, 0
        for event in self.events(replica):
            kind = event["kind"]
            if kind == "start":
                level, last = False, 0
            elif kind == "quorum" and last == 0:
                level, last = event["level"], event["base_step"]
            elif kind == "level":
                level = True
            elif kind == "behind" and event["time"] < since:
                level, last = False, event["base_step"]
            elif kind == "commit":
                assert event["step"] == last + 1, f"{replica} committed {event['step']} after {last}"
                assert event["contributed"] == level, (
                    f"{replica}, step {event['step']}: contributed {event['contributed']}"
                )
                last = event["step"]
            assert kind != "refused" or event["time"] < since, f"{replica} lost a step: {event}"

    def longest_gap(self, replica: str, start: float, end: float) -> float:
        """Longest time between two commits around [start, end], in seconds."""
        times = [event["time"] for event in self.events(replica, "commit")]
        pairs = itertools.pairwise(times)
        return max((b - a for a, b in pairs if b >= start and a <= end), default=0.0)

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def trainer_settings(settings: dict[str, object]) -> dict[str, str]:
    return {f"TRAINER_{name.upper()}": str(value) for name, value in settings.items()}


def until(condition: Callable[[], bool], timeout_s: float, what: str, cluster: Cluster | None = None) -> None:
    """Wait for a fact that shows in files of other processes."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise Timeout(f"{what} within {timeout_s} s" + (f"\n{cluster.logs()}" if cluster else ""))
        time.sleep(0.02)


def started(make: MakeCluster, groups: list[str], ranks: int = 1, **options: object) -> Cluster:
    cluster = make(expected=len(groups), **options)
    for group in groups:
        cluster.start(group, ranks)
    for group in groups:
        cluster.until_step(group, 3, timeout_s=90)
    return cluster


def finish(cluster: Cluster, groups: list[str], survivors: list[str], ranks: int = 1) -> None:
    """Let everybody train on together for a while, end the run, and check what must hold for everybody."""
    together = max(cluster.step(group) for group in groups) + 5
    for group in groups:
        cluster.until_step(group, together)
    for group in groups:
        cluster.signal(group, signal.SIGTERM)
    for group in groups:
        assert cluster.wait(group, 60) == 0, cluster.logs()
    for survivor in survivors:
        cluster.assert_no_step_lost(survivor)
    cluster.assert_digests_equal(groups, ranks, at_least=5)
