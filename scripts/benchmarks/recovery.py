"""``bench recovery``: what the SIGKILL of one of three replica groups costs the others.

Each variant runs three groups of one rank with steps of about 40 ms. A random one is killed at a random moment; when the
survivors have gone on, it is started again; when all three step together, the next one is killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, Child, ChildFailed, Worker, environment
from benchmarks.figures import summarize
from benchmarks.recovery_log import Journal
from lighthouse.messages import Process
from torchft_plus.launch.exit_reporter import ExitReporter
from torchft_plus.launch.process import parse_exiting

GROUPS = 3
SETTLED_COMMITS = 20
"""Commits of all together before the next kill."""
AFTER_COMMITS = 10
"""Commits of a survivor after a kill, or of the one that came back, that are watched."""
START_DEADLINE_S = 120.0
SURVIVORS_DEADLINE_S = 90.0
KILL_WINDOW_S = 0.2
"""The kill falls at a random moment of this window: some steps."""
EXIT_POLL_S = 0.005
"""As the launcher looks after its children."""


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
class Kill:
    """One kill, in seconds and steps."""

    victim: str
    normal_step_s: float
    stall_s: float | None
    """The survivors' longest gap between commits minus a normal step; None if none survived."""
    survivors_died: int
    steps_lost: int
    """Attempts of survivors that were not committed before they went on."""
    restart_to_commit_s: float
    rejoin_stall_s: float | None
    """The same gap from the restart until the group that came back has committed some steps."""


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Run the chosen variants one after the other. Returns what the report needs."""
    results: list[dict[str, Any]] = []
    for name in options.variants:
        variant = VARIANTS[name]
        if variant.system not in options.systems:
            continue
        folder = Path(options.scratch) / name
        folder.mkdir(parents=True)
        with _job(variant, folder, torchft_python) as job:
            job.run(options.kills, random.Random(options.seed))
            wrong, compared = job.journal.disagreements()
        results.append(
            {
                "variant": name,
                "title": variant.title,
                "kills": [asdict(kill) for kill in job.kills],
                "ended_early": job.ended_early,
                "steps_compared": compared,
                "steps_that_differ": wrong,
                "jobs_lost": job.jobs_lost,
            }
        )
        print("  ".join(_line(results[-1])), file=sys.stderr, flush=True)
    return {"variants": results}


class Job:
    """Three groups of one variant."""

    def __init__(
        self, variant: Variant, folder: Path, address: str, command: list[str], env: dict[str, str]
    ) -> None:
        self._variant = variant
        self._folder = folder
        self._address = address
        self._command = command
        self._env = env
        self._starts = 0
        self._workers: dict[str, Worker] = {}
        self._incarnations: dict[str, str] = {}
        self._reporter = ExitReporter(lambda: address, "bench") if variant.report_exit else None
        self.journal = Journal()
        self.kills: list[Kill] = []
        self.ended_early = ""
        """Why it could not go on."""
        self.jobs_lost = 0
        """How often no survivor was left."""

    def run(self, count: int, chance: random.Random) -> None:
        """Start all, and kill so often, or until the job cannot go on."""
        try:
            self._start_missing()
            self._wait_together(time.monotonic(), SETTLED_COMMITS)
            for number in range(count):
                self.kills.append(self._kill(chance))
                if sys.stderr.isatty():
                    print(
                        f"\r{self._variant.title}: {number + 1}/{count}", end="", file=sys.stderr, flush=True
                    )
        except ChildFailed as error:
            self.ended_early = str(error)

    def close(self) -> None:
        """End everything."""
        if self._reporter is not None:
            self._reporter.close()
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.end()

    def _kill(self, chance: random.Random) -> Kill:
        victim = chance.choice(sorted(self._workers))
        survivors = sorted(set(self._workers) - {victim})
        time.sleep(
            chance.uniform(0.0, KILL_WINDOW_S)
        )  # the moment is what is random here; nothing is waited for
        killed = time.monotonic()
        self._send_sigkill(victim)
        self._wait(
            lambda: all(not self._alive(one) or self._went_on(one, killed) for one in survivors),
            SURVIVORS_DEADLINE_S,
            f"the survivors of {victim} to go on",
        )
        left = [one for one in survivors if self._alive(one)]
        normal = {one: self.journal.normal_step_s(one, killed) for one in survivors}
        stall = max((self._stall(one, killed, time.monotonic()) - normal[one] for one in left), default=None)
        lost = sum(not attempt.committed for one in left for attempt in self.journal.since(one, killed))
        if not left:
            self.jobs_lost += 1
            self.journal = Journal()  # it starts from step 0: nothing that was said before can be compared
        restarted = time.monotonic()
        back = self._start_missing()
        first = self._wait_together(restarted, AFTER_COMMITS, watched=back)
        rejoin = max(
            (self._stall(one, restarted, time.monotonic()) - normal[one] for one in left), default=None
        )
        self._wait_together(time.monotonic(), SETTLED_COMMITS)
        return Kill(
            victim=victim,
            normal_step_s=max(normal.values()),
            stall_s=stall,
            survivors_died=len(survivors) - len(left),
            steps_lost=lost,
            restart_to_commit_s=first - restarted,
            rejoin_stall_s=rejoin,
        )

    def _send_sigkill(self, victim: str) -> None:
        """Kill, and report the exit once it can be seen, as a launcher does."""
        pid = self._workers[victim].process.pid
        os.kill(pid, signal.SIGKILL)
        if self._reporter is None:
            return
        while parse_exiting(Path(f"/proc/{pid}/stat").read_bytes()) is None:
            time.sleep(EXIT_POLL_S)
        self._reporter.report(Process(victim, self._incarnations[victim]))

    def _went_on(self, replica_id: str, killed: float) -> bool:
        return len(self.journal.commits(replica_id, killed)) >= AFTER_COMMITS

    def _stall(self, replica_id: str, start: float, end: float) -> float:
        return self.journal.longest_gap_s(replica_id, start, end)

    def _start_missing(self) -> list[str]:
        missing = [name for name in (f"replica_{index}" for index in range(GROUPS)) if not self._alive(name)]
        for name in missing:
            self._start(name)
        return missing

    def _start(self, replica_id: str) -> None:
        old = self._workers.get(replica_id)
        if old is not None:
            old.end()
        self._starts += 1
        self._incarnations[replica_id] = f"bench-{self._starts}"
        env = {**self._env, "TORCHFT_PLUS_INCARNATION": self._incarnations[replica_id]}
        log = self._folder / f"{replica_id}.log"
        journal = self.journal
        worker = Worker(
            replica_id, self._command, env, log, on_line=lambda line: journal.add(replica_id, line)
        )
        self._workers[replica_id] = worker
        worker.send(
            system=self._variant.system,
            replica_id=replica_id,
            lighthouse=self._address,
            tuning=self._variant.tuning,
            gradients=self._variant.gradients,
        )

    def _alive(self, replica_id: str) -> bool:
        return replica_id in self._workers and self._workers[replica_id].alive

    def _wait_together(self, start: float, commits: int, watched: list[str] | None = None) -> float:
        """Wait until all (or those watched) have made so many commits with everybody; returns when the slowest made its first."""
        names = watched or sorted(self._workers)

        def done() -> bool:
            dead = [name for name in self._workers if not self._alive(name)]
            if dead:
                raise ChildFailed(f"{dead[0]} ended by itself, see {self._workers[dead[0]].log}")
            return all(len(self.journal.commits(name, start, GROUPS)) >= commits for name in names)

        self._wait(done, START_DEADLINE_S, "all groups to step together")
        return max(self.journal.commits(name, start, GROUPS)[0].time for name in names)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise ChildFailed(
                    f"{self._variant.title}: waited {timeout_s:g} s for {what}, see {self._folder}"
                )
            with self.journal.changed:
                self.journal.changed.wait(0.1)  # a slice: the end of a process is not announced


@contextmanager
def _job(variant: Variant, folder: Path, torchft_python: str | None) -> Generator[Job]:
    child: Child
    if variant.system == "torchft_plus":
        python, env = sys.executable, environment([ROOT, ROOT / "scripts"])
        child, address = lighthouses.start_torchft_plus(folder, min_replicas=2, expected_replicas=GROUPS)
    else:
        assert torchft_python is not None
        python, env = torchft_python, environment([ROOT / "scripts"], RUST_LOG="error")
        child, address = lighthouses.start_torchft(
            python, folder, "lighthouse", 2, variant.lighthouse_options
        )
    job = Job(variant, folder, address, [python, "-m", "benchmarks.recovery_worker"], env)
    try:
        yield job
    finally:
        job.close()
        child.end()


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    header = [
        "variant",
        "kills",
        "stall s",
        "survivors died",
        "steps lost",
        "rejoin stall s",
        "start to commit s",
    ]
    header += ["steps that differ"]
    return [("gap of the survivors minus a normal step", header, [_line(one) for one in result["variants"]])]


def failures(result: dict[str, Any]) -> list[str]:
    """Why variants could not be finished, one sentence each."""
    return [f"{one['title']}: {one['ended_early']}" for one in result["variants"] if one["ended_early"]]


def _line(result: dict[str, Any]) -> list[str]:
    kills = result["kills"]
    died = sum(kill["survivors_died"] > 0 for kill in kills)
    return [
        result["title"],
        str(len(kills)),
        _span([kill["stall_s"] for kill in kills]),
        f"in {died} of {len(kills)} kills",
        str(sum(kill["steps_lost"] for kill in kills)),
        _span([kill["rejoin_stall_s"] for kill in kills]),
        _span([kill["restart_to_commit_s"] for kill in kills]),
        f"{result['steps_that_differ']} of {result['steps_compared']}",
    ]


def _span(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    one = summarize(known)
    return f"{one.median:.3f} [{one.least:.3f}..{one.most:.3f}]"


NOTES = [
    "stall: longest gap between two commits of a survivor around the kill, minus its normal step; worst survivor of"
    " each kill; median [least..most].",
    "steps lost: passes of a survivor through its loop that were not committed: their batch was computed in vain.",
    "rejoin stall: the same gap while the killed group comes back. Start to commit: from its start to its first"
    " commit with all.",
    "steps that differ: committed steps after which two groups held different parameters (CRC-32), of those that"
    " could be compared.",
    "torchft's DDP often takes its survivors with it; the same with one manager.allreduce a step shows what those that"
    " live wait. Tuned: heartbeat_timeout 1000, tick 20, join_timeout 10000, heartbeats each 50 ms, process group 5 s.",
    "the killed group is started again only when the survivors have gone on, in every variant.",
]
