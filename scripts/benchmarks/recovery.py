"""``bench recovery``: what the SIGKILL of one of three replica groups costs the others.

Each variant runs three groups of one rank with steps of about 40 ms. A random one is killed at a random moment; when the
survivors have gone on, it is started again; when all three step together, the next one is killed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import ChildFailed
from benchmarks.figures import summarize
from benchmarks.groups import GROUPS, VARIANTS, Groups
from benchmarks.recovery_log import Journal
from benchmarks.workload import Workload

MIN_REPLICAS = 2
SETTLED_COMMITS = 20
"""Commits of all together before the next kill."""
AFTER_COMMITS = 10
"""Commits of a survivor after a kill, or of the one that came back, that are watched."""
START_DEADLINE_S = 120.0
SURVIVORS_DEADLINE_S = 90.0
KILL_WINDOW_S = 0.2
"""The kill falls at a random moment of this window: some steps."""


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
        with Groups(variant, folder, torchft_python, MIN_REPLICAS, Workload()) as groups:
            job = Job(groups, folder)
            job.run(options.kills, random.Random(options.seed))
            wrong, compared = groups.journal.disagreements()
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

    def __init__(self, groups: Groups, folder: Path) -> None:
        self._groups = groups
        self._folder = folder
        self.kills: list[Kill] = []
        self.ended_early = ""
        """Why it could not go on."""
        self.jobs_lost = 0
        """How often no survivor was left."""

    def run(self, count: int, chance: random.Random) -> None:
        """Start all, and kill so often, or until the job cannot go on."""
        try:
            self._groups.start_missing()
            self._wait_together(time.monotonic(), SETTLED_COMMITS)
            for number in range(count):
                self.kills.append(self._kill(chance))
                if sys.stderr.isatty():
                    print(
                        f"\r{self._groups.variant.title}: {number + 1}/{count}",
                        end="",
                        file=sys.stderr,
                        flush=True,
                    )
        except ChildFailed as error:
            self.ended_early = str(error)

    def _kill(self, chance: random.Random) -> Kill:
        victim = chance.choice(sorted(self._groups.workers))
        survivors = sorted(set(self._groups.workers) - {victim})
        time.sleep(
            chance.uniform(0.0, KILL_WINDOW_S)
        )  # the moment is what is random here; nothing is waited for
        killed = time.monotonic()
        self._groups.kill(victim)
        self._wait(
            lambda: all(not self._groups.alive(one) or self._went_on(one, killed) for one in survivors),
            SURVIVORS_DEADLINE_S,
            f"the survivors of {victim} to go on",
        )
        left = [one for one in survivors if self._groups.alive(one)]
        normal = {one: self._groups.journal.normal_step_s(one, killed) for one in survivors}
        stall = max((self._stall(one, killed, time.monotonic()) - normal[one] for one in left), default=None)
        lost = sum(
            not attempt.committed for one in left for attempt in self._groups.journal.since(one, killed)
        )
        if not left:
            self.jobs_lost += 1
            self._groups.journal = (
                Journal()
            )  # it starts from step 0: nothing that was said before can be compared
        restarted = time.monotonic()
        back = self._groups.start_missing()
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

    def _went_on(self, replica_id: str, killed: float) -> bool:
        return len(self._groups.journal.commits(replica_id, killed)) >= AFTER_COMMITS

    def _stall(self, replica_id: str, start: float, end: float) -> float:
        return self._groups.journal.longest_gap_s(replica_id, start, end)

    def _wait_together(self, start: float, commits: int, watched: list[str] | None = None) -> float:
        """Wait until all (or those watched) have made so many commits with everybody; returns when the slowest made its first."""
        names = watched or sorted(self._groups.workers)

        def done() -> bool:
            dead = [name for name in self._groups.workers if not self._groups.alive(name)]
            if dead:
                raise ChildFailed(f"{dead[0]} ended by itself, see {self._groups.workers[dead[0]].log}")
            return all(len(self._groups.journal.commits(name, start, GROUPS)) >= commits for name in names)

        self._wait(done, START_DEADLINE_S, "all groups to step together")
        return max(self._groups.journal.commits(name, start, GROUPS)[0].time for name in names)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise ChildFailed(
                    f"{self._groups.variant.title}: waited {timeout_s:g} s for {what}, see {self._folder}"
                )
            with self._groups.journal.changed:
                self._groups.journal.changed.wait(0.1)  # a slice: the end of a process is not announced


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
