"""``bench state``, part *steps*: how long the survivors' steps take while a third group fetches a state.

Once with the link as it is (on few cores the copy itself takes CPU from training), once with a link so throttled that the
download takes as many steps as it is asked to and next to no CPU: what is left is the waiting of the system itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, ChildFailed, Worker, environment
from benchmarks.figures import quantile
from benchmarks.recovery_log import Journal
from benchmarks.recovery_worker import DEVICE_TIME_S

MB = 1 << 20
TRANSFER_STEPS = 20
STEP_S = DEVICE_TIME_S + 0.015
"""About what a step of the workload takes while the third group fetches."""
THROTTLED_MB = 64
FREE_MB = 1024
NORMAL_STEPS = 60
DEADLINE_S = 120.0
SURVIVORS = ("replica_0", "replica_1")
JOINER = "replica_2"


@dataclass(frozen=True, slots=True)
class Variant:
    """One run."""

    system: str
    throttled: bool

    @property
    def size_bytes(self) -> int:
        """Of the state."""
        return (THROTTLED_MB if self.throttled else FREE_MB) * MB

    @property
    def link_bytes_per_s(self) -> int:
        """Of one connection; 0: as fast as it goes. torchft has one donor, we have all survivors."""
        if not self.throttled:
            return 0
        donors = len(SURVIVORS) if self.system == "torchft_plus" else 1
        return int(self.size_bytes / (TRANSFER_STEPS * STEP_S) / donors)


def measure(options: Any, torchft_python: str | None) -> list[dict[str, Any]]:
    """Both systems, throttled and not. Returns one entry each."""
    entries: list[dict[str, Any]] = []
    for throttled in (True, False):
        for system in options.systems:
            variant = Variant(system, throttled)
            folder = Path(options.scratch) / f"steps-{system}-{'throttled' if throttled else 'free'}"
            folder.mkdir(parents=True)
            runs: list[dict[str, Any]] = []
            for run in range(options.joins):
                (folder / str(run)).mkdir()
                with _groups(variant, folder / str(run), torchft_python) as groups:
                    runs.append(groups.join())
            entries.append(_entry(variant, runs))
    return entries


class Groups:
    """Two groups that train, and one that waits for the word to join."""

    def __init__(self, journal: Journal, workers: dict[str, Worker], entered: dict[str, float]) -> None:
        self._journal = journal
        self._workers = workers
        self._entered = entered
        """When each group was about to start its first step."""

    def join(self) -> dict[str, Any]:
        """Let the third one join. Returns the survivors' times between commits: of two groups, until the third is level,
        and of three."""
        for replica_id in SURVIVORS:
            self._workers[replica_id].send(join=True)
        start = time.monotonic()
        self._until_commits(SURVIVORS, start, 10)
        begin = time.monotonic()
        self._until_commits(SURVIVORS, begin, NORMAL_STEPS)
        joined = time.monotonic()
        self._workers[JOINER].send(join=True)
        self._until_commits((JOINER, *SURVIVORS), joined, 3, participants=len(SURVIVORS) + 1)
        first = self._entered[JOINER]
        level = self._journal.commits(JOINER, joined, participants=len(SURVIVORS) + 1)[0].time
        settled = time.monotonic()
        self._until_commits((JOINER, *SURVIVORS), settled, NORMAL_STEPS)
        wrong, _ = self._journal.disagreements()
        return {
            "normal_s": self._gaps(begin, joined),
            "during_s": self._gaps(first, level),
            "three_s": self._gaps(settled, time.monotonic()),
            "join_s": level - first,
            "steps_that_differ": wrong,
        }

    def _gaps(self, start: float, end: float) -> list[float]:
        gaps: list[float] = []
        for replica_id in SURVIVORS:
            times = [one.time for one in self._journal.commits(replica_id, start)]
            gaps += [late - early for early, late in pairwise(times) if early <= end]
        return gaps

    def _until_commits(
        self, replica_ids: tuple[str, ...], start: float, count: int, participants: int = 0
    ) -> None:
        end = time.monotonic() + DEADLINE_S
        with self._journal.changed:
            while any(len(self._journal.commits(one, start, participants)) < count for one in replica_ids):
                for one in replica_ids:
                    if not self._workers[one].alive:
                        raise ChildFailed(f"{one} ended, see {self._workers[one].log}")
                if time.monotonic() > end:
                    raise ChildFailed(f"{replica_ids} did not commit {count} steps within {DEADLINE_S:g} s")
                self._journal.changed.wait(1.0)


@contextmanager
def _groups(variant: Variant, folder: Path, torchft_python: str | None) -> Generator[Groups]:
    with ExitStack() as stack:
        python = sys.executable
        if variant.system == "torchft_plus":
            child, address = lighthouses.start_torchft_plus(folder, min_replicas=2, expected_replicas=2)
            env = environment([ROOT, ROOT / "scripts"], TORCHFT_PLUS_EVENTS=str(folder / "events"))
        else:
            assert torchft_python is not None
            python = torchft_python
            child, address = lighthouses.start_torchft(python, folder, "lighthouse", min_replicas=2)
            env = environment([ROOT / "scripts"], RUST_LOG="error")
        stack.callback(child.end)
        journal, workers, entered = Journal(), dict[str, Worker](), dict[str, float]()
        for replica_id in (*SURVIVORS, JOINER):
            workers[replica_id] = stack.enter_context(
                _worker(variant, folder, python, env, replica_id, address, journal, entered)
            )
        yield Groups(journal, workers, entered)


@contextmanager
def _worker(
    variant: Variant,
    folder: Path,
    python: str,
    env: dict[str, str],
    replica_id: str,
    address: str,
    journal: Journal,
    entered: dict[str, float],
) -> Generator[Worker]:
    def on_line(line: dict[str, Any]) -> None:
        if "entered" in line:
            entered[replica_id] = line["entered"]
        elif "ready" not in line:
            journal.add(replica_id, line)

    command = [python, "-m", "benchmarks.state_steps_worker"]
    worker = Worker(replica_id, command, env, folder / f"{replica_id}.log", on_line)
    try:
        worker.send(
            system=variant.system,
            replica_id=replica_id,
            lighthouse=address,
            size_bytes=variant.size_bytes,
            link_bytes_per_s=variant.link_bytes_per_s,
            late=replica_id == JOINER,
        )
        yield worker
    finally:
        worker.end()


def _entry(variant: Variant, runs: list[dict[str, Any]]) -> dict[str, Any]:
    normal = [gap for run in runs for gap in run["normal_s"]]
    during = [gap for run in runs for gap in run["during_s"]]
    three = [gap for run in runs for gap in run["three_s"]]
    return {
        "system": variant.system,
        "throttled": variant.throttled,
        "size_mb": variant.size_bytes // MB,
        "joins": len(runs),
        "steps": len(during) // len(SURVIVORS) // len(runs),
        "join_s": sum(run["join_s"] for run in runs) / len(runs),
        "normal_ms": [1000 * quantile(normal, share) for share in (0.5, 0.95)],
        "during_ms": [1000 * quantile(during, share) for share in (0.5, 0.95, 1.0)],
        "three_ms": [1000 * quantile(three, share) for share in (0.5, 0.95)],
        "worst_ms": [1000 * max(run["during_s"]) for run in runs],
        "steps_that_differ": sum(run["steps_that_differ"] for run in runs),
    }


def table(entries: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """The entries as (title, header, rows)."""
    header = ["link", "system", "state MB", "steps meanwhile"]
    header += ["two groups p50/p95 ms", "meanwhile p50/p95 ms", "three groups p50/p95 ms"]
    header += ["p50, p95 of two", "p50, p95 of three", "worst step of a join ms, median", "differ"]
    rows = [
        [
            "throttled" if entry["throttled"] else "free",
            entry["system"],
            str(entry["size_mb"]),
            str(entry["steps"]),
            "{:.1f} / {:.1f}".format(*entry["normal_ms"]),
            "{:.1f} / {:.1f}".format(*entry["during_ms"]),
            "{:.1f} / {:.1f}".format(*entry["three_ms"]),
            _ratios(entry, "normal_ms"),
            _ratios(entry, "three_ms"),
            f"{median(entry['worst_ms']):.0f}",
            str(entry["steps_that_differ"]),
        ]
        for entry in entries
    ]
    return "Survivors' steps while a third group joins and fetches", header, rows


def _ratios(entry: dict[str, Any], base: str) -> str:
    ratios = [during / normal for during, normal in zip(entry["during_ms"][:2], entry[base], strict=True)]
    return ", ".join(f"{ratio:.2f} x" for ratio in ratios)
