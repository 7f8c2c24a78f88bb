"""``bench state``, part *steps*: how long the survivors' steps take while a third group fetches a state.

Once with the link as it is (on few cores the copy itself takes CPU from training), once with a link so throttled that the
download takes as many steps as it is asked to and next to no CPU: what is left is the waiting of the system itself.

And once with the model's compute on the same few cores, where a third group that computes makes the steps of the others
longer also when nobody fetches, once as though each group had a device of its own: emulated, see ``WORKLOADS``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, ChildFailed, Worker, environment
from benchmarks.figures import quantile
from benchmarks.recovery_log import Journal
from benchmarks.workload import Workload

MB = 1 << 20
WORKLOADS = {"cpu": Workload(), "device": Workload(batch=1, device_time_s=0.1, digest_every=10)}
"""By where the model computes. *device*: a wait of a fixed length, which holds neither a processor nor the GIL, stands for it.
A batch of one row is computed beside it, so that gradients are as large and as real as with *cpu*. Reduction, vote, optimizer
and state are the same, and are on the CPUs that the groups share: the wait is long, so that they are a small part of a step."""
TRANSFER_STEPS = 20
BESIDE_DEVICE_S = 0.01
"""About what a step takes beside the wait of its workload, while the third group fetches."""
THROTTLED_MB = 64
FREE_MB = 1024
NORMAL_STEPS = 30
DEADLINE_S = 120.0
SURVIVORS = ("replica_0", "replica_1")
JOINER = "replica_2"


@dataclass(frozen=True, slots=True)
class Variant:
    """One run."""

    system: str
    throttled: bool
    compute: str
    """One of ``WORKLOADS``."""

    @property
    def name(self) -> str:
        """For its folder."""
        return f"steps-{self.compute}-{'throttled' if self.throttled else 'free'}-{self.system}"

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
        step_s = WORKLOADS[self.compute].device_time_s + BESIDE_DEVICE_S
        return int(self.size_bytes / (TRANSFER_STEPS * step_s) / donors)


def measure(options: Any, torchft_python: str | None) -> list[dict[str, Any]]:
    """Both systems, throttled and not, with either compute. Returns one entry each."""
    cases = product(WORKLOADS, (True, False), options.systems)
    variants = [Variant(system, throttled, compute) for compute, throttled, system in cases]
    runs: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for run in range(options.joins):  # in turn: what others do to the machine meanwhile meets all of them
        for variant in variants:
            if not variant.throttled and run >= -(-options.joins // 2):
                continue  # what is looked for there is seconds long
            folder = Path(options.scratch) / f"{variant.name}-{run}"
            folder.mkdir(parents=True)
            with _groups(variant, folder, torchft_python) as groups:
                runs[variant].append(groups.join())
    return [_entry(variant, runs[variant]) for variant in variants]


class Groups:
    """Two groups that train, and one that waits for the word to join."""

    def __init__(self, journal: Journal, workers: dict[str, Worker], entered: dict[str, float]) -> None:
        self._journal = journal
        self._workers = workers
        self._entered = entered
        """When each group was about to make its manager, which asks the Lighthouse to let it in."""

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
            "normal_s": self._gaps_within(begin, joined),
            "during_s": self._gaps_that_meet(first, level),
            "three_s": self._gaps_within(settled, time.monotonic()),
            "join_s": level - first,
            "steps_that_differ": wrong,
        }

    def _gaps_within(self, start: float, end: float) -> list[float]:
        """Seconds between the commits of each survivor, of whole steps between two moments."""
        return [late - early for early, late in self._steps() if start <= early and late <= end]

    def _gaps_that_meet(self, start: float, end: float) -> list[float]:
        """The same of all steps of which a part lies between them."""
        return [late - early for early, late in self._steps() if start < late and early < end]

    def _steps(self) -> list[tuple[float, float]]:
        steps: list[tuple[float, float]] = []
        for replica_id in SURVIVORS:
            steps += pairwise(one.time for one in self._journal.commits(replica_id, 0.0))
        return steps

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
            workload=asdict(WORKLOADS[variant.compute]),
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
        "compute": variant.compute,
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
    header = ["compute", "link", "system", "state MB", "steps meanwhile"]
    header += ["two groups p50/p95 ms", "meanwhile p50/p95 ms", "three groups p50/p95 ms"]
    header += ["p50, p95 of two", "p50, p95 of three", "worst step of a join ms, median", "differ"]
    rows = [
        [
            entry["compute"],
            "throttled" if entry["throttled"] else "free",
            entry["system"],
            str(entry["size_mb"]),
            f"{entry['joins']} x {entry['steps']}",
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
    title = "Survivors' steps while a third group joins and fetches; a device of each group's own is emulated by a wait"
    return title, header, rows


def _ratios(entry: dict[str, Any], base: str) -> str:
    ratios = [during / normal for during, normal in zip(entry["during_ms"][:2], entry[base], strict=True)]
    return ", ".join(f"{ratio:.2f} x" for ratio in ratios)
