"""``bench goodput``, scenarios: one fault in a job of three groups, and what the groups that it did not hit commit then."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import ChildFailed
from benchmarks.goodput_account import committed_steps
from benchmarks.groups import GROUPS, VARIANTS, Groups
from benchmarks.workload import Workload

FAULT_S = 10.0
"""How long the Lighthouse is away, or a group is frozen."""
HELD_GIL_S = 3600
"""For good: the bench ends it."""
VICTIM = "replica_1"
SYSTEMS = {"torchft_plus": "plus", "torchft default": "torchft", "torchft tuned": "torchft-tuned"}
SETTLED_COMMITS, AFTER_COMMITS = 10, 10
NORMAL_S, WINDOW_S, WATCH_S = 10.0, 30.0, 75.0
"""Undisturbed; that counts after the fault; and that is watched until the survivors go on or have ended. torchft's longest
deadline is 60 s."""
START_DEADLINE_S = 120.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault; ``end`` undoes it after ``FAULT_S``."""

    title: str
    begin: Callable[[Groups], None]
    end: Callable[[Groups], None] | None
    hits: tuple[str, ...]
    """Groups that are not counted as survivors."""


def _kill_lighthouse(groups: Groups) -> None:
    groups.lighthouse.process.kill()


def _freeze(groups: Groups) -> None:
    os.kill(groups.workers[VICTIM].process.pid, signal.SIGSTOP)


def _thaw(groups: Groups) -> None:
    if groups.alive(VICTIM):
        os.kill(groups.workers[VICTIM].process.pid, signal.SIGCONT)


def _hold_gil(groups: Groups) -> None:
    groups.workers[VICTIM].send(hold_gil_s=HELD_GIL_S)


SCENARIOS = {
    "lighthouse": Scenario(
        f"Lighthouse killed, back after {FAULT_S:g} s", _kill_lighthouse, Groups.restart_lighthouse, ()
    ),
    "frozen": Scenario(f"a group frozen for {FAULT_S:g} s", _freeze, _thaw, (VICTIM,)),
    "gil": Scenario("a group holds its GIL for good", _hold_gil, None, (VICTIM,)),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one fault did."""

    scenario: str
    system: str
    normal_steps_per_s: float = 0.0
    window_s: float = 0.0
    steps: int = 0
    """Committed within the window after the fault."""
    share: float = 0.0
    """Of what would have been committed undisturbed."""
    longest_gap_s: float | None = None
    """Of a survivor that lived; the longest one, to the end of the watch if it had not gone on."""
    steps_lost: int = 0
    """Batches of survivors that were counted in no commit."""
    survivors_died: int = 0
    went_on: bool = False
    """All survivors that lived were committing at the end."""
    ended_s: float | None = None
    """When the last survivor had ended."""
    victim_back_s: float | None = None
    """When the group that was hit committed again; from the fault."""
    digests_differ: int = 0
    error: str = ""
    """Why it could not be measured."""


def measure(options: Any, torchft_python: str | None, workload: Workload) -> list[dict[str, Any]]:
    """Play the chosen scenarios with each system. Returns their outcomes."""
    window_s, watch_s = (10.0, 20.0) if options.quick else (WINDOW_S, WATCH_S)
    outcomes: list[dict[str, Any]] = []
    for name in options.scenarios:
        for system, variant in SYSTEMS.items():
            if VARIANTS[variant].system not in options.systems:
                continue
            folder = Path(options.scratch) / f"{name}-{variant}"
            with Groups(VARIANTS[variant], folder, torchft_python, 1, workload) as groups:
                try:
                    outcome = _Play(name, system, groups, window_s, watch_s).run()
                except ChildFailed as error:
                    outcome = Outcome(name, system, error=str(error))
            outcomes.append(asdict(outcome))
            print("  ".join(_cells(outcomes[-1])), file=sys.stderr, flush=True)
    return outcomes


class _Play:
    """One scenario with one system."""

    def __init__(self, name: str, system: str, groups: Groups, window_s: float, watch_s: float) -> None:
        self._name, self._system, self._groups = name, system, groups
        self._window_s, self._watch_s = window_s, watch_s
        self._scenario = SCENARIOS[name]
        self._survivors = [one for one in groups.names if one not in self._scenario.hits]
        self._fault = 0.0
        self._ended: float | None = None

    def run(self) -> Outcome:
        """Train, disturb, watch.

        Raises:
            ChildFailed: the groups did not train together in the first place, or the Lighthouse did not come back.
        """
        self._groups.start_missing()
        self._settle()
        normal = time.monotonic()
        while time.monotonic() < normal + NORMAL_S:
            time.sleep(POLL_S)
        self._fault = time.monotonic()
        self._scenario.begin(self._groups)
        watched = self._watch()
        return self._outcome(normal, watched)

    def _settle(self) -> None:
        end = time.monotonic() + START_DEADLINE_S
        commits = self._groups.journal.commits
        while any(len(commits(one, 0.0, GROUPS)) < SETTLED_COMMITS for one in self._groups.names):
            dead = [one for one in self._groups.names if not self._groups.alive(one)]
            if dead:
                raise ChildFailed(f"{dead[0]} ended by itself, see {self._groups.workers[dead[0]].log}")
            if time.monotonic() > end:
                raise ChildFailed(f"{self._system} does not train with all groups")
            time.sleep(POLL_S)

    def _watch(self) -> float:
        """Until the window is over and all survivors go on, or have ended, or for the longest time. Returns when."""
        undo = self._scenario.end
        while (now := time.monotonic()) < self._fault + self._watch_s:
            if undo is not None and now >= self._fault + FAULT_S:
                undo(self._groups)
                undo = None
            living = [one for one in self._survivors if self._groups.alive(one)]
            if not living:
                self._ended = self._ended or now
                break
            if now >= self._fault + self._window_s and undo is None and self._go_on(living, now):
                break
            time.sleep(POLL_S)
        return time.monotonic()

    def _go_on(self, living: list[str], now: float) -> bool:
        """All have made some commits of late."""
        recent = now - self._window_s / 3
        return all(len(self._groups.journal.commits(one, recent, 1)) >= AFTER_COMMITS for one in living)

    def _outcome(self, normal: float, watched: float) -> Outcome:
        journal, fault = self._groups.journal, self._fault
        living = [one for one in self._survivors if self._groups.alive(one)]
        steps = committed_steps(attempt for one in self._survivors for attempt in journal.since(one, normal))
        rate = sum(step.time < fault for step in steps) / (fault - normal)
        after = sum(fault <= step.time < fault + self._window_s for step in steps)
        back = [one.time for name in self._scenario.hits for one in journal.commits(name, fault + FAULT_S, 1)]
        return Outcome(
            scenario=self._name,
            system=self._system,
            normal_steps_per_s=rate,
            window_s=self._window_s,
            steps=after,
            share=after / (rate * self._window_s) if rate else 0.0,
            longest_gap_s=max((self._gap_s(one, watched) for one in living), default=None),
            steps_lost=sum(not a.committed for one in self._survivors for a in journal.since(one, fault)),
            survivors_died=len(self._survivors) - len(living),
            went_on=bool(living) and self._go_on(living, watched),
            ended_s=None if self._ended is None else self._ended - fault,
            victim_back_s=min(back) - fault if back else None,
            digests_differ=journal.disagreements()[0],
        )

    def _gap_s(self, name: str, watched: float) -> float:
        last = max(one.time for one in self._groups.journal.commits(name, 0.0))
        between = self._groups.journal.longest_gap_s(name, self._fault, watched)
        return max(between, watched - last)


def table(outcomes: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """The outcomes as (title, header, rows)."""
    header = ["fault", "system", "steps after it", "of undisturbed", "longest gap s", "batches lost"]
    header += ["survivors that died", "outcome"]
    window_s = max(one["window_s"] for one in outcomes)
    title = (
        f"one fault, and the steps that the groups that it did not hit commit in the {window_s:g} s after it"
    )
    return title, header, [_cells(one) for one in outcomes]


def _cells(outcome: dict[str, Any]) -> list[str]:
    title = SCENARIOS[outcome["scenario"]].title
    if outcome["error"]:
        return [title, outcome["system"], *["-"] * 5, outcome["error"]]
    gap = outcome["longest_gap_s"]
    return [
        title,
        outcome["system"],
        str(outcome["steps"]),
        f"{outcome['share']:.2f}",
        "-" if gap is None else f"{gap:.2f}",
        str(outcome["steps_lost"]),
        str(outcome["survivors_died"]),
        _ending(outcome),
    ]


def _ending(outcome: dict[str, Any]) -> str:
    if outcome["ended_s"] is not None:
        return f"ended after {outcome['ended_s']:.1f} s"
    text = "went on" if outcome["went_on"] else "did not go on while it was watched"
    if outcome["victim_back_s"] is not None:
        text += f"; the group that was hit commits again after {outcome['victim_back_s']:.1f} s"
    return text


def failures(outcomes: list[dict[str, Any]]) -> list[str]:
    """Ours goes on, and loses nobody and nothing."""
    found: list[str] = []
    for one in outcomes:
        title = f"{one['system']}, {SCENARIOS[one['scenario']].title}"
        if one["error"]:
            found.append(f"{title}: {one['error']}")
        elif one["system"] == "torchft_plus":
            if not one["went_on"] or one["survivors_died"]:
                found.append(f"{title}: {_ending(one)}, {one['survivors_died']} survivors died")
            if one["steps_lost"]:
                found.append(f"{title}: {one['steps_lost']} batches of survivors were lost")
            if one["digests_differ"]:
                found.append(f"{title}: parameters differ after {one['digests_differ']} steps")
    return found
